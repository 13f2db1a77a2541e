"""Compaction, larger maps and grace: space comes back, others follow, and a death in between costs nothing."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from store_helpers import DAY, NOW, assert_clean, data, merge, publish, python, remove, staged, unlike

from mpfs.errors import IntegrityError, LockedError, NoSpaceError, UsageError
from mpfs.objects import block_id
from mpfs.store import Store, check, execute_gc
from mpfs.store import compact as compact_module
from mpfs.store.config import read_config
from mpfs.store.locks import repository_lock

pytest_plugins = ["store_fixtures"]

LATER = NOW + 100 * DAY
MIB = 1 << 20


def store_directories(store: Store) -> list[str]:
    """The directories of LMDB environments."""
    return sorted(item.name for item in store.path.iterdir() if item.name.startswith("store"))


def half_empty(store: Store) -> str:
    """Publish much, and remove most of it; the commit that is left."""
    kept = publish(store, {"w": unlike(1, 300_000)}, ref="kept")
    publish(store, {"w": unlike(2, 3_000_000)}, ref="gone")
    merge(store, kept, kept)
    remove(store, "gone")
    return kept


def collect(store: Store, *, compact: bool = True) -> int:
    """Collect and compact; bytes given back."""
    return execute_gc(store, now=LATER, compact=compact).file_bytes_freed


def test_the_space_goes_back_to_the_file_system(store: Store) -> None:
    kept = half_empty(store)
    before = store.environment.data_size()
    freed = collect(store)
    assert freed > 2_500_000
    assert store.environment.data_size() == os.path.getsize(store.environment.path / "data.mdb") < before - 2_500_000
    assert store_directories(store) == ["store-1"]
    assert store.refs.get("kept").commit == kept
    assert_clean(store)
    publish(store, {"w": unlike(3, 50_000)}, ref="new")
    collect(store)
    assert store_directories(store) == ["store-2"]
    assert_clean(store)


def test_hints_are_right_after_a_compaction(store: Store) -> None:
    half_empty(store)
    collect(store)
    with store.environment.read() as txn:
        blocks = [key for key, _ in txn.scan("blocks", values=False)]
    contents = (store.environment.path / "data.mdb").read_bytes()
    for block in blocks:
        info = store.blocks.info(block)
        assert info is not None
        assert info.offset is not None
        assert block_id(contents[info.offset : info.offset + info.stored_size]) == block


def test_it_is_opened_again_by_who_comes_later(store: Store) -> None:
    kept = half_empty(store)
    collect(store)
    store.close()
    again = Store.open(store.path)
    assert again.refs.get("kept").commit == kept
    assert_clean(again)
    again.close()


def test_readers_in_this_process_go_on_in_what_they_have(store: Store) -> None:
    half_empty(store)
    with store.environment.read() as old:
        number = old.count("blocks")
        thread = threading.Thread(target=collect, args=[store])
        thread.start()
        thread.join()
        assert old.count("blocks") == number
        key = next(iter(old.scan("blocks", values=False)))[0]
        assert block_id(old.get("blocks", key)) == key
        with store.environment.read() as new:
            assert new.count("blocks") < number
    assert_clean(store)
    assert store.environment._active == 0


FOLLOW = """
import sys
from pathlib import Path
from store_helpers import publish, unlike
from mpfs.store import Store, check
store = Store.open(Path(sys.argv[1]))
print(len(store.refs.all()), flush=True)
for line in sys.stdin:
    publish(store, {"w": unlike(int(line), 60_000)}, ref="child" + line.strip())
    assert check(store, read_data=True).ok
    print(store.environment.path.name, len(store.refs.all()), store.environment.map_size, flush=True)
"""


def test_other_processes_follow(store: Store) -> None:
    half_empty(store)
    process = python(FOLLOW, str(store.path))
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "2\n"
    for turn in range(1, 4):
        collect(store)
        size = store.grow_map((turn + 1) << 30)
        process.stdin.write(f"{turn}\n")
        process.stdin.flush()
        assert process.stdout.readline() == f"store-{turn} {2 + turn} {size}\n"
        publish(store, {"w": unlike(turn + 10, 60_000)}, ref="again", expected=_tip(store))
        remove(store, "again")
        assert_clean(store)
    process.stdin.close()
    assert process.wait(30) == 0


def _tip(store: Store) -> str | None:
    found = store.refs.find("again")
    return None if found is None else found.commit


def test_it_waits_for_writers(store: Store) -> None:
    half_empty(store)
    with store.writer(), pytest.raises(LockedError):
        execute_gc(store, now=LATER, compact=True, lock_timeout=0.1)
    assert store_directories(store) == ["store"]


STEPS = ["copy_compacted", "_place_blocks", "sync_file", "sync_directory", "write_config"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("before", [True, False])
def test_an_error_at_any_step(store: Store, monkeypatch: pytest.MonkeyPatch, step: str, before: bool) -> None:
    kept = half_empty(store)
    owner = store.environment.__class__ if step == "copy_compacted" else compact_module
    real: Callable[..., object] = getattr(owner, step)

    def fail(*arguments: object) -> object:
        if not before:
            real(*arguments)
        raise NoSpaceError("no room")

    monkeypatch.setattr(owner, step, fail)
    with pytest.raises(NoSpaceError):
        collect(store)
    monkeypatch.undo()
    assert store_directories(store) == (["store", "store-1"] if step == "write_config" and not before else ["store"])
    assert_clean(store)
    collect(store)
    assert len(store_directories(store)) == 1
    assert store.refs.get("kept").commit == kept
    assert_clean(store)


KILL = """
import os, signal, sys
from pathlib import Path
from mpfs.store import Store, compact, execute_gc, environment
name, before = sys.argv[2], sys.argv[3] == "True"
owner = environment.Environment if name == "copy_compacted" else compact
real = getattr(owner, name)
def die(*arguments):
    if not before:
        real(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)
