"""Where a file of a checkpoint is: a path, or a place that something else than the operating system reads (a URL)."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol, TypeAlias, runtime_checkable

from mpfs.errors import BadInputError, NotFoundError


@runtime_checkable
class RemoteLocation(Protocol):
    """A file that is not on this machine's file system. `str` of it names it in messages."""

    @property
    def name(self) -> str:
        """The last part of its name."""

    @property
    def size(self) -> int:
        """Its length in bytes."""

    def open(self) -> BinaryIO:
        """Open it for reading and seeking."""


Location: TypeAlias = Path | RemoteLocation


@contextmanager
def opened(location: str | os.PathLike[str] | RemoteLocation) -> Iterator[tuple[BinaryIO, int]]:
    """A regular file open for reading, and its size in bytes.

    Raises:
        NotFoundError: there is no such file.
        BadInputError: it is not a regular file, or cannot be read (also while the block reads it).
    """
    source = str(location)
    try:
        if isinstance(location, RemoteLocation):
            with location.open() as remote:
                yield remote, location.size
            return
        # Looked at before it is opened: opening a named pipe would wait for a writer.
        if not stat.S_ISREG(os.stat(location).st_mode):
            raise BadInputError(f"{source}: not a regular file", file=source)
        with open(location, "rb") as file:
            yield file, os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        raise NotFoundError(f"{source}: no such file", file=source) from None
    except OSError as error:
        raise BadInputError(f"{source}: cannot be read: {error.strerror or error}", file=source) from error
