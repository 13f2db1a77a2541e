"""The blocks that a column of a tensor consists of. Pure."""

from __future__ import annotations

from mpfs.merge.models import ModelTensor
from mpfs.objects import BlockId, Tensor
from mpfs.stats.stored import blocks_per_column


def column_blocks(
    expert: Tensor, column: int, column_elements: int, base: ModelTensor | None
) -> list[tuple[BlockId, int]]:
    """The blocks (with sizes) that an expert's column consists of, less those that are the base's at that place."""
    width = blocks_per_column(expert, column_elements)
    start, stop = column * width, min((column + 1) * width, len(expert.blocks))
    run = expert.blocks[start:stop]
    sizes = [expert.block_size] * len(run)
    if stop == len(expert.blocks) and run:
        sizes[-1] = expert.block_nbytes(stop - 1)
    if base is None or base.tensor.dtype != expert.dtype:
        return list(zip(run, sizes, strict=True))
    theirs = base.tensor.blocks[start:stop]
    return [(block, size) for block, size, other in zip(run, sizes, theirs, strict=True) if block != other]
