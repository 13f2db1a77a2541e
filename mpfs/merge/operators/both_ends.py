"""Counting magnitudes for two ends of each expert's delta at once, by kernels, over a whole tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from mpfs.merge.kernels.backend import Kernels
from mpfs.merge.kernels.columns import BitsColumn, BitsColumns, Only
from mpfs.merge.operators.base import TensorContext
from mpfs.merge.operators.fast import KernelCounts
from mpfs.merge.operators.magnitude import LAYOUTS, mirrored

_Result = TypeVar("_Result")


class _Twice:
    """Columns with every expert twice (`BitsColumns`). Remembers how many elements they have together.

    Where an expert is not read though none of it was `left_out`, it is the base.
    """

    def __init__(self, columns: BitsColumns, left_out: Sequence[bool]) -> None:
        self._columns = columns
        self._left_out = left_out
        self._sizes: dict[int, int] = {}

    @property
    def numel(self) -> int:
        """Elements of all columns, once all have been passed over; of those that were, before."""
        return sum(self._sizes.values())

    def numbers(self) -> list[int]:
        """See `BitsColumns`."""
        return self._columns.numbers()

    def map(self, function: Callable[[BitsColumn], _Result], only: Only | None = None) -> Iterator[tuple[int, _Result]]:
        """See `BitsColumns`."""
        once = len(self._left_out)
        chosen = only and {column: {i % once for i in experts} for column, experts in only.items()}
        return self._columns.map(lambda column: function(self._doubled(column)), chosen)

    def in_order(self, function: Callable[[BitsColumn], None]) -> None:
        """See `BitsColumns`."""
        self._columns.in_order(lambda column: function(self._doubled(column)))

    def _doubled(self, column: BitsColumn) -> BitsColumn:
        self._sizes[column.start] = column.numel
        experts = [
            column.base if expert is None and not left_out else expert
            for expert, left_out in zip(column.experts, self._left_out, strict=True)
        ]
        return BitsColumn(column.number, column.start, column.numel, column.base, experts * 2)


class EndCounts:
    """How often magnitudes occur in n experts' deltas, for 2n searches (`mpfs.merge.operators.magnitude.Counts`).

    Searches i and i + n are about expert i. Those of an expert in `turned` see `FloatLayout.last` minus the patterns.
    Elements in columns that are not streamed have a delta of zero. What two searches of one expert ask alike is counted
    once.
    """

    def __init__(
        self,
        kernels: Kernels,
        context: TensorContext,
        columns: BitsColumns,
        *,
        left_out: Sequence[bool],
        turned: Sequence[bool],
    ) -> None:
        self._kernels = kernels
        self._dtype = context.work
        self._numel = context.numel
        self._columns = _Twice(columns, left_out)
        self._counts = KernelCounts(kernels, context, self._columns)
        self._turned = turned
        self._experts = len(turned)
        self._gaps: int | None = None
        self._counted_as: dict[int, int] = {}

    def histograms(self, shift: int, bits: int, prefixes: Mapping[int, int]) -> dict[int, NDArray[np.int64]]:
        """See `Counts`."""
        high = shift + bits
        asked = {i: self._pattern(i, prefix << high) >> high for i, prefix in prefixes.items()}
        first: dict[tuple[int, int], int] = {}
        self._counted_as = {i: first.setdefault((i % self._experts, prefix), i) for i, prefix in asked.items()}
        counted = self._counts.histograms(shift, bits, {i: asked[i] for i in first.values()})
        self._gaps = self._numel - self._columns.numel
        for (_, prefix), i in first.items():
            counted[i][0] += 0 if prefix else self._gaps
        return {i: self._histogram(i, counted[self._counted_as[i]], shift) for i in asked}

    def equal(self, wanted: Mapping[int, int]) -> dict[int, int]:
        """See `Counts`."""
        patterns = {i: self._pattern(i, pattern) for i, pattern in wanted.items()}
        found = self._counts.equal(patterns)
        self._gaps = self._numel - self._columns.numel
        return {i: count + (0 if patterns[i] else self._gaps) for i, count in found.items()}

    def cutoffs(self, wanted: Mapping[int, tuple[int, int, int]]) -> dict[int, int]:
        """See `Counts`."""
        asked = {i: (self._pattern(i, pattern), number, total) for i, (pattern, number, total) in wanted.items()}
        # Zeros are also where nothing is streamed, which only a pass of its own tells.
        zeros = {i: number for i, (pattern, number, _) in asked.items() if pattern == 0 and self._gaps != 0}
        found = self._zeros_end(zeros) if zeros else {}
        alone = {i: asked[i] for i in asked if i not in zeros and self._counted_as.get(i, i) == i}
        found |= self._counts.cutoffs(alone) if alone else {}
        for i in asked.keys() - found.keys():
            other = self._counted_as[i]
            found |= {i: self._counts.cutoffs({other: asked[i]})[other]}
        return found

    def _pattern(self, search: int, pattern: int) -> int:
        """The pattern itself of one that a search sees, and the other way round."""
        return LAYOUTS[self._dtype].last - pattern if self._turned[search % self._experts] else pattern

    def _histogram(self, search: int, counted: NDArray[np.int64], shift: int) -> NDArray[np.int64]:
        """The counts as a search sees them."""
        if not self._turned[search % self._experts]:
            return counted
        if shift == LAYOUTS[self._dtype].levels[0][0]:
            return mirrored(counted, self._dtype)
        return counted[::-1]  # the bits below the leading ones are all set in `last`

    def _zeros_end(self, wanted: Mapping[int, int]) -> dict[int, int]:
        """For each search how many zero deltas to count off: the index after the last."""
        left, found = dict(wanted), {}
        inside: dict[int, tuple[int, int]] = {}
        reached = 0

        def pass_gap(end: int) -> None:
            for i, number in list(left.items()):
                if number <= end - reached:
                    found[i] = reached + left.pop(i)
                else:
                    left[i] -= end - reached

        def count(column: BitsColumn) -> tuple[BitsColumn, list[int]]:
            counts = [self._kernels.find_equal(self._dtype, column, i, 0)[0] for i in wanted]
            return BitsColumn(column.number, column.start, column.numel, None, ()), counts

        for number, (column, counts) in self._columns.map(count):
            pass_gap(column.start)
            for i, here in zip(wanted, counts, strict=True):
                if left.get(i, here + 1) <= here:
                    inside[i] = (number, left.pop(i))
                elif i in left:
                    left[i] -= here
            reached = column.start + column.numel
            if not left:
                break
        pass_gap(self._numel)
        return found | {i: self._place(i, *where) for i, where in inside.items()}

    def _place(self, search: int, column: int, number: int) -> int:
        """The index after so many zero deltas of one column."""
        ((_, place),) = self._columns.map(
            lambda found: found.start + self._kernels.find_equal(self._dtype, found, search, 0, number)[1],
            {column: [search]},
        )
        return place
