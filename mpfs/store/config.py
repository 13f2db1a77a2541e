"""config.json: what has to be known before the store can be opened. It is replaced whole, so it is old or new.

Its `store` names the directory of the LMDB environment. Compaction builds another one beside it and then changes this
name: one atomic rename is the whole switch (docs/format.md).
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

from mpfs.errors import MPFSError, NotARepositoryError, UnsupportedFormatError

FORMAT_VERSION = 1
DEFAULT_MAP_SIZE = 1 << 40
"""Bytes of address space for LMDB's map. It is sparse: the file grows only with what is stored."""
MAX_MAP_SIZE = 1 << 46
"""Bytes; half of what a process can address on x86-64."""

CONFIG_NAME = "config.json"
FIRST_STORE = "store"
STORE_NAME = re.compile(r"store(-[1-9][0-9]{0,8})?")

Stamp: TypeAlias = tuple[int, int, int]
"""Tells one config.json from the one that replaced it."""


@dataclass(frozen=True, slots=True)
class Config:
    """What config.json says; `map_size` in bytes."""

    format_version: int = FORMAT_VERSION
    map_size: int = DEFAULT_MAP_SIZE
    allow_network_file_system: bool = False
    store: str = FIRST_STORE


def stamp(root: Path) -> Stamp:
    """The stamp of the config of the repository at `root`.

    Raises:
        NotARepositoryError: there is none (any more).
    """
    try:
        # Asked at the start of every transaction: joining strings is five times as fast as joining paths.
        status = os.stat(f"{root}/{CONFIG_NAME}")
    except (FileNotFoundError, NotADirectoryError):
        raise _no_repository(root) from None
    except OSError as error:
        raise MPFSError(f"{root}: cannot be read: {error.strerror}") from error
    return status.st_ino, status.st_mtime_ns, status.st_size


def read_config(root: Path) -> Config:
    """Read the config of the repository at `root`.

    Raises:
        NotARepositoryError: there is none, or it makes no sense.
        UnsupportedFormatError: a newer MPFS wrote it.
    """
    try:
        text = (root / CONFIG_NAME).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise _no_repository(root) from None
    except OSError as error:
        raise MPFSError(f"{root}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise NotARepositoryError(f"{root}/{CONFIG_NAME}: not a repository's config: {error}") from error
    try:
        values = json.loads(text)
        version = _integer(values["format_version"])
        if version > FORMAT_VERSION:
            raise UnsupportedFormatError(
                f"{root}: format version {version} is newer than this MPFS understands ({FORMAT_VERSION}); upgrade mpfs",
                format_version=version,
            )
        config = Config(
            version,
            _integer(values.get("map_size", DEFAULT_MAP_SIZE)),
            values.get("allow_network_file_system", False) is True,
            str(values.get("store", FIRST_STORE)),
        )
        if version < 1 or not 0 < config.map_size <= MAX_MAP_SIZE or not STORE_NAME.fullmatch(config.store):
            raise ValueError("a value is out of range")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise NotARepositoryError(f"{root}/{CONFIG_NAME}: not a repository's config: {error!r}") from error
    return config


def write_config(root: Path, config: Config) -> None:
    """Replace the config, durably: after a crash at any instant it is the old one or the new one."""
    fd, temporary = tempfile.mkstemp(prefix=f".{CONFIG_NAME}.", dir=root)
    try:
        with open(fd, "w", encoding="utf-8") as file:
            file.write(json.dumps(asdict(config), indent=2) + "\n")
            file.flush()
            os.fchmod(file.fileno(), _mode(root))
            os.fsync(file.fileno())
        os.replace(temporary, root / CONFIG_NAME)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_directory(root)


def sync_directory(path: Path) -> None:
    """Make the entries of a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_file(path: Path) -> None:
    """Make a file's contents durable."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _mode(root: Path) -> int:
    """The permissions of a config: those of the directory, as far as they make sense for a file."""
    return os.stat(root).st_mode & 0o666


def _integer(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r} is not a whole number")
    return value


def _no_repository(root: Path) -> NotARepositoryError:
    return NotARepositoryError(f"{root}: not an MPFS repository; make one with 'mpfs init'", path=str(root))
