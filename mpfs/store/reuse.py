"""The reuse table: results by the digest of what they were computed from.

Two kinds of entries share it: a column's output blocks, and what an operator's `prepare` found for a tensor. A column
entry is only believed while all its blocks are in the store.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from mpfs.objects import BlockId
from mpfs.objects.encoding import Json, encode
from mpfs.objects.ids import BLOCK_ID_SIZE
from mpfs.store.environment import Environment, Transaction
from mpfs.store.seal import SEAL_SIZE, is_sealed


def reuse_key(value: Json) -> bytes:
    """The digest of a description of inputs (any JSON object). SHA-256: a collision would be silent wrong data."""
    return hashlib.sha256(encode(value)).digest()


class ReuseTable:
    """Looks results up."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def blocks(self, key: bytes) -> tuple[BlockId, ...] | None:
        """The output blocks that were stored under `key`, if all of them are still there."""
        return self.blocks_of([key])[0]

    def blocks_of(self, keys: Sequence[bytes]) -> list[tuple[BlockId, ...] | None]:
        """The same for several keys, in one transaction."""
        with self._environment.read() as txn:
            return [_blocks(txn, key) for key in keys]

    def value(self, key: bytes) -> bytes | None:
        """The bytes that were stored under `key`."""
        with self._environment.read() as txn:
            return _payload(txn, key)


def _blocks(txn: Transaction, key: bytes) -> tuple[BlockId, ...] | None:
    raw = _payload(txn, key)
    if raw is None:
        return None
    blocks = tuple(raw[i : i + BLOCK_ID_SIZE] for i in range(0, len(raw), BLOCK_ID_SIZE))
    return blocks if all(txn.contains("block_info", block) for block in blocks) else None


def _payload(txn: Transaction, key: bytes) -> bytes | None:
    """What is stored under a key; a damaged entry is as good as none."""
    value = txn.get("reuse", key)
    return bytes(value[:-SEAL_SIZE]) if value is not None and is_sealed(key, value) else None
