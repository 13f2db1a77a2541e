"""Importing a checkpoint: look at the source, store every file's bytes, and describe them as a snapshot."""

from __future__ import annotations

import stat
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from mpfs.errors import BadInputError, FormatError, NotFoundError
from mpfs.formats import huggingface, safetensors, torch_file
from mpfs.formats.messages import count, is_unicode, listing, show
from mpfs.ingest.pipeline import TensorJob, store_tensors
from mpfs.ingest.source import ByteSource, KnownBytes, MemoryBytes, SourceFile, SourceFiles, TensorBytes, source_files
from mpfs.objects import BlobFile, File, SafetensorsFile, Snapshot, Tensor, object_id
from mpfs.objects.dtypes import nbytes
from mpfs.objects.progress import Progress
from mpfs.store import Writer
from mpfs.vfs.layout import INDEX_PATH, SINGLE_PATH, synthesise_files

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")

_TORCH_INDEX_SUFFIX = ".bin" + huggingface.INDEX_SUFFIX
_SAFETENSORS_NAMES = {
    "diffusion_pytorch_model.bin": "diffusion_pytorch_model.safetensors",
    "adapter_model.bin": "adapter_model.safetensors",
}
"""What loaders call a torch file's safetensors form, where that is not `model.safetensors`."""


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
    """A file of the snapshot to be. A blob's `content` is all of it; a safetensors file's is its header."""

    path: str
    content: ByteSource
    prefix: str = ""
    tensors: tuple[tuple[str, TensorJob], ...] | None = None

    def jobs(self) -> Iterator[TensorJob]:
        yield TensorJob("U8", (self.content.size,), self.content)
        yield from (job for _, job in self.tensors or ())

    @property
    def size(self) -> int:
        return sum(job.nbytes for job in self.jobs())

    def described(self, parts: Iterator[str]) -> File:
        """The file's description, from the ids of its parts in the order of `jobs`."""
        content = next(parts)
        if self.tensors is None:
            return BlobFile(self.path, self.size, content)
        entries = tuple((name, next(parts)) for name, _ in self.tensors)
        return SafetensorsFile(self.path, self.size, content, self.prefix, entries)


@dataclass(frozen=True, slots=True)
class _Torch:
    """A torch file's state dict, and the file."""

    state: torch_file.StateDict
    file: SourceFile


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
    with source_files() as files:
        incoming, skipped = _look_at(source, key, files)
        incoming.sort(key=lambda item: item.path)
        _refuse_impossible(source, incoming)
        total = sum(item.size for item in incoming)
        jobs = (job for item in incoming for job in item.jobs())
        tensors: dict[Tensor, None] = {}

        def identities(stored: Iterator[Tensor]) -> Iterator[str]:
            for tensor in stored:
                tensors[tensor] = None
                yield object_id(tensor.encode())

        # Closed before the files are: when this fails no worker may still be reading.
        with closing(
            store_tensors(writer, block_size, jobs, threads=threads, progress=progress, total=total)
        ) as stored:
            parts = identities(stored)
            described = tuple(item.described(parts) for item in incoming)
        files.check_unchanged()
    return Ingested(Snapshot(described), tuple(tensors), tuple(skipped))


def _look_at(source: Path, key: str | None, files: SourceFiles) -> tuple[list[_Incoming], list[str]]:
    try:
        mode = source.stat().st_mode
    except OSError as error:
        raise NotFoundError(f"{source}: {error.strerror or error}", file=str(source)) from error
    except ValueError as error:  # a name that no file can have
        raise NotFoundError(f"{str(source)!r}: {error}") from error
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
        found = _read_torch(source, key, files)
        return _torch({source.name: found}, "", SINGLE_PATH), list(found.state.skipped)
    raise BadInputError(
        f"{source}: not a checkpoint that MPFS knows; give a directory, a .safetensors file or a torch file "
        f"({', '.join(TORCH_SUFFIXES)})",
        file=str(source),
    )


