"""The LMDB environment: one per repository and process, its named databases, and its errors in our words.

LMDB allows a path to be opened once in a process, and an open environment must not cross a fork; so environments
are shared here by path and opened anew in a child. Facts about LMDB that bind are in docs/format.md.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

import lmdb

from mpfs.errors import IntegrityError, LockedError, MPFSError, NoSpaceError

if TYPE_CHECKING:
    _Databases: TypeAlias = dict[str, lmdb._Database]

DATABASES = (
    "blocks",
    "block_info",
    "stats",
    "tensors",
    "snapshots",
    "commits",
    "plans",
    "runs",
    "run_index",
    "refs",
    "reflog",
    "reuse",
    "pairs",
    "meta",
)
"""The named databases; docs/format.md gives their keys and values."""

_MAX_READERS = 510
_MIN_FREE = 1 << 20
"""Bytes; a disk with less than this free is full."""

_registry: dict[str, Environment] = {}
_registry_lock = threading.Lock()


class Environment:
    """An open LMDB environment. Get one with `Environment.open`; it is shared and safe to use from many threads."""

    def __init__(self, path: Path, map_size: int) -> None:
        self.path = path
        self.map_size = map_size
        self._references = 0
        self._pid = os.getpid()
        self._active = 0
        self._active_lock = threading.Lock()
        self._env, self._databases = self._open()
        self._fd = os.open(path / "data.mdb", os.O_RDONLY | os.O_CLOEXEC)
        self._map_start: int | None = None

    @classmethod
    def open(cls, path: Path, map_size: int) -> Environment:
        """The environment at `path` (a directory), opened if this process has not done so yet."""
        key = os.path.realpath(path)
        with _registry_lock:
            environment = _registry.get(key)
            if environment is None:
                environment = _registry[key] = cls(Path(key), map_size)
            environment._references += 1
            return environment

    def _open(self) -> tuple[lmdb.Environment, _Databases]:
        try:
            env = lmdb.open(
                str(self.path),
                map_size=self.map_size,
                max_dbs=len(DATABASES),
                max_readers=_MAX_READERS,
                readahead=False,
                meminit=False,
            )
            # A process that was killed while reading pins old pages until somebody clears its slot.
            env.reader_check()
            databases = {name: env.open_db(name.encode()) for name in DATABASES}
        except lmdb.Error as error:
            raise self.translate(error) from error
        return env, databases

    def close(self) -> None:
        """Give up one reference; the last one closes the environment."""
        with _registry_lock:
            self._references -= 1
            if self._references > 0:
                return
            if _registry.get(str(self.path)) is self:
                del _registry[str(self.path)]
            # Still under the lock: LMDB must not see the path opened again before it is closed.
            self._env.close()
            os.close(self._fd)

    @contextmanager
    def read(self) -> Iterator[Transaction]:
        """A read transaction: a consistent view, to be held for no longer than one batch of blocks.

        Values come back as buffers into the map, valid until the transaction ends.
        """
        try:
            with self._transaction(write=False) as txn:
                yield txn
        except lmdb.Error as error:
            raise self.translate(error) from error

    @contextmanager
    def write(self, needed: int = 0) -> Iterator[Transaction]:
        """A write transaction: all or nothing, durable when the block ends without an exception.

        `needed` is about how many bytes it will write, for the message when there is no room.
        """
        try:
            with self._transaction(write=True) as txn:
                yield txn
        except lmdb.Error as error:
            raise self.translate(error, needed) from error

    def catch_up(self) -> None:
        """Make read transactions see everything that is durable.

        A process that is killed after LMDB wrote a transaction's meta page (which takes a sync of the disk), and before
        it noted that in the shared lock file, leaves a transaction that is durable, and that no reader sees until the
        next writer finds the dead one's lock. Whoever reads in order to remove things must be that writer first.
        """
        with self.write():
            pass

    @contextmanager
    def _transaction(self, *, write: bool) -> Iterator[Transaction]:
        self._reopen_after_fork()
        with self._active_lock:
            self._active += 1
        try:
            try:
                txn = self._env.begin(write=write, buffers=True)
            except lmdb.Error as error:
                raise self.translate(error) from error
            with txn:
                yield Transaction(txn, self._databases)
        finally:
            with self._active_lock:
                self._active -= 1

    def _reopen_after_fork(self) -> None:
        if self._pid == os.getpid():
            return
        with _registry_lock:
            if self._pid == os.getpid():
                return
            if self._active:
                # Ending a transaction that the parent still uses would free its slot in the shared reader table.
                raise LockedError(
                    f"{self.path}: this process was forked in the middle of a transaction and cannot use the "
                    "repository; start workers with the 'spawn' method, or before the repository is used"
                )
            self._env.close()
            self._active_lock = threading.Lock()
            self._env, self._databases = self._open()
            self._map_start = None
            self._pid = os.getpid()

    def batches(
        self, database: str, count: int = 1024, *, values: bool = True
    ) -> Iterator[tuple[Transaction, list[tuple[bytes, memoryview]]]]:
        """A whole database in key order, `count` pairs at a time, each batch in a read transaction of its own.

        What is put in or removed meanwhile may be seen or not; the rest is seen once.
        """
        after: bytes | None = None
        while True:
            with self.read() as txn:
                batch = list(islice(txn.scan(database, values=values, after=after), count))
                if not batch:
                    return
                yield txn, batch
                after = batch[-1][0]

    def file_offset(self, address: int) -> int | None:
        """Where in data.mdb the byte at a memory address of the map lies; None where that cannot be told."""
        if self._map_start is None:
            self._map_start = _mapping_start(self.path / "data.mdb")
        offset = address - self._map_start
        return offset if self._map_start and 0 <= offset < self.map_size else None

    def prefetch(self, offset: int, size: int) -> None:
        """Ask the kernel to read a range of data.mdb in the background."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, offset, size, os.POSIX_FADV_WILLNEED)

    def data_size(self) -> int:
        """Bytes of data.mdb."""
        return os.fstat(self._fd).st_size

    def translate(self, error: lmdb.Error, needed: int = 0) -> MPFSError:
        """An LMDB error in our words."""
        where = self.path.parent
        if isinstance(error, lmdb.MapFullError):
            return NoSpaceError(
                f"{where}: the repository's map of {self.map_size:,} bytes is full "
                f"(about {needed:,} bytes more are needed); nothing was published",
                needed=needed,
                map_size=self.map_size,
            )
        text = str(error)
        free = shutil.disk_usage(self.path).free
        no_space = any(os.strerror(code) in text for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
        # LMDB reports a write that the file system cut short, for want of room, as an I/O error.
        if no_space or (os.strerror(errno.EIO) in text and free < needed + _MIN_FREE):
            return NoSpaceError(
                f"{where}: the disk is full: about {needed:,} bytes are needed, {free:,} are free; "
                "nothing was published and the repository is as it was",
                needed=needed,
                free=free,
            )
        if isinstance(error, lmdb.ReadersFullError):
            return LockedError(f"{where}: all {_MAX_READERS} reader slots are taken; close some readers and try again")
        if isinstance(error, lmdb.CorruptedError | lmdb.PageNotFoundError | lmdb.InvalidError | lmdb.PanicError):
            return IntegrityError(f"{where}: the store is damaged: {text}; see 'mpfs fsck'")
        return MPFSError(f"{where}: LMDB: {text}")


class Transaction:
    """Gets, puts and scans by database name, within one LMDB transaction."""

    def __init__(self, txn: lmdb.Transaction, databases: _Databases) -> None:
        self._txn = txn
        self._databases = databases

    def get(self, database: str, key: bytes) -> memoryview | None:
        """The value, as a buffer that is valid until the transaction ends."""
        return cast("memoryview | None", self._txn.get(key, db=self._databases[database]))

    def contains(self, database: str, key: bytes) -> bool:
        """Whether the key is there, without touching the value's pages."""
        with self._txn.cursor(self._databases[database]) as cursor:
            return bool(cursor.set_key(key))

    def size(self, database: str, key: bytes) -> int | None:
        """Length of the value in bytes, without touching its pages; None if the key is not there."""
        with self._txn.cursor(self._databases[database]) as cursor:
            return len(cursor.value()) if cursor.set_key(key) else None

    def put(self, database: str, key: bytes, value: bytes | memoryview) -> None:
        """Insert or replace."""
        self._txn.put(key, value, db=self._databases[database])

    def delete(self, database: str, key: bytes) -> bool:
        """Remove a key; whether it was there."""
        return self._txn.delete(key, db=self._databases[database])

    def scan(
        self, database: str, prefix: bytes = b"", *, values: bool = True, after: bytes | None = None
    ) -> Iterator[tuple[bytes, memoryview]]:
        """All pairs whose key starts with `prefix`, in key order (with `values=False`, values are empty).

        With `after`, only the keys greater than that one: so that a long scan can be cut into short transactions.
        """
        with self._txn.cursor(self._databases[database]) as cursor:
            start = prefix if after is None else max(prefix, after + b"\0")
            found = cursor.set_range(start) if start else cursor.first()
            while found:
                key = bytes(cursor.key())
                if not key.startswith(prefix):
                    return
                yield key, cast("memoryview", cursor.value()) if values else memoryview(b"")
                found = cursor.next()

    def last(self, database: str, prefix: bytes) -> tuple[bytes, memoryview] | None:
        """The pair with the greatest key that starts with `prefix`."""
        with self._txn.cursor(self._databases[database]) as cursor:
            # The successor of all keys with this prefix: nothing of ours holds 0xff bytes past a prefix.
            found = cursor.prev() if cursor.set_range(prefix + b"\xff" * 16) else cursor.last()
            if not found or not bytes(cursor.key()).startswith(prefix):
                return None
            return bytes(cursor.key()), cast("memoryview", cursor.value())

    def count(self, database: str) -> int:
        """Number of keys."""
        return int(self._txn.stat(self._databases[database])["entries"])


def _renew_locks() -> None:
    """After a fork: whichever thread held one of these does not exist in the child."""
    global _registry_lock
    _registry_lock = threading.Lock()
    for environment in _registry.values():
        environment._active_lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_locks)


def _mapping_start(path: Path) -> int:
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
            for line in maps:
                parts = line.rstrip("\n").split(maxsplit=5)
                if len(parts) == 6 and parts[5] == str(path) and int(parts[2], 16) == 0:
                    return int(parts[0].partition("-")[0], 16)
    except OSError:
        pass
    return 0
