"""Which of the experts' blocks are not the base's, and how many bytes they are: many tensors at once, by arrays of ids.

No block is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, compress
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from mpfs.objects import BlockId, Tensor
from mpfs.stats.segments import Segments
from mpfs.stats.stored import blocks_per_column

BoolArray: TypeAlias = NDArray[np.bool_]
IntArray: TypeAlias = NDArray[np.int64]
Ids: TypeAlias = NDArray[np.uint64]


class BlockRuns:
    """The blocks of several tensors, one after the other, with their sizes."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.runs = Segments([len(tensor.blocks) for tensor in tensors])

    @property
    def ids(self) -> Ids:
        """Shape (blocks, 2)."""
        return _ids(self.tensors)

    @property
    def sizes(self) -> IntArray:
        """Bytes of each block, shape (blocks,)."""
        sizes = np.array([tensor.block_size for tensor in self.tensors], np.int64)[self.runs.of]
        ends = [
            (stop, tensor.block_nbytes(len(tensor.blocks) - 1))
            for tensor, stop in zip(self.tensors, self.runs.starts[1:].tolist(), strict=True)
            if tensor.blocks
        ]
        for stop, size in ends:
            sizes[stop - 1] = size
        return sizes

    def columns(self, elements: Sequence[int]) -> IntArray:
        """The column that each block lies in, of its tensor, whose columns have so many elements; shape (blocks,)."""
        widths = [blocks_per_column(tensor, count) for tensor, count in zip(self.tensors, elements, strict=True)]
        places: IntArray = self.runs.places
        return places if set(widths) <= {1} else places // np.array(widths, np.int64)[self.runs.of]

    def differing(self, bases: Sequence[Tensor | None]) -> BoolArray:
        """Which blocks are not those of the bases at that place, shape (blocks,); all are where there is nothing to compare."""
        alike = [
            base is not None and base.dtype == tensor.dtype for tensor, base in zip(self.tensors, bases, strict=True)
        ]
        theirs = [
            base if same and base else tensor for tensor, base, same in zip(self.tensors, bases, alike, strict=True)
        ]
        found: BoolArray = np.asarray((self.ids != _ids(theirs)).any(axis=1), bool)
        for same, rows in zip(alike, self.runs.slices(), strict=True):
            if not same:
                found[rows] = True
        return found


def _ids(tensors: Iterable[Tensor]) -> Ids:
    joined = b"".join(chain.from_iterable(tensor.blocks for tensor in tensors))
    return np.frombuffer(joined, np.uint64).reshape(-1, 2)


def numbered(ids: Ids) -> tuple[IntArray, int]:
    """A number for each id, equal for equal ones, shape (ids,); and how many there are."""
    order = np.argsort(ids[:, 0], kind="stable")
    ranked = ids[order]
    new = (ranked[1:] != ranked[:-1]).any(axis=1)
    if bool((new & (ranked[1:, 0] == ranked[:-1, 0])).any()):  # half an id is hardly ever that of two
        order = np.lexsort((ids[:, 1], ids[:, 0]))
        ranked = ids[order]
        new = (ranked[1:] != ranked[:-1]).any(axis=1)
    numbers = np.zeros(len(ids), np.int64)
    numbers[order[1:]] = np.cumsum(new)
    return numbers, int(new.sum()) + 1 if len(ids) else 0


def differing_blocks(expert: Tensor, base: Tensor | None) -> Iterator[tuple[BlockId, int]]:
    """An expert's blocks (with sizes) that are not the base's at that place."""
    return compress(expert.sized_blocks(), BlockRuns([expert]).differing([base]).tolist())


def blocks_in(tensor: Tensor, columns: BoolArray, column_elements: int) -> Iterator[tuple[BlockId, int]]:
    """The blocks (with sizes) of the marked columns of a tensor."""
    inside = np.repeat(columns, blocks_per_column(tensor, column_elements))[: len(tensor.blocks)]
    return compress(zip(tensor.blocks, BlockRuns([tensor]).sizes.tolist(), strict=True), inside.tolist())
