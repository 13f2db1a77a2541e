"""Statistics of stored tensors, block by block or in columns: what planning and diffing look at instead of blocks.

The one module here that reads the store; the functions that it feeds stay pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpfs.errors import IntegrityError
from mpfs.objects import ObjectId, Tensor
from mpfs.objects.dtypes import itemsize
from mpfs.stats.differences import Comparison
from mpfs.stats.estimate import combine
from mpfs.stats.record import RECORD, Records
from mpfs.store import BlockReader
from mpfs.store.pairs import PairRecord

_BATCH_BLOCKS = 16


def block_records(reader: BlockReader, tensor: Tensor, identity: ObjectId | None = None) -> Records:
    """The records of a tensor's blocks, shape (blocks,). `identity` is the tensor's id, for those who know it.

    Raises:
        IntegrityError: one is missing.
    """
    return _records(tensor, reader.stats(tensor, identity))


def _records(tensor: Tensor, found: bytes) -> Records:
    if len(found) != RECORD.itemsize * len(tensor.blocks):
        raise IntegrityError(
            f"{len(found):,} bytes of statistics are not {len(tensor.blocks):,} records of {RECORD.itemsize:,} bytes; "
            "'mpfs fsck --read-data --repair' makes them anew"
        )
    return np.frombuffer(found, RECORD)


def blocks_per_column(tensor: Tensor, column_elements: int) -> int:
    """How many of a tensor's blocks a column of so many elements covers."""
    return column_elements * itemsize(tensor.dtype) // tensor.block_size


def column_records(
    reader: BlockReader, tensor: Tensor, column_elements: int, identity: ObjectId | None = None
) -> Records:
    """The records of a tensor's columns, shape (columns,); see `block_records`."""
    return _in_columns(block_records(reader, tensor, identity), tensor, column_elements)


def column_records_of(
    reader: BlockReader, tensors: Sequence[tuple[Tensor, ObjectId | None]], column_elements: int
) -> list[Records]:
    """The same for several tensors with their ids, in one transaction."""
    found = reader.stats_of(tensors)
    return [
        _in_columns(_records(tensor, payload), tensor, column_elements)
        for (tensor, _), payload in zip(tensors, found, strict=True)
    ]


def _in_columns(records: Records, tensor: Tensor, column_elements: int) -> Records:
    width = blocks_per_column(tensor, column_elements)
    if width == 1:
        return records
    columns = -(-len(records) // width)
    padded = np.zeros(columns * width, RECORD)
    padded[: len(records)] = records
    return combine(padded.reshape(columns, width))


def compare(reader: BlockReader, a: Tensor, b: Tensor, where: str, *, binned: bool) -> PairRecord:
    """What is stored of a pair of tensors of one mergeable dtype and one shape; blocks that differ are read.

    `binned` says whether the magnitudes of the differences are counted.

    Raises:
        IntegrityError: a block is missing or damaged; the message says `where`.
    """
    found = Comparison(a.dtype, a.numel, a.block_size, binned=binned)
    differing: list[int] = []
    for index, (ours, theirs) in enumerate(zip(a.blocks, b.blocks, strict=True)):
        if ours == theirs:
            found.equal()
        else:
            differing.append(index)
    for start in range(0, len(differing), _BATCH_BLOCKS):
        batch = differing[start : start + _BATCH_BLOCKS]
        blocks = [block for index in batch for block in (a.blocks[index], b.blocks[index])]
        reader.prefetch(blocks)
        with reader.view(blocks, where) as payloads:
            for place, index in enumerate(batch):
                found.differ(index, payloads[2 * place], payloads[2 * place + 1])
    return found.record
