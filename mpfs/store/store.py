"""A repository's directory on disk: its config, its lock and its LMDB environment, opened together.

.mpfs/
  config.json     format version and map size
  lock            the repository lock (flock)
  store/          the LMDB environment: data.mdb, lock.mdb
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpfs.errors import MPFSError, NotARepositoryError, UnsupportedFormatError, UsageError
from mpfs.objects import ObjectId, Plan
from mpfs.store.blocks import BlockReader
from mpfs.store.environment import Environment
from mpfs.store.filesystem import refuse_network_file_system
from mpfs.store.locks import repository_lock
from mpfs.store.objects import ObjectReader, put_object
from mpfs.store.refs import RefKind, RefReader, set_ref
from mpfs.store.reuse import ReuseTable
from mpfs.store.writer import Writer

FORMAT_VERSION = 1
HASH_NAME = "xxh3-128"
DEFAULT_BLOCK_SIZE = 1 << 20
MIN_BLOCK_SIZE = 4096
MAX_BLOCK_SIZE = 64 << 20
DEFAULT_MAP_SIZE = 1 << 40
"""Bytes of address space for LMDB's map. It is sparse: the file grows only with what is stored."""


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
        if not (MIN_BLOCK_SIZE <= block_size <= MAX_BLOCK_SIZE) or block_size & (block_size - 1):
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
        # Made aside and renamed, so that a repository is either whole or not there.
        building = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        try:
            os.chmod(building, 0o777 & ~_umask())
            info = StoreInfo(FORMAT_VERSION, block_size, HASH_NAME, str(uuid.uuid4()))
            (building / "store").mkdir()
            (building / "lock").touch()
            environment = Environment.open(building / "store", map_size)
            try:
                with environment.write() as txn:
                    for key, value in (
                        (b"format_version", str(info.format_version)),
                        (b"block_size", str(info.block_size)),
                        (b"hash_name", info.hash_name),
                        (b"uuid", info.uuid),
                    ):
                        txn.put("meta", key, value.encode())
            finally:
                environment.close()
            config = {
                "format_version": FORMAT_VERSION,
                "map_size": map_size,
                "allow_network_file_system": allow_network_file_system,
            }
            (building / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            try:
                os.rename(building, path)
            except OSError as error:
                raise UsageError(f"{path}: the path is taken: {error.strerror}") from error
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
        config = _read_config(path)
        if not config.get("allow_network_file_system", False):
            refuse_network_file_system(path)
        environment = Environment.open(path / "store", int(config.get("map_size", DEFAULT_MAP_SIZE)))
        try:
            return cls(path, environment, _read_info(path, environment))
        except BaseException:
            environment.close()
            raise

    def close(self) -> None:
        """Close the repository; once closed, do nothing."""
        if not self._closed:
            self._closed = True
            self.environment.close()

    @contextmanager
    def writer(self) -> Iterator[Writer]:
        """A writer, under the shared repository lock.

        Raises:
            LockedError: a garbage collection is at work and does not end soon.
        """
        with repository_lock(self.path / "lock", exclusive=False), Writer(self.environment) as writer:
            yield writer

    def put_plan(self, plan: Plan) -> ObjectId:
        """Keep a plan that was not run; its id."""
        with repository_lock(self.path / "lock", exclusive=False), self.environment.write(needed=1 << 20) as txn:
            return put_object(txn, plan)

    def move_ref(
        self, name: str, commit: str | None, *, expected: str | None, kind: RefKind, time: int, author: str, reason: str
    ) -> None:
        """Move, make or remove a ref by compare-and-set; see `refs.set_ref`."""
        with repository_lock(self.path / "lock", exclusive=False), self.environment.write() as txn:
            set_ref(txn, name, commit, expected=expected, kind=kind, time=time, author=author, reason=reason)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _read_config(path: Path) -> dict[str, Any]:
    try:
        text = (path / "config.json").read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise NotARepositoryError(
            f"{path}: not an MPFS repository; make one with 'mpfs init'", path=str(path)
        ) from None
    except OSError as error:
        raise MPFSError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        config = json.loads(text)
        version = int(config["format_version"])
    except (ValueError, KeyError, TypeError) as error:
        raise NotARepositoryError(f"{path}/config.json: not a repository's config: {error!r}") from error
    if version > FORMAT_VERSION:
        raise UnsupportedFormatError(
            f"{path}: format version {version} is newer than this MPFS understands ({FORMAT_VERSION}); upgrade mpfs",
            format_version=version,
        )
    if not (path / "store" / "data.mdb").exists():
        raise NotARepositoryError(f"{path}: its store/data.mdb is missing", path=str(path))
    return dict(config)


def _read_info(path: Path, environment: Environment) -> StoreInfo:
    with environment.read() as txn:
        values = {key.decode(): bytes(value).decode() for key, value in txn.scan("meta")}
    try:
        info = StoreInfo(int(values["format_version"]), int(values["block_size"]), values["hash_name"], values["uuid"])
    except (KeyError, ValueError) as error:
        raise NotARepositoryError(f"{path}: the store has no valid meta record: {error!r}") from error
    if info.format_version > FORMAT_VERSION or info.hash_name != HASH_NAME:
        raise UnsupportedFormatError(
            f"{path}: format {info.format_version} with {info.hash_name} blocks is not understood by this MPFS"
        )
    return info
