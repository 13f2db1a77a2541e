"""The initialisers of an ONNX model: where in the file their numbers lie.

Only protobuf's wire format is read, and of it what leads to tensors; everything else is passed over. The numbers of an
initialiser lie in one run of bytes, little-endian, so the file is runs of other bytes and tensors, as GGUF is.

Format: protobuf (protobuf.dev, "Encoding") and onnx/onnx.proto3: ModelProto.graph = 7, GraphProto.initializer = 5;
TensorProto: dims = 1, data_type = 2, float_data = 4, name = 8, raw_data = 9, double_data = 10, data_location = 14.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import BinaryIO, NoReturn

from mpfs.errors import FormatError
from mpfs.formats import sniff
from mpfs.formats.location import RemoteLocation, opened
from mpfs.formats.messages import show
from mpfs.formats.safetensors import TensorEntry
from mpfs.objects.dtypes import nbytes

DTYPES: Mapping[int, str] = {
    1: "F32",
    2: "U8",
    3: "I8",
    4: "U16",
    5: "I16",
    6: "I32",
    7: "I64",
    9: "BOOL",
    10: "F16",
    11: "F64",
    12: "U32",
    13: "U64",
    14: "C64",
    16: "BF16",
    17: "F8_E4M3",
    18: "F8_E4M3FNUZ",
    19: "F8_E5M2",
    20: "F8_E5M2FNUZ",
    24: "F8_E8M0",
}
"""TensorProto.DataType to MPFS's dtypes. Others (texts, complex128, 4-bit integers) are kept as bytes of the file."""

_GRAPH, _INITIALISER = 7, 5
_DIMS, _TYPE, _FLOATS, _NAME, _RAW, _DOUBLES, _LOCATION = 1, 2, 4, 8, 9, 10, 14
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_NAME = 1 << 16


@dataclass(frozen=True, slots=True)
class Model:
    """A model's initialisers in the order of the file, with their places in it: the whole file is data. `left` are the names
    of those that are kept as bytes of the file only: their data is in other files, or is no plain run of numbers."""

    entries: tuple[TensorEntry, ...]
    left: tuple[str, ...]
    file_size: int


def read_model(path: str | os.PathLike[str] | RemoteLocation) -> Model:
    """Find the initialisers of a model; the whole file is passed through once if it cannot be jumped about in.

    Raises:
        NotFoundError: there is no such file.
        BadInputError: the path is not a regular file, or cannot be read.
        FormatError: the file is damaged, cut off, no ONNX model, or has no initialiser that is a run of numbers.
    """
    with opened(path) as (file, size):
        reader = _Reader(file, size, str(path))
        head = file.read(sniff.HEAD_SIZE)
        problem = sniff.foreign(head)
        if problem is not None:
            reader.fail(problem)
        file.seek(0)
        model = _Found(reader)
        reader.message(size, {_GRAPH: lambda end: reader.message(end, {_INITIALISER: model.initialiser})})
    if not model.entries:
        reader.fail("it has no initialisers whose numbers are in the file; this is no ONNX model with weights")
    return Model(tuple(model.entries.values()), tuple(model.left), size)


