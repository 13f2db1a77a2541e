"""Making blocks ready for the store: a name and statistics for each. What import and merge have in common."""

from __future__ import annotations

from mpfs.objects import Tensor, block_id
from mpfs.stats.block import block_stats
from mpfs.store import StagedBlock, Writer


def stage_block(data: bytes | memoryview, dtype: str, first: int) -> StagedBlock:
    """Name a block and take its statistics; `first` is the index of its first element within its tensor."""
    return StagedBlock(block_id(data), data, dtype, first, block_stats(data, dtype, first).tobytes())


def stage_bytes(writer: Writer, content: bytes, block_size: int) -> Tensor:
    """Stage a byte string (a header, a small file) as a U8 tensor; block size in bytes."""
    staged = [stage_block(content[at : at + block_size], "U8", at) for at in range(0, len(content), block_size)]
    for block in staged:
        writer.put_block(block)
    return Tensor("U8", (len(content),), block_size, tuple(block.block for block in staged))
