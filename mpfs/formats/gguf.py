"""The GGUF header: parsed strictly, so that a file is known as its header, its tensors and the padding between them.

Format (github.com/ggml-org/ggml, docs/gguf.md, versions 2 and 3; all little-endian): the magic `GGUF`, the version as
u32, the number of tensors and of metadata pairs as u64; the pairs (key, type u32, value); for each tensor its name,
the number of its dimensions u32, the dimensions u64 (the fastest first), its type u32 and its offset u64 in the data;
padding to `general.alignment` (32 where that is not given); the data, each tensor padded to the alignment. A string is
its length as u64 and UTF-8. Sizes of quantised types are from gguf-py's `GGML_QUANT_SIZES` (0.19).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import BinaryIO, NoReturn, TypeAlias

from mpfs.errors import FormatError
from mpfs.formats import sniff
from mpfs.formats.location import RemoteLocation, opened
from mpfs.formats.messages import count, show

MAGIC = b"GGUF"

MAX_HEADER_SIZE = 1 << 28
"""The longest header that is read, in bytes. Those of models with a vocabulary of 250,000 tokens take some 15 MB."""

MAX_TENSORS = 1 << 18
MAX_PAIRS = 1 << 16
"""How many tensors and metadata pairs are read: a hundred times what the largest models have."""

MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32
_LIMIT = 2**63
_FIRST_READ = 1 << 20

Value: TypeAlias = "int | float | bool | str | None"
"""A metadata value; None for arrays, which are only skipped."""


@dataclass(frozen=True, slots=True)
class GGMLType:
    """A tensor type of ggml: `block` elements take `size` bytes. `dtype` is MPFS's, U8 for the quantised ones, whose
    bytes are kept as they are."""

    name: str
    dtype: str
    block: int = 1
    size: int = 1

    @property
    def is_quantised(self) -> bool:
        """Whether the elements are no plain numbers."""
        return self.block > 1


TYPES: Mapping[int, GGMLType] = {
    0: GGMLType("F32", "F32", 1, 4),
    1: GGMLType("F16", "F16", 1, 2),
    24: GGMLType("I8", "I8", 1, 1),
    25: GGMLType("I16", "I16", 1, 2),
    26: GGMLType("I32", "I32", 1, 4),
    27: GGMLType("I64", "I64", 1, 8),
    28: GGMLType("F64", "F64", 1, 8),
    30: GGMLType("BF16", "BF16", 1, 2),
    **{
        code: GGMLType(name, "U8", block, size)
        for code, name, block, size in (
            (2, "Q4_0", 32, 18),
            (3, "Q4_1", 32, 20),
            (6, "Q5_0", 32, 22),
            (7, "Q5_1", 32, 24),
            (8, "Q8_0", 32, 34),
            (9, "Q8_1", 32, 40),
            (10, "Q2_K", 256, 84),
            (11, "Q3_K", 256, 110),
            (12, "Q4_K", 256, 144),
            (13, "Q5_K", 256, 176),
            (14, "Q6_K", 256, 210),
            (15, "Q8_K", 256, 292),
            (16, "IQ2_XXS", 256, 66),
            (17, "IQ2_XS", 256, 74),
            (18, "IQ3_XXS", 256, 98),
            (19, "IQ1_S", 256, 50),
            (20, "IQ4_NL", 32, 18),
            (21, "IQ3_S", 256, 110),
            (22, "IQ2_S", 256, 82),
            (23, "IQ4_XS", 256, 136),
            (29, "IQ1_M", 256, 56),
            (34, "TQ1_0", 256, 54),
            (35, "TQ2_0", 256, 66),
            (39, "MXFP4", 32, 17),
            (40, "NVFP4", 64, 36),
            (41, "Q1_0", 128, 18),
        )
    },
}
"""ggml's tensor types by their codes. 4, 5, 31 to 33 and 36 to 38 are gone from ggml."""

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor. `shape` counts what MPFS stores, the slowest dimension first: elements, or for quantised types bytes in
    the last dimension. `start` and `end` are byte offsets in the file."""

    name: str
    type: GGMLType
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def dtype(self) -> str:
        """What MPFS stores it as."""
        return self.type.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the file."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Header:
    """A valid header: entries in data order, without holes but for padding. `size` is its length with its padding;
    `metadata` has the values that are no arrays."""

    version: int
    alignment: int
    metadata: dict[str, Value]
    entries: tuple[Entry, ...]
    size: int
    file_size: int

    @property
    def quantised(self) -> dict[str, str]:
        """The quantised tensors' types by name."""
        return {entry.name: entry.type.name for entry in self.entries if entry.type.is_quantised}


