"""Methods at work on bit patterns, by the kernels of `mpfs.merge.kernels`: the results of `prepare` and `apply`, faster.

An operator says in `Operator.fast` which of these does its work. What a kernel does not do is left to the operator:
the few elements at the end of a float32 tensor whose experts torch sums in an order of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from mpfs.merge.deferred import torch
from mpfs.merge.kernels.backend import Kernels
from mpfs.merge.kernels.columns import BIT_TYPES, NAN, Bits, BitsColumn, BitsColumns, Largest, Only, Rule, Whole
from mpfs.merge.operators.base import Column, Operator, Parameters, Prepared, TensorContext
from mpfs.merge.operators.magnitude import LAYOUTS, Threshold, magnitude
from mpfs.merge.operators.places import Place, narrow_all
from mpfs.merge.operators.scalars import first_dealt
from mpfs.merge.random import keep_limit
from mpfs.stats.accumulators import fold_lanes
from mpfs.stats.hashing import GROUP


class LinearPath:
    """`Linear`."""

    def __init__(self, kernels: Kernels, context: TensorContext, weights: Sequence[float], divisor: float) -> None:
        self._kernels = kernels
        self._context = context
        self._weights = weights
        self._divisor = divisor

    def prepare(self, columns: BitsColumns) -> Prepared:
        """Nothing."""
        return {}

    def apply(self, prepared: Prepared, column: BitsColumn) -> Bits:
        """The mean of one column.

        Raises:
            ValueError: an expert is not read and there is no base to stand in for it, or there are no experts.
        """
        inputs = [column.base if expert is None else expert for expert in column.experts]
        models = [model for model in inputs if model is not None]
        if not models or len(models) < len(inputs):
            where = f"{self._context.name}: a model is missing at {column.start}"
            raise ValueError(f"{where}, and there is no base to stand in")
        return self._kernels.linear(self._context.work, models, self._weights, self._divisor)


class BlendPath:
    """`Slerp`; `factors` makes its scalars of the two squared norms and the product."""

    def __init__(
        self, kernels: Kernels, context: TensorContext, factors: Callable[[Sequence[float]], Prepared]
    ) -> None:
        self._kernels = kernels
        self._context = context
        self._factors = factors

    def prepare(self, columns: BitsColumns) -> Prepared:
        """The operator's scalars, in one pass.

        Raises:
            ValueError: a column has no base.
        """
        lanes = np.zeros((3, GROUP))
        work = self._context.work
        columns.in_order(lambda column: self._kernels.products(work, column, column.experts[0], lanes))
        return self._factors([fold_lanes(lane) for lane in lanes])

    def apply(self, prepared: Prepared, column: BitsColumn) -> Bits:
        """Merge one column.

        Raises:
            ValueError: the column has no base.
        """
        if column.base is None:
            raise ValueError(f"{self._context.name}: the column at {column.start} has no base")
        other = column.base if column.experts[0] is None else column.experts[0]
        factors = cast("Sequence[float]", prepared["factors"])
        return self._kernels.blend(self._context.work, column.base, other, factors, keep_equal=bool(prepared["linear"]))


class TaskVectorPath:
    """A `TaskVectorOperator`, given what it makes of the parameters.

    `rules` gives the part of each expert's delta that is merged. `condense` is the operator's `prepare`.
    """

    def __init__(
        self,
        kernels: Kernels,
        operator: Operator,
        context: TensorContext,
        parameters: Parameters,
        *,
        weights: Sequence[float],
        rules: Callable[[Prepared], Sequence[Rule]],
        condense: Callable[[BitsColumns], Prepared],
        elects: bool,
        divide: bool,
        divisor: float,
        scale: float,
    ) -> None:
        self._kernels = kernels
        self._operator = operator
        self._context = context
        self._parameters = parameters
        self._weights = weights
        self._rules = rules
        self._condense = condense
        self._elects = elects
        self._divide = divide
        self._divisor = divisor
        self._scale = scale
        self._ruled: tuple[Prepared, Sequence[Rule]] | None = None

    def prepare(self, columns: BitsColumns) -> Prepared:
        """The operator's scalars."""
        return self._condense(columns)

    def apply(self, prepared: Prepared, column: BitsColumn) -> Bits:
        """Merge one column.

        Raises:
            ValueError: the column has no base.
        """
        if column.base is None:
            raise ValueError(f"{self._context.name}: the column at {column.start} has no base")
        result = self._kernels.task_vector(
            self._context.work,
            column,
            self._rules_of(prepared),
            self._weights,
            elects=self._elects,
            divide=self._divide,
            divisor=self._divisor,
            scale=self._scale,
        )
        if self._context.work == "F32" and len(column.experts) > 4:
            low = max(first_dealt(self._context.numel, "F32") - column.start, 0)
            if low < column.numel:
                result[low:] = self._reference(prepared, column, low)
        return result

    def _rules_of(self, prepared: Prepared) -> Sequence[Rule]:
        """The same for all columns, so they are made once."""
        known = self._ruled
        if known is None or known[0] is not prepared:
            known = self._ruled = (prepared, self._rules(prepared))
        return known[1]

    def _reference(self, prepared: Prepared, column: BitsColumn, low: int) -> Bits:
        """The elements from `low` on, by the operator itself."""
        context = self._context

        def tensor(bits: Bits) -> torch.Tensor:
            return torch.from_numpy(bits[low:].astype(np.int32)).view(context.dtype)

        base = None if column.base is None else tensor(column.base)
        experts = [None if expert is None else tensor(expert) for expert in column.experts]
        rest = Column(column.start + low, base, experts)
        merged = self._operator.apply(context, self._parameters, prepared, rest)
        values: NDArray[np.float32] = merged.numpy()
        return values.view(BIT_TYPES[context.work])


