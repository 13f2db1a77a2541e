"""Many objects, pairs and results at a time: the same as one by one, whatever is missing or damaged among them."""

from __future__ import annotations

import threading

import pytest
from store_helpers import staged, tensor_id

from mpfs.errors import IntegrityError, NotFoundError
from mpfs.objects import Budget, Cost, Plan, Tensor
from mpfs.store import Store
from mpfs.store.objects import ObjectReader, put_object
from mpfs.store.pairs import PairRecord, PairTable, put_pairs

pytest_plugins = ["store_fixtures"]


def put_tensors(store: Store, count: int) -> list[Tensor]:
    """Store so many tensors, whose blocks are not there."""
    made = [Tensor("U8", (16,), 4096, (index.to_bytes(16, "big"),)) for index in range(count)]
    with store.environment.write() as txn:
        for tensor in made:
            put_object(txn, tensor)
    return made


def test_many_are_those_one_by_one(store: Store) -> None:
    made = put_tensors(store, 2500)
    names = [tensor_id(tensor) for tensor in made]
    found = store.objects.get_many(Tensor, [*names, names[0]])
    assert found == dict(zip(names, made, strict=True))
    assert store.objects.get(Tensor, names[7]) == made[7]
    assert store.objects.get_many(Tensor, []) == {}


@pytest.mark.parametrize("missing", ["0" * 64, "no id at all", ""])
def test_one_that_is_missing_is_told(store: Store, missing: str) -> None:
    [made] = put_tensors(store, 1)
    with pytest.raises(NotFoundError, match="no tensor"):
        store.objects.get_many(Tensor, [tensor_id(made), missing])


def damage(store: Store, tensor: Tensor) -> None:
    """Put other bytes in the place of a tensor."""
    with store.environment.write() as txn:
        txn.put("tensors", bytes.fromhex(tensor_id(tensor)), b"{}")


def test_one_that_is_damaged_is_told(store: Store) -> None:
    made = put_tensors(store, 3)
    damage(store, made[1])
    with pytest.raises(IntegrityError, match="damaged"):
        store.objects.get_many(Tensor, map(tensor_id, made))


def test_tensors_are_read_once_while_they_are_remembered(store: Store) -> None:
    first, second = put_tensors(store, 2)
    objects: ObjectReader = store.objects
    seen: list[Tensor] = []

    def elsewhere() -> None:
        seen.append(objects.get(Tensor, tensor_id(first)))

    with objects.remembering():
        known = objects.get(Tensor, tensor_id(first))
        with objects.remembering():
            damage(store, first)
        assert objects.get_many(Tensor, [tensor_id(first), tensor_id(second)])[tensor_id(first)] is known
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert seen[0] is known
    with pytest.raises(IntegrityError):
        objects.get(Tensor, tensor_id(first))
    with objects.remembering(), pytest.raises(IntegrityError):
        objects.get(Tensor, tensor_id(first))


def test_pairs_are_those_one_by_one(store: Store) -> None:
    names = [tensor_id(tensor) for tensor in put_tensors(store, 4)]
    table = PairTable(store.environment)
    records = {(names[0], names[1]): PairRecord(b"x" * 8), (names[3], names[2]): PairRecord(b"y" * 8, b"")}
    put_pairs(store, records)
    asked = [(a, b) for a in names for b in names if a != b]
    one_by_one = {pair: table.get(*pair) for pair in asked}
    assert table.get_many(asked) == {pair: value for pair, value in one_by_one.items() if value is not None}
    assert len(table.get_many(asked)) == 4  # in either order
    key = bytes.fromhex(min(names[0], names[1]) + max(names[0], names[1]))
    with store.environment.write() as txn:
        txn.put("pairs", key, b"z" * 16)
    assert set(table.get_many(asked)) == {(names[2], names[3]), (names[3], names[2])}


def test_results_are_those_whose_blocks_are_there(store: Store) -> None:
    keys = [index.to_bytes(32, "big") for index in range(2100)]
    with store.writer() as writer:
        block = staged(b"result")
        writer.put_block(block)
        for index, key in enumerate(keys):
            writer.put_reuse(key, block.block * 2 if index % 3 else block.block + b"x" * 16)
        writer.flush()
    found = store.reuse.blocks_of([*keys, b"unknown".rjust(32)])
    assert found == [(block.block, block.block) if index % 3 else None for index in range(2100)] + [None]


def test_a_plan_that_is_there_already_is_not_written_again(store: Store) -> None:
    cost = Cost(0, 0, 0, 0, 0, 0)
    plan = Plan("linear", "none", {}, (), None, 0, None, None, 0, 4096, Budget(), "energy", (), cost, 1.0)
    first = store.put_plan(plan)
    with store.environment.read() as txn:
        number = txn.number
    assert store.put_plan(plan) == first
    with store.environment.read() as txn:
        assert txn.number == number
