"""The file system for fsspec: every ref and commit of a repository as a read-only directory.

    fsspec.open("mpfs://main/config.json", repo="path/to/repository")

fsspec finds the class by its entry point. A path is `REF/path/inside`; refs may have slashes; a commit's id, or a
prefix of it of at least 8 digits, may stand in place of a ref.
"""

from __future__ import annotations

import errno
import io
import os
import threading
import weakref
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fsspec.spec import AbstractFileSystem  # type: ignore[import-untyped]

from mpfs.errors import UsageError
from mpfs.objects import ObjectId
from mpfs.store import Store
from mpfs.vfs.names import can_be_ref, find_commits
from mpfs.vfs.reader import FileReader
from mpfs.vfs.tree import Tree, Trees, children, content_key

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

REPOSITORY_VARIABLE = "MPFS_REPO"
"""The environment variable that names the repository where `repo` is not given."""

BUFFER_BYTES = 128 << 10
"""Small reads from an open file are served out of a buffer of this size; larger ones go past it."""


@dataclass(frozen=True)
class _Place:
    """Where a path leads. `inner` is the path in the snapshot of `commit`; both None above the refs."""

    commit: ObjectId | None
    inner: str


class MPFSFile(io.BufferedReader):
    """An open file: the standard library's buffered reader over the store's map. `size` is in bytes."""

    def __init__(self, fs: MPFSFileSystem, path: str, reader: FileReader, buffer_size: int) -> None:
        super().__init__(_RawFile(reader), buffer_size)
        self.fs = fs  # Keeps the store open.
        self.path = path
        self.size = reader.size


class _RawFile(io.RawIOBase):
    """Reads straight into the caller's buffer."""

    def __init__(self, reader: FileReader) -> None:
        self._reader = reader
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._reader.size}
        if whence not in base:
            raise ValueError(f"whence is {whence}; it must be 0, 1 or 2")
        if base[whence] + offset < 0:
            raise OSError(errno.EINVAL, f"cannot seek to {base[whence] + offset}")
        self._position = base[whence] + offset
        return self._position

    def readinto(self, buffer: WriteableBuffer) -> int:
        self._check_open()
        count = self._reader.read_into(self._position, memoryview(buffer))
        self._position += count
        return count

    def readall(self) -> bytes:
        self._check_open()
        data = self._reader.read_at(self._position, max(0, self._reader.size - self._position))
        self._position += len(data)
        return data

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("I/O operation on a closed file")


class MPFSFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """A repository as a read-only file system.

    Args:
        repo: the repository's directory, or one that has it as `.mpfs`. By default $MPFS_REPO, looked up when the
            file system is used.

    Damaged data raises `mpfs.errors.IntegrityError`; a missing path FileNotFoundError; every writing method
    OSError (EROFS).
    """

    protocol = "mpfs"
    root_marker = ""
    cachable = True

    def __init__(self, repo: str | os.PathLike[str] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._repo = None if repo is None else os.fspath(repo)
        self._lock = threading.RLock()
        self._stores: dict[str, Store] = {}
        self._trees = Trees()

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        stripped = super()._strip_protocol(path)
        return stripped.lstrip("/") if isinstance(stripped, str) else stripped

    @property
    def fsid(self) -> str:
        """The repository's identity: the same for every way to reach it."""
        return f"mpfs-{self.store.info.uuid}"

    @property
    def store(self) -> Store:
        """The repository's store, opened at the first use.

        Raises:
            UsageError: no repository was named.
            NotARepositoryError: there is none at its path.
        """
        repo = self._repo
        if repo is None:
            repo = os.environ.get(REPOSITORY_VARIABLE)  # The one use of the environment below the command line.
        if not repo:
            raise UsageError(f"no repository is named: give repo=…, or set ${REPOSITORY_VARIABLE}")
        with self._lock:
            store = self._stores.get(repo)
            if store is None:
                store = self._stores[repo] = Store.open(_repository_directory(Path(repo)))
                # The instance may live as long as the process, in fsspec's cache; closing at exit gains nothing.
                weakref.finalize(self, store.close).atexit = False
            return store

    # Reading.

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        """The entries of a directory, or of a file its own; names, or with `detail` as `info` gives them.

        Raises:
            FileNotFoundError: there is nothing at `path`.
        """
        path = self._strip_protocol(path)
        place = self._place(path)
        if place.commit is None:
            names = children(path, (ref.name for ref in self.store.refs.all()))
        else:
            tree = self._tree(place.commit)
            if place.inner in tree.reader:
                return [self.info(path)] if detail else [path]
            if place.inner not in tree.directories:
                raise _missing(path)
            names = list(tree.directories[place.inner])
        entries = [f"{path}/{name}" if path else name for name in names]
        return [self.info(entry) for entry in entries] if detail else entries

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """What is known of a path: `name`, `size` (bytes), `type`; inside a commit also `commit`, and `created` and
        `mtime`, the commit's time in seconds since 1970, UTC; of a file also `ukey`, a digest of its content.

        Raises:
            FileNotFoundError: there is nothing at `path`.
        """
        path = self._strip_protocol(path)
        place = self._place(path)
        info: dict[str, Any] = {"name": path, "size": 0, "type": "directory"}
        if place.commit is None:
            return info
        tree = self._tree(place.commit)
        info |= {"created": float(tree.time), "mtime": float(tree.time), "commit": place.commit}
        if place.inner in tree.reader:
            file = tree.reader.file(place.inner)
            info |= {"size": file.size, "type": "file", "ukey": content_key(file)}
        elif place.inner not in tree.directories:
            raise _missing(path)
        return info

    def open_reader(self, path: str) -> FileReader:
        """Open a file for random access by offset, without a position.

        Raises:
            FileNotFoundError: there is nothing at `path`.
            IsADirectoryError: it is a directory.
        """
        path = self._strip_protocol(path)
        place = self._place(path)
        if place.commit is not None:
            tree = self._tree(place.commit)
            if place.inner in tree.reader:
                return tree.reader.open(place.inner)
            if place.inner not in tree.directories:
                raise _missing(path)
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **kwargs: Any) -> MPFSFile:
        if mode != "rb":
            _read_only(path)
        return MPFSFile(self, path, self.open_reader(path), block_size or BUFFER_BYTES)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        """Bytes [start, end) of a file; negative offsets count from its end."""
        reader = self.open_reader(path)
        first, last, _ = slice(start, end).indices(reader.size)
        return reader.read_at(first, max(0, last - first))

    def created(self, path: str) -> datetime:
        """The time of the commit that the path is in."""
        info = self.info(path)
        if "created" not in info:
            raise IsADirectoryError(errno.EISDIR, "a directory of refs has no time", path)
        return datetime.fromtimestamp(info["created"], UTC)

    def modified(self, path: str) -> datetime:
        """The time of the commit that the path is in."""
        return self.created(path)

    def ukey(self, path: str) -> str:
        """A digest of a file's content, the same wherever that content is."""
        info = self.info(path)
        return str(info.get("ukey") or info.get("commit") or super().ukey(path))

    def checksum(self, path: str) -> int:
        """`ukey` as a number."""
        return int(self.ukey(path), 16)

    def invalidate_cache(self, path: str | None = None) -> None:
        """Nothing to do: refs are looked up each time, and commits never change."""

    # Writing: not here.

    def _refuse(self, path: object = None, *args: object, **kwargs: object) -> NoReturn:
        _read_only(path)

    mkdir = makedirs = rmdir = rm = rm_file = _rm = mv = mv_file = cp_file = copy = _refuse
    touch = pipe = pipe_file = put_file = put = write_bytes = write_text = _refuse

    # Finding the way.

    def _place(self, path: str) -> _Place:
        """Raises FileNotFoundError where no ref, commit or directory of refs is named."""
        if not path:
            return _Place(None, "")
        parts = path.split("/")
        refs = self.store.refs
        for depth in range(len(parts), 0, -1):
            name = "/".join(parts[:depth])
            if can_be_ref(name) and (ref := refs.find(name)) is not None:
                return _Place(ref.commit, "/".join(parts[depth:]))
        if any(ref.name.startswith(f"{path}/") for ref in refs.all()):
            return _Place(None, "")
        found = find_commits(self.store, parts[0])
        if len(found) > 1:
            raise FileNotFoundError(errno.ENOENT, f"{len(found)} commits begin with {parts[0]}", path)
        if found:
            return _Place(found[0], "/".join(parts[1:]))
        raise _missing(path)

    def _tree(self, commit: ObjectId) -> Tree:
        return self._trees.get(self.store, commit)


def _repository_directory(path: Path) -> Path:
    inner = path / ".mpfs"
    return inner if not (path / "config.json").exists() and inner.is_dir() else path


def _missing(path: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def _read_only(path: object) -> NoReturn:
    raise OSError(
        errno.EROFS, "an MPFS repository is read-only through fsspec; use 'mpfs import' or 'mpfs merge'", path
    )
