"""Working through a column in pieces that stay in the processor's cache.

Operators give the same bits for any cut, so a column may be cut further. The reference implementations make several
passes over several temporaries; pieces of this size keep those small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mpfs.merge.deferred import torch
from mpfs.merge.operators.base import Column

PIECE = 65_536
"""Elements of a piece; a multiple of 64."""


def pieces(column: Column, numel: int) -> Iterator[Column]:
    """The column of `numel` elements as columns of at most `PIECE` elements, in order."""
    if numel <= PIECE:
        yield column
        return
    for low in range(0, numel, PIECE):
        part = slice(low, low + PIECE)
        yield Column(
            column.start + low,
            None if column.base is None else column.base[part],
            [None if expert is None else expert[part] for expert in column.experts],
        )


def by_piece(column: Column, like: torch.Tensor, merge: Callable[[Column], torch.Tensor]) -> torch.Tensor:
    """`merge` of each piece of the column, put together; `like` has the result's size, dtype and device."""
    if like.numel() <= PIECE:
        return merge(column)
    result = torch.empty_like(like)
    for piece in pieces(column, like.numel()):
        low = piece.start - column.start
        result[low : low + PIECE] = merge(piece)
    return result
