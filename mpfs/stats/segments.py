"""Sums over runs of rows: what is worked out for many tensors at once stays, bit for bit, what it is for each alone. Pure.

The columns of several tensors are put one below the other and computed with together, elementwise. Whatever is summed
over the columns of one tensor is summed here: from 0.0 on, in the order of the rows, on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


class Segments:
    """Runs of rows that follow one another."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        self._numbers: dict[int, NDArray[np.int64]] = {}

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def rows(self) -> int:
        """How many rows there are in all."""
        return int(self.starts[-1])

    @cached_property
    def of(self) -> NDArray[np.int64]:
        """The run of each row, shape (rows,)."""
        return np.repeat(np.arange(len(self)), np.diff(self.starts))

    @cached_property
    def places(self) -> NDArray[np.int64]:
        """The place of each row in its run, shape (rows,)."""
        found: NDArray[np.int64] = np.arange(self.rows) - self.starts[self.of]
        return found

    def slices(self) -> list[slice]:
        """The rows of each run."""
        edges = self.starts.tolist()
        return [slice(start, stop) for start, stop in pairwise(edges)]

    def sums(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Over the rows of each run: (rows, ...) to (runs, ...)."""
        width = int(np.prod(values.shape[1:], dtype=np.int64))
        # bincount adds one after the other; numpy's own sums over an axis may go in any order.
        total = np.asarray(np.bincount(self._cells(width), values.reshape(-1), len(self) * width), np.float64)
        return total.reshape(len(self), *values.shape[1:])

    def _cells(self, width: int) -> NDArray[np.int64]:
        """For each number of (rows, width), flat, where it is added."""
        if width == 1:
            return self.of
        if width not in self._numbers:
            self._numbers[width] = (self.of[:, None] * width + np.arange(width)).reshape(-1)
        return self._numbers[width]


def running_sum(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sums over the last axis, in order: (..., n) to (...)."""
    return np.cumsum(values, axis=-1)[..., -1] if values.shape[-1] else np.zeros(values.shape[:-1])