def read_header(path: str | os.PathLike[str] | RemoteLocation) -> tuple[Header, bytes]:
    """The header of a file, parsed and as raw bytes with its padding.

    Raises:
        NotFoundError: there is no such file.
        BadInputError: the path is not a regular file, or cannot be read.
        FormatError: the file is not valid GGUF; the message says what is wrong, with byte counts.
    """
    with opened(path) as (file, size):
        return parse(file, size, str(path))


def parse(file: BinaryIO, file_size: int, source: str) -> tuple[Header, bytes]:
    """As `read_header`, from an open file; `source` is its name, for messages."""
    cursor = _Cursor(file, file_size, source)
    magic = cursor.take(4, "its magic number") if file_size >= 4 else b""
    if magic != MAGIC:
        cursor.fail(sniff.foreign(cursor.head()) or "this is no GGUF file: it does not begin with GGUF")
    version = cursor.integer("<I", "its version")
    if version & 0xFFFF == 0 and version:
        cursor.fail("this GGUF file is big-endian, and MPFS keeps little-endian ones; convert it first")
    if version not in (2, 3):
        cursor.fail(f"it is GGUF version {version}; MPFS reads versions 2 and 3")
    tensor_count = cursor.integer("<Q", "its number of tensors")
    pair_count = cursor.integer("<Q", "its number of metadata pairs")
    for number, limit, what in ((tensor_count, MAX_TENSORS, "tensors"), (pair_count, MAX_PAIRS, "metadata pairs")):
        if number > limit:
            cursor.fail(f"it says that it has {number:,} {what}, and MPFS reads {limit:,}; the file is damaged")
    metadata: dict[str, Value] = {}
    for _ in range(pair_count):
        key = cursor.string("a metadata key")
        if key in metadata:
            cursor.fail(f"the metadata key {show(key)} occurs twice")
        metadata[key] = cursor.value(cursor.integer("<I", f"the type of {show(key)}"), key)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1) or alignment > 1 << 20:
        cursor.fail(f"general.alignment is {show(alignment)}; it must be a power of two")
    described: dict[str, tuple[GGMLType, tuple[int, ...], int]] = {}
    for _ in range(tensor_count):
        name = cursor.string("a tensor's name")
        if name in described:
            cursor.fail(f"there are two tensors {show(name)}", tensor=name)
        described[name] = _described(cursor, name)
    size = _aligned(cursor.at, alignment)
    if tensor_count == 0:
        size = min(size, file_size)
    cursor.take(size - cursor.at, "the padding after its header")
    entries = _entries(cursor, described, alignment, size)
    return Header(version, alignment, metadata, entries, size, file_size), cursor.raw(size)


