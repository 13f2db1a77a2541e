"""The mount: every ref of a repository as a read-only directory, and every commit under `.commits`.

    MOUNT/
      main/…             a branch: config.json, model.safetensors, …
      team/model/v1/…    a ref with slashes
      .commits/ID/…      a commit, by its id or a prefix of it of at least 8 digits

A file has one inode number for each commit that it is in, and what that names never changes. So the kernel may keep
its pages for good; a branch that moves leads to other inodes, and a file that is open, or mapped, stays what it was.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from mpfs.errors import UsageError
from mpfs.objects import Commit, ObjectId
from mpfs.store import Store
from mpfs.vfs.libfuse import FOREVER, ROOT, Attributes, Entry, Session
from mpfs.vfs.names import can_be_ref, find_commits
from mpfs.vfs.reader import FileReader
from mpfs.vfs.tree import Tree, Trees, children

COMMITS = ".commits"
"""The directory of all commits. No ref can be called that."""

_READ_AHEAD_KIB = 1024


@dataclass(frozen=True, slots=True)
class _Refs:
    """The directory of refs whose names begin with `prefix`/; "" is the top."""

    prefix: str


@dataclass(frozen=True, slots=True)
class _Commits:
    """The directory of all commits."""


@dataclass(frozen=True, slots=True)
class _Directory:
    """A directory of a commit. `where` is how it was reached: a directory has one place only, unlike a file."""

    where: str
    commit: ObjectId
    path: str


@dataclass(frozen=True, slots=True)
class _File:
    """A file of a commit, wherever it was reached."""

    commit: ObjectId
    path: str


_Node = _Refs | _Commits | _Directory | _File


class RepositoryFiles:
    """A repository as `libfuse.FileSystem`. Knows nothing of mounting, so it can be tried without."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._trees = Trees()
        self._lock = threading.Lock()
        self._nodes: dict[int, _Node] = {ROOT: _Refs("")}
        self._numbers: dict[_Node, int] = {_Refs(""): ROOT}
        self._lookups: dict[int, int] = {ROOT: 1}
        self._new_numbers = count(ROOT + 1)
        self._open: dict[int, FileReader] = {}
        self._new_handles = count(1)

    def lookup(self, parent: int, name: str) -> Entry:
        """See `FileSystem`."""
        directory = self._nodes[parent]
        node: _Node
        lasting = False
        if isinstance(directory, _Refs):
            path = f"{directory.prefix}/{name}" if directory.prefix else name
            node = _Commits() if path == COMMITS else self._ref(path)
        elif isinstance(directory, _Commits):
            found = find_commits(self._store, name)
            if len(found) != 1:
                raise _missing(name)
            node = _Directory(f"{COMMITS}/{name}", found[0], "")
        elif isinstance(directory, _Directory):
            node, lasting = self._child(directory, name), True
        else:
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        with self._lock:
            ino = self._numbers.get(node)
            if ino is None:
                ino = next(self._new_numbers)
                self._nodes[ino], self._numbers[node], self._lookups[ino] = node, ino, 0
            self._lookups[ino] += 1
        return Entry(self._attributes(ino, node), FOREVER if lasting else 0.0)

    def forget(self, ino: int, count: int) -> None:
        """See `FileSystem`."""
        with self._lock:
            left = self._lookups.get(ino, 0) - count
            if left > 0 or ino == ROOT:
                self._lookups[ino] = max(left, 1)
            else:
                self._lookups.pop(ino, None)
                node = self._nodes.pop(ino, None)
                if node is not None:
                    del self._numbers[node]

    def attributes(self, ino: int) -> Entry:
        """See `FileSystem`."""
        node = self._nodes[ino]
        return Entry(self._attributes(ino, node), FOREVER if isinstance(node, _Directory | _File) else 0.0)

    def open(self, ino: int) -> int:
        """See `FileSystem`."""
        node = self._nodes[ino]
        if not isinstance(node, _File):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        reader = self._tree(node.commit).reader.open(node.path)
        with self._lock:
            handle = next(self._new_handles)
            self._open[handle] = reader
        return handle

    def read(self, handle: int, offset: int, size: int, reply: Callable[[Sequence[memoryview]], None]) -> None:
        """See `FileSystem`."""
        reader = self._open[handle]
        wanted = max(0, min(size, reader.size - offset))
        kept: list[memoryview] = []
        answered = False

        def take(batch: list[memoryview]) -> None:
            nonlocal answered
            if not kept and sum(map(len, batch)) == wanted:
                reply(batch)
                answered = True
            else:
                kept.append(memoryview(b"".join(batch)))

        reader.visit(offset, wanted, take)
        if not answered:
            reply(kept)

    def release(self, handle: int) -> None:
        """See `FileSystem`."""
        with self._lock:
            self._open.pop(handle, None)

    def entries(self, ino: int) -> Sequence[tuple[str, int, bool]]:
        """See `FileSystem`."""
        node = self._nodes[ino]
        if isinstance(node, _Refs):
            names = children(node.prefix, (ref.name for ref in self._store.refs.all()))
            return [(name, 0, True) for name in names] + ([] if node.prefix else [(COMMITS, 0, True)])
        if isinstance(node, _Commits):
            return [(name, 0, True) for name in self._store.objects.ids(Commit)]
        if isinstance(node, _Directory):
            tree = self._tree(node.commit)
            prefix = f"{node.path}/" if node.path else ""
            return [(name, 0, prefix + name in tree.directories) for name in tree.directories[node.path]]
        raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))

    def open_files(self) -> int:
        """How many files are open."""
        return len(self._open)

    def known_inodes(self) -> int:
        """How many inodes the kernel knows."""
        return len(self._nodes)

    def _ref(self, path: str) -> _Node:
        ref = self._store.refs.find(path) if can_be_ref(path) else None
        if ref is not None:
            return _Directory(path, ref.commit, "")
        if any(ref.name.startswith(f"{path}/") for ref in self._store.refs.all()):
            return _Refs(path)
        raise _missing(path)

    def _child(self, directory: _Directory, name: str) -> _Node:
        path = f"{directory.path}/{name}" if directory.path else name
        tree = self._tree(directory.commit)
        if path in tree.reader:
            return _File(directory.commit, path)
        if path in tree.directories:
            return _Directory(directory.where, directory.commit, path)
        raise _missing(path)

    def _attributes(self, ino: int, node: _Node) -> Attributes:
        if isinstance(node, _File):
            tree = self._tree(node.commit)
            return Attributes(ino, False, tree.reader.size(node.path), tree.time)
        time = self._tree(node.commit).time if isinstance(node, _Directory) else 0
        return Attributes(ino, True, 0, time)

    def _tree(self, commit: ObjectId) -> Tree:
        return self._trees.get(self._store, commit)


