"""Files and blocks: where the bytes of a file lie, and how tensors are put into safetensors files.

Pure arithmetic over tensors; no store. Checkout cuts a snapshot anew with `synthesise_files`, and a merge makes the
files of its result with it.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol, TypeVar

from mpfs.formats.messages import show
from mpfs.formats.safetensors import MAX_HEADER_SIZE, build_header
from mpfs.objects import BlobFile, BlockId, File, ObjectId, PartsFile, Tensor

DEFAULT_SHARD_SIZE = 5_000_000_000
"""Bytes of tensor data in one file, as mergekit and transformers cut."""

SINGLE_PATH = "model.safetensors"
INDEX_PATH = "model.safetensors.index.json"

DEFAULT_METADATA: Mapping[str, str] = {"format": "pt"}
"""What loaders want to find in a header: without it transformers refuses the file."""

_ENTRY_BYTES = 110
_DIMENSION_BYTES = 20
_HEADER_RESERVE = 1 << 20


class Described(Protocol):
    """What cutting files needs to know of a tensor: its dtype, shape and size in bytes."""

    @property
    def dtype(self) -> str:
        """The element type, as safetensors names it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, in elements."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""


_Described = TypeVar("_Described", bound=Described)


@dataclass(frozen=True, slots=True)
class Segment:
    """One block of a file. `offset` is where it starts in the file and `size` its length, in bytes.

    `tensor` is the name, in the snapshot, of the tensor that it belongs to; None for a header or a side file.
    """

    block: BlockId
    offset: int
    size: int
    tensor: str | None


