"""Importing a checkpoint: look at the source, store every file's bytes, and describe them as a snapshot."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from mpfs.errors import BadInputError, FormatError, NotFoundError
from mpfs.formats import huggingface, safetensors, torch_file
from mpfs.ingest.pipeline import Progress, TensorJob, store_tensors
from mpfs.ingest.source import ByteSource, FileBytes, MemoryBytes, OpenFiles
from mpfs.objects import BlobFile, File, SafetensorsFile, Snapshot, Tensor, object_id
from mpfs.store import Writer
from mpfs.vfs.layout import INDEX_PATH, synthesise_files

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")


@dataclass(frozen=True, slots=True)
class Ingested:
    """What an import found and staged: objects that are not published yet. `size` is the snapshot's, in bytes.

    `skipped` are entries of torch checkpoints that are not weights, by dotted path.
    """

    snapshot: Snapshot
    tensors: tuple[Tensor, ...]
    skipped: tuple[str, ...]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return self.snapshot.size


@dataclass(frozen=True, slots=True)
class _Incoming:
    """A file of the snapshot to be. A blob has `content`; a safetensors file has `header` and `tensors`."""

    path: str
    content: ByteSource | None = None
    header: bytes = b""
    prefix: str = ""
    tensors: tuple[tuple[str, TensorJob], ...] = ()

    def jobs(self) -> Iterator[TensorJob]:
        if self.content is not None:
            yield TensorJob("U8", (self.content.size,), self.content)
        else:
            yield TensorJob("U8", (len(self.header),), MemoryBytes(self.header, f"header of {self.path}"))
            yield from (job for _, job in self.tensors)

    @property
    def size(self) -> int:
        return sum(job.source.size for job in self.jobs())

    def file(self, stored: Iterator[Tensor]) -> tuple[File, list[Tensor]]:
        """The file's description, from its tensors as they come out of the pipeline."""
        first = next(stored)
        if self.content is not None:
            return BlobFile(self.path, self.content.size, object_id(first.encode())), [first]
        rest = [next(stored) for _ in self.tensors]
        names = [name for name, _ in self.tensors]
        entries = tuple((name, object_id(tensor.encode())) for name, tensor in zip(names, rest, strict=True))
        file = SafetensorsFile(self.path, self.size, object_id(first.encode()), self.prefix, entries)
        return file, [first, *rest]


def ingest(
    source: Path,
    writer: Writer,
    block_size: int,
    *,
    key: str | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Ingested:
    """Read a checkpoint and stage all of it.

    Args:
        source: a directory in Hugging Face layout, a .safetensors file, or a torch file.
        writer: takes the blocks.
        block_size: bytes of a block.
        key: which state dict of a torch file to take, where it holds several.
        threads: worker threads; default: the number of CPUs.
        progress: told the bytes staged, of all.

    Raises:
        NotFoundError: there is nothing at `source`, or nothing under `key`.
        BadInputError: it is damaged, unsafe or no checkpoint; the subclasses tell which.
    """
    with ExitStack() as stack:
        files = OpenFiles(stack)
        incoming, skipped = _look_at(source, key, files)
        incoming.sort(key=lambda item: item.path)
        total = sum(item.size for item in incoming)
        jobs = (job for item in incoming for job in item.jobs())
        stored = store_tensors(writer, block_size, jobs, threads=threads, progress=progress, total=total)
        described: list[File] = []
        tensors: dict[Tensor, None] = {}
        for item in incoming:
            file, parts = item.file(stored)
            described.append(file)
            tensors.update(dict.fromkeys(parts))
        files.check_unchanged()
    return Ingested(Snapshot(tuple(described)), tuple(tensors), tuple(skipped))


def _look_at(source: Path, key: str | None, files: OpenFiles) -> tuple[list[_Incoming], list[str]]:
    try:
        mode = source.stat().st_mode
    except OSError as error:
        raise NotFoundError(f"{source}: {error.strerror or error}", file=str(source)) from error
    if stat.S_ISDIR(mode):
        return _directory(source, key, files)
    if not stat.S_ISREG(mode):
        raise BadInputError(f"{source}: neither a directory nor a regular file", file=str(source))
    if source.suffix == ".safetensors":
        if key is not None:
            raise BadInputError(f"{source}: --key chooses within torch files; a safetensors file has no state dicts")
        header, raw = safetensors.read_header(source)
        return [_safetensors(source.name, source, header, raw, "", files)], []
    if source.suffix in TORCH_SUFFIXES:
        state = torch_file.read_state_dict(source, key)
        return _torch({str(source): state}), list(state.skipped)
    raise BadInputError(
        f"{source}: not a checkpoint that MPFS knows; give a directory, a .safetensors file or a torch file "
        f"({', '.join(TORCH_SUFFIXES)})",
        file=str(source),
    )


def _directory(source: Path, key: str | None, files: OpenFiles) -> tuple[list[_Incoming], list[str]]:
    layout = huggingface.scan(source)
    incoming: list[_Incoming] = []
    states: dict[str, torch_file.StateDict] = {}
    skipped: list[str] = list(layout.skipped)
    for weights in layout.weights:
        if weights.header is not None:
            incoming.append(
                _safetensors(weights.path, weights.location, weights.header, weights.raw_header, weights.prefix, files)
            )
        else:
            states[weights.path] = state = torch_file.read_state_dict(weights.location, key)
            skipped.extend(state.skipped)
    if states:
        incoming.extend(_torch(states))
    if key is not None and not states:
        raise BadInputError(f"{source}: --key chooses within torch files; there is none")
    taken = {item.path for item in incoming}
    for side in layout.files:
        if states and side.path.endswith(".bin.index.json"):
            # It describes torch shards that this snapshot does not have.
            skipped.append(side.path)
        elif side.path in taken:
            raise FormatError(f"{source}: {side.path} is in the way of the weights under the same name")
        else:
            file = files.open(side.location)
            incoming.append(_Incoming(side.path, content=FileBytes(file, 0, file.size)))
    return incoming, skipped


def _safetensors(
    path: str, location: Path, header: safetensors.Header, raw: bytes, prefix: str, files: OpenFiles
) -> _Incoming:
    file = files.open(location)
    tensors = tuple(
        (
            entry.name,
            TensorJob(
                entry.dtype, entry.shape, FileBytes(file, header.data_offset + entry.start, entry.end - entry.start)
            ),
        )
        for entry in header.entries
    )
    return _Incoming(path, header=raw, prefix=prefix, tensors=tensors)


def _torch(states: dict[str, torch_file.StateDict]) -> list[_Incoming]:
    """Torch files have no bytes worth keeping but their tensors': those become safetensors files."""
    jobs: dict[str, TensorJob] = {}
    for where, state in states.items():
        for name, tensor in state.tensors.items():
            if name in jobs:
                raise FormatError(f"{where}: tensor {name} is in another shard as well", tensor=name)
            dtype = torch_file.dtype_name(tensor.dtype)
            data = torch_file.tensor_bytes(tensor)
            jobs[name] = TensorJob(dtype, torch_file.tensor_shape(tensor), MemoryBytes(data, f"{where}: {name}"))
    planned = synthesise_files(list(jobs.items()))
    incoming = [
        _Incoming(file.path, header=file.header, tensors=tuple((name, jobs[name]) for name in file.tensors))
        for file in planned.files
    ]
    if planned.index is not None:
        incoming.append(_Incoming(INDEX_PATH, content=MemoryBytes(planned.index, INDEX_PATH)))
    return incoming
