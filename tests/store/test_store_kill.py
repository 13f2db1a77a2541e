"""SIGKILL at random instants, to a writer and to a garbage collector that work on one repository."""

from __future__ import annotations

import os
import random
import signal
import struct
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from store_helpers import DAY, NOW, assert_clean, checkpoint, merge, publish, remove, unlike

from mpfs.errors import LockedError
from mpfs.objects import Commit, object_id
from mpfs.store import RefMove, Store, execute_gc

ROUNDS = 60
LATER = NOW + 100 * DAY


def spawn(work: Callable[[], None]) -> int:
    """Run `work` in a forked child (the store is closed when this is called), the child's pid."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
        os._exit(1)  # work never ends by itself
    return pid


def write_for_ever(path: Path, report: int, number: int) -> None:
    """Publish commits onto main, each saying its number, and report each that is done; and make garbage."""
    store = Store.open(path)
    while True:
        number += 1
        expected = store.refs.get("main").commit
        with store.writer() as writer:
            writer._batch_bytes = 20_000
            tensors, snapshot = checkpoint(writer, {"w": unlike(number, 80_000), "v": unlike(number, 5000)}, 4096)
            commit = Commit(object_id(snapshot.encode()), (), (), None, str(number), "", NOW)
            move = RefMove("main", expected, "branch", "loop")
            writer.publish(tensors=tensors, snapshot=snapshot, commit=commit, move=move)
        os.write(report, struct.pack("<Q", number))
        base = publish(store, {"w": unlike(1, 9000)}, ref=f"b{number}")
        merge(store, base, store.refs.get("main").commit, ref=f"m{number}", seed=number)
        remove(store, f"b{number}")
        remove(store, f"m{number}")


def collect_for_ever(path: Path) -> None:
    store = Store.open(path)
    while True:
        try:
            execute_gc(store, now=LATER, reflog_days=0)
        except LockedError:
            continue


def last_report(reader: int) -> int | None:
    """The last number reported."""
    data = b""
    while piece := os.read(reader, 1 << 16):
        data += piece
    whole = len(data) // 8 * 8
    return struct.unpack("<Q", data[whole - 8 : whole])[0] if whole else None


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_killed_at_any_instant(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    path = tmp_path / "repo"
    store = Store.create(path, block_size=4096, map_size=256 << 20)
    publish(store, {"w": unlike(0, 5000)}, message="0")
    store.close()
    number = done = collections = 0
    for _ in range(ROUNDS):
        reader, writer = os.pipe()
        first = number
        children = [spawn(lambda: write_for_ever(path, writer, first)), spawn(lambda: collect_for_ever(path))]  # noqa: B023
        os.close(writer)
        rng.shuffle(children)
        for child in children:
            time.sleep(rng.uniform(0.002, 0.12))
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "a child ended by itself"
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        reported = last_report(reader)
        os.close(reader)

        store = Store.open(path)
        assert_clean(store)
        commit = store.refs.get("main").commit
        found = int(store.objects.get(Commit, commit).message)
        # The old one or the new one; and what was reported as done is done.
        assert found in ({number, number + 1} if reported is None else {reported, reported + 1})
        done += found - number
        collections += not all(entry.new == commit for entry in store.refs.log("main"))
        number = found + 1
        publish(store, {"w": unlike(number, 5000)}, expected=commit, message=str(number))
        store.close()
    store = Store.open(path)
    execute_gc(store, now=LATER, reflog_days=0)
    assert_clean(store)
    for ref in store.refs.all():
        if ref.name != "main":
            remove(store, ref.name)
    execute_gc(store, now=LATER, reflog_days=0)
    assert len(store.objects.ids(Commit)) == 1
    assert_clean(store)
    store.close()
    assert done > ROUNDS / 4
