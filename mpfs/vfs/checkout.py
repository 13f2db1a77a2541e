"""Writing a snapshot out as files: planned without a store, executed all or nothing.

The bytes go from the store's map to the files by pwrite(2), without a copy in between; each block is verified on its
way. The target appears complete, or stays as it was.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from mpfs.errors import BadInputError, MPFSError, NoSpaceError, UsageError
from mpfs.formats.messages import listing, show
from mpfs.formats.portable import windows_problem
from mpfs.objects import Snapshot, block_id, object_id
from mpfs.objects.progress import Progress
from mpfs.store import Store
from mpfs.store.filesystem import require_free_space
from mpfs.store.writeback import start_writing
from mpfs.vfs.layout import ranges
from mpfs.vfs.plan import CheckoutPlan, PlannedFile, Variant, plan_from
from mpfs.vfs.reader import FileReader
from mpfs.vfs.target import building, check_target, existing_parent, replace, resolve_target, sync_directory

WORKERS = 2
TASK_BYTES = 256 << 20
"""Bytes that one thread writes and syncs in one go: bounds what is dirty, and shares a single large file out."""

EARLY_BYTES = 8 << 20
"""How much is written before the disk is asked to begin with it."""

_PAGE = 4096
_COMPARE_BUFFER = 1 << 20


@dataclass(frozen=True, slots=True)
class CheckoutResult:
    """What a checkout has written. `target` is a directory or a URL; `bytes` were written, which is less than the sizes
    of `files` where some were there, `unchanged`, already. `seconds` is wall time, syncing included.
    """

    target: Path | str
    files: tuple[str, ...]
    bytes: int
    seconds: float
    unchanged: tuple[str, ...] = ()

    def as_json(self) -> dict[str, object]:
        """The JSON form."""
        return {
            "target": str(self.target),
            "files": list(self.files),
            "bytes": self.bytes,
            "seconds": self.seconds,
            "unchanged": list(self.unchanged),
        }


def check_out(
    store: Store,
    snapshot: Snapshot,
    target: Path,
    *,
    name: str | None = None,
    shard_size: int | None = None,
    variant: Variant | None = None,
    force: bool = False,
    update: bool = False,
    protected: Sequence[Path] = (),
    progress: Progress | None = None,
) -> CheckoutResult:
    """Write a snapshot's files into a directory: `plan_from`, then `execute`.

    `variant` says how the files are to differ from the snapshot's; `shard_size` is short for one with only that.

    Raises:
        As both.
    """
    files = plan_from(store, snapshot, name, variant or Variant(shard_size))
    called = name if name is not None else object_id(snapshot.encode())
    plan = CheckoutPlan(target, files)
    return execute(plan, store, called, force=force, update=update, protected=protected, progress=progress)


def execute(
    plan: CheckoutPlan,
    store: Store,
    name: str,
    *,
    force: bool = False,
    update: bool = False,
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
        update: the target is an earlier checkout: files that are in it, and still are what they are to be, are read
            and kept rather than written. Without `force` nothing but planned files may be in it.
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
        check_target(target, store.path, force=force or update, protected=protected)
        kept: tuple[PlannedFile, ...] = ()
        if update and target.is_dir():
            if not force:
                _refuse_others(target, plan)
            kept = _unchanged(target, plan.files, workers)
        there = {file.path for file in kept}
        due = CheckoutPlan(target, tuple(file for file in plan.files if file.path not in there))
        needed = sum(-(-file.size // _PAGE) * _PAGE for file in due.files)
        require_free_space(existing_parent(target), needed, f"checking out {name}")
        with building(target) as directory:
            _make_names(plan, there, target, directory)
            _check_names(plan, directory)
            _reserve(due, directory)
            _write_files(due, directory, store, name, progress, workers)
            for parent in sorted(_directories(plan), reverse=True):
                sync_directory(directory / parent)
            # Much may have happened meanwhile.
            check_target(target, store.path, force=force or update, protected=protected)
            replace(directory, target)
    paths, unchanged = tuple(file.path for file in plan.files), tuple(file.path for file in kept)
    return CheckoutResult(target, paths, due.total_bytes, time.monotonic() - started, unchanged)


def _refuse_others(target: Path, plan: CheckoutPlan) -> None:
    planned = {file.path for file in plan.files}
    found = (os.path.join(parent, name) for parent, _, names in os.walk(target) for name in names)
    others = sorted({os.path.relpath(path, target) for path in found} - planned)
    if others:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        raise UsageError(
            f"{target}: has files that the checkout does not: {', '.join(map(show, others[:3]))}{more}; "
            "to remove them use --update with --force",
            target=str(target),
            files=others,
        )


def _unchanged(target: Path, files: Sequence[PlannedFile], workers: int) -> tuple[PlannedFile, ...]:
    """The files that are in a directory as they are planned."""
    with ThreadPoolExecutor(workers, thread_name_prefix="mpfs-compare") as pool:
        same = pool.map(lambda file: _is_same(target / file.path, file), files)
        return tuple(file for file, is_same in zip(files, same, strict=True) if is_same)


def _is_same(path: Path, file: PlannedFile) -> bool:
    """Whether a file on disk holds what is planned: its head, and blocks of the planned ids."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    with open(fd, "rb", buffering=_COMPARE_BUFFER) as found:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size != file.size or found.read(len(file.head)) != file.head:
            return False
        segments = () if file.body is None else file.body.segments()
        return all(block_id(found.read(segment.size)) == segment.block for segment in segments)


