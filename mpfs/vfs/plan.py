"""Which files a checkout, an upload or an export consists of: planned without a store."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from mpfs.errors import BadInputError, IntegrityError, NotFoundError, UsageError
from mpfs.formats.messages import show
from mpfs.formats.safetensors import build_header
from mpfs.objects import BlobFile, ObjectId, SafetensorsFile, Snapshot, Tensor, TensorFile
from mpfs.store import Store
from mpfs.vfs.layout import DEFAULT_METADATA, INDEX_PATH, FileLayout, synthesise_files
from mpfs.vfs.reader import CHUNK_BYTES, FileReader, SnapshotReader

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
class Variant:
    """How the files are to differ from the snapshot's.

    Args:
        shard_size: None writes the files exactly as the snapshot has them; a number of bytes cuts the model's own
            tensors (those of files with the prefix "") into new files of about that size, with a new index. Other
            files, and tensors under a prefix, stay as they are.
        include: patterns of fnmatch; only tensors whose name matches one of them. Files that lose some get a new
            header, and their index a new list; files that lose all are left out. None: every tensor.
        weights_only: only the safetensors files and their indexes.
    """

    shard_size: int | None = None
    include: tuple[str, ...] | None = None
    weights_only: bool = False


AS_IT_IS = Variant()


def plan_checkout(
    snapshot: Snapshot,
    tensors: Mapping[ObjectId, Tensor],
    target: Path,
    *,
    shard_size: int | None = None,
    metadata: Mapping[str, str] = DEFAULT_METADATA,
) -> CheckoutPlan:
    """Plan the files of a checkout into a directory; see `plan_files`."""
    return CheckoutPlan(target, plan_files(snapshot, tensors, Variant(shard_size), metadata))


def plan_files(
    snapshot: Snapshot,
    tensors: Mapping[ObjectId, Tensor],
    variant: Variant = AS_IT_IS,
    metadata: Mapping[str, str] = DEFAULT_METADATA,
) -> tuple[PlannedFile, ...]:
    """Plan the files of a checkout, sorted by path. Pure: neither the store nor the disk is looked at.

    Args:
        snapshot: what to write.
        tensors: at least those that the snapshot refers to.
        variant: how the files differ from the snapshot's.
        metadata: what the headers of newly cut files say under `__metadata__`.

    Raises:
        UsageError: the shard size is not positive.
        NotFoundError: no tensor matches what is to be included.
        BadInputError: paths that cannot be together in a directory.
        FormatError: tensors that no safetensors file can hold.
        KeyError, ValueError: `tensors` does not fit the snapshot.
    """
    size = variant.shard_size
    if size is not None and size <= 0:
        raise UsageError(f"a shard size of {size:,} bytes: it must be positive")
    kept = {file.path: _included(file, variant.include) for file in snapshot.tensor_files()}
    if variant.include is not None and not any(kept.values()):
        raise NotFoundError(f"no tensor matches {' or '.join(variant.include)}; 'mpfs ls --tensors' lists the names")
    recut = [file for file in snapshot.safetensors_files() if size is not None and not file.prefix]
    indexes: dict[str, list[SafetensorsFile]] = {}
    for file in snapshot.safetensors_files():
        indexes.setdefault(index_path(file.path), []).append(file)
    gone = {file.path for file in recut} | {index_path(file.path) for file in recut}
    files: list[PlannedFile] = []
    for item in snapshot.files:
        if item.path in gone:
            continue
        if isinstance(item, BlobFile):
            listed = indexes.get(item.path, [])
            if any(len(kept[file.path]) < len(file.tensors) for file in listed):
                left = [file for file in listed if kept[file.path]]
                files += [PlannedFile(item.path, _index(left, kept, tensors), None)] if left else []
            elif listed or not variant.weights_only:
                files.append(PlannedFile(item.path, b"", FileLayout.of_file(item, tensors)))
        elif len(kept[item.path]) == len(item.tensors):
            files.append(PlannedFile(item.path, b"", FileLayout.of_file(item, tensors)))
        elif kept[item.path]:
            files.append(_with_some(item, kept[item.path], tensors, metadata))
    if size is not None and recut:
        chosen = {name: tensors[identity] for file in recut for name, identity in kept[file.path]}
        if chosen or variant.include is None:
            files += _recut(chosen, size, metadata)
    files.sort(key=lambda file: file.path)
    _check_paths([file.path for file in files])
    return tuple(files)


def plan_from(store: Store, snapshot: Snapshot, name: str | None, variant: Variant) -> tuple[PlannedFile, ...]:
    """Plan the files of a snapshot in a store.

    Newly cut files keep the metadata of the files they come from (where these disagree, the first one's), and say
    {"format": "pt"} in any case.

    Raises:
        As `plan_files`; and
        IntegrityError: an object of the snapshot is missing or damaged.
    """
    reader = SnapshotReader(store, snapshot, name)
    tensors = {identity: reader.tensor_object(identity) for identity in snapshot.references()}
    metadata = dict(DEFAULT_METADATA)
    if variant.shard_size is not None or variant.include is not None:
        metadata |= reader.metadata()
    try:
        return plan_files(snapshot, tensors, variant, metadata)
    except ValueError as error:
        raise IntegrityError(f"snapshot {reader.name}: {error}", snapshot=reader.name) from error


def chunks(file: PlannedFile, store: Store, name: str, size: int = CHUNK_BYTES) -> Iterator[bytes]:
    """The bytes of a planned file, at most `size` at a time, verified.

    Raises:
        IntegrityError: a block is missing or damaged; `name` is what the message calls the snapshot.
    """
    if file.head:
        yield file.head
    if file.body is not None:
        yield from FileReader(store, file.body, name).iter_chunks(batch=size)


def index_path(path: str) -> str:
    """The path of the index that would list a safetensors file."""
    match = _SHARD.fullmatch(path)
    return f"{match['stem'] if match else path}.safetensors.index.json"


def _included(file: TensorFile, patterns: Iterable[str] | None) -> list[tuple[str, ObjectId]]:
    if patterns is None:
        return list(file.tensors)
    wanted = list(patterns)
    return [
        (name, identity)
        for name, identity in file.tensors
        if any(fnmatchcase(file.prefix + name, pattern) for pattern in wanted)
    ]


def _with_some(
    file: TensorFile,
    kept: Sequence[tuple[str, ObjectId]],
    tensors: Mapping[ObjectId, Tensor],
    metadata: Mapping[str, str],
) -> PlannedFile:
    """A safetensors file with some of a file's tensors."""
    named = {name: tensors[identity] for name, identity in kept}
    raw, header = build_header([(name, tensor.dtype, tensor.shape) for name, tensor in named.items()], metadata)
    parts = [(file.prefix + entry.name, named[entry.name]) for entry in header.entries]
    path = file.path if isinstance(file, SafetensorsFile) else f"{file.path}.safetensors"
    return PlannedFile(path, raw, FileLayout.of_parts(path, parts))


def _index(
    files: Sequence[SafetensorsFile],
    kept: Mapping[str, Sequence[tuple[str, ObjectId]]],
    tensors: Mapping[ObjectId, Tensor],
) -> bytes:
    """The index of files of one directory."""
    held = [(name, file.path.rpartition("/")[2], tensors[key]) for file in files for name, key in kept[file.path]]
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for _, _, tensor in held)},
        "weight_map": {name: path for name, path, _ in sorted(held, key=lambda item: item[0])},
    }
    return json.dumps(index, indent=2, ensure_ascii=False).encode() + b"\n"


def _recut(named: Mapping[str, Tensor], shard_size: int, metadata: Mapping[str, str]) -> Iterator[PlannedFile]:
    synthesis = synthesise_files(list(named.items()), shard_size, metadata)
    for file in synthesis.files:
        body = FileLayout.of_parts(file.path, [(name, named[name]) for name in file.tensors])
        yield PlannedFile(file.path, file.header, body)
    if synthesis.index is not None:
        yield PlannedFile(INDEX_PATH, synthesis.index, None)


def _check_paths(paths: Sequence[str]) -> None:
    """Refuse paths that no directory can hold together. What else the target's file system cannot have, `execute` finds
    before it writes a byte."""
    seen = set(paths)
    if len(seen) != len(paths):
        twice = next(path for index, path in enumerate(paths) if path in paths[:index])
        raise BadInputError(f"{show(twice)} would be written twice: the new files collide with one of the snapshot's")
    for path in paths:
        for parent in PurePosixPath(path).parents:
            if str(parent) in seen:
                raise BadInputError(f"{show(str(parent))} is a file, and a directory of {show(path)}", path=path)