_REMEMBERED = 16 << 20
"""The most bytes of counts that are kept apart for the sake of the cut-offs, for each tensor."""


class KernelCounts:
    """How often magnitudes occur in a tensor's deltas (`mpfs.merge.operators.magnitude.Counts`), by kernels.

    The counts of the last pass are also kept for groups of columns, as small as memory allows, so that a cut-off is
    looked for in the one group where it lies.
    """

    def __init__(
        self, kernels: Kernels, context: TensorContext, columns: BitsColumns, *, remembered: int = _REMEMBERED
    ) -> None:
        self._kernels = kernels
        self._dtype = context.work
        self._columns = columns
        self._remembered = remembered
        self._experts: list[int] = []
        self._equal: dict[int, list[tuple[int, int]]] = {}
        self._groups: list[tuple[list[int], NDArray[np.int64]]] = []

    def histograms(self, shift: int, bits: int, prefixes: Mapping[int, int]) -> dict[int, NDArray[np.int64]]:
        """See `Counts`."""
        chosen = dict(prefixes)
        self._experts, self._groups = list(chosen), []
        columns, most = 1, max(2, self._remembered // (8 * len(chosen) << bits))
        for number, counts in self._columns.map(
            lambda column: self._kernels.histogram(self._dtype, column, shift, bits, chosen)
        ):
            if self._groups and len(self._groups[-1][0]) < columns:
                self._groups[-1][0].append(number)
                np.add(self._groups[-1][1], counts, out=self._groups[-1][1])
                continue
            if len(self._groups) >= most:
                columns *= 2
                self._groups = [_together(self._groups[i : i + 2]) for i in range(0, most, 2)]
            self._groups.append(([number], counts))
        total = np.zeros((len(chosen), 1 << bits), np.int64)
        for _, counts in self._groups:
            total += counts
        return dict(zip(chosen, total, strict=True))

    def equal(self, wanted: Mapping[int, int]) -> dict[int, int]:
        """See `Counts`."""
        # A pass reads every expert, so one has to do for all of them.
        self._equal.update({i: [] for i in wanted})
        for number, counts in self._columns.map(
            lambda column: [self._kernels.find_equal(self._dtype, column, i, p)[0] for i, p in wanted.items()]
        ):
            for i, count in zip(wanted, counts, strict=True):
                self._equal[i].append((number, count))
        return {i: sum(count for _, count in self._equal[i]) for i in wanted}

    def cutoffs(self, wanted: Mapping[int, tuple[int, int, int]]) -> dict[int, int]:
        """See `Counts`."""
        places = [self._place(i, *asked) for i, asked in wanted.items()]
        narrow_all(places, self._count)
        found: dict[int, list[Place]] = {}
        for place in places:
            found.setdefault(place.columns[0], []).append(place)
        ends = self._ends(found)
        return {
            place.expert: end for number, here in found.items() for place, end in zip(here, ends[number], strict=True)
        }

    def _place(self, expert: int, pattern: int, wanted: int, total: int) -> Place:
        """Where to look, as far as it was counted."""
        counted = [([number], count) for number, count in self._equal.get(expert, ())]
        if not counted and expert in self._experts:
            row = self._experts.index(expert)
            counted = [(numbers, int(counts[row, pattern % counts.shape[1]])) for numbers, counts in self._groups]
        if not counted:
            return Place(expert, pattern, wanted, total, self._columns.numbers())
        for numbers, count in counted:
            if wanted <= count:
                return Place(expert, pattern, wanted, count, numbers)
            wanted -= count
        raise ValueError("there are fewer elements than are wanted")

    def _count(self, wanted: Mapping[int, Sequence[Place]]) -> dict[int, list[int]]:
        """How many elements of some columns have the patterns of the places that may lie there."""

        def count(column: BitsColumn) -> list[int]:
            places = wanted[column.number]
            return [self._kernels.find_equal(self._dtype, column, item.expert, item.pattern)[0] for item in places]

        return dict(self._columns.map(count, _experts(wanted)))

    def _ends(self, places: Mapping[int, Sequence[Place]]) -> dict[int, list[int]]:
        """The indices after the elements; by columns, in each of which some of them lie."""

        def find(column: BitsColumn) -> list[int]:
            found = [
                self._kernels.find_equal(self._dtype, column, item.expert, item.pattern, item.wanted)[1]
                for item in places[column.number]
            ]
            if min(found) < 0:
                raise ValueError("there are fewer elements than are wanted")
            return [column.start + end for end in found]

        return dict(self._columns.map(find, _experts(places)))


def _experts(places: Mapping[int, Sequence[Place]]) -> Only:
    """What is to be read of columns to look for places in them."""
    return {number: {place.expert for place in here} for number, here in places.items()}


def _together(groups: Sequence[tuple[list[int], NDArray[np.int64]]]) -> tuple[list[int], NDArray[np.int64]]:
    """Neighbouring groups of columns as one."""
    numbers = [number for group, _ in groups for number in group]
    return numbers, np.sum([counts for _, counts in groups], axis=0)


def drawn_norms(
    kernels: Kernels, context: TensorContext, columns: BitsColumns, keys: Mapping[int, tuple[int, float]]
) -> dict[int, tuple[float, float]]:
    """The L1 norms of experts' deltas, whole and as drawn; `keys` has the experts' streams and densities."""
    lanes = np.zeros((len(keys), 2 * GROUP))
    draws = {i: (key, keep_limit(density)) for i, (key, density) in keys.items()}
    columns.in_order(lambda column: kernels.drawn_norms(context.work, column, draws, lanes))
    return {i: (fold_lanes(row[:GROUP]), fold_lanes(row[GROUP:])) for i, row in zip(keys, lanes, strict=True)}


def rule_of(threshold: Threshold, context: TensorContext) -> Rule:
    """A threshold as kernels take it."""
    if threshold.pattern == 0 and threshold.cutoff >= context.numel:
        return Whole()
    return Largest(min(float_pattern(threshold.pattern, context.work), NAN), threshold.cutoff)


def float_pattern(pattern: int, work: str) -> int:
    """A magnitude's pattern as that of the same float32; NaN's is `NAN`, that of anything above it `NAN` + 1."""
    if pattern > LAYOUTS[work].infinity:
        return NAN + (pattern > LAYOUTS[work].nan)
    return int(np.float32(magnitude(pattern, work)).view(np.uint32))
