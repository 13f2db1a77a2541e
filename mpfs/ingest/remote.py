"""Sources that fsspec reads: URLs (s3://, https://, memory://, zip://…::…) and archives, streamed without a local copy.

A file is read once and in order, whatever order the workers ask in: what is passed over waits until it is asked for. So
compressed archives and plain HTTP servers do. Where fsspec can ask for ranges at any time (s3, gs, http), workers do that
at the same time instead. Only torch and .npz files, which have to be mapped, are copied to a temporary file.

fsspec takes as long to load as importing a small model does, so it waits for the first of these.
"""

from __future__ import annotations

import hashlib
import io
import os
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast
from urllib.parse import urlsplit, urlunsplit

from mpfs.errors import BadInputError, FormatError, MPFSError, NotFoundError, UnsafeInputError
from mpfs.formats import sniff
from mpfs.formats.archive import BoundedGzip, check_members
from mpfs.formats.location import opened
from mpfs.formats.messages import show
from mpfs.formats.tree import SKIPPED_NAMES, SKIPPED_SUFFIXES, FoundFile
from mpfs.ingest.forward import ForwardReader
from mpfs.ingest.source import SourceFile

_ARCHIVE_SUFFIXES = (".zip", ".whl", ".tgz", ".tar.gz")
_WEIGHTS = (".safetensors", (".bin", ".pt", ".pth", ".ckpt", ".pth.tar"), ".gguf", ".onnx")
"""What weights are called, those first that make the others side files."""

_CHUNK = 4 << 20
_TAGS = ("ETag", "etag", "blob_id", "checksum", "sha256", "md5")
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created", "CRC", "date_time")


def is_url(source: str) -> bool:
    """Whether a source is for fsspec to read."""
    return "://" in source or "::" in source


def open_source(source: str, options: Mapping[str, Any] | None = None) -> Path | RemoteTree:
    """What a path, URL or hub id leads to: a path where it is one of this machine's.

    Raises:
        BadInputError: fsspec does not know the protocol, or lacks what it needs for it.
    """
    from mpfs.ingest.hub import is_hub_model, open_model

    if is_hub_model(source):
        return open_model(source, options)
    if not is_url(source):
        return Path(source)
    import fsspec  # type: ignore[import-untyped]
    from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

    with _our_errors(_shown(source)):
        system, root = fsspec.core.url_to_fs(source, **dict(options or {}))
        _refuse_bombs(system, _shown(source))
    if isinstance(system, LocalFileSystem):
        return Path(root)
    return RemoteTree(system, root.rstrip("/"), _shown(source))


def is_archive(path: Path) -> bool:
    """Whether a file is an archive of a model; of a .tar its content decides, since torch's .pth.tar is none."""
    if path.name.endswith(_ARCHIVE_SUFFIXES):
        return True
    if path.suffix != ".tar":
        return False
    with opened(path) as (file, _):
        return file.read(sniff.HEAD_SIZE)[257:262] == b"ustar"


def open_archive(path: Path) -> tuple[RemoteTree, int]:
    """The model inside a zip or tar archive: the innermost directory with all the weights. And how many files are outside.

    Raises:
        FormatError: it is damaged or encrypted, or no such archive.
    """
    import fsspec

    protocol = "zip" if path.name.endswith((".zip", ".whl")) else "tar"
    with _our_errors(str(path)):
        packed = path.name.endswith((".tgz", ".tar.gz"))
        system = fsspec.filesystem(protocol, fo=BoundedGzip(path) if packed else str(path), skip_instance_cache=True)
        _refuse_bombs(system, str(path))
        files = [place for place in system.find("") if SKIPPED_NAMES.isdisjoint(place.split("/"))]
    for place in files:
        if ".." in place.split("/"):
            raise UnsafeInputError(f"{path}: unsafe path in the archive: {show(place)}", file=str(path))
    root = ""
    for kind in _WEIGHTS:
        weights = [place.rpartition("/")[0] for place in files if place.endswith(kind)]
        if weights:
            root = os.path.commonpath(weights)
            break
    inside = sum(place.startswith(f"{root}/") for place in files) if root else len(files)
    return RemoteTree(system, root, str(path), pinned=True), len(files) - inside


def _refuse_bombs(system: Any, shown: str) -> None:
    """Look at a zip archive's directory before anything is taken out of it."""
    archive = getattr(system, "zip", None)
    if isinstance(archive, zipfile.ZipFile):
        check_members(archive, system.fo.seek(0, os.SEEK_END), shown)


