"""Space taken ahead of data.mdb's end: nobody sees it, nothing depends on it, and it is given back."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
from store_helpers import NOW, assert_clean, publish, python, staged, unlike

from mpfs.objects import Commit
from mpfs.store import Store, ahead, execute_gc
from mpfs.store.writer import Writer

MIB = 1 << 20

SLACK = 64 << 10
"""Bytes that a file system keeps books in."""


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "STEP", 16 * MIB)
    monkeypatch.setattr(ahead, "SMALLEST", MIB)


def sizes(store: Store) -> tuple[int, int]:
    """Of data.mdb: its size, and the space that it takes on the disk."""
    status = (store.environment.path / "data.mdb").stat()
    return status.st_size, status.st_blocks * 512


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A new store, on a file system that can do it."""
    with (tmp_path / "probe").open("wb") as probe:
        try:
            ahead._fallocate()(probe.fileno(), 0, MIB)
        except OSError:
            pytest.skip("NOT TESTED: space cannot be taken ahead on this file system")
    return Store.create(tmp_path / "repo")


def test_it_is_taken_in_steps_and_given_back(store: Store) -> None:
    with Writer(store.environment, batch_bytes=2 * MIB) as writer:
        for index in range(8):
            writer.put_block(staged(unlike(index, MIB)))
        writer.flush()
        size, taken = sizes(store)
        assert size < 9 * MIB
        assert 15 * MIB < taken < 18 * MIB
        for index in range(8, 40):
            writer.put_block(staged(unlike(index, MIB)))
        writer.flush()
        size, taken = sizes(store)
        assert 40 * MIB < size < 42 * MIB
        assert size + 2 * MIB < taken < size + 17 * MIB
    assert size <= sizes(store)[1] <= size + SLACK
    assert_clean(store)
    store.close()


def test_small_batches_take_nothing(store: Store) -> None:
    with Writer(store.environment, batch_bytes=MIB // 4) as writer:
        for index in range(8):
            writer.put_block(staged(unlike(index, MIB // 8)))
        writer.flush()
        size, taken = sizes(store)
        assert taken <= size + SLACK
    store.close()


def test_it_is_left_alone_where_there_is_little_room(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "room_to_grow", lambda path: 60 * MIB)
    with Writer(store.environment, batch_bytes=2 * MIB) as writer:
        for index in range(8):
            writer.put_block(staged(unlike(index, MIB)))
        writer.flush()
        size, taken = sizes(store)
        assert taken <= size + SLACK
    store.close()


def test_where_it_cannot_be_had_nothing_is_lost(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def refuse(fd: int, offset: int, length: int) -> None:
        asked.append(offset)
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(ahead, "_fallocate", lambda: refuse)
    first = publish(store, {"w": unlike(1, 6 * MIB)})
    with Writer(store.environment, batch_bytes=2 * MIB) as writer:
        for index in range(8):
            writer.put_block(staged(unlike(index, MIB)))
        writer.flush()
    assert len(asked) == 1  # and not again
    assert store.objects.ids(Commit) == [first]
    assert_clean(store)
    store.close()


def test_space_that_gc_freed_is_used_first(store: Store) -> None:
    def fill(start: int) -> None:
        with Writer(store.environment, batch_bytes=4 * MIB) as writer:
            for index in range(start, start + 24):
                writer.put_block(staged(unlike(index, MIB)))
            writer.flush()

    fill(0)
    before, _ = sizes(store)
    execute_gc(store, now=NOW)
    fill(100)
    size, taken = sizes(store)
    assert size <= before + 5 * MIB
    assert taken <= size + SLACK
    assert_clean(store)
    store.close()


def test_writers_at_once_keep_what_they_write(store: Store) -> None:
    """One gives space back while another one fills it."""

    def work(number: int) -> None:
        for part in range(4):
            with Writer(store.environment, batch_bytes=2 * MIB) as writer:
                for index in range(6):
                    writer.put_block(staged(unlike(1000 * number + 10 * part + index, MIB)))
                writer.flush()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with store.environment.read() as txn:
        assert txn.count("blocks") == 3 * 4 * 6
    assert_clean(store)
    store.close()


KILLED = """
import sys
from pathlib import Path
from mpfs.store import Store, ahead
from mpfs.store.writer import Writer
from store_helpers import staged, unlike

ahead.STEP, ahead.SMALLEST = 16 << 20, 1 << 20
store = Store.open(Path(sys.argv[1]))
with Writer(store.environment, batch_bytes=2 << 20) as writer:
    for index in range(1000):
        writer.put_block(staged(unlike(int(sys.argv[2]) + index, 1 << 20)))
        print(index, flush=True)
"""


def test_processes_that_are_killed_leave_a_sound_store(store: Store) -> None:
    """Two write, one of them is killed with space taken; the other one and the next go on."""
    for round_ in range(3):
        children = [python(KILLED, str(store.path), str(10_000 * (2 * round_ + n))) for n in range(2)]
        for child, lines in zip(children, (5, 12), strict=True):
            assert child.stdout is not None
            for _ in range(lines):
                child.stdout.readline()
            os.kill(child.pid, signal.SIGKILL)
        for child in children:
            child.communicate()
            assert child.returncode == -signal.SIGKILL
        assert_clean(store)
    with Writer(store.environment, batch_bytes=2 * MIB) as writer:
        for index in range(20):
            writer.put_block(staged(unlike(index, MIB)))
        writer.flush()
    size, taken = sizes(store)
    assert taken <= size + SLACK
    assert_clean(store)
    store.close()
