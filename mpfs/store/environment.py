"""The LMDB environment: one per repository and process, its named databases, and its errors in our words.

LMDB allows a path to be opened once in a process, and an open environment must not cross a fork; so environments
are shared here by path and opened anew in a child. Facts about LMDB that bind are in docs/format.md.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import cast

import lmdb

from mpfs.deferred import numpy as np
from mpfs.errors import LockedError, MPFSError, NotARepositoryError
from mpfs.store.ahead import SMALLEST, RoomAhead
from mpfs.store.config import Config, Stamp, read_config, stamp, sync_directory
from mpfs.store.failures import MAX_READERS, translate
from mpfs.store.filesystem import mapping_start
from mpfs.store.locks import opening
from mpfs.store.pages import check_metas
from mpfs.store.resident import is_resident
from mpfs.store.writeback import early_writeback

DATABASES = (
    "blocks",
    "block_info",
    "stats",
    "tensor_stats",
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

_MIN_FREE = 1 << 20
"""Bytes; a disk with less than this free is full."""

_REQUEST_BYTES = 128 << 10
"""Bytes of the file that the kernel is asked for at a time: Linux's default read-ahead, of which it leaves nothing out."""

_OPEN_ATTEMPTS = 100
_RESIZE_SECONDS = 10.0

_registry: dict[str, Environment] = {}
_registry_lock = threading.Lock()


class _Handle:
    """One opening of an LMDB environment. One that has been replaced is closed with its last transaction."""

    def __init__(self, path: Path, map_size: int, *, create: bool = False) -> None:
        self.path = path
        self.map_size = map_size
        self.active = 0
        self.map_start: int | None = None
        self.ahead = RoomAhead(path / "data.mdb")
        with opening(path):
            self.env = lmdb.open(
                str(path),
                map_size=map_size,
                max_dbs=len(DATABASES),
                max_readers=MAX_READERS,
                create=create,
                readahead=False,
                meminit=False,
            )
        try:
            # A process that was killed while reading pins old pages until somebody clears its slot.
            self.env.reader_check()
            self.databases = {name: self.env.open_db(name.encode()) for name in DATABASES}
            self.fd = os.open(path / "data.mdb", os.O_RDONLY | os.O_CLOEXEC)
        except BaseException:
            self.env.close()
            raise

    def resize(self, map_size: int) -> None:
        """Take another map size; no transaction may be open."""
        self.env.set_mapsize(map_size)
        self.map_size = map_size
        self.map_start = None

    def file_offset(self, address: int) -> int | None:
        """Where in data.mdb the byte at a memory address of the map lies; None where that cannot be told."""
        if self.map_start is None:
            self.map_start = mapping_start(self.path / "data.mdb")
        offset = address - self.map_start
        return offset if self.map_start and 0 <= offset < self.map_size else None

    def close(self) -> None:
        os.close(self.fd)
        try:
            with opening(self.path):
                self.env.close()
        except FileNotFoundError:  # compacted away
            self.env.close()


