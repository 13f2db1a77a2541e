"""Blocks: reading them back, verified, and the little that is kept about each.

Reads are the budget's business: whoever reads gets exactly the blocks that were named, and the disk is asked for
exactly their ranges (DESIGN §4: no read-ahead, but a prefetch by the file offsets kept in block_info).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeAlias

from mpfs.errors import IntegrityError
from mpfs.objects import BlockId, ObjectId, Tensor, block_id
from mpfs.store.environment import Environment, Transaction
from mpfs.store.seal import unseal_all
from mpfs.store.statistics import packed, stats_keys

RAW = 0
"""The codec of payloads that are the raw bytes; no other is defined yet."""

_INFO = struct.Struct("<B3xIQQq")
_UNKNOWN_OFFSET = -1

_PAGE = 4096
_PAGE_HEADER = 16
_SMALL = 2000
"""Bytes; LMDB keeps what is about this small together with others in a page."""


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """What is known of a stored block. Sizes in bytes; `offset` is a hint where in data.mdb the payload lies, `staged`
    when it was stored, in seconds since 1970, UTC (0: not known): gc may leave young blocks alone."""

    codec: int
    raw_size: int
    stored_size: int
    offset: int | None
    staged: int = 0

    def pack(self) -> bytes:
        """The record: 32 bytes, little-endian."""
        offset = _UNKNOWN_OFFSET if self.offset is None else self.offset
        return _INFO.pack(self.codec, self.staged, self.raw_size, self.stored_size, offset)

    @classmethod
    def unpack(cls, record: bytes | memoryview) -> BlockInfo:
        """Read a record.

        Raises:
            ValueError: it has the wrong length.
        """
        if len(record) != _INFO.size:
            raise ValueError(f"a block_info record has {_INFO.size} bytes, not {len(record)}")
        codec, staged, raw_size, stored_size, offset = _INFO.unpack(record)
        return cls(codec, raw_size, stored_size, None if offset == _UNKNOWN_OFFSET else offset, staged)


def footprint(size: int) -> int:
    """Bytes that a block of `size` bytes takes in data.mdb at the least: whole pages of its own, unless it is small."""
    return size if size < _SMALL else -(-(size + _PAGE_HEADER) // _PAGE) * _PAGE


def read_ahead(environment: Environment, blocks: Sequence[BlockId]) -> None:
    """Ask the disk for blocks, as far as their places are known. Never fails for a bad hint."""
    with environment.read() as txn:
        records = txn.get_many("block_info", blocks)
    places: list[tuple[int, int]] = []
    for record in records.values():
        with suppress(ValueError):
            info = BlockInfo.unpack(record)
            if info.offset is not None:
                places.append((info.offset, info.offset + info.stored_size))
    places.sort()
    # Neighbours are asked for together: nothing but the end of one's page and the next one's header is between them.
    start = end = -1
    for first, last in places:
        if start >= 0 and end <= first <= end + _PAGE:
            end = last
            continue
        _ask(environment, start, end)
        start, end = first, last
    _ask(environment, start, end)


def _ask(environment: Environment, start: int, end: int) -> None:
    if start >= 0:
        with suppress(OSError, OverflowError, ValueError):
            environment.prefetch(start, end - start)


Read: TypeAlias = Callable[[Iterable[BlockId]], list[memoryview]]
"""Gives blocks' payloads, verified, in the order of their ids."""


class BlockReader:
    """Reads blocks by id and verifies each against its id."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    @contextmanager
    def reading(self, where: str) -> Iterator[Read]:
        """A function that gives the payloads of blocks, without a copy: buffers into the map, valid inside the `with` block.

        `where` names the reader's object (tensor, snapshot) for error messages. The function raises IntegrityError where a
        block is missing, or its bytes are not what its id says.
        """
        with self._environment.read() as txn:
            yield lambda blocks: [_verified(txn, block, where) for block in blocks]

    @contextmanager
    def view(self, blocks: Iterable[BlockId], where: str) -> Iterator[list[memoryview]]:
        """The payloads of a batch of blocks, as `reading` gives them.

        Raises:
            IntegrityError: a block is missing, or its bytes are not what its id says.
        """
        with self.reading(where) as read:
            yield read(blocks)

    def read(self, block: BlockId, where: str) -> bytes:
        """The raw bytes of one block, copied."""
        with self.view([block], where) as (payload,):
            return bytes(payload)

    def prefetch(self, blocks: Sequence[BlockId]) -> None:
        """Start reading these blocks from the disk, as far as their places are known. Never fails for a bad hint."""
        read_ahead(self._environment, blocks)

    def info(self, block: BlockId) -> BlockInfo | None:
        """What is known of a block, None if it is not there."""
        with self._environment.read() as txn:
            record = txn.get("block_info", block)
            return None if record is None else BlockInfo.unpack(record)

    def stats(self, tensor: Tensor, identity: ObjectId | None = None) -> bytes:
        """The records of statistics of a tensor's blocks, one after the other; `identity` is its id, where that is known.

        Raises:
            IntegrityError: one is missing or damaged.
        """
        return self.stats_of([(tensor, identity)])[0]

    def stats_of(self, tensors: Sequence[tuple[Tensor, ObjectId | None]]) -> list[bytes]:
        """The same for several tensors with their ids, in one transaction.

        Raises:
            IntegrityError: one is missing or damaged.
        """
        with self._environment.read() as txn:
            return [_stats(txn, tensor, identity) for tensor, identity in tensors]


def _stats(txn: Transaction, tensor: Tensor, identity: ObjectId | None) -> bytes:
    whole = packed(txn, tensor, identity)
    if whole is not None:
        return bytes(whole)
    keys = stats_keys(tensor)
    payloads, damaged = unseal_all(txn.get_many("stats", keys))
    if damaged is not None:
        name = damaged[:16].hex()
        raise IntegrityError(f"block {name}: its record of statistics is damaged: its checksum does not match")
    try:
        return b"".join([payloads[key] for key in keys])
    except KeyError as error:
        name = error.args[0][:16].hex()
        raise IntegrityError(f"block {name}: its statistics are missing", block=name) from None


def _verified(txn: Transaction, block: BlockId, where: str) -> memoryview:
    payload = txn.get("blocks", block)
    if payload is None:
        raise IntegrityError(f"{where}: block {block.hex()} is missing from the store", block=block.hex(), where=where)
    if block_id(payload) != block:
        raise IntegrityError(
            f"{where}: block {block.hex()} is damaged: its bytes do not match its id", block=block.hex(), where=where
        )
    return payload