def _directories(plan: CheckoutPlan) -> set[PurePosixPath]:
    return {parent for file in plan.files for parent in PurePosixPath(file.path).parents} | {PurePosixPath()}


def _make_names(plan: CheckoutPlan, kept: Collection[str], target: Path, directory: Path) -> None:
    """Make the directories of all planned files, and every file: empty, or the one that is kept of an earlier checkout. What
    a file system cannot have shows now.

    Raises:
        BadInputError: two paths are the same there, or it cannot have a name.
    """
    for parent in sorted(_directories(plan)):
        with _naming(str(parent)):
            os.makedirs(directory / parent, exist_ok=True)
    for file in plan.files:
        with _naming(file.path):
            if file.path in kept:
                os.link(target / file.path, directory / file.path, follow_symlinks=False)
                continue
            os.close(os.open(directory / file.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))


@contextmanager
def _naming(path: str) -> Iterator[None]:
    try:
        yield
    except (FileExistsError, IsADirectoryError, NotADirectoryError) as error:
        raise BadInputError(
            f"{show(path)} is the same as another path on this file system (upper and lower case?); check out to another one",
            path=path,
        ) from error
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EILSEQ):
            raise
        problem = windows_problem(path)
        raise BadInputError(
            f"this file system cannot have {show(path)} ({problem or error.strerror}); check out to another one",
            path=path,
        ) from error


def _check_names(plan: CheckoutPlan, directory: Path) -> None:
    """Some file systems take a name and make another of it, or take two for one: what is there must be what was planned."""
    wanted = {file.path for file in plan.files} | {str(parent) for parent in _directories(plan)} - {"."}
    found = {
        os.path.relpath(os.path.join(parent, name), directory)
        for parent, directories, names in os.walk(directory)
        for name in (*directories, *names)
    }
    if wanted != found:
        lost = sorted(wanted - found)
        raise BadInputError(
            f"this file system makes {listing(sorted(found - wanted)) or 'one name'} of {listing(lost)}: two paths, or another "
            "name than was asked for; check out to another one",
            paths=lost,
        )


def _reserve(plan: CheckoutPlan, directory: Path) -> None:
    """Give every file its full size where the file system can promise it."""
    for file in plan.files:
        if file.size:
            fd = os.open(directory / file.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
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
        position = started = start

        def write(piece: memoryview) -> None:
            nonlocal position, started
            left = piece
            while left:
                left = left[os.pwrite(fd, left, position + len(piece) - len(left)) :]
            position += len(piece)
            # The disk has something to do from now on, and not only from the fsync below.
            if position - started >= EARLY_BYTES:
                start_writing(fd, started, position - started)
                started = position
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