class Mount:
    """A mounted repository. Use it in a `with` block, or close it.

    Never touch the mounted files from the process that serves them: a page fault in a mapped file holds Python's
    lock while this very process is to answer it.

    Args:
        store: stays open meanwhile.
        directory: where; made if it does not exist. Must be empty, and not in the repository.
        allow_other: let other users in, too (for one who is not root, /etc/fuse.conf must say user_allow_other).
        threads: how many answer the kernel; default: one a CPU, between 2 and 8.
        report: told of damage, in words; the reader gets EIO.

    Raises:
        UsageError: not there.
        FuseUnavailableError: the machine cannot mount; the message says what is missing.
        MPFSError: the system refuses.
    """

    def __init__(
        self,
        store: Store,
        directory: Path,
        *,
        allow_other: bool = False,
        threads: int | None = None,
        report: Callable[[str], object] = lambda message: None,
    ) -> None:
        self.directory = check_mountpoint(directory, store.path)
        self.files = RepositoryFiles(store)
        threads = threads or max(2, min(8, os.cpu_count() or 1))
        options = [f"fsname=mpfs:{_escaped(str(store.path))}", "subtype=mpfs"]
        options += ["allow_other"] if allow_other else []
        self._session = Session(self.files, str(self.directory), options=options, threads=threads, report=report)
        _raise_read_ahead(self.directory)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until somebody unmounts it (`fusermount3 -u DIR`), for at most `timeout` seconds; whether it is."""
        return self._session.wait(timeout)

    def close(self) -> None:
        """Unmount it."""
        self._session.close()

    def __enter__(self) -> Mount:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_mountpoint(directory: Path, repository: Path) -> Path:
    """The absolute path of a directory that may be mounted over, made if need be."""
    path, store = Path(os.path.realpath(directory)), Path(os.path.realpath(repository))
    if path == store or store in path.parents or path in store.parents:
        raise UsageError(f"{path}: is in or above the repository {store}; mount beside it", path=str(path))
    try:
        path.mkdir(parents=True, exist_ok=True)
        taken = next(path.iterdir(), None) is not None
    except FileExistsError:
        raise UsageError(f"{path}: is a file; a mount needs a directory", path=str(path)) from None
    except OSError as error:
        hint = f"; left by a mount that was killed? 'fusermount3 -u {path}'" if error.errno == errno.ENOTCONN else ""
        raise UsageError(f"{path}: cannot be mounted over: {error.strerror}{hint}", path=str(path)) from error
    if os.path.ismount(path):
        raise UsageError(f"{path}: something is mounted there already", path=str(path))
    if taken:
        raise UsageError(f"{path}: is not empty, and a mount would hide what is in it", path=str(path))
    return path


def _raise_read_ahead(directory: Path) -> None:
    """Let the kernel ask for 1 MiB at a time. Only root may say so; elsewhere it stays at 128 KiB."""
    try:
        device = os.stat(directory).st_dev
        knob = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
        knob.write_text(str(_READ_AHEAD_KIB))
    except OSError:
        pass


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace(",", "\\,")


def _missing(path: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
