"""Arrays out of NumPy's .npz archives, without pickles.

Format: a zip archive (stored or deflated) of .npy files (numpy.org, `numpy.lib.format`), one an array, called NAME.npy.
The checksum of each is verified as it is read.
"""

from __future__ import annotations

import ast
import os
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import IO, TYPE_CHECKING, NoReturn, cast

from mpfs.errors import FormatError, UnsafeInputError
from mpfs.formats import sniff
from mpfs.formats.archive import check_members, data_offset
from mpfs.formats.location import opened
from mpfs.formats.messages import is_unicode, show
from mpfs.formats.safetensors import METADATA_KEY
from mpfs.objects.dtypes import nbytes

if TYPE_CHECKING:
    import numpy as np

_DTYPES = {
    "f8": "F64",
    "f4": "F32",
    "f2": "F16",
    "c8": "C64",
    "i8": "I64",
    "i4": "I32",
    "i2": "I16",
    "i1": "I8",
    "u8": "U64",
    "u4": "U32",
    "u2": "U16",
    "u1": "U8",
    "b1": "BOOL",
}
"""NumPy's kind and item size to safetensors' dtype."""


_MAX_DIMENSIONS = 64
"""What NumPy 2 allows."""


@dataclass(frozen=True, slots=True)
class Array:
    """An array of an archive: what it is, and which member holds it. `in_order` says that its numbers lie as safetensors has
    them, in C order and little-endian."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    member: zipfile.ZipInfo
    in_order: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return nbytes(self.dtype, self.shape)


def read_arrays(path: str | os.PathLike[str]) -> tuple[Array, ...]:
    """Describe the arrays of an archive, in its order; no data is read.

    Raises:
        NotFoundError: there is no such file.
        BadInputError: the path is not a regular file, or cannot be read.
        UnsafeInputError: an array holds Python objects.
        FormatError: the file is damaged, encrypted or no .npz archive, or has an array that no safetensors file can hold.
    """
    source = os.fspath(path)
    try:
        with opened(source) as (file, size):
            head = file.read(sniff.HEAD_SIZE)
            if not head.startswith((sniff.ZIP_MAGIC, sniff.EMPTY_ZIP_MAGIC)):
                _fail(source, sniff.foreign(head) or "this is no .npz file: it is no zip archive")
            with zipfile.ZipFile(file) as archive:
                return _arrays(check_members(archive, size, source), archive, source)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, zlib.error, UnicodeError) as error:
        _fail(source, f"the archive is damaged or was cut off ({error}); download or copy it again")


class ArrayStream:
    """An array's numbers as the file has them, one after the other. The checksum is verified with the last of them."""

    def __init__(self, path: str | os.PathLike[str], array: Array) -> None:
        """Open it.

        Raises:
            FormatError: the archive is damaged, or was changed since it was described.
        """
        self._source = os.fspath(path)
        self._array = array
        with self._our_errors():
            file = open(path, "rb")  # noqa: SIM115  # closed with the member
            try:
                file.seek(data_offset(file, array.member))
                self._member = zipfile.ZipExtFile(file, "r", array.member, close_fileobj=True)
            except BaseException:
                file.close()
                raise
            self.dtype, self.fortran, shape = _npy_header(cast(IO[bytes], self._member), array.name, self._source)
            if shape != array.shape:
                raise zipfile.BadZipFile("its shape is another one by now")

    def read(self, size: int, /) -> bytes:
        """The next bytes; fewer only at the end."""
        with self._our_errors():
            return self._member.read(size)

    def close(self) -> None:
        """Close it."""
        self._member.close()

    @contextmanager
    def _our_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, zlib.error) as error:
            _fail(
                self._source,
                f"array {show(self._array.name)} is damaged ({error}); download or copy the file again",
                tensor=self._array.name,
            )