def _described(cursor: _Cursor, name: str) -> tuple[GGMLType, tuple[int, ...], int]:
    """Type, stored shape and offset of the tensor whose description follows."""
    dimensions = cursor.integer("<I", f"the number of dimensions of {show(name)}")
    if dimensions > MAX_DIMENSIONS:
        cursor.fail(f"tensor {show(name)} has {dimensions} dimensions; GGUF allows {MAX_DIMENSIONS}", tensor=name)
    shape = tuple(cursor.integer("<Q", f"the shape of {show(name)}") for _ in range(dimensions))[::-1]
    code = cursor.integer("<I", f"the type of {show(name)}")
    offset = cursor.integer("<Q", f"the offset of {show(name)}")
    kind = TYPES.get(code)
    if kind is None:
        cursor.fail(f"tensor {show(name)} has the type {code}, which MPFS does not know", tensor=name)
    extent = prod(max(dim, 1) for dim in shape) * kind.size
    if extent >= _LIMIT:
        cursor.fail(f"tensor {show(name)} has the shape {show(shape)}, which overflows", tensor=name)
    if kind.is_quantised:
        if not shape or shape[-1] % kind.block:
            cursor.fail(
                f"tensor {show(name)} is {kind.name} {show(shape)}: rows must be whole blocks of {kind.block}",
                tensor=name,
            )
        shape = (*shape[:-1], shape[-1] // kind.block * kind.size)
    return kind, shape, offset


def _entries(
    cursor: _Cursor, described: Mapping[str, tuple[GGMLType, tuple[int, ...], int]], alignment: int, data: int
) -> tuple[Entry, ...]:
    """The tensors in data order; refused if they overlap, leave holes or do not fill the file."""
    found = [
        Entry(name, kind, shape, data + offset, data + offset + _nbytes(kind, shape))
        for name, (kind, shape, offset) in described.items()
    ]
    found.sort(key=lambda entry: (entry.start, entry.end))
    end = data
    for entry in found:
        if entry.start != _aligned(end - data, alignment) + data:
            cursor.fail(
                f"tensor {show(entry.name)} starts at byte {entry.start - data:,} of the data, where "
                f"{_aligned(end - data, alignment):,} is next; tensors overlap, or leave a hole",
                tensor=entry.name,
            )
        end = entry.end
    present, needed = cursor.file_size - data, end - data
    if present < needed:
        cursor.fail(
            f"the tensors take {count(needed, 'byte')}, but only {count(max(present, 0), 'byte')} follow the header: "
            f"{needed - present:,} are missing; the file was cut off, download or copy it again"
        )
    if present > _aligned(needed, alignment):
        cursor.fail(
            f"the tensors take {count(needed, 'byte')}, but {count(present, 'byte')} follow the header: the last "
            f"{present - needed:,} belong to no tensor; the file is damaged, download or copy it again"
        )
    return tuple(found)


def _nbytes(kind: GGMLType, shape: Sequence[int]) -> int:
    return prod(shape) * (1 if kind.is_quantised else kind.size)


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


class _Cursor:
    """A place in the header, which is read as it is needed."""

    def __init__(self, file: BinaryIO, file_size: int, source: str) -> None:
        self._file = file
        self._buffer = bytearray()
        self.file_size = file_size
        self.source = source
        self.at = 0

    def fail(self, problem: str, **details: object) -> NoReturn:
        raise FormatError(f"{self.source}: {problem}", file=self.source, **details)

    def head(self) -> bytes:
        return bytes(self._buffer[: sniff.HEAD_SIZE])

    def raw(self, size: int) -> bytes:
        return bytes(self._buffer[:size])

    def skip(self, size: int, what: str) -> int:
        """Where the next bytes start, which are there; go past them."""
        end = self.at + size
        if end > self.file_size:
            self.fail(f"the header says that {what} ends at byte {end:,}, but the file ends at {self.file_size:,}")
        if end > MAX_HEADER_SIZE:
            self.fail(f"the header is over {MAX_HEADER_SIZE:,} bytes long; the file is damaged")
        if end > len(self._buffer):
            self._buffer += self._file.read(max(end - len(self._buffer), len(self._buffer), _FIRST_READ))
            if end > len(self._buffer):
                self.fail("it became shorter while it was being read; import it again when it is complete")
        start, self.at = self.at, end
        return start

    def take(self, size: int, what: str) -> bytes:
        start = self.skip(size, what)
        return bytes(self._buffer[start : start + size])

    def integer(self, layout: str, what: str) -> int:
        start = self.skip(struct.calcsize(layout), what)
        (number,) = struct.unpack_from(layout, self._buffer, start)
        return int(number)

    def string(self, what: str) -> str:
        data = self.take(self.integer("<Q", f"the length of {what}"), what)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8; the file is damaged")

    def value(self, kind: int, key: str) -> Value:
        what = f"the metadata value {show(key)}"
        layout = _SCALARS.get(kind)
        if layout is not None:
            start = self.skip(struct.calcsize(layout), what)
            (scalar,) = struct.unpack_from(layout, self._buffer, start)
            return scalar if isinstance(scalar, bool | int | float) else None
        if kind == _STRING:
            # Texts of the metadata are kept as bytes; only tensors' names and keys have to be text.
            return self.take(self.integer("<Q", what), what).decode("utf-8", "replace")
        if kind != _ARRAY:
            self.fail(f"{what} has the type {kind}, which GGUF does not define; the file is damaged")
        self._skip_array(what, 0)
        return None

    def _skip_array(self, what: str, depth: int) -> None:
        kind, length = self.integer("<I", what), self.integer("<Q", what)
        layout = _SCALARS.get(kind)
        if layout is not None:
            self.skip(length * struct.calcsize(layout), what)
        elif kind == _STRING:
            for _ in range(length):
                self.skip(self.integer("<Q", what), what)
        elif kind == _ARRAY and depth < 8:
            for _ in range(length):
                self._skip_array(what, depth + 1)
        else:
            self.fail(f"{what} has elements of type {kind}, which GGUF does not define; the file is damaged")
