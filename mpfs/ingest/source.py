"""Where the bytes of a tensor or a side file come from: a range of a file, a torch tensor, or memory."""

from __future__ import annotations

import hashlib
import io
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol, TypeAlias

import numpy as np

from mpfs.errors import BadInputError, FormatError
from mpfs.formats import npz, torch_file
from mpfs.formats.location import Location
from mpfs.ingest.forward import ForwardReader, Stream
from mpfs.store.memory import MEMORY

if TYPE_CHECKING:
    import torch

_Stamp: TypeAlias = tuple[int, int, int, int, int]

_CHUNK = 4 << 20

_WHOLE = 256 << 10
"""What is read in multiples of this is whole blocks, of which there are many of one size."""

_BYTES = np.dtype(np.uint8)


class ByteSource(Protocol):
    """A run of bytes that can be read in pieces, from any thread."""

    @property
    def where(self) -> str:
        """What it is, for messages."""

    @property
    def size(self) -> int:
        """Its length in bytes."""

    def read(self, offset: int, size: int) -> bytes | memoryview:
        """Exactly `size` bytes from `offset`. Every byte is asked for once."""


class SourceFile:
    """A file that must not change from when this is made until `check_unchanged`.

    It is open from the first read of one of its ranges to the last, so that a checkpoint of thousands of files needs
    a few descriptors. Read with pread into memory of our own: a mapped file that somebody truncates would kill the
    process (SIGBUS).
    """

    def __init__(self, path: Path) -> None:
        self.path: Location = path
        self._local = path
        self._lock = threading.Lock()
        self._fd: int | None = None
        self._unread = 0
        try:
            status = os.stat(path)
        except OSError as error:
            self._fail(error)
        self._stamp = _stamp(status)
        self._changed_ns = max(status.st_mtime_ns, status.st_ctime_ns)
        self.size = status.st_size
        self.digest = hashlib.sha256()

    @property
    def identity(self) -> str:
        """Where the file is, symlinks resolved; what is no Unicode in it as an escape."""
        return os.path.realpath(self._local).encode("utf-8", "backslashreplace").decode("utf-8")

    @property
    def stamp(self) -> tuple[int | str, ...]:
        """What changes with the file: device, inode, size, and times in nanoseconds."""
        return self._stamp

    def settled_before(self, time_ns: int) -> bool:
        """Whether the file was last changed before a time."""
        return self._changed_ns < time_ns

    def sha256(self, progress: Callable[[int], None] | None = None) -> str:
        """The SHA-256 of the file in hex, read now from its beginning to its end. `progress` is told the bytes read.

        Raises:
            FormatError, BadInputError: as for `read`.
        """
        whole, digest = self.range(0, self.size), hashlib.sha256()
        for offset in range(0, self.size, _CHUNK):
            size = min(_CHUNK, self.size - offset)
            digest.update(whole.read(offset, size))
            if progress is not None:
                progress(offset + size)
        return digest.hexdigest()

    def range(self, offset: int, size: int) -> FileBytes:
        """A range that will be read, every byte of it once."""
        self.announce(size)
        return FileBytes(self, offset, size)

    def announce(self, size: int) -> None:
        """That many bytes more will be read."""
        self._unread += size

    def read(self, offset: int, size: int) -> bytes | memoryview:
        """Exactly `size` bytes from `offset`, of a range that was announced.

        Raises:
            FormatError: the file has become shorter, is another one, or gone.
            BadInputError: it cannot be read.
        """
        try:
            data = self._pread(offset, size)
        except FileNotFoundError as error:
            raise self._changed() from error
        except OSError as error:
            self._fail(error)
        with self._lock:
            self._unread -= size
            if self._unread <= 0:
                self._close()
        return data

    def check_unchanged(self) -> None:
        """Raise FormatError if the file was written to or replaced."""
        try:
            same = _stamp(os.stat(self._local)) == self._stamp
        except OSError:
            same = False
        if not same:
            raise self._changed()

    def close(self) -> None:
        """Close the file, wherever reading it has come to."""
        with self._lock:
            self._close()

    def _pread(self, offset: int, size: int) -> bytes | memoryview:
        fd = self._open()
        if size and size % _WHOLE == 0 and hasattr(os, "preadv"):
            # Most blocks are of one size: their memory serves again and again.
            buffer = MEMORY.empty(size, _BYTES).data
            done = 0
            while done < size:
                count = os.preadv(fd, [buffer[done:]], offset + done)
                if not count:
                    raise self._ended(offset + done, offset + size)
                done += count
            return buffer
        data = os.pread(fd, size, offset)
        while len(data) < size:
            more = os.pread(fd, size - len(data), offset + len(data))
            if not more:
                raise self._ended(offset + len(data), offset + size)
            data += more
        return data

    def _ended(self, at: int, expected: int) -> FormatError:
        return FormatError(
            f"{self.path}: ended at byte {at:,} while bytes up to {expected:,} were being "
            "read; it changed during the import",
            file=str(self.path),
        )

    def _open(self) -> int:
        with self._lock:
            if self._fd is None:
                # Should a pipe be there by now, opening it must not wait for its writer.
                self._fd = os.open(self._local, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
                if _stamp(os.fstat(self._fd)) != self._stamp:
                    self._close()
                    raise self._changed()
            return self._fd

    def _close(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            os.close(fd)

    def _changed(self) -> FormatError:
        return FormatError(
            f"{self.path}: changed while it was being imported; import it again when it is complete",
            file=str(self.path),
        )

    def _fail(self, error: OSError) -> NoReturn:
        raise BadInputError(f"{self.path}: cannot be read: {error.strerror}", file=str(self.path)) from error


def _stamp(status: os.stat_result) -> _Stamp:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


class FileBytes:
    """A range of a file."""

    def __init__(self, file: SourceFile, offset: int, size: int) -> None:
        self._file = file
        self._offset = offset
        self._size = size

    @property
    def where(self) -> str:
        """The file's path."""
        return str(self._file.path)

    @property
    def size(self) -> int:
        """Bytes of the range."""
        return self._size

    def read(self, offset: int, size: int) -> bytes | memoryview:
        """Exactly `size` bytes from `offset` within the range."""
        return self._file.read(self._offset + offset, size)


class KnownBytes:
    """The beginning of a file that was read before, read again: it must still be the same."""

    def __init__(self, file: SourceFile, expected: bytes) -> None:
        self._content = file.range(0, len(expected))
        self._expected = expected

    @property
    def where(self) -> str:
        """What the bytes are."""
        return f"header of {self._content.where}"

    @property
    def size(self) -> int:
        """Number of bytes."""
        return len(self._expected)

    def read(self, offset: int, size: int) -> bytes | memoryview:
        """Exactly `size` bytes from `offset`.

        Raises:
            FormatError: they are others than before.
        """
        data = self._content.read(offset, size)
        if data != self._expected[offset : offset + size]:
            where = self._content.where
            raise FormatError(f"{where}: its header changed while it was being imported; import it again", file=where)
        return data


class TensorBytes:
    """A tensor of a torch file. Where its bytes are not in the file in order, a copy exists while it is being read.

    The file is mapped by torch, so it is looked at before each access: what lies beyond the end of a mapped file that
    became shorter must not be touched. (If that happens between the look and the access, the kernel ends the process.)
    """

    def __init__(self, tensor: torch.Tensor, size: int, file: SourceFile, name: str) -> None:
        self._tensor = tensor
        self._size = size
        self._file = file
        self._name = name
        self._lock = threading.Lock()
        self._data: memoryview | None = None
        self._unread = size

    @property
    def where(self) -> str:
        """The file and the tensor's name."""
        return f"{self._file.path}: {self._name}"

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return self._size

    def read(self, offset: int, size: int) -> bytes:
        """Exactly `size` bytes from `offset`.

        Raises:
            FormatError: the file has changed.
        """
        self._file.check_unchanged()
        with self._lock:
            if self._data is None:
                self._data = torch_file.tensor_bytes(self._tensor)
            data = self._data
        piece = bytes(data[offset : offset + size])
        with self._lock:
            self._unread -= size
            if self._unread <= 0:
                self._data = None
        return piece


class ArrayBytes:
    """An array of a .npz archive. One whose numbers do not lie in order is in memory while it is being read; of another
    only what workers have passed over."""

    def __init__(self, array: npz.Array, path: Path, file: SourceFile) -> None:
        self._array = array
        self._path = path
        self._file = file
        self._size = self._unread = array.nbytes
        self._lock = threading.Lock()
        self._forward = ForwardReader(self._open)

    @property
    def where(self) -> str:
        """The file and the array's name."""
        return f"{self._file.path}: {self._array.name}"

    @property
    def size(self) -> int:
        """Bytes of the array."""
        return self._size

    def read(self, offset: int, size: int) -> bytes:
        """Exactly `size` bytes from `offset`.

        Raises:
            FormatError: the archive is damaged, or has changed.
        """
        with self._lock:
            piece = self._forward.read(offset, size)
            self._unread -= size
            if self._unread <= 0:
                self._forward.close()
        if len(piece) != size:
            raise FormatError(f"{self.where}: ended early; the archive is damaged", file=str(self._file.path))
        return piece

    def _open(self) -> Stream:
        if self._array.in_order:
            return npz.ArrayStream(self._path, self._array)
        return io.BytesIO(npz.read_array(self._path, self._array))


class MemoryBytes:
    """Bytes in memory."""

    def __init__(self, data: bytes | memoryview, where: str) -> None:
        self._data = memoryview(data)
        self._where = where

    @property
    def where(self) -> str:
        """What the bytes are."""
        return self._where

    @property
    def size(self) -> int:
        """Number of bytes."""
        return len(self._data)

    def read(self, offset: int, size: int) -> memoryview:
        """A view of `size` bytes from `offset`."""
        return self._data[offset : offset + size]
