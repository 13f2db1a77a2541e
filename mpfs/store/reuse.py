"""The reuse table: results by the digest of what they were computed from.

Two kinds of entries share it: a column's output blocks, and what an operator's `prepare` found for a tensor. A column
entry is only believed while all its blocks are in the store.
"""

from __future__ import annotations

import hashlib

from mpfs.objects import BlockId
from mpfs.objects.encoding import Json, encode
from mpfs.objects.ids import BLOCK_ID_SIZE
from mpfs.store.environment import Environment


def reuse_key(value: Json) -> bytes:
    """The digest of a description of inputs (any JSON object). SHA-256: a collision would be silent wrong data."""
    return hashlib.sha256(encode(value)).digest()


class ReuseTable:
    """Looks results up."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def blocks(self, key: bytes) -> tuple[BlockId, ...] | None:
        """The output blocks that were stored under `key`, if all of them are still there."""
        with self._environment.read() as txn:
            value = txn.get("reuse", key)
            if value is None:
                return None
            raw = bytes(value)
            blocks = tuple(raw[i : i + BLOCK_ID_SIZE] for i in range(0, len(raw), BLOCK_ID_SIZE))
            if all(txn.contains("block_info", block) for block in blocks):
                return blocks
            return None

    def value(self, key: bytes) -> bytes | None:
        """The bytes that were stored under `key`."""
        with self._environment.read() as txn:
            value = txn.get("reuse", key)
            return None if value is None else bytes(value)