class _Found:
    """Collects initialisers."""

    def __init__(self, reader: _Reader) -> None:
        self._reader = reader
        self.entries: dict[str, TensorEntry] = {}
        self.left: list[str] = []

    def initialiser(self, end: int) -> None:
        """Read one, which ends at a byte of the file."""
        reader = self._reader
        shape: list[int] = []
        code = location = 0
        name = ""
        raw: tuple[int, int] | None = None
        typed: dict[str, tuple[int, int]] = {}
        while reader.at < end:
            field, wire = reader.key(end)
            if field in (_DIMS, _TYPE, _LOCATION) and wire == _VARINT:
                value = reader.varint(end)
                if field == _DIMS:
                    shape.append(value)
                elif field == _TYPE:
                    code = value
                else:
                    location = value
            elif wire == _BYTES:
                start, stop = reader.run(end)
                if field == _DIMS:
                    reader.go(start)
                    while reader.at < stop:
                        shape.append(reader.varint(stop))
                elif field == _NAME:
                    name = reader.text(start, stop)
                elif field == _RAW:
                    raw = start, stop
                elif field in (_FLOATS, _DOUBLES):
                    typed["F32" if field == _FLOATS else "F64"] = start, stop
                reader.go(stop)
            else:
                reader.skip(wire, end)
        self._add(name, code, tuple(shape), None if location else raw or typed.get(DTYPES.get(code, "")))

    def _add(self, name: str, code: int, shape: tuple[int, ...], where: tuple[int, int] | None) -> None:
        reader = self._reader
        if not name or name in self.entries or name in self.left:
            reader.fail(
                f"there are two initialisers {show(name)}" if name else "an initialiser has no name", tensor=name
            )
        dtype = DTYPES.get(code)
        if dtype is None or where is None:
            self.left.append(name)
            return
        if any(dim >= 2**62 for dim in shape) or len(shape) > 64:
            reader.fail(f"initialiser {show(name)} has the shape {show(shape)}, which cannot be", tensor=name)
        expected, found = nbytes(dtype, shape), where[1] - where[0]
        if expected != found:
            reader.fail(
                f"initialiser {show(name)} is {dtype} {show(shape)}, which takes {expected:,} bytes, but has {found:,}; the "
                "file is damaged",
                tensor=name,
            )
        self.entries[name] = TensorEntry(name, dtype, shape, *where)


class _Reader:
    """A place in the file, and protobuf's ways to write numbers."""

    def __init__(self, file: BinaryIO, size: int, source: str) -> None:
        self._file = file
        self._size = size
        self._source = source
        self.at = 0

    def fail(self, problem: str, **details: object) -> NoReturn:
        raise FormatError(f"{self._source}: {problem}", file=self._source, **details)

    def damaged(self) -> NoReturn:
        self.fail(f"it is damaged, cut off or no ONNX model: what is at byte {self.at:,} cannot be; copy it again")

    def message(self, end: int, inner: Mapping[int, Callable[[int], None]]) -> None:
        """Go through a message, and into those of its fields that are of interest."""
        while self.at < end:
            field, wire = self.key(end)
            if wire == _BYTES and field in inner:
                start, stop = self.run(end)
                self.go(start)
                inner[field](stop)
                if self.at != stop:
                    self.damaged()
            else:
                self.skip(wire, end)

    def key(self, end: int) -> tuple[int, int]:
        value = self.varint(end)
        if value >> 3 == 0 or value >> 3 >= 1 << 29:
            self.damaged()
        return value >> 3, value & 7

    def varint(self, end: int) -> int:
        value = shift = 0
        while self.at < end and shift < 70:
            byte = self._file.read(1)
            if not byte:
                break
            self.at += 1
            value |= (byte[0] & 0x7F) << shift
            shift += 7
            if byte[0] < 0x80:
                return value
        return self.damaged()

    def run(self, end: int) -> tuple[int, int]:
        """Where the bytes of a field start and stop."""
        length = self.varint(end)
        if length > end - self.at:
            self.damaged()
        return self.at, self.at + length

    def skip(self, wire: int, end: int) -> None:
        if wire == _VARINT:
            self.varint(end)
        elif wire == _BYTES:
            self.go(self.run(end)[1])
        elif wire in (_FIXED64, _FIXED32) and end - self.at >= (8 if wire == _FIXED64 else 4):
            self.go(self.at + (8 if wire == _FIXED64 else 4))
        else:
            self.damaged()

    def go(self, place: int) -> None:
        """Go to a byte of the file, which is there."""
        if place != self.at:
            self._file.seek(place)
            self.at = place

    def text(self, start: int, stop: int) -> str:
        if stop - start > _MAX_NAME:
            self.damaged()
        self.go(start)
        data = self._file.read(stop - start)
        self.at = start + len(data)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            self.damaged()
