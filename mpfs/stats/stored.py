"""Statistics of stored tensors, block by block or in columns: what planning and diffing look at instead of blocks.

The one module here that reads the store; the functions that it feeds stay pure.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mpfs.objects import Tensor
from mpfs.objects.dtypes import itemsize
from mpfs.stats.estimate import combine
from mpfs.stats.exact import squared_distance
from mpfs.stats.record import RECORD, Records
from mpfs.store import BlockReader, stats_key

_BATCH_BLOCKS = 16


def block_records(reader: BlockReader, tensor: Tensor) -> Records:
    """The records of a tensor's blocks, shape (blocks,).

    Raises:
        IntegrityError: one is missing.
    """
    keys = [stats_key(block, tensor.dtype, tensor.block_start(index)) for index, block in enumerate(tensor.blocks)]
    return np.frombuffer(b"".join(reader.stats(keys)), RECORD)


def blocks_per_column(tensor: Tensor, column_elements: int) -> int:
    """How many of a tensor's blocks a column of so many elements covers."""
    return column_elements * itemsize(tensor.dtype) // tensor.block_size


def column_records(reader: BlockReader, tensor: Tensor, column_elements: int) -> Records:
    """The records of a tensor's columns, shape (columns,)."""
    records = block_records(reader, tensor)
    width = blocks_per_column(tensor, column_elements)
    if width == 1:
        return records
    columns = -(-len(records) // width)
    padded = np.zeros(columns * width, RECORD)
    padded[: len(records)] = records
    return combine(padded.reshape(columns, width))


def block_distances(reader: BlockReader, a: Tensor, b: Tensor, where: str) -> NDArray[np.float64]:
    """The squared distances of two tensors' blocks, shape (blocks,). The tensors have one mergeable dtype and one shape;
    blocks that differ are read.

    Raises:
        IntegrityError: a block is missing or damaged; the message says `where`.
    """
    result = np.zeros(len(a.blocks))
    differing = [index for index, (ours, theirs) in enumerate(zip(a.blocks, b.blocks, strict=True)) if ours != theirs]
    for start in range(0, len(differing), _BATCH_BLOCKS):
        batch = differing[start : start + _BATCH_BLOCKS]
        blocks = [block for index in batch for block in (a.blocks[index], b.blocks[index])]
        reader.prefetch(blocks)
        with reader.view(blocks, where) as payloads:
            for place, index in enumerate(batch):
                result[index] = squared_distance(payloads[2 * place], payloads[2 * place + 1], a.dtype)
    return result