class RemoteTree:
    """A place that fsspec reads: a file, or what is below a directory. What is `pinned` cannot change: a commit of the hub,
    or the inside of an archive, which is watched itself."""

    def __init__(self, system: Any, root: str, shown: str, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._system = system
        self._root = root
        self._shown = shown
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return self._shown

    @property
    def name(self) -> str:
        """The last part of its name."""
        return self._root.partition("?")[0].rpartition("/")[2] or self._shown.rstrip("/").rpartition("/")[2]

    def file(self) -> RemoteFile | None:
        """The file that this is; None if it is a directory.

        Raises:
            NotFoundError: there is nothing.
        """
        with _our_errors(self._shown):
            info = self._system.info(self._root) if self._root else {"type": "directory"}
            # A plain HTTP server has only pages: one that lists others is a directory.
            if info["type"] == "directory" or (info.get("size") is None and self._system.isdir(self._root)):
                return None
        return RemoteFile(self._system, self._root, self._shown, info, self._lock, self._pinned)

    def walk(self) -> tuple[list[FoundFile], list[str]]:
        """As `mpfs.formats.tree.walk`."""
        with _our_errors(self._shown):
            found = self._system.find(self._root, detail=True)
        files: list[FoundFile] = []
        skipped: list[str] = []
        prefix = f"{self._root}/" if self._root else ""
        for place in sorted(found):
            path = place.removeprefix(prefix).lstrip("/")
            parts = path.split("/")
            if not SKIPPED_NAMES.isdisjoint(parts) or path.endswith(SKIPPED_SUFFIXES):
                skipped.append(path)
            else:
                location = RemoteFile(
                    self._system, place, f"{self._shown}/{path}", found[place], self._lock, self._pinned
                )
                files.append(FoundFile(path, location))
        if not files and not skipped:
            raise NotFoundError(f"{self._shown}: there is nothing", file=self._shown)
        return files, skipped


class RemoteFile:
    """A file that fsspec reads; see `mpfs.formats.location.RemoteLocation`."""

    def __init__(
        self, system: Any, place: str, shown: str, info: Mapping[str, Any], lock: threading.Lock, pinned: bool
    ) -> None:
        self._pinned = pinned
        self._system = system
        self._place = place
        self._shown = shown
        self._lock = lock
        from fsspec.asyn import AsyncFileSystem  # type: ignore[import-untyped]

        size = info.get("size")
        if type(size) is not int or size < 0:
            raise BadInputError(f"{shown}: the server does not say how large it is; download it first", file=shown)
        self.size: int = size
        protocol = system.protocol if isinstance(system.protocol, tuple) else (system.protocol,)
        self._has_ranges = isinstance(system, AsyncFileSystem) and (
            "http" not in protocol or info.get("partial") is True
        )
        self.tag = next((str(info[name]) for name in _TAGS if info.get(name)), None)
        self.version = _version(info)

    def __str__(self) -> str:
        return self._shown

    @property
    def name(self) -> str:
        """The last part of its name."""
        return self._place.partition("?")[0].rpartition("/")[2]

    def open(self) -> BinaryIO:
        """Open it; what goes wrong while it is read is an OSError."""
        with _our_errors(self._shown):
            return cast(BinaryIO, io.BufferedReader(_Guarded(self._system.open(self._place, "rb"), self._lock), _CHUNK))

    def range(self, offset: int, size: int) -> bytes | None:
        """Bytes of it, where they can be had at any time and from any thread; None elsewhere."""
        if not self._has_ranges or not size:
            return None
        with _our_errors(self._shown):
            return bytes(self._system.cat_file(self._place, start=offset, end=offset + size))

    def is_unchanged(self) -> bool:
        """Whether size, tag and times are as they were, as far as the place tells."""
        if self._pinned:
            return True
        with _our_errors(self._shown):
            self._system.invalidate_cache()
            now = _version(self._system.info(self._place))
        return all(now[name] == value for name, value in self.version.items() if name in now)


class RemoteSource(SourceFile):
    """A remote file that is being imported."""

    def __init__(self, location: RemoteFile) -> None:
        self.path = location
        self.size = location.size
        self.digest = hashlib.sha256()
        self._remote = location
        self._order = threading.Lock()
        self._forward = ForwardReader(location.open)
        self._left = 0

    @property
    def identity(self) -> str:
        """Its URL."""
        return str(self._remote)

    @property
    def stamp(self) -> tuple[int | str, ...]:
        """Size, tag and time, as the server tells."""
        return tuple(item for pair in sorted(self._remote.version.items()) for item in pair)

    def settled_before(self, time_ns: int) -> bool:
        """Whether its tag is one of its content; a server's times are too coarse."""
        return bool(self._remote.tag)

    def announce(self, size: int) -> None:
        """That many bytes more will be read."""
        with self._order:
            self._left += size

    def read(self, offset: int, size: int) -> bytes:
        """Exactly `size` bytes from `offset`, of a range that was announced.

        Raises:
            FormatError: the file has become shorter.
            BadInputError: it cannot be read.
        """
        data = self._remote.range(offset, size)
        if data is None:
            with self._order:
                try:
                    data = self._forward.read(offset, size)
                except OSError as error:
                    raise BadInputError(f"{self.path}: cannot be read: {error}", file=str(self.path)) from error
                self._left -= size
                if self._left <= 0:
                    self._forward.close()
        if len(data) != size:
            raise FormatError(f"{self.path}: ended early while it was being read; import it again", file=str(self.path))
        return data

    def check_unchanged(self) -> None:
        """Raise FormatError if the file is another one by now, as far as the server tells."""
        try:
            same = self._remote.is_unchanged()
        except MPFSError:
            same = False
        if not same:
            raise FormatError(
                f"{self.path}: changed while it was being imported; import it again when it is complete",
                file=str(self.path),
            )

    def copy_to(self, path: Path) -> None:
        """Copy the file's content."""
        with path.open("wb") as target:
            for offset in range(0, self.size, _CHUNK):
                size = min(_CHUNK, self.size - offset)
                self.announce(size)
                target.write(self.read(offset, size))

    def close(self) -> None:
        """Close the file, wherever reading it has come to."""
        with self._order:
            self._forward.close()


class _Guarded(io.RawIOBase):
    """A file of fsspec's, one read at a time in its file system, whose every failure is an OSError."""

    def __init__(self, file: Any, lock: threading.Lock) -> None:
        self._file = file
        self._lock = lock

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._guard(self._file.seekable))

    def readinto(self, buffer: Any) -> int:
        data = self._guard(lambda: self._file.read(len(buffer)))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self._guard(lambda: self._file.seek(offset, whence)))

    def tell(self) -> int:
        return int(self._guard(self._file.tell))

    def close(self) -> None:
        if not self.closed:
            with self._lock:
                self._file.close()
        super().close()

    def _guard(self, action: Callable[[], Any]) -> Any:
        try:
            with self._lock:
                return action()
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{type(error).__name__}: {error}") from error


