"""Compaction: the store copied without its free space, which goes back to the file system.

The copy is a new LMDB environment in a directory of its own beside the old one. When it is whole, checked and synced,
config.json is replaced by one that names it: that one rename is the switch, so a crash at any instant leaves the old
store or the new one, and beside it at most a directory that the next gc removes. A new directory, and not a rename of
data.mdb, because lock.mdb belongs to data.mdb: were only one of them replaced, two processes could each believe that
they are the only writer.

Everybody who has the old store open notices at the next transaction (`Environment`). The exclusive repository lock
keeps writers out meanwhile; readers go on, in what they have.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import islice
from pathlib import Path

from mpfs.errors import IntegrityError
from mpfs.store.config import CONFIG_NAME, STORE_NAME, read_config, sync_directory, sync_file, write_config
from mpfs.store.environment import DATABASES, Environment, StoreCopy
from mpfs.store.filesystem import require_free_space
from mpfs.store.pages import verify
from mpfs.store.store import Store
from mpfs.store.writer import record_offsets

_BATCH_KEYS = 4096


def compact_store(store: Store) -> int:
    """Compact; by how many bytes data.mdb became smaller. The caller holds the repository lock, exclusively.

    Raises:
        IntegrityError: the store's pages are damaged; it stays as it is.
        NoSpaceError: there is no room for the copy; it stays as it is.
    """
    environment = store.environment
    environment.catch_up()
    remove_leftovers(store)
    config = read_config(store.path)
    before = environment.data_size()
    _require_sound(environment.path)
    require_free_space(store.path, environment.used_size(), "a compaction")
    number = int(config.store.partition("-")[2] or 0) + 1
    target = environment.root / f"store-{number}"
    target.mkdir()
    try:
        environment.copy_compacted(target)
        _place_blocks(environment, target)
        _require_sound(target)
        sync_file(target / "data.mdb")
        sync_directory(target)
        sync_directory(store.path)
        write_config(store.path, replace(config, store=target.name))
    except BaseException:
        if read_config(store.path).store != target.name:
            shutil.rmtree(target, ignore_errors=True)
        raise
    environment.refresh()
    remove_leftovers(store)
    return before - environment.data_size()


def remove_leftovers(store: Store) -> None:
    """Remove what a compaction that died has left. The caller holds the repository lock, exclusively."""
    current = read_config(store.path).store
    for item in store.path.iterdir():
        if STORE_NAME.fullmatch(item.name) and item.name != current and not item.is_symlink():
            # Whoever still reads there keeps the file until the end of the transaction.
            shutil.rmtree(item, ignore_errors=True)
        elif item.name.startswith(f".{CONFIG_NAME}."):
            item.unlink(missing_ok=True)


def _require_sound(path: Path) -> None:
    problems = verify(path / "data.mdb")
    if problems:
        raise IntegrityError(
            f"{path}: page {problems[0].page} is damaged ({problems[0].detail}); nothing was compacted, "
            "see 'mpfs fsck'",
            page=problems[0].page,
        )


def _place_blocks(environment: Environment, target: Path) -> None:
    """Check that the copy has as much in it, and note where its blocks lie."""
    with StoreCopy(target, environment.map_size) as copy:
        with environment.read() as old, copy.read() as new:
            counts = [(name, old.count(name), new.count(name)) for name in DATABASES]
        if any(before != after for _, before, after in counts):
            raise IntegrityError(f"{target}: the copy is not like the original: {counts}; nothing was compacted")
        after: bytes | None = None
        while True:
            with copy.write() as txn:
                keys = [key for key, _ in islice(txn.scan("blocks", values=False, after=after), _BATCH_KEYS)]
                record_offsets(txn, keys)
            if not keys:
                return
            after = keys[-1]
