"""Task vectors without their largest and their smallest elements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from typing import ClassVar, Literal, cast

from mpfs.merge.deferred import torch
from mpfs.merge.kernels.backend import Kernels
from mpfs.merge.kernels.columns import Between, BitsColumns, Rule, Whole
from mpfs.merge.operators.arithmetic import difference
from mpfs.merge.operators.base import Column, Histogram, LeftOut, Parameter, Parameters, Prepared, TensorContext
from mpfs.merge.operators.both_ends import EndCounts
from mpfs.merge.operators.fast import float_pattern
from mpfs.merge.operators.magnitude import (
    LAYOUTS,
    Counts,
    Patterns,
    Streamed,
    Threshold,
    cut_of,
    kept,
    mirrored,
    patterns,
    search_thresholds,
)
from mpfs.merge.operators.reductions import all_pieces, base_of
from mpfs.merge.operators.rows import without_gaps
from mpfs.merge.operators.task_vector import KernelTaskVector
from mpfs.merge.operators.values import value_of
from mpfs.objects import Cut

_PARAMETERS: tuple[Parameter, ...] = (
    Parameter("weight", required=True, per_model=True),
    Parameter("density", default=1.0, per_model=True),
    Parameter("gamma", default=0.01, per_model=True),
    Parameter("lambda", default=1.0),
    Parameter("normalize", default=False),
    Parameter("int8_mask", default=False),
)


def kept_range(density: float, gamma: float, numel: int) -> tuple[int, int]:
    """Which positions of the magnitudes in ascending order are kept, as a half-open range.

    `density` of the elements, below the top `gamma`; if there are not so many, the top gives way.
    """
    if density >= 1:
        return 0, numel
    if density <= 0:
        return 0, 0
    keep = min(int(density * numel), numel)
    bottom = max(numel - keep - int(gamma * numel), 0)
    return bottom, bottom + keep


class Breadcrumbs(KernelTaskVector):
    """Of each delta drop the `gamma` largest share and the smallest, so that `density` is left; add the weighted sum.

    The share is of the whole tensor, in elements rounded down, and magnitudes are ordered over the whole tensor; equal
    ones by index, so that of those at the lower end the highest indices are kept, and of those at the upper end the
    lowest. Bit for bit as mergekit 0.1.5 with a stable sort. A density of 1 or more keeps everything.

    `prepare` gives for each expert `above` and `within`, each a list of [pattern, cutoff]: an element is kept iff it is
    not among the first `bottom` in ascending order and is among the first `bottom + keep`; it is among the first iff
    its magnitude pattern is below the pattern, or equals it and its index is below the cutoff. Under a budget both ends
    approximate those of the full delta, as ties does (`magnitude`).

    Source: Davari and Belilovsky, "Model breadcrumbs", arXiv 2312.06795.
    """

    name: ClassVar[str] = "breadcrumbs"
    parameters: ClassVar[tuple[Parameter, ...]] = _PARAMETERS

    def validate(self, parameters: Parameters) -> list[str]:
        """Also a gamma that is not a share."""
        found = super().validate(parameters)
        gammas = [] if found else self._gammas(parameters)
        return found + [
            f"model {i + 1}: gamma must lie between 0 and 1, not {gamma!r}"
            for i, gamma in enumerate(gammas)
            if not 0 <= gamma <= 1
        ]

    def cuts(
        self, work: str, numel: int, parameters: Parameters, histograms: Sequence[Histogram | None]
    ) -> Sequence[Sequence[Cut]]:
        """Two for each expert: what lies below the range that is kept, and what lies below its end, smallest first."""
        return [
            () if histogram is None else tuple(cut_of(mirrored(histogram, work), end) for end in ends)
            for ends, histogram in zip(self._ranges(parameters, numel), histograms, strict=True)
        ]

    def _ranges(self, parameters: Parameters, numel: int) -> list[tuple[int, int]]:
        return [
            kept_range(density, gamma, numel)
            for density, gamma in zip(self._densities(parameters), self._gammas(parameters), strict=True)
        ]

    def prepare(
        self, context: TensorContext, parameters: Parameters, columns: Callable[[], Iterator[Column]]
    ) -> Prepared:
        """Both ends: no pass if everything or nothing is kept, else at most two (16-bit) or three (float32).

        Raises:
            ValueError: a column has no base.
        """
        count = len(parameters.experts)
        runs, turned = self._left_out(context, count), self._turned(context, count)

        def source(wanted: Set[int]) -> Iterator[tuple[int, Sequence[Patterns | None]]]:
            for piece in all_pieces(lambda: without_gaps(context, columns(), count)):
                base = base_of(context, piece)
                found: list[Patterns | None] = []
                for i, expert in enumerate(piece.experts):
                    if not {i, i + count} & wanted or (expert is None and runs[i]):
                        found.append(None)
                        continue
                    pattern = patterns(difference(base if expert is None else expert, base))
                    found.append((LAYOUTS[context.work].last - pattern if turned[i] else pattern).cpu().numpy())
                yield piece.start, found + found

        return self._ends(context, parameters, Streamed(source))

    def condense(
        self, context: TensorContext, parameters: Parameters, kernels: Kernels, columns: BitsColumns
    ) -> Prepared:
        """Both ends, in as many passes."""
        count = len(parameters.experts)
        left_out = [bool(runs) for runs in self._left_out(context, count)]
        turned = self._turned(context, count)
        return self._ends(context, parameters, EndCounts(kernels, context, columns, left_out=left_out, turned=turned))

    def _left_out(self, context: TensorContext, count: int) -> list[list[LeftOut]]:
        return [[run for run in expert if run.numel] for expert in context.left_out] or [[] for _ in range(count)]

    def _turned(self, context: TensorContext, count: int) -> list[bool]:
        """Whose ends are looked for among mirrored patterns.

        "Among the first p" is "among the p largest" of those, so that ties too are told by index. What a budget leaves
        out can only be reckoned with in the patterns themselves, unless a histogram counts it: there it is "not among
        the n - p largest".
        """
        runs = self._left_out(context, count)
        return [bool(known) or not expert for known, expert in zip(context.cuts or [()] * count, runs, strict=True)]

    def _ends(self, context: TensorContext, parameters: Parameters, counts: Counts) -> Prepared:
        """`prepare`'s, given counts for each expert's bottom, then for each one's top."""
        ranges = self._ranges(parameters, context.numel)
        count = len(ranges)
        nan, last = LAYOUTS[context.work].nan, LAYOUTS[context.work].last
        runs, turned = self._left_out(context, count), self._turned(context, count)
        cuts = context.cuts or [()] * count
        counted = context.counted
        ends = [bottom for bottom, _ in ranges] + [top for _, top in ranges]
        found = search_thresholds(
            context.work,
            context.numel,
            [p if turned[i % count] else context.numel - p for i, p in enumerate(ends)],
            runs + runs,
            counts,
            cuts=[known[end] if known else None for end in range(2) for known in cuts],
            counted=None if counted is None else lambda i, found: counted(i % count, mirrored(found, context.work)),
        )

        def first(i: int) -> list[int]:
            end, p = found[i], ends[i]
            if p <= 0:
                return [0, 0]
            if p >= context.numel:
                return [nan, context.numel]
            if turned[i % count]:
                return [last - end.pattern, end.cutoff]
            return [end.pattern, 0]

        return {"above": [first(i) for i in range(count)], "within": [first(i + count) for i in range(count)]}

    def sparsify(
        self,
        context: TensorContext,
        parameters: Parameters,
        prepared: Prepared,
        expert: int,
        start: int,
        delta: torch.Tensor,
    ) -> torch.Tensor:
        """The elements between the two ends, the others zero."""
        low, high = _bounds(prepared, expert)
        nan = LAYOUTS[context.work].nan
        if low == (0, 0) and high == (nan, context.numel):
            return delta
        mirror = nan - patterns(delta)
        inside = kept(mirror, Threshold(nan - high[0], high[1]), start)
        inside &= ~kept(mirror, Threshold(nan - low[0], low[1]), start)
        return torch.where(inside, delta, delta.new_zeros(()))

    def rule(self, context: TensorContext, parameters: Parameters, prepared: Prepared, expert: int) -> Rule:
        """The elements between the two ends."""
        low, high = _bounds(prepared, expert)
        if low == (0, 0) and high == (LAYOUTS[context.work].nan, context.numel):
            return Whole()
        return Between((float_pattern(low[0], context.work), low[1]), (float_pattern(high[0], context.work), high[1]))

    def _gammas(self, parameters: Parameters) -> list[float]:
        return [float(value_of(self.parameters, values, "gamma")) for values in parameters.experts]


def _bounds(prepared: Prepared, expert: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The pattern and cutoff of both ends."""
    low, high = (cast("Sequence[Sequence[int]]", prepared[end])[expert] for end in ("above", "within"))
    return (low[0], low[1]), (high[0], high[1])


class BreadcrumbsTies(Breadcrumbs):
    """Breadcrumbs' trimming, then TIES's sign election; by default the sum of what agrees, not its mean.

    Source: arXiv 2312.06795 and 2306.01708.
    """

    name: ClassVar[str] = "breadcrumbs_ties"
    interaction: ClassVar[Literal["additive", "column"]] = "column"
    elects_sign: ClassVar[bool] = True
