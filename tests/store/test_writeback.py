"""Early write-back: the kernel is asked while a large transaction is written, by a thread that ends with it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from store_helpers import assert_clean, staged, unlike

from mpfs.store import Store, writeback
from mpfs.store import environment as environment_module
from mpfs.store.writer import Writer

MIB = 1 << 20


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The descriptors that the kernel is asked about."""
    found: list[int] = []

    def ask(fd: int, *_: int) -> int:
        found.append(fd)
        return 0

    monkeypatch.setattr(writeback, "_sync_file_range", lambda: ask)
    return found


def write(store: Store, batch: int, size: int) -> None:
    with Writer(store.environment, batch_bytes=batch) as writer:
        for index in range(16):
            writer.put_block(staged(unlike(index, size)))
        writer.flush()


def test_the_kernel_is_asked_for_large_batches_only(
    tmp_path: Path, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment_module, "SMALLEST", MIB)
    store = Store.create(tmp_path / "repo")
    write(store, MIB // 2, MIB // 16)
    assert asked == []
    before = threading.active_count()
    write(store, 4 * MIB, MIB)
    assert asked
    assert threading.active_count() == before
    assert_clean(store)
    store.close()


def test_it_ends_with_a_failure(asked: list[int]) -> None:
    before = threading.active_count()
    with pytest.raises(KeyError), writeback.early_writeback(7):  # noqa: PT012
        while not asked:
            time.sleep(0.001)
        raise KeyError
    assert set(asked) == {7}
    assert threading.active_count() == before


def test_where_the_system_cannot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[int] = []

    def refuse(fd: int, *_: int) -> int:
        calls.append(fd)
        return -1

    monkeypatch.setattr(environment_module, "SMALLEST", MIB)
    monkeypatch.setattr(writeback, "_sync_file_range", lambda: refuse)
    store = Store.create(tmp_path / "repo")
    write(store, 4 * MIB, MIB)
    assert len(calls) <= 4  # one for each batch
    monkeypatch.setattr(writeback, "_sync_file_range", lambda: None)
    assert not writeback.start_writing(0)
    write(store, 4 * MIB, MIB - 4096)
    assert_clean(store)
    store.close()


def test_the_real_call(tmp_path: Path) -> None:
    if writeback._sync_file_range() is None:
        pytest.skip("NOT TESTED: this system has no sync_file_range")
    with (tmp_path / "x").open("wb") as file:
        file.write(bytes(MIB))
        file.flush()
        assert writeback.start_writing(file.fileno(), 4096, 8192)
        assert writeback.start_writing(file.fileno())
    assert not writeback.start_writing(-1)
