"""Writing a snapshot out as files: planned without a store, executed all or nothing.

The bytes go from the store's map to the files by pwrite(2), without a copy in between; each block is verified on its
way. The target appears complete, or stays as it was.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from mpfs.errors import BadInputError, IntegrityError, MPFSError, NoSpaceError, UsageError
from mpfs.formats.messages import show
from mpfs.objects import ObjectId, SafetensorsFile, Snapshot, Tensor
from mpfs.objects.progress import Progress
from mpfs.store import Store
from mpfs.store.filesystem import require_free_space
from mpfs.vfs.layout import DEFAULT_METADATA, INDEX_PATH, FileLayout, ranges, synthesise_files
from mpfs.vfs.reader import FileReader, SnapshotReader
from mpfs.vfs.target import building, check_target, existing_parent, replace, resolve_target, sync_directory

WORKERS = 2
TASK_BYTES = 256 << 20
"""Bytes that one thread writes and syncs in one go: bounds what is dirty, and shares a single large file out."""

_PAGE = 4096
_SHARD = re.compile(r"(?P<stem>.*?)(-\d+-of-\d+)?\.safetensors", re.DOTALL)


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file to write: literal bytes, then blocks. `head` is empty for a file that is in the snapshot as it is."""

    path: str
    head: bytes
    body: FileLayout | None

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self.head) + (0 if self.body is None else self.body.size)