@dataclass(frozen=True, slots=True)
class FileLayout:
    """A file as a sequence of parts: tensors' bytes, one after the other, without gaps.

    `parts` are (name of the tensor in the snapshot, or None; tensor). `starts` are their offsets in the file in bytes,
    and the file's size at the end.
    """

    path: str
    parts: tuple[tuple[str | None, Tensor], ...]
    starts: tuple[int, ...] = field(repr=False)

    @classmethod
    def of_parts(cls, path: str, parts: Sequence[tuple[str | None, Tensor]]) -> FileLayout:
        """A file made of these parts."""
        starts = [0]
        for _, tensor in parts:
            starts.append(starts[-1] + tensor.nbytes)
        return cls(path, tuple(parts), tuple(starts))

    @classmethod
    def of_file(cls, file: File, tensors: Mapping[ObjectId, Tensor]) -> FileLayout:
        """The layout of a snapshot's file. `tensors` holds at least those that the file refers to.

        Raises:
            KeyError: a tensor is not in `tensors`.
            ValueError: the parts together are not as long as the snapshot says.
        """
        parts: list[tuple[str | None, Tensor]]
        if isinstance(file, BlobFile):
            parts = [(None, tensors[file.content])]
        else:
            named = file.parts if isinstance(file, PartsFile) else file.tensors
            parts = [(None, tensors[file.header])]
            parts += [(None if name is None else file.prefix + name, tensors[identity]) for name, identity in named]
        layout = cls.of_parts(file.path, parts)
        if layout.size != file.size:
            raise ValueError(
                f"the parts of {file.path} have {layout.size:,} bytes together, but the snapshot says {file.size:,}"
            )
        return layout

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self.starts[-1]

    def segments_in(self, start: int, stop: int) -> Iterator[Segment]:
        """The segments that hold bytes [start, stop) of the file, in order; whole ones, also at the ends.

        Found by bisection over the parts, then by arithmetic: the blocks of a tensor are of equal size. Empty parts
        have no segments. Offsets outside the file are cut to it.
        """
        start, stop = max(start, 0), min(stop, self.size)
        if start >= stop:
            return
        index = bisect_right(self.starts, start) - 1
        while index < len(self.parts) and self.starts[index] < stop:
            name, tensor = self.parts[index]
            begin, end = self.starts[index], self.starts[index + 1]
            size = tensor.block_size
            first = max(0, start - begin) // size
            last = -(-(min(stop, end) - begin) // size)
            for number in range(first, last):
                offset = begin + number * size
                yield Segment(tensor.blocks[number], offset, min(size, end - offset), name)
            index += 1

    def segments(self) -> Iterator[Segment]:
        """All segments of the file."""
        return self.segments_in(0, self.size)

    def where(self, segment: Segment) -> str:
        """What a segment belongs to, for messages."""
        if segment.tensor is None:
            return f"file {show(self.path)}"
        return f"file {show(self.path)}, tensor {show(segment.tensor)}"


def batches(segments: Iterable[Segment], max_bytes: int, max_blocks: int) -> Iterator[list[Segment]]:
    """Cut a run of segments into batches of at most `max_bytes` bytes and `max_blocks` segments, one at least."""
    batch: list[Segment] = []
    nbytes = 0
    for segment in segments:
        if batch and (nbytes + segment.size > max_bytes or len(batch) >= max_blocks):
            yield batch
            batch, nbytes = [], 0
        batch.append(segment)
        nbytes += segment.size
    if batch:
        yield batch


def ranges(size: int, step: int) -> list[tuple[int, int]]:
    """[0, size) cut into half-open ranges of `step`, the last one shorter; one empty range for an empty file."""
    edges = [*range(0, size, step), size] if size else [0, 0]
    return list(pairwise(edges))


@dataclass(frozen=True, slots=True)
class SynthesisedFile:
    """A safetensors file to be: its header, byte for byte, and its tensors' names in the order of their data.

    `size` is that of the whole file in bytes.
    """

    path: str
    header: bytes
    tensors: tuple[str, ...]
    size: int


@dataclass(frozen=True, slots=True)
class Synthesis:
    """The safetensors files that hold some tensors. `index` is the content of INDEX_PATH; None for a single file."""

    files: tuple[SynthesisedFile, ...]
    index: bytes | None


def shard(
    tensors: Sequence[tuple[str, _Described]], shard_size: int = DEFAULT_SHARD_SIZE
) -> list[list[tuple[str, _Described]]]:
    """Cut tensors into shards the way mergekit does: in the order given, each shard filled up to `shard_size` bytes.

    A single tensor that is larger has a shard of its own. A shard also ends where its header would grow past what
    readers of safetensors accept (case I9).

    Raises:
        ValueError: `shard_size` is not positive.
    """
    if shard_size <= 0:
        raise ValueError(f"a shard size of {shard_size:,} bytes: it must be positive")
    shards: list[list[tuple[str, _Described]]] = []
    nbytes = header = 0
    for name, tensor in tensors:
        size = tensor.nbytes
        entry = _ENTRY_BYTES + len(json.dumps(name)) + _DIMENSION_BYTES * len(tensor.shape)
        if not shards or nbytes + size > shard_size or header + entry > MAX_HEADER_SIZE - _HEADER_RESERVE:
            shards.append([])
            nbytes = header = 0
        shards[-1].append((name, tensor))
        nbytes += size
        header += entry
    return shards


def synthesise_files(
    tensors: Sequence[tuple[str, Described]],
    shard_size: int = DEFAULT_SHARD_SIZE,
    metadata: Mapping[str, str] = DEFAULT_METADATA,
) -> Synthesis:
    """Plan the safetensors files that hold these tensors.

    One shard is `model.safetensors`; several are `model-00001-of-0000N.safetensors` with an index. Tensors that share
    their blocks (tied ones) are as many full copies in the files, as the format demands.

    Args:
        tensors: name and tensor, names unique.
        shard_size: bytes of tensor data in one file; see `shard`.
        metadata: what each header says under `__metadata__`.

    Raises:
        ValueError: `shard_size` is not positive, or a name occurs twice.
        FormatError: a name, or a shape of a dtype, that no safetensors file can hold.
    """
    shards = shard(tensors, shard_size) or [[]]
    files: list[SynthesisedFile] = []
    weight_map: dict[str, str] = {}
    for number, content in enumerate(shards, start=1):
        path = SINGLE_PATH if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        raw, header = build_header([(name, tensor.dtype, tensor.shape) for name, tensor in content], metadata)
        names = tuple(entry.name for entry in header.entries)
        files.append(SynthesisedFile(path, raw, names, len(raw) + header.data_size))
        weight_map.update(dict.fromkeys(names, path))
    if len(weight_map) != len(tensors):
        raise ValueError("tensor names must be unique")
    if len(files) == 1:
        return Synthesis(tuple(files), None)
    total = sum(tensor.nbytes for _, tensor in tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return Synthesis(tuple(files), json.dumps(index, indent=2, ensure_ascii=False).encode() + b"\n")
