"""The pair table: how far two tensors of equal dtype and shape lie apart, block by block, exactly.

A record is the squared distance of each two blocks that line up (little-endian f64), sealed; distance knows no order,
so the key is the two tensors' ids, the smaller one first. Records are found by `mpfs analyze` and only ever make
plans better: a damaged one is as good as none, and gc drops those whose tensors go.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from mpfs.objects import ObjectId
from mpfs.store.environment import Environment
from mpfs.store.locks import repository_lock
from mpfs.store.seal import is_sealed, seal, unseal
from mpfs.store.store import Store

Pair: TypeAlias = tuple[ObjectId, ObjectId]


class PairTable:
    """Looks records up."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def get(self, a: ObjectId, b: ObjectId) -> bytes | None:
        """The squared distances of the blocks of two tensors, 8 bytes each; None if they are not known."""
        key = _key(a, b)
        with self._environment.read() as txn:
            value = txn.get("pairs", key)
            return unseal(key, value, "pair") if value is not None and is_sealed(key, value) else None


def put_pairs(store: Store, records: Mapping[Pair, bytes]) -> None:
    """Store records; those of tensors that are no longer there are left out.

    Raises:
        NoSpaceError: the disk or the map is full.
    """
    needed = sum(map(len, records.values())) + 4096 * len(records)
    with repository_lock(store.path / "lock", exclusive=False), store.environment.write(needed) as txn:
        for (a, b), payload in records.items():
            if txn.contains("tensors", bytes.fromhex(a)) and txn.contains("tensors", bytes.fromhex(b)):
                key = _key(a, b)
                txn.put("pairs", key, seal(key, payload))


def _key(a: ObjectId, b: ObjectId) -> bytes:
    first, second = sorted((a, b))
    return bytes.fromhex(first + second)
