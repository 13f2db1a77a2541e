"""Where the bytes of a tensor or a side file come from: a range of a file, or memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from mpfs.errors import BadInputError, FormatError


class ByteSource(Protocol):
    """A run of bytes that can be read in pieces, from any thread."""

    @property
    def where(self) -> str:
        """What it is, for messages."""

    @property
    def size(self) -> int:
        """Its length in bytes."""

    def read(self, offset: int, size: int) -> bytes | memoryview:
        """Exactly `size` bytes from `offset`."""


class SourceFile:
    """An open file that must not change while it is read.

    Read with pread into memory of our own: a mapped file that somebody truncates would kill the process (SIGBUS).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise BadInputError(f"{path}: cannot be read: {error.strerror}", file=str(path)) from error
        self._stamp = self._stat()
        self.size = os.fstat(self._fd).st_size

    def _stat(self) -> tuple[int, int]:
        status = os.fstat(self._fd)
        return status.st_size, status.st_mtime_ns

    def read(self, offset: int, size: int) -> bytes:
        """Exactly `size` bytes from `offset`.

        Raises:
            FormatError: the file has become shorter.
        """
        data = os.pread(self._fd, size, offset)
        while len(data) < size:
            more = os.pread(self._fd, size - len(data), offset + len(data))
            if not more:
                raise FormatError(
                    f"{self.path}: ended at byte {offset + len(data):,} while bytes up to {offset + size:,} were being "
                    "read; it changed during the import",
                    file=str(self.path),
                )
            data += more
        return data

    def check_unchanged(self) -> None:
        """Raise FormatError if the file was written to since it was opened."""
        if self._stat() != self._stamp:
            raise FormatError(
                f"{self.path}: changed while it was being imported; import it again when it is complete",
                file=str(self.path),
            )

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


class FileBytes:
    """A range of an open file."""

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

    def read(self, offset: int, size: int) -> bytes:
        """Exactly `size` bytes from `offset` within the range."""
        return self._file.read(self._offset + offset, size)


class MemoryBytes:
    """Bytes in memory (or in a mapping that somebody else holds)."""

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


class OpenFiles:
    """The files of an import: opened on first use, closed together, checked for changes at the end."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._files: dict[Path, SourceFile] = {}

    def __iter__(self) -> Iterator[SourceFile]:
        return iter(self._files.values())

    def open(self, path: Path) -> SourceFile:
        """The open file at `path`."""
        file = self._files.get(path)
        if file is None:
            file = self._files[path] = SourceFile(path)
            self._stack.callback(file.close)
        return file

    def check_unchanged(self) -> None:
        """Raise FormatError if any file was written to since it was opened."""
        for file in self._files.values():
            file.check_unchanged()