def read_array(path: str | os.PathLike[str], array: Array) -> bytes:
    """An array's elements in C order, little-endian; its checksum is verified.

    Raises:
        FormatError: the archive is damaged, or was changed since it was described.
    """
    import numpy as np

    stream = ArrayStream(path, array)
    try:
        data = stream.read(array.nbytes + 1)
    finally:
        stream.close()
    if len(data) != array.nbytes:
        _fail(
            os.fspath(path),
            f"array {show(array.name)} has {len(data):,} bytes where {show(array.shape)} takes {array.nbytes:,}; it is damaged",
            tensor=array.name,
        )
    if array.in_order:
        return data
    values = np.frombuffer(data, stream.dtype).reshape(array.shape, order="F" if stream.fortran else "C")
    return values.astype(stream.dtype.newbyteorder("<"), order="C").tobytes()


def _arrays(records: Sequence[zipfile.ZipInfo], archive: zipfile.ZipFile, source: str) -> tuple[Array, ...]:
    found: dict[str, Array] = {}
    for record in records:
        if record.is_dir():
            continue
        name = record.filename.removesuffix(".npy")
        if name == record.filename:
            _fail(source, f"this is a zip archive, but not one of NumPy's: {show(name)} in it is no .npy file")
        if name == METADATA_KEY or not is_unicode(name):
            _fail(source, f"array {show(name)} has a name that no safetensors file can hold; rename it", tensor=name)
        with archive.open(record) as stream:
            dtype, fortran, shape = _npy_header(stream, name, source)
            expected, there = dtype.itemsize * prod(shape), record.file_size - stream.tell()
        if expected != there:
            _fail(
                source,
                f"array {show(name)} has {there:,} bytes where {show(shape)} takes {expected:,}; it is damaged",
                tensor=name,
            )
        in_order = not fortran and dtype.byteorder != ">"
        found[name] = Array(name, _DTYPES[f"{dtype.kind}{dtype.itemsize}"], shape, record, in_order)
    if not found:
        _fail(source, "the archive holds no arrays")
    return tuple(found.values())


def _npy_header(stream: IO[bytes], name: str, source: str) -> tuple[np.dtype[np.generic], bool, tuple[int, ...]]:
    """Dtype, whether in Fortran's order, and shape."""
    import numpy as np

    def fail(problem: str) -> NoReturn:
        _fail(source, f"array {show(name)}: {problem}", tensor=name)

    start = stream.read(8)
    if not start.startswith(b"\x93NUMPY") or len(start) < 8 or start[6] not in (1, 2, 3):
        fail("it has no .npy header that MPFS knows; it is damaged")
    length = int.from_bytes(stream.read(2 if start[6] == 1 else 4), "little")
    if length > 1 << 20:
        fail("its header is too long; it is damaged")
    try:
        table = ast.literal_eval(stream.read(length).decode("utf-8" if start[6] == 3 else "latin-1"))
        descr, fortran, shape = table["descr"], table["fortran_order"], table["shape"]
        plain = isinstance(shape, tuple) and all(type(dim) is int and 0 <= dim < 2**62 for dim in shape)
        if not plain or len(shape) > _MAX_DIMENSIONS or type(fortran) is not bool:
            raise ValueError(f"shape {shape!r}")
        if not isinstance(descr, str):
            fail("it has several fields; save each as an array of its own")
        dtype = np.dtype(descr)
    except (ValueError, SyntaxError, KeyError, TypeError, MemoryError, RecursionError) as error:
        fail(f"its header makes no sense ({type(error).__name__}); it is damaged")
    if dtype.hasobject:
        raise UnsafeInputError(
            f"{source}: array {show(name)} holds Python objects, which could only be read by running code out of the file",
            file=source,
            tensor=name,
        )
    if f"{dtype.kind}{dtype.itemsize}" not in _DTYPES:
        fail(f"it is {dtype}, for which safetensors has no dtype; convert it first")
    return dtype, fortran, shape


def _fail(source: str, problem: str, **details: object) -> NoReturn:
    raise FormatError(f"{source}: {problem}", file=source, **details)
