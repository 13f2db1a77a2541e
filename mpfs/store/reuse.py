"""The reuse table: results by the digest of what they were computed from.

Several kinds of entries share it: output blocks, of a column or of all that is computed of a tensor; and JSON: what an
operator's `prepare` found for a tensor, and what planning came to. Blocks and plans that an entry names may be gone, and it
is only believed while they are there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Sequence
from typing import Final

from mpfs.objects import BlockId
from mpfs.objects.encoding import Json, decode, encode
from mpfs.objects.ids import BLOCK_ID_SIZE, is_object_id
from mpfs.store.environment import Environment, Transaction
from mpfs.store.pairs import PairStates
from mpfs.store.seal import SEAL_SIZE, is_sealed

PLANNED: Final = "planned"
"""The kind of entries of what planning came to: `plan` is a plan's id, or `worth` two numbers of a tensor (energy, cosine).
`pairs` are the states of the pair table (`mpfs.store.pairs`) that it depends on: of the distances, and of the histograms or
None."""

_BATCH: Final = 1024
"""Columns that are looked up in one transaction."""


def reuse_key(value: Json) -> bytes:
    """The digest of a description of inputs (any JSON object). SHA-256: a collision would be silent wrong data."""
    return hashlib.sha256(encode(value)).digest()


class ReuseTable:
    """Looks results up."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def blocks_of(self, keys: Sequence[bytes]) -> list[tuple[BlockId, ...] | None]:
        """For each key the output blocks that were stored under it, if all of them are still there."""
        found: dict[bytes, tuple[BlockId, ...]] = {}
        for start in range(0, len(keys), _BATCH):
            batch = keys[start : start + _BATCH]
            with self._environment.read() as txn:
                named = {key: _blocks(payload) for key, payload in _payloads(txn, batch).items()}
                there = txn.get_many("block_info", [block for blocks in named.values() for block in blocks])
            found.update((key, blocks) for key, blocks in named.items() if all(block in there for block in blocks))
        return [found.get(key) for key in keys]

    def values(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """The bytes that were stored under those of these keys that are known."""
        with self._environment.read() as txn:
            return _payloads(txn, keys)


def useless(txn: Transaction, value: memoryview, gone: Container[BlockId], states: PairStates | None) -> bool:
    """Whether an entry names a block that is gone or a plan that is not in the store, or is of other states of the pair
    table."""
    payload = bytes(value[:-SEAL_SIZE])
    try:
        planned = decode(payload, PLANNED)
        distances, histograms = planned["pairs"]
    except (ValueError, KeyError, TypeError):
        return any(block in gone for block in _blocks(payload))
    plan = planned.get("plan")
    return (
        states is None
        or distances != states.distances
        or histograms not in (None, states.histograms)
        or (plan is not None and not (is_object_id(str(plan)) and txn.contains("plans", bytes.fromhex(plan))))
    )


def _blocks(payload: bytes) -> tuple[BlockId, ...]:
    return tuple(payload[i : i + BLOCK_ID_SIZE] for i in range(0, len(payload), BLOCK_ID_SIZE))


def _payloads(txn: Transaction, keys: Sequence[bytes]) -> dict[bytes, bytes]:
    """What is stored under keys; a damaged entry is as good as none."""
    found = txn.get_many("reuse", keys)
    return {key: value[:-SEAL_SIZE] for key, value in found.items() if is_sealed(key, value)}