def _directory(source: Path, key: str | None, files: SourceFiles) -> tuple[list[_Incoming], list[str]]:
    layout = huggingface.scan(source)
    incoming: list[_Incoming] = []
    by_prefix: dict[str, dict[str, _Torch]] = defaultdict(dict)
    skipped: list[str] = list(layout.skipped)
    for weights in layout.weights:
        if weights.header is not None:
            incoming.append(
                _safetensors(weights.path, weights.location, weights.header, weights.raw_header, weights.prefix, files)
            )
        else:
            found = _read_torch(weights.location, key, files)
            by_prefix[weights.prefix][weights.path.removeprefix(weights.prefix)] = found
            skipped.extend(f"{weights.path}: {entry}" if weights.prefix else entry for entry in found.state.skipped)
    if key is not None and not by_prefix:
        raise BadInputError(f"{source}: --key chooses within torch files; there is none")
    for prefix, states in by_prefix.items():
        incoming.extend(_torch(states, prefix, _safetensors_name(states)))
    taken = {item.path for item in incoming}
    for side in layout.files:
        directory, slash, name = side.path.rpartition("/")
        states = by_prefix.get(directory + slash, {})
        if states and name.endswith(_TORCH_INDEX_SUFFIX):
            # It describes torch shards, which this snapshot does not have as such.
            _check_shards(side.location, states)
            skipped.append(side.path)
        elif side.path in taken:
            raise FormatError(f"{source}: {side.path} is in the way of the weights under the same name")
        else:
            file = files.add(side.location)
            incoming.append(_Incoming(side.path, file.range(0, file.size)))
    return incoming, skipped


def _safetensors(
    path: str, location: Path, header: safetensors.Header, raw: bytes, prefix: str, files: SourceFiles
) -> _Incoming:
    file = files.add(location)
    if file.size != header.data_offset + header.data_size:
        raise FormatError(f"{location}: changed while it was being imported; import it again", file=str(location))
    tensors = tuple(
        (
            entry.name,
            TensorJob(entry.dtype, entry.shape, file.range(header.data_offset + entry.start, entry.nbytes)),
        )
        for entry in header.entries
    )
    return _Incoming(path, KnownBytes(file, raw), prefix, tensors)


def _read_torch(path: Path, key: str | None, files: SourceFiles) -> _Torch:
    file = files.add(path)
    return _Torch(torch_file.read_state_dict(path, key), file)


def _torch(states: Mapping[str, _Torch], prefix: str, name: str) -> list[_Incoming]:
    """Torch files have no bytes worth keeping but their tensors': those become safetensors files in their place."""
    jobs: dict[str, TensorJob] = {}
    for found in states.values():
        for tensor_name, tensor in found.state.tensors.items():
            if tensor_name in jobs:
                where = found.file.path
                raise FormatError(
                    f"{where}: tensor {show(tensor_name)} is in another shard as well", tensor=tensor_name
                )
            dtype, shape = torch_file.dtype_name(tensor.dtype), torch_file.tensor_shape(tensor)
            content = TensorBytes(tensor, nbytes(dtype, shape), found.file, tensor_name)
            jobs[tensor_name] = TensorJob(dtype, shape, content)
    planned = synthesise_files(list(jobs.items()))
    incoming = []
    for file in planned.files:
        path = prefix + (name if file.path == SINGLE_PATH else file.path)
        header = MemoryBytes(file.header, f"header of {path}")
        incoming.append(_Incoming(path, header, prefix, tuple((key, jobs[key]) for key in file.tensors)))
    if planned.index is not None:
        incoming.append(_Incoming(prefix + INDEX_PATH, MemoryBytes(planned.index, prefix + INDEX_PATH)))
    return incoming


def _safetensors_name(states: Mapping[str, _Torch]) -> str:
    """What the safetensors file of a directory's torch files is called."""
    (name, *others) = states
    return SINGLE_PATH if others else _SAFETENSORS_NAMES.get(name, SINGLE_PATH)


def _check_shards(index: Path, states: Mapping[str, _Torch]) -> None:
    """Refuse torch shards without a tensor that their index says they have."""
    shards = huggingface.read_index(index)
    if set(shards.values()) != set(states):
        return  # of other files than those that the weights come from
    absent = [name for name, shard in shards.items() if name not in states[shard].state.tensors]
    if absent:
        raise FormatError(
            f"{index}: the index lists {count(len(absent), 'tensor')} that the named shard lacks: {listing(absent)} "
            f"({show(absent[0])} should be in {show(shards[absent[0]])}); index and shards do not belong together, "
            "download them again",
            file=str(index),
            tensors=absent[:100],
        )


def _refuse_impossible(source: Path, incoming: list[_Incoming]) -> None:
    """Refuse what no snapshot can hold (odd paths, names twice) before anything is stored."""
    for item in incoming:
        if not is_unicode(item.path):
            raise BadInputError(f"{source.parent}: the file name {show(item.path)} is not valid UTF-8; rename it")
    nothing = iter(lambda: "", None)
    try:
        Snapshot(tuple(item.described(nothing) for item in incoming))
    except ValueError as error:
        raise BadInputError(f"{source}: {error}", file=str(source)) from error