@dataclass(frozen=True, slots=True)
class CheckoutPlan:
    """What a checkout will write. `files` are sorted by path, their paths relative to the target."""

    target: Path
    files: tuple[PlannedFile, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of all files together."""
        return sum(file.size for file in self.files)

    def as_json(self) -> dict[str, object]:
        """The JSON form; sizes in bytes."""
        return {
            "target": str(self.target),
            "files": [{"path": file.path, "size": file.size} for file in self.files],
            "bytes": self.total_bytes,
        }


@dataclass(frozen=True, slots=True)
class CheckoutResult:
    """What a checkout has written. `seconds` is wall time, syncing included."""

    target: Path
    files: tuple[str, ...]
    bytes: int
    seconds: float

    def as_json(self) -> dict[str, object]:
        """The JSON form."""
        return {"target": str(self.target), "files": list(self.files), "bytes": self.bytes, "seconds": self.seconds}


def plan_checkout(
    snapshot: Snapshot,
    tensors: Mapping[ObjectId, Tensor],
    target: Path,
    *,
    shard_size: int | None = None,
    metadata: Mapping[str, str] = DEFAULT_METADATA,
) -> CheckoutPlan:
    """Plan the files of a checkout. Pure: neither the store nor the disk is looked at.

    Args:
        snapshot: what to write.
        tensors: at least those that the snapshot refers to.
        target: the directory to write.
        shard_size: None writes the files exactly as the snapshot has them; a number of bytes cuts the model's own
            tensors (those of files with the prefix "") into new files of about that size, with a new index. Other
            files, and tensors under a prefix, stay as they are.
        metadata: what the headers of newly cut files say under `__metadata__`.

    Raises:
        UsageError: the shard size is not positive.
        BadInputError: paths that cannot be together in a directory.
        FormatError: tensors that no safetensors file can hold.
        KeyError, ValueError: `tensors` does not fit the snapshot.
    """
    if shard_size is not None and shard_size <= 0:
        raise UsageError(f"a shard size of {shard_size:,} bytes: it must be positive")
    recut: list[SafetensorsFile] = []
    if shard_size is not None:
        recut = [file for file in snapshot.safetensors_files() if not file.prefix]
    gone = {file.path for file in recut} | {_index_of(file.path) for file in recut}
    files = [
        PlannedFile(file.path, b"", FileLayout.of_file(file, tensors))
        for file in snapshot.files
        if file.path not in gone
    ]
    if recut and shard_size is not None:
        files += _recut(recut, tensors, shard_size, metadata)
    files.sort(key=lambda file: file.path)
    _check_paths([file.path for file in files])
    return CheckoutPlan(target, tuple(files))


def check_out(
    store: Store,
    snapshot: Snapshot,
    target: Path,
    *,
    name: str | None = None,
    shard_size: int | None = None,
    force: bool = False,
    protected: Sequence[Path] = (),
    progress: Progress | None = None,
) -> CheckoutResult:
    """Write a snapshot's files into a directory: `plan_checkout`, then `execute`.

    Newly cut files keep the metadata of the files they come from (where these disagree, the first one's), and say
    {"format": "pt"} in any case.

    Raises:
        As both.
    """
    reader = SnapshotReader(store, snapshot, name)
    tensors = {identity: reader.tensor_object(identity) for identity in snapshot.references()}
    metadata = dict(DEFAULT_METADATA)
    if shard_size is not None:
        metadata = {**DEFAULT_METADATA, **reader.metadata()}
    try:
        plan = plan_checkout(snapshot, tensors, target, shard_size=shard_size, metadata=metadata)
    except ValueError as error:
        raise IntegrityError(f"snapshot {reader.name}: {error}", snapshot=reader.name) from error
    return execute(plan, store, reader.name, force=force, protected=protected, progress=progress)


def execute(
    plan: CheckoutPlan,
    store: Store,
    name: str,
    *,
    force: bool = False,
    protected: Sequence[Path] = (),
    progress: Progress | None = None,
    workers: int = WORKERS,
) -> CheckoutResult:
    """Write the planned files.

    They are written into a directory beside the target, synced, and renamed into place. When this fails or is
    interrupted the target is as it was and that directory is gone; when the process is killed it stays behind, called
    `.TARGET.mpfs-checkout-XXXXXXXX`, and the next checkout to the same target removes it.

    Args:
        plan: from `plan_checkout`.
        store: holds the blocks.
        name: what the snapshot is called, for messages.
        force: replace a target with something in it, as a whole. See `target.check_target` for what never is.
        protected: further directories that are never replaced (the home directory that the user has set, say).
        progress: told about the bytes written.
        workers: threads.

    Raises:
        UsageError: the target must not be written there.
        NoSpaceError: the disk is, or gets, full.
        IntegrityError: a block is missing or damaged; the message names it, its tensor and the snapshot.
        MPFSError: the files cannot be written (permissions, a name that is too long, …).
    """
    started = time.monotonic()
    target = resolve_target(plan.target)
    with _our_errors(target, plan):
        check_target(target, store.path, force=force, protected=protected)
        needed = sum(-(-file.size // _PAGE) * _PAGE for file in plan.files)
        require_free_space(existing_parent(target), needed, f"checking out {name}")
        with building(target) as directory:
            _make_files(plan, directory)
            _write_files(plan, directory, store, name, progress, workers)
            for parent in sorted(_directories(plan), reverse=True):
                sync_directory(directory / parent)
            # Much may have happened meanwhile.
            check_target(target, store.path, force=force, protected=protected)
            replace(directory, target)
    return CheckoutResult(target, tuple(file.path for file in plan.files), plan.total_bytes, time.monotonic() - started)


def _recut(
    files: Sequence[SafetensorsFile],
    tensors: Mapping[ObjectId, Tensor],
    shard_size: int,
    metadata: Mapping[str, str],
) -> Iterator[PlannedFile]:
    named = {name: tensors[identity] for file in files for name, identity in file.tensors}
    synthesis = synthesise_files(list(named.items()), shard_size, metadata)
    for file in synthesis.files:
        body = FileLayout.of_parts(file.path, [(name, named[name]) for name in file.tensors])
        yield PlannedFile(file.path, file.header, body)
    if synthesis.index is not None:
        yield PlannedFile(INDEX_PATH, synthesis.index, None)


def _index_of(path: str) -> str:
    """The path of the index that would list a safetensors file."""
    match = _SHARD.fullmatch(path)
    return f"{match['stem'] if match else path}.safetensors.index.json"


def _check_paths(paths: Sequence[str]) -> None:
    """Refuse paths that no directory can hold together. That a file system folds case shows only when writing."""
    seen = set(paths)
    if len(seen) != len(paths):
        twice = next(path for index, path in enumerate(paths) if path in paths[:index])
        raise BadInputError(f"{show(twice)} would be written twice: the new files collide with one of the snapshot's")
    for path in paths:
        for parent in PurePosixPath(path).parents:
            if str(parent) in seen:
                raise BadInputError(f"{show(str(parent))} is a file, and a directory of {show(path)}", path=path)


def _directories(plan: CheckoutPlan) -> set[PurePosixPath]:
    return {parent for file in plan.files for parent in PurePosixPath(file.path).parents} | {PurePosixPath()}


def _make_files(plan: CheckoutPlan, directory: Path) -> None:
    """Make every directory and file, at its full size where the file system can promise it."""
    for parent in sorted(_directories(plan)):
        (directory / parent).mkdir(exist_ok=True)
    for file in plan.files:
        try:
            fd = os.open(directory / file.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except (FileExistsError, IsADirectoryError) as error:
            raise BadInputError(
                f"{show(file.path)} is the same as another path on this file system (upper and lower case?)",
                path=file.path,
            ) from error
        try:
            if file.size:
                _allocate(fd, file.size)
        finally:
            os.close(fd)


def _allocate(fd: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
            os.ftruncate(fd, size)


def _write_files(
    plan: CheckoutPlan, directory: Path, store: Store, name: str, progress: Progress | None, workers: int
) -> None:
    meter = _Meter(plan.total_bytes, progress)
    pool = ThreadPoolExecutor(workers, thread_name_prefix="mpfs-checkout")
    try:
        # Largest first, so that no thread is left alone with a large one at the end.
        tasks: list[Future[None]] = [
            pool.submit(_write_range, file, directory / file.path, start, stop, store, name, meter)
            for file in sorted(plan.files, key=lambda file: -file.size)
            for start, stop in ranges(file.size, TASK_BYTES)
        ]
        done, _ = wait(tasks, return_when=FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        meter.stopped.set()
        pool.shutdown(wait=True, cancel_futures=True)


def _write_range(file: PlannedFile, path: Path, start: int, stop: int, store: Store, name: str, meter: _Meter) -> None:
    """Write and sync bytes [start, stop) of a file that is there already."""
    fd = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        position = start

        def write(piece: memoryview) -> None:
            nonlocal position
            left = piece
            while left:
                left = left[os.pwrite(fd, left, position + len(piece) - len(left)) :]
            position += len(piece)
            meter.add(len(piece))

        head = len(file.head)
        if start < head:
            write(memoryview(file.head)[start:stop])
        if file.body is not None and stop > head:
            FileReader(store, file.body, name).copy_to(write, max(start - head, 0), stop - head)
        os.fsync(fd)
    finally:
        os.close(fd)


class _StoppedError(Exception):
    """Another thread has failed, or the user has interrupted."""


class _Meter:
    """Counts bytes over all threads, and is where they learn that they should stop."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.stopped = threading.Event()
        self._total = total
        self._progress = progress
        self._done = 0
        self._lock = threading.Lock()

    def add(self, nbytes: int) -> None:
        if self.stopped.is_set():
            raise _StoppedError
        with self._lock:
            self._done += nbytes
            if self._progress is not None:
                self._progress(self._done, self._total)


@contextmanager
def _our_errors(target: Path, plan: CheckoutPlan) -> Iterator[None]:
    """Turn the system's errors into ours."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = 0
            with suppress(OSError):
                free = shutil.disk_usage(existing_parent(target)).free
            raise NoSpaceError(
                f"{target}: the disk is full: {plan.total_bytes:,} bytes are needed, {free:,} are free; "
                "nothing was written there",
                needed=plan.total_bytes,
                free=free,
            ) from error
        raise MPFSError(f"{target}: cannot be written: {error.strerror or error}", target=str(target)) from error
