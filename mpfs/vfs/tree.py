"""A commit as a tree of directories: what the fsspec file system and the mount show of it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256

from mpfs.objects import BlobFile, Commit, File, ObjectId, Snapshot
from mpfs.store import Store
from mpfs.vfs.reader import SnapshotReader

_KEPT_COMMITS = 16


@dataclass(frozen=True)
class Tree:
    """A commit, opened, and its directories: the names in each, sorted, by path ("" is the top).

    `time` is the commit's, in seconds since 1970, UTC.
    """

    reader: SnapshotReader
    time: int
    directories: dict[str, tuple[str, ...]]


class Trees:
    """Opens commits and keeps the last few. Safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._trees: OrderedDict[tuple[str, ObjectId], Tree] = OrderedDict()

    def get(self, store: Store, commit: ObjectId) -> Tree:
        """The tree of a commit.

        Raises:
            NotFoundError: there is no such commit.
            IntegrityError: it, or its snapshot, is damaged.
        """
        key = (str(store.path), commit)
        with self._lock:
            tree = self._trees.get(key)
            if tree is None:
                tree = self._trees[key] = open_tree(store, commit)
                if len(self._trees) > _KEPT_COMMITS:
                    self._trees.popitem(last=False)
            self._trees.move_to_end(key)
            return tree


def open_tree(store: Store, commit: ObjectId) -> Tree:
    """Open a commit; no tensor object and no block is read.

    Raises:
        As `Trees.get`.
    """
    found = store.objects.get(Commit, commit)
    snapshot = store.objects.get(Snapshot, found.snapshot)
    names: dict[str, set[str]] = {"": set()}
    for file in snapshot.files:
        path = file.path
        while path:
            parent, _, name = path.rpartition("/")
            names.setdefault(parent, set()).add(name)
            path = parent
    directories = {directory: tuple(sorted(children)) for directory, children in names.items()}
    return Tree(SnapshotReader(store, snapshot, commit), found.time, directories)


def children(directory: str, paths: Iterable[str]) -> list[str]:
    """The names directly in a directory, sorted, out of the paths of everything."""
    prefix = f"{directory}/" if directory else ""
    return sorted({path[len(prefix) :].partition("/")[0] for path in paths if path.startswith(prefix)})


def content_key(file: File) -> str:
    """64 hex digits that name a file's content, from the ids of what it is made of; no block is read."""
    if isinstance(file, BlobFile):
        return file.content
    return sha256("".join(file.references()).encode()).hexdigest()
