"""Where records of statistics are kept: one for each place of a block, and those of a tensor together once more.

`stats` has what is true, block by block. `tensor_stats` is an index over it, so that a plan looks up one value a tensor
instead of one a block: a tensor without an entry, or with a damaged one, is looked up block by block. Entries
are made when a tensor is published, and only of tensors of several blocks. gc drops those whose tensor is gone; a crash
may leave some that have none yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import xxhash

from mpfs.deferred import numpy as np
from mpfs.objects import BlockId, ObjectId, Tensor, object_id
from mpfs.objects.dtypes import CODES
from mpfs.store.environment import Environment, Transaction
from mpfs.store.seal import SEAL_SIZE, seal, unseal_all

PACKED: Final = "tensor_stats"
"""The database: tensor id → the records of its blocks in order, sealed."""

_BATCH_BYTES: Final = 32 << 20
"""Bytes of entries that are made at a time."""


def stats_key(block: BlockId, dtype: str, first_element: int) -> bytes:
    """The key of a block's statistics: they depend on its bytes, its dtype and where in a tensor it lies."""
    return block + bytes([CODES[dtype]]) + first_element.to_bytes(8, "big")


def stats_keys(tensor: Tensor) -> list[bytes]:
    """The keys of the statistics of all of a tensor's blocks."""
    code = bytes([CODES[tensor.dtype]])
    starts = [tensor.block_start(index) for index in range(min(2, len(tensor.blocks)))]
    step = starts[-1] if starts else 0
    places = (np.arange(len(tensor.blocks), dtype=np.uint64) * np.uint64(step)).astype(">u8").tobytes()
    return [block + code + places[8 * index : 8 * index + 8] for index, block in enumerate(tensor.blocks)]


def packed(txn: Transaction, tensor: Tensor, identity: ObjectId | None = None) -> memoryview | None:
    """The records of a tensor's blocks, one after the other, valid as long as the transaction; None if they are not there.

    `identity` is the tensor's id, for those who know it.
    """
    if len(tensor.blocks) < 2:
        return None
    key = bytes.fromhex(identity or object_id(tensor.encode()))
    value = txn.get(PACKED, key)
    if value is None or len(value) <= SEAL_SIZE or (len(value) - SEAL_SIZE) % len(tensor.blocks):
        return None
    payload = value[:-SEAL_SIZE]
    checksum = xxhash.xxh3_64(key)
    checksum.update(payload)
    return payload if checksum.digest() == value[-SEAL_SIZE:] else None


def missing(environment: Environment, tensors: Iterable[Tensor]) -> Iterator[list[tuple[bytes, bytes]]]:
    """Entries (key, value) for those of these tensors that have none, in batches of bounded size.

    Tensors of which a record is missing or damaged are left out.
    """
    batch: list[tuple[bytes, bytes]] = []
    nbytes = 0
    for tensor in tensors:
        if len(tensor.blocks) < 2:
            continue
        with environment.read() as txn:
            entry = _entry(txn, tensor)
        if entry is not None:
            batch.append(entry)
            nbytes += len(entry[1])
        if nbytes >= _BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


def put_packed(txn: Transaction, entries: Iterable[tuple[bytes, bytes]]) -> None:
    """Store entries."""
    for key, value in entries:
        txn.put(PACKED, key, value)


def packed_problem(txn: Transaction, tensor: Tensor, identity: ObjectId) -> str | None:
    """What is wrong with a tensor's entry, judged by the records that it should hold; None if nothing is, or there is none."""
    if not txn.contains(PACKED, bytes.fromhex(identity)):
        return None
    found = packed(txn, tensor, identity)
    if found is None:
        return "it does not match its checksum, or not the tensor"
    records = _records(txn, tensor)
    # What is wrong with a record itself is told of the record.
    return "it is not what the records of its blocks are" if records is not None and found != records else None


def _entry(txn: Transaction, tensor: Tensor) -> tuple[bytes, bytes] | None:
    key = bytes.fromhex(object_id(tensor.encode()))
    records = None if txn.contains(PACKED, key) else _records(txn, tensor)
    return None if records is None else (key, seal(key, records))


def _records(txn: Transaction, tensor: Tensor) -> bytes | None:
    keys = stats_keys(tensor)
    payloads, damaged = unseal_all(txn.get_many("stats", keys))
    if damaged is not None or any(key not in payloads for key in keys):
        return None
    return b"".join([payloads[key] for key in keys])