setattr(owner, name, die)
execute_gc(Store.open(Path(sys.argv[1])), now=1_900_000_000, compact=True)
"""


@pytest.mark.parametrize("step", [*STEPS, "remove_leftovers"])
@pytest.mark.parametrize("before", [True, False])
def test_a_death_at_any_step(store: Store, step: str, before: bool) -> None:
    kept = half_empty(store)
    process = python(KILL, str(store.path), step, str(before))
    process.wait(60)
    assert process.returncode == -9, process.stderr and process.stderr.read()
    assert store.refs.get("kept").commit == kept
    assert_clean(store)
    execute_gc(store, now=LATER)
    assert len(store_directories(store)) == 1
    assert sorted(item.name for item in store.path.iterdir())[:2] == ["config.json", "lock"]
    publish(store, {"w": data(5)}, ref="after")
    assert_clean(store)


def test_there_must_be_room_for_the_copy(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    half_empty(store)
    usage = shutil.disk_usage(store.path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100_000))
    with pytest.raises(NoSpaceError, match="a compaction needs up to"):
        collect(store)
    assert store_directories(store) == ["store"]


def test_damaged_pages_are_not_copied(store: Store) -> None:
    half_empty(store)
    execute_gc(store, now=LATER)
    number = store.environment._env.info()["last_pgno"]
    with store.environment.read() as txn:
        offset = txn.file_offset("commits", next(iter(txn.scan("commits")))[0])
    assert offset is not None
    with open(store.environment.path / "data.mdb", "r+b") as file:
        page = offset // 4096
        file.seek(page * 4096)
        file.write((number + 5).to_bytes(8, "little"))
    with pytest.raises(IntegrityError, match="nothing was compacted"):
        collect(store)
    assert store_directories(store) == ["store"]
    report = check(store)
    assert {problem.kind for problem in report.problems} == {"damaged_page"}
    assert "commits" in report.problems[0].object


# Larger maps


def test_a_full_map_can_be_made_larger(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "repo", map_size=16 * MIB)
    with pytest.raises(NoSpaceError, match="--map-size"):
        _fill(store, 30)
    assert_clean(store)
    assert store.grow_map(64 * MIB - 5) == 64 * MIB
    assert store.grow_map(32 * MIB) == 64 * MIB  # never smaller
    assert json.loads((store.path / "config.json").read_text())["map_size"] == 64 * MIB
    publish(store, {"w": unlike(1, 30 * MIB)})
    assert_clean(store)
    store.close()
    again = Store.open(store.path)
    assert_clean(again)
    again.close()


def test_the_next_writer_makes_an_almost_full_map_larger(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "repo", map_size=16 * MIB)
    with pytest.raises(NoSpaceError):
        _fill(store, 30)
    with repository_lock(store.path / "lock", exclusive=False), pytest.raises(NoSpaceError):
        _fill(store, 30)  # somebody else is at work, so the map stays
    _fill(store, 16)
    assert store.environment.map_size > 32 * MIB
    with store.writer(needed=100 * MIB):
        assert store.environment.map_size > 200 * MIB
    assert_clean(store)


def _fill(store: Store, count: int) -> None:
    with store.writer() as writer:
        writer._batch_bytes = MIB
        for index in range(count):
            writer.put_block(staged(index.to_bytes(4, "big") * (MIB // 4)))
        writer.flush()


def test_a_map_does_not_move_under_a_reader(store: Store) -> None:
    publish(store, {"w": data(1)})
    with store.environment.read() as txn:
        key, value = next(iter(txn.scan("blocks")))
        store.grow_map(4 << 30)
        publish(store, {"w": data(2)}, ref="other")
        assert block_id(value) == key
        assert store.environment._handle.map_size == 1 << 30
    store.refs.all()
    assert store.environment._handle.map_size == 4 << 30
    assert_clean(store)


OUTGROW = """
import sys
from pathlib import Path
from store_helpers import publish, unlike
from mpfs.store import Store
store = Store.open(Path(sys.argv[1]))
with store.writer(needed=60 << 20):
    pass
publish(store, {"w": unlike(1, 40 << 20)}, ref="large")
"""


def test_a_reader_follows_a_store_that_outgrew_its_map(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "repo", map_size=16 * MIB)
    publish(store, {"w": data(1)})
    process = python(OUTGROW, str(store.path))
    assert process.wait(60) == 0, process.stderr and process.stderr.read()
    assert len(store.refs.all()) == 2
    assert_clean(store)
    assert store.environment.map_size == read_config(store.path).map_size > 60 * MIB
    store.close()


def test_a_map_that_no_process_could_have(store: Store) -> None:
    with pytest.raises(UsageError, match="cannot be"):
        store.grow_map(1 << 60)


# Grace


def test_grace_keeps_what_an_import_that_died_has_staged(store: Store) -> None:
    now = int(time.time())
    with store.writer() as writer:
        writer.put_block(staged(b"staged"))
        writer.flush()
    assert execute_gc(store, now=now + 60, grace_seconds=3600).blocks_removed == 0
    assert execute_gc(store, now=now + 60, grace_seconds=3600, dry_run=True).blocks_removed == 0
    assert execute_gc(store, now=now + 7200, grace_seconds=3600).blocks_removed == 1
