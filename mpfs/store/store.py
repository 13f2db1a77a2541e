"""A repository's directory on disk: its config, its lock and its LMDB environment, opened together.

.mpfs/
  config.json     format version, map size, and which directory holds the LMDB environment
  lock            the repository lock (flock)
  store/          the LMDB environment: data.mdb, lock.mdb (store-1/ after a compaction, and so on)
"""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from mpfs.errors import LockedError, NoSpaceError, NotARepositoryError, UnsupportedFormatError, UsageError
from mpfs.objects import ObjectId, Plan, object_id
from mpfs.store.blocks import BlockReader
from mpfs.store.config import (
    DEFAULT_MAP_SIZE,
    FORMAT_VERSION,
    MAX_MAP_SIZE,
    Config,
    read_config,
    sync_directory,
    write_config,
)
from mpfs.store.environment import Environment
from mpfs.store.filesystem import refuse_network_file_system, room_to_grow
from mpfs.store.locks import repository_lock
from mpfs.store.objects import ObjectReader, put_object
from mpfs.store.pairs import new_states
from mpfs.store.refs import RefKind, RefReader, set_ref
from mpfs.store.reuse import ReuseTable
from mpfs.store.writer import Writer

__all__ = ["DEFAULT_BLOCK_SIZE", "DEFAULT_MAP_SIZE", "FORMAT_VERSION", "Store", "StoreInfo"]

HASH_NAME = "xxh3-128"
DEFAULT_BLOCK_SIZE = 1 << 20
MIN_BLOCK_SIZE = 4096
MAX_BLOCK_SIZE = 64 << 20
_MAP_UNIT = 1 << 20


@dataclass(frozen=True, slots=True)
class StoreInfo:
    """What a repository is. Block size in bytes."""

    format_version: int
    block_size: int
    hash_name: str
    uuid: str