class Environment:
    """The open LMDB environment of a repository. Get one with `Environment.open`; it is shared by path within the
    process, and safe to use from many threads.

    At the start of a transaction it notices that config.json was replaced, by a compaction or because the map was made
    larger, and follows. Both happen under the exclusive repository lock, so never while somebody writes.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._references = 0
        self._pid = os.getpid()
        self._active = 0
        self._active_lock = threading.Lock()
        self._stamp, self._config, self._handle = self._open()

    @classmethod
    def open(cls, root: Path) -> Environment:
        """The environment of the repository at `root`, opened if this process has not done so yet.

        Raises:
            NotARepositoryError: there is none.
            IntegrityError: it is damaged, and LMDB could not even open it, or not safely.
        """
        key = os.path.realpath(root)
        with _registry_lock:
            environment = _registry.get(key)
            if environment is None:
                environment = _registry[key] = cls(Path(key))
            environment._references += 1
            return environment

    @staticmethod
    def create(path: Path, map_size: int, meta: Mapping[str, str]) -> None:
        """Make a new LMDB environment in the empty directory `path`, durably, with these `meta` records."""
        handle = _Handle(path, map_size, create=True)
        try:
            with handle.env.begin(write=True) as txn:
                for key, value in meta.items():
                    txn.put(key.encode(), value.encode(), db=handle.databases["meta"])
            handle.env.sync(True)
        finally:
            handle.close()
        sync_directory(path)

    def _open(self) -> tuple[Stamp, Config, _Handle]:
        for _ in range(_OPEN_ATTEMPTS):
            before = stamp(self.root)
            config = read_config(self.root)
            handle, failure = self._try_open(config)
            if stamp(self.root) == before:
                if handle is None:
                    raise failure or NotARepositoryError(f"{self.root}: its store is missing")
                return before, config, handle
            # Compacted meanwhile: what was opened may be on its way out.
            if handle is not None:
                handle.close()
        raise LockedError(f"{self.root}: is compacted all the time; try again later")

    def _try_open(self, config: Config) -> tuple[_Handle | None, MPFSError | None]:
        path = self.root / config.store
        try:
            check_metas(path / "data.mdb")
            return _Handle(path, config.map_size), None
        except (FileNotFoundError, NotADirectoryError):
            missing = f"{self.root}: its {config.store}/data.mdb is missing"
            return None, NotARepositoryError(missing, path=str(self.root))
        except OSError as error:
            return None, MPFSError(f"{path}: cannot be read: {error.strerror}")
        except lmdb.Error as error:
            return None, translate(error, self.root, path / "data.mdb", config.map_size)
        except MPFSError as error:
            return None, error

    @property
    def _env(self) -> lmdb.Environment:
        return self._handle.env

    @property
    def path(self) -> Path:
        """The directory of the LMDB environment, which a compaction changes."""
        return self._handle.path

    @property
    def map_size(self) -> int:
        """Bytes of address space: the most that the store can grow to."""
        return self._config.map_size

    def close(self) -> None:
        """Give up one reference; the last one closes the environment."""
        with _registry_lock:
            self._references -= 1
            if self._references > 0:
                return
            if _registry.get(str(self.root)) is self:
                del _registry[str(self.root)]
            # Still under the lock: LMDB must not see the path opened again before it is closed.
            self._handle.close()

    def read(self) -> AbstractContextManager[Transaction]:
        """A read transaction: a consistent view, to be held for no longer than one batch of blocks.

        Values come back as buffers into the map, valid until the transaction ends.
        """
        return _Opened(self, False, 0)

    def write(self, needed: int = 0) -> AbstractContextManager[Transaction]:
        """A write transaction: all or nothing, durable when the block ends without an exception.

        `needed` is about how many bytes it will write, for the message when there is no room.
        """
        return _Opened(self, True, needed)

    def catch_up(self) -> None:
        """Make read transactions see everything that is durable.

        A process that is killed after LMDB wrote a transaction's meta page (which takes a sync of the disk), and before
        it noted that in the shared lock file, leaves a transaction that is durable, and that no reader sees until the
        next writer finds the dead one's lock. Whoever reads in order to remove things must be that writer first.
        """
        with self.write():
            pass

    def _enter(self) -> _Handle:
        self._reopen_after_fork()
        if stamp(self.root) != self._stamp:
            self.refresh()
        with self._active_lock:
            handle = self._handle
            # LMDB's map can only be moved while nothing looks into it; until then the old size is as good.
            if handle.map_size < self._config.map_size and handle.active == 0:
                handle.resize(self._config.map_size)
            handle.active += 1
            self._active += 1
            return handle

    def _leave(self, handle: _Handle) -> None:
        with self._active_lock:
            handle.active -= 1
            self._active -= 1
            if handle is not self._handle and handle.active == 0:
                handle.close()

    def _begin(self, handle: _Handle, write: bool) -> lmdb.Transaction:
        deadline = time.monotonic() + _RESIZE_SECONDS
        while True:
            try:
                return handle.env.begin(write=write, buffers=True)
            except lmdb.MapResizedError as error:
                # Another process has a larger map and has filled it beyond ours.
                if time.monotonic() > deadline:
                    raise LockedError(
                        f"{self.root}: the store has outgrown this process's map, which cannot be replaced while "
                        "transactions are open; close and open the repository"
                    ) from error
                with self._active_lock:
                    if handle.active == 1:
                        handle.resize(max(self._config.map_size, handle.map_size * 2))
                        continue
            except lmdb.Error as error:
                raise self.translate(error) from error
            time.sleep(0.01)

    def refresh(self) -> None:
        """Follow config.json: another store after a compaction, a larger map."""
        with _registry_lock:
            before = stamp(self.root)
            config = read_config(self.root)
            if before == self._stamp:
                return
            if config.store == self._config.store:
                self._stamp, self._config = before, config
                return
            old = self._handle
            found = self._open()
            with self._active_lock:
                self._stamp, self._config, self._handle = found
                if old.active == 0:
                    old.close()

    def _reopen_after_fork(self) -> None:
        if self._pid == os.getpid():
            return
        with _registry_lock:
            if self._pid == os.getpid():
                return
            if self._active:
                # Ending a transaction that the parent still uses would free its slot in the shared reader table.
                raise LockedError(
                    f"{self.root}: this process was forked in the middle of a transaction and cannot use the "
                    "repository; start workers with the 'spawn' method, or before the repository is used"
                )
            self._handle.close()
            self._active_lock = threading.Lock()
            self._stamp, self._config, self._handle = self._open()
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

    def prefetch(self, offset: int, size: int) -> None:
        """Ask the kernel to read a range of data.mdb in the background."""
        if hasattr(os, "posix_fadvise"):
            # Of one request Linux reads no more than the device takes at a time, and leaves the rest to be read page by page.
            # A hint may be of another file, or of none.
            first, end = max(0, offset), min(offset + size, self.data_size())
            if is_resident(self._handle.fd, first, end - first):
                return
            for start in range(first, end, _REQUEST_BYTES):
                length = min(_REQUEST_BYTES, end - start)
                os.posix_fadvise(self._handle.fd, start, length, os.POSIX_FADV_WILLNEED)

    def writing_back(self, size: int) -> AbstractContextManager[None]:
        """Around a write transaction of about `size` bytes: let the disk begin before everything is there."""
        return early_writeback(self._handle.fd) if size >= SMALLEST else nullcontext()

    def data_size(self) -> int:
        """Bytes of data.mdb."""
        return os.fstat(self._handle.fd).st_size

    def give_room_back(self) -> None:
        """Give back the space that writers have taken ahead (`Transaction.take_room`) and that nobody needs now."""
        if self._handle.ahead.taken:
            # In a transaction, so that nobody makes the file larger at the same time.
            with self.write():
                self._handle.ahead.give_back()

    def used_size(self) -> int:
        """Bytes of data.mdb that are in use; the rest is free for new blocks, and given back by a compaction."""
        with self.read() as txn:
            return txn.pages() * self._handle.env.stat()["psize"]

    def copy_compacted(self, directory: Path) -> None:
        """Write a copy without free pages to `directory`/data.mdb; not synced."""
        try:
            self._handle.env.copy(str(directory), compact=True)
        except lmdb.Error as error:
            raise self.translate(error, self.used_size()) from error

    def translate(self, error: lmdb.Error, needed: int = 0) -> MPFSError:
        """An LMDB error in our words."""
        return translate(error, self.root, self.path / "data.mdb", self.map_size, needed)


class _Opened:
    """A transaction of an environment, from `with` to the end of its block. No generator: many are short."""

    __slots__ = ("_environment", "_handle", "_needed", "_txn", "_write")

    def __init__(self, environment: Environment, write: bool, needed: int) -> None:
        self._environment = environment
        self._write = write
        self._needed = needed

    def __enter__(self) -> Transaction:
        handle = self._handle = self._environment._enter()
        try:
            self._txn = self._environment._begin(handle, self._write)
            self._txn.__enter__()
        except BaseException:
            self._environment._leave(handle)
            raise
        return Transaction(self._txn, handle)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._txn.__exit__(kind, error, trace)
        except lmdb.Error as failed:
            raise self._environment.translate(failed, self._needed) from failed
        finally:
            self._environment._leave(self._handle)
        if isinstance(error, lmdb.Error):
            raise self._environment.translate(error, self._needed) from error


class StoreCopy:
    """A store that nobody else knows of yet, while it is being built. Its transactions need not be durable."""

    def __init__(self, path: Path, map_size: int) -> None:
        self._handle = _Handle(path, map_size)

    def __enter__(self) -> StoreCopy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.close()

    @contextmanager
    def read(self) -> Iterator[Transaction]:
        """A read transaction."""
        with self._handle.env.begin(buffers=True) as txn:
            yield Transaction(txn, self._handle)

    @contextmanager
    def write(self) -> Iterator[Transaction]:
        """A write transaction."""
        with self._handle.env.begin(write=True, buffers=True) as txn:
            yield Transaction(txn, self._handle)


class Transaction:
    """Gets, puts and scans by database name, within one LMDB transaction."""

    def __init__(self, txn: lmdb.Transaction, handle: _Handle) -> None:
        self._txn = txn
        self._handle = handle
        self._databases = handle.databases

    @property
    def number(self) -> int:
        """LMDB's number of the transaction that made what a reader sees."""
        return int(self._txn.id())

    @property
    def path(self) -> Path:
        """The directory of the LMDB environment that this is a view of."""
        return self._handle.path

    def file_offset(self, database: str, key: bytes) -> int | None:
        """Where in data.mdb a value lies, without touching its pages; None where that cannot be told."""
        with self._txn.cursor(self._databases[database]) as cursor:
            if not cursor.set_key(key) or not len(cursor.value()):
                return None
            address = np.frombuffer(cursor.value(), np.uint8).__array_interface__["data"][0]
        return self._handle.file_offset(address)

    def get(self, database: str, key: bytes) -> memoryview | None:
        """The value, as a buffer that is valid until the transaction ends."""
        return cast("memoryview | None", self._txn.get(key, db=self._databases[database]))

    def get_many(self, database: str, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """The values of those of many keys that are there, copied: much faster than one by one."""
        with self._txn.cursor(self._databases[database]) as cursor:
            return {bytes(key): bytes(value) for key, value in cursor.getmulti(keys)}

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

    def take_room(self, size: int) -> None:
        """In a write transaction that will write about `size` bytes: let the file system find the space at once."""
        used = (int(self._handle.env.info()["last_pgno"]) + 1) * int(self._handle.env.stat()["psize"])
        self._handle.ahead.take(used, size + size // 16)

    def count(self, database: str) -> int:
        """Number of keys."""
        return int(self._txn.stat(self._databases[database])["entries"])

    def pages(self) -> int:
        """Number of pages that hold something."""
        found = (self._txn.stat(self._databases[name]) for name in DATABASES)
        return 4 + sum(item["branch_pages"] + item["leaf_pages"] + item["overflow_pages"] for item in found)


def _renew_locks() -> None:
    """After a fork: whichever thread held one of these does not exist in the child."""
    global _registry_lock
    _registry_lock = threading.Lock()
    for environment in _registry.values():
        environment._active_lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_locks)
