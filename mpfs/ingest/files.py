"""The files that an import reads: kept until its end, then looked at again for changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from mpfs.formats.location import Location
from mpfs.ingest.remote import RemoteFile, RemoteSource
from mpfs.ingest.source import SourceFile


class SourceFiles:
    """The files of an import: closed together, and checked for changes at the end."""

    def __init__(self) -> None:
        self._files: dict[str, SourceFile] = {}
        self._directory: TemporaryDirectory[str] | None = None

    def add(self, location: Location) -> SourceFile:
        """The file at `location`.

        Raises:
            BadInputError: it cannot be looked at.
        """
        file = self._files.get(str(location))
        if file is None:
            file = self._files[str(location)] = self._make(location)
        return file

    def local(self, location: Location) -> Path:
        """A file on this machine with the content of the one at `location`: itself, or a temporary copy.

        Raises:
            FormatError, BadInputError: it cannot be read.
        """
        if isinstance(location, Path):
            return location
        if self._directory is None:
            self._directory = TemporaryDirectory(prefix="mpfs-import-")
        path = Path(self._directory.name) / f"{len(self._files)}-{location.name}"
        remote = self.add(location)
        if isinstance(remote, RemoteSource):
            remote.copy_to(path)
        return path

    def _make(self, location: Location) -> SourceFile:
        if isinstance(location, Path):
            return SourceFile(location)
        if not isinstance(location, RemoteFile):
            raise TypeError(f"{location} is no file that an import can read")
        return RemoteSource(location)

    def check_unchanged(self) -> None:
        """Raise FormatError if any file was written to or replaced since it was added."""
        for file in self._files.values():
            file.check_unchanged()

    def close(self) -> None:
        """Close all that are open, and remove the temporary copies."""
        for file in self._files.values():
            file.close()
        if self._directory is not None:
            self._directory.cleanup()


@contextmanager
def source_files() -> Iterator[SourceFiles]:
    """The files of an import, for the length of the block."""
    files = SourceFiles()
    try:
        yield files
    finally:
        files.close()
