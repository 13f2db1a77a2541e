"""Statistics by tensor: an index that is used where it is right, and never missed where it is not."""

from __future__ import annotations

import pytest
from store_helpers import DAY, NOW, STATS, assert_clean, publish, remove, stage, tensor_id, unlike

from mpfs.errors import IntegrityError
from mpfs.objects import Commit, Snapshot, Tensor
from mpfs.store import Store, check, execute_gc, statistics
from mpfs.store.repair import repair

pytest_plugins = ["store_fixtures"]


def published(store: Store, ref: str = "main", *, size: int = 12_000) -> tuple[str, Tensor]:
    """A tensor of several blocks, and its id."""
    commit = store.objects.get(Commit, publish(store, {"w": unlike(len(ref), size)}, ref=ref))
    identity = store.objects.get(Snapshot, commit.snapshot).tensors["w"]
    return identity, store.objects.get(Tensor, identity)


def drop(store: Store, database: str) -> None:
    """Remove all records of a database."""
    with store.environment.write() as txn:
        for key in [bytes(key) for key, _ in txn.scan(database, values=False)]:
            txn.delete(database, key)


def keys(store: Store) -> list[str]:
    """The tensors that have an entry."""
    with store.environment.read() as txn:
        return [key.hex() for key, _ in txn.scan("tensor_stats", values=False)]


def test_a_tensor_of_several_blocks_gets_an_entry(store: Store) -> None:
    identity, tensor = published(store)
    assert len(tensor.blocks) == 3
    assert keys(store) == [identity]  # neither the header nor the side file, of one block each


def test_either_one_is_enough(store: Store) -> None:
    identity, tensor = published(store)
    expected = STATS * len(tensor.blocks)
    assert store.blocks.stats(tensor) == store.blocks.stats(tensor, identity) == expected
    drop(store, "stats")
    assert store.blocks.stats(tensor) == store.blocks.stats(tensor, identity) == expected
    drop(store, "tensor_stats")
    with pytest.raises(IntegrityError, match="statistics are missing"):
        store.blocks.stats(tensor)


@pytest.mark.parametrize("position", [0, 100, -1])
def test_a_damaged_entry_is_as_good_as_none(store: Store, position: int) -> None:
    identity, tensor = published(store)
    key = bytes.fromhex(identity)
    with store.environment.write() as txn:
        value = bytearray(txn.get("tensor_stats", key) or b"")
        value[position] ^= 1
        txn.put("tensor_stats", key, bytes(value))
    assert store.blocks.stats(tensor, identity) == STATS * len(tensor.blocks)


@pytest.mark.parametrize("lost", [True, False])
def test_repair_makes_entries_anew(store: Store, lost: bool) -> None:
    identity, tensor = published(store)
    key = bytes.fromhex(identity)
    with store.environment.write() as txn:
        if lost:
            txn.delete("tensor_stats", key)
            txn.delete("stats", statistics.stats_keys(tensor)[0])
        else:
            txn.put("tensor_stats", key, b"?" * 20)
    assert [problem.kind for problem in check(store).problems] == ["missing_stats" if lost else "damaged_tensor_stats"]
    report = repair(store, stats_of=lambda data, dtype, first: STATS, author="a")
    assert report.after.ok
    assert keys(store) == [identity]
    drop(store, "stats")
    assert store.blocks.stats(tensor) == STATS * len(tensor.blocks)


def test_gc_drops_entries_with_their_tensors_and_those_that_never_had_one(store: Store) -> None:
    kept, _ = published(store)
    gone, _ = published(store, "other")
    assert sorted(keys(store)) == sorted([kept, gone])
    with store.writer() as writer:  # killed after it had stored the entries, and before it published
        tensor = stage(writer, unlike(3, 12_000), 4096, "F32", [3000])
        writer.flush()
        for entries in statistics.missing(store.environment, [tensor]):
            with store.environment.write() as txn:
                statistics.put_packed(txn, entries)
    assert tensor_id(tensor) in keys(store)
    assert_clean(store)
    remove(store, "other")
    execute_gc(store, now=NOW + 31 * DAY)
    assert keys(store) == [kept]
    assert_clean(store)


def test_entries_are_made_in_bounded_batches(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "_BATCH_BYTES", 300)
    weights = {name: unlike(number, 8192) for number, name in enumerate("abcde")}
    commit = store.objects.get(Commit, publish(store, weights))
    tensors = store.objects.get(Snapshot, commit.snapshot).tensors
    assert sorted(keys(store)) == sorted(tensors.values())
    drop(store, "tensor_stats")
    readable = [store.objects.get(Tensor, identity) for identity in tensors.values()]
    batches = list(statistics.missing(store.environment, readable))
    assert len(batches) > 1
    assert sorted(key.hex() for batch in batches for key, _ in batch) == sorted(tensors.values())