class Store:
    """An open repository directory."""

    def __init__(self, path: Path, environment: Environment, info: StoreInfo) -> None:
        self.path = path
        self.environment = environment
        self.info = info
        self.blocks = BlockReader(environment)
        self.objects = ObjectReader(environment)
        self.refs = RefReader(environment)
        self.reuse = ReuseTable(environment)
        self._closed = False

    @classmethod
    def create(
        cls,
        path: Path,
        *,
        block_size: int = DEFAULT_BLOCK_SIZE,
        map_size: int = DEFAULT_MAP_SIZE,
        allow_network_file_system: bool = False,
    ) -> Store:
        """Make a repository at `path`, which must not exist or be an empty directory.

        Raises:
            UsageError: the path is taken, or the block size is not a power of two between 4 KiB and 64 MiB.
            NotARepositoryError: the path lies on a network file system and that was not allowed.
        """
        if not _possible(block_size):
            raise UsageError(
                f"block size {block_size:,}: must be a power of two between {MIN_BLOCK_SIZE:,} and {MAX_BLOCK_SIZE:,} bytes"
            )
        path = Path(os.path.abspath(path))
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            what = "a repository is there already" if (path / "config.json").exists() else "the path is taken"
            raise UsageError(f"{path}: {what}")
        path.parent.mkdir(parents=True, exist_ok=True)
        if not allow_network_file_system:
            refuse_network_file_system(path.parent)
        # Made aside and renamed, so that a repository is either whole or not there; and synced, so that a power loss
        # cannot take it away once something was published in it.
        building = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        try:
            os.chmod(building, 0o777 & ~_umask())
            config = Config(FORMAT_VERSION, map_size, allow_network_file_system)
            (building / config.store).mkdir()
            (building / "lock").touch()
            Environment.create(building / config.store, map_size, _new_meta(block_size))
            write_config(building, config)
            try:
                os.rename(building, path)
            except OSError as error:
                raise UsageError(f"{path}: the path is taken: {error.strerror}") from error
            sync_directory(path.parent)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise
        return cls.open(path)

    @classmethod
    def open(cls, path: Path) -> Store:
        """Open the repository at `path`.

        Raises:
            NotARepositoryError: there is none, or it lies on a network file system.
            UnsupportedFormatError: it was made by a newer MPFS.
        """
        path = Path(os.path.abspath(path))
        if not read_config(path).allow_network_file_system:
            refuse_network_file_system(path)
        environment = Environment.open(path)
        try:
            return cls(path, environment, _read_info(path, environment))
        except BaseException:
            environment.close()
            raise

    def __reduce__(self) -> tuple[object, ...]:
        # Unpickled, in whatever process, it is opened anew (and shares what is open there).
        return (Store.open, (self.path,))

    def close(self) -> None:
        """Close the repository; once closed, do nothing."""
        if not self._closed:
            self._closed = True
            self.environment.close()

    @contextmanager
    def writer(self, needed: int = 0) -> Iterator[Writer]:
        """A writer, under the shared repository lock. `needed` is about how many bytes it will write, if that is known.

        A map that is almost full is made larger first, if nobody else is at work.

        Raises:
            LockedError: a garbage collection is at work and does not end soon.
        """
        wanted = (self.environment.used_size() + needed) * 10 // 9
        if wanted > self.environment.map_size:
            with suppress(LockedError):
                self.grow_map(2 * wanted, timeout=0)
        with repository_lock(self.path / "lock", exclusive=False), Writer(self.environment) as writer:
            yield writer

    def grow_map(self, map_size: int, *, timeout: float = 10.0) -> int:
        """Make LMDB's map at least `map_size` bytes; what it is then. Other processes follow at their next transaction.

        Raises:
            UsageError: no process could have so large a map.
            LockedError: writers were at work for all of `timeout` seconds.
        """
        if map_size > MAX_MAP_SIZE:
            raise UsageError(f"a map of {map_size:,} bytes cannot be: at most {MAX_MAP_SIZE:,}")
        # Under the exclusive lock nobody writes: two processes that write with maps of two sizes tear the file.
        with repository_lock(self.path / "lock", exclusive=True, timeout=timeout):
            config = read_config(self.path)
            if map_size > config.map_size:
                pages = -(-map_size // _MAP_UNIT) * _MAP_UNIT
                write_config(self.path, replace(config, map_size=pages))
                self.environment.refresh()
        return self.environment.map_size

    def room(self) -> int:
        """Bytes that new blocks can take at the most: what is free on the disk, and in the store where blocks were removed."""
        environment = self.environment
        inside = max(0, environment.data_size() - environment.used_size())
        return room_to_grow(environment.path / "data.mdb") + inside

    def require_room(self, needed: int, what: str) -> None:
        """Check before work starts that `needed` bytes can be stored; `what` needs them.

        Raises:
            NoSpaceError: they cannot, unless somebody makes room meanwhile.
        """
        room = self.room()
        if needed > room:
            raise NoSpaceError(
                f"{self.path}: {what} needs {needed:,} bytes, {room:,} are free; nothing was written. Remove what is not "
                "needed (mpfs rm, mpfs gc), or make room on the disk; --no-space-check tries it all the same",
                needed=needed,
                free=room,
            )

    def put_plan(self, plan: Plan) -> ObjectId:
        """Keep a plan that was not run; its id."""
        data = plan.encode()
        identity = object_id(data)
        with self.environment.read() as txn:
            if bytes(txn.get("plans", bytes.fromhex(identity)) or b"") == data:
                return identity  # without waiting for the disk
        with repository_lock(self.path / "lock", exclusive=False), self.environment.write(needed=1 << 20) as txn:
            return put_object(txn, plan)

    def move_ref(
        self, name: str, commit: str | None, *, expected: str | None, kind: RefKind, time: int, author: str, reason: str
    ) -> None:
        """Move, make or remove a ref by compare-and-set; see `refs.set_ref`."""
        with repository_lock(self.path / "lock", exclusive=False), self.environment.write() as txn:
            set_ref(txn, name, commit, expected=expected, kind=kind, time=time, author=author, reason=reason)


def _possible(block_size: int) -> bool:
    return MIN_BLOCK_SIZE <= block_size <= MAX_BLOCK_SIZE and not block_size & (block_size - 1)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _new_meta(block_size: int) -> dict[str, str]:
    values = {
        "format_version": str(FORMAT_VERSION),
        "block_size": str(block_size),
        "hash_name": HASH_NAME,
        "uuid": str(uuid.uuid4()),
    }
    return {**values, "checksum": meta_checksum(values), **new_states()}


def meta_checksum(values: Mapping[str, str]) -> str:
    """The checksum that the meta database holds of what does not change in it."""
    text = "".join(f"{name}={values.get(name, '')}\n" for name in ("format_version", "block_size", "hash_name", "uuid"))
    return xxhash.xxh3_64_hexdigest(text.encode())


def _read_info(path: Path, environment: Environment) -> StoreInfo:
    with environment.read() as txn:
        found = {bytes(key): bytes(value) for key, value in txn.scan("meta")}
    try:
        values = {key.decode(errors="replace"): value.decode(errors="replace") for key, value in found.items()}
        info = StoreInfo(int(values["format_version"]), int(values["block_size"]), values["hash_name"], values["uuid"])
    except (KeyError, ValueError) as error:
        raise NotARepositoryError(f"{path}: the store has no valid meta record: {error!r}") from error
    if not _possible(info.block_size):
        raise NotARepositoryError(f"{path}: the store has no valid meta record: blocks of {info.block_size:,} bytes")
    if info.format_version > FORMAT_VERSION or info.hash_name != HASH_NAME:
        raise UnsupportedFormatError(
            f"{path}: format {info.format_version} with {info.hash_name} blocks is not understood by this MPFS"
        )
    return info