@contextmanager
def _our_errors(shown: str) -> Iterator[None]:
    """What fsspec and its back ends raise, which is almost anything, as errors of ours."""
    try:
        yield
    except (MPFSError, MemoryError):
        raise
    except FileNotFoundError as error:
        raise NotFoundError(f"{shown}: there is nothing", file=shown) from error
    except ImportError as error:
        _fail(shown, f"fsspec needs another package for it ({error}); for s3:// install mpfs[s3]", error)
    except ValueError as error:
        _fail(shown, f"not a source that fsspec can read ({_line(error)})", error)
    except Exception as error:
        text = _line(error)
        if "encrypted" in text:
            raise FormatError(f"{shown}: the archive is encrypted; unpack it first", file=shown) from error
        if type(error).__name__ in ("BadZipFile", "ReadError", "error", "CompressionError"):
            raise FormatError(
                f"{shown}: the archive is damaged, or none ({text}); copy it again", file=shown
            ) from error
        _fail(shown, f"cannot be read ({text})", error)


def _fail(shown: str, problem: str, error: Exception) -> NoReturn:
    raise BadInputError(f"{shown}: {problem}", file=shown) from error


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _version(info: Mapping[str, Any]) -> dict[str, str]:
    """What tells whether a file is another one."""
    found = {name: info[name] for name in ("size", *_TAGS, *_TIMES) if info.get(name) is not None}
    # Some file systems give one time as a number in lists, and as a datetime elsewhere.
    return {name: str(value.timestamp() if isinstance(value, datetime) else value) for name, value in found.items()}


def _shown(source: str) -> str:
    """A URL without what is secret in it: a password, or the signature in its query."""
    shown = []
    for part in source.split("::"):
        split = urlsplit(part)
        if split.scheme in ("http", "https", "ftp", "sftp", "ssh", "smb", "webdav"):
            part = urlunsplit((split.scheme, split.netloc.rpartition("@")[2], split.path, "", ""))
        shown.append(part)
    return "::".join(shown)
