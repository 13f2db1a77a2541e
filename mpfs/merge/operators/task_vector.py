"""Methods that add a combination of deltas ("task vectors") to the base.

All go the same way, each step rounded to the tensor's dtype: delta = expert - base; sparsify; times the expert's
weight (itself rounded to the dtype); sum over experts (`sum_experts`), of those entries that agree with the elected
sign where the method elects one; divide by the sum of their weights if `normalize`; times `lambda`; add to the base.
At full budget task_arithmetic and ties give mergekit 0.1.5's bits (for ties up to which of equal magnitudes are kept:
here the lowest indices); the dare methods give its distribution, and its bits for the same mask and norms.

Two things are MPFS's own, so that a merge does not depend on where blocks end: a block in which no expert differs from
the base is the base's block, so an element that nothing changes keeps the base's bits (mergekit turns -0 into 0), and
where an expert equals the base the delta is zero even at infinity (mergekit gives NaN).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import ClassVar, Literal, cast

import numpy as np

from mpfs.merge.deferred import torch
from mpfs.merge.kernels.backend import Kernels
from mpfs.merge.kernels.columns import BIT_TYPES, BitsColumns, Drawn, Rule, Whole
from mpfs.merge.operators.arithmetic import accumulator, difference, moved, quotient, scaled, sum_experts
from mpfs.merge.operators.base import (
    Column,
    FastPath,
    Histogram,
    LeftOut,
    Operator,
    Parameter,
    Parameters,
    Prepared,
    TensorContext,
)
from mpfs.merge.operators.consensus import counting
from mpfs.merge.operators.fast import KernelCounts, TaskVectorPath, drawn_norms, rule_of
from mpfs.merge.operators.magnitude import (
    Counts,
    Patterns,
    Streamed,
    Threshold,
    cut_of,
    keep_count,
    kept,
    magnitude,
    patterns,
    search_thresholds,
)
from mpfs.merge.operators.pieces import by_piece, pieces
from mpfs.merge.operators.scalars import norm_ratio, rounded, sum_weights
from mpfs.merge.operators.values import problems, value_of
from mpfs.merge.random import bernoulli, keep_limit, stream_key
from mpfs.objects import Cut
from mpfs.stats.lanesum import LaneSum

_WEIGHT = Parameter("weight", required=True, per_model=True)
_DENSITY = Parameter("density", default=1.0, per_model=True)
_LAMBDA = Parameter("lambda", default=1.0)
_INT8_MASK = Parameter("int8_mask", default=False)

_SMALL_DIVISOR = 1e-8
"""A sum of all weights closer to zero than this divides nothing."""


class TaskVectorOperator(Operator):
    """What the methods of this family share; a method says how it sparsifies and whether it elects signs."""

    elects_sign: ClassVar[bool] = False

    def validate(self, parameters: Parameters) -> list[str]:
        """Values that are absent, not finite numbers, or a negative density; a density above 1 means 1."""
        return problems(self.parameters, parameters)

    def apply(self, context: TensorContext, parameters: Parameters, prepared: Prepared, column: Column) -> torch.Tensor:
        """Merge one column; 1-D, in the context's dtype.

        Raises:
            ValueError: the column has no base.
        """
        return by_piece(
            column, _base_of(context, column), lambda piece: self._merge(context, parameters, prepared, piece)
        )

    def _merge(
        self, context: TensorContext, parameters: Parameters, prepared: Prepared, column: Column
    ) -> torch.Tensor:
        base = _base_of(context, column)
        weights = self._weights(context, parameters)
        terms: list[torch.Tensor | None] = []
        for i, (expert, weight) in enumerate(zip(column.experts, weights, strict=True)):
            if expert is None:
                terms.append(None)
                continue
            sparse = self.sparsify(context, parameters, prepared, i, column.start, difference(expert, base))
            terms.append(scaled(sparse, weight))
        if not terms:
            return base
        normalize = self._normalize(parameters)
        if self.elects_sign:
            mixed = _agreeing(context, column.start, terms, weights, base, normalize=normalize)
        else:
            mixed = sum_experts(terms, column.start, context.numel, base)
            if normalize:
                mixed = quotient(mixed, mixed.new_tensor(_divisor(weights, context.work)))
        factor = self._lambda(parameters)
        if factor != 1:
            mixed = scaled(mixed, factor)
        return moved(base, mixed)

    @abstractmethod
    def sparsify(
        self,
        context: TensorContext,
        parameters: Parameters,
        prepared: Prepared,
        expert: int,
        start: int,
        delta: torch.Tensor,
    ) -> torch.Tensor:
        """The part of a column of expert number `expert`'s delta that is merged, before its weight; in its dtype."""

    def _weights(self, context: TensorContext, parameters: Parameters) -> list[float]:
        return [
            rounded(float(value_of(self.parameters, values, "weight")), context.work) for values in parameters.experts
        ]

    def _normalize(self, parameters: Parameters) -> bool:
        return bool(value_of(self.parameters, parameters.shared, "normalize"))

    def _lambda(self, parameters: Parameters) -> float:
        return float(value_of(self.parameters, parameters.shared, "lambda"))

    def _densities(self, parameters: Parameters) -> list[float]:
        return [float(value_of(self.parameters, values, "density")) for values in parameters.experts]


def _divisor(weights: Sequence[float], dtype: str) -> float:
    """What a sum of everything is divided by."""
    divisor = sum_weights(weights, dtype)
    return 1.0 if abs(divisor) < _SMALL_DIVISOR else divisor


def _base_of(context: TensorContext, column: Column) -> torch.Tensor:
    if column.base is None:
        raise ValueError(f"{context.name}: the column at {column.start} has no base")
    return column.base


def _all_pieces(context: TensorContext, columns: Callable[[], Iterator[Column]]) -> Iterator[Column]:
    for column in columns():
        yield from pieces(column, _base_of(context, column).numel())


def _agreeing(
    context: TensorContext,
    start: int,
    terms: Sequence[torch.Tensor | None],
    weights: Sequence[float],
    like: torch.Tensor,
    *,
    normalize: bool,
) -> torch.Tensor:
    """The sum of the entries with the elected sign; if `normalize`, over the sum of their weights (1 where that is 0)."""
    counts = counting(terms, start, context.numel, like)
    zero = like.new_zeros(())
    agreeing = [
        None if term is None or mask is None else torch.where(mask, term, zero)
        for term, mask in zip(terms, counts, strict=True)
    ]
    mixed = sum_experts(agreeing, start, context.numel, like)
    if not normalize:
        return mixed
    shares = [
        None if mask is None else torch.where(mask, like.new_tensor(weight), zero)
        for mask, weight in zip(counts, weights, strict=True)
    ]
    divisor = sum_experts(shares, start, context.numel, like)
    return quotient(mixed, torch.where(divisor == 0, like.new_ones(()), divisor))


class KernelTaskVector(TaskVectorOperator):
    """A method of this family that there are kernels for: what it does to a delta can be said as a rule."""

    def fast(self, context: TensorContext, parameters: Parameters, kernels: Kernels) -> FastPath | None:
        """By the kernels for task vectors."""
        if context.work not in BIT_TYPES:
            return None
        weights = self._weights(context, parameters)
        return TaskVectorPath(
            kernels,
            self,
            context,
            parameters,
            weights=weights,
            rules=lambda prepared: [self.rule(context, parameters, prepared, i) for i in range(len(weights))],
            condense=lambda columns: self.condense(context, parameters, kernels, columns),
            elects=self.elects_sign,
            divide=self._normalize(parameters),
            divisor=1.0 if self.elects_sign else _divisor(weights, context.work),
            scale=self._lambda(parameters),
        )

    @abstractmethod
    def rule(self, context: TensorContext, parameters: Parameters, prepared: Prepared, expert: int) -> Rule:
        """What `sparsify` does to expert number `expert`'s delta."""

    def condense(
        self, context: TensorContext, parameters: Parameters, kernels: Kernels, columns: BitsColumns
    ) -> Prepared:
        """What `prepare` gives."""
        return {}


class TaskArithmetic(KernelTaskVector):
    """The weighted sum of the deltas.

    Source: Ilharco et al., "Editing models with task arithmetic", arXiv 2212.04089.
    """

    name: ClassVar[str] = "task_arithmetic"
    parameters: ClassVar[tuple[Parameter, ...]] = (_WEIGHT, _LAMBDA, Parameter("normalize", default=False), _INT8_MASK)

    def sparsify(
        self,
        context: TensorContext,
        parameters: Parameters,
        prepared: Prepared,
        expert: int,
        start: int,
        delta: torch.Tensor,
    ) -> torch.Tensor:
        """Everything."""
        return delta

    def rule(self, context: TensorContext, parameters: Parameters, prepared: Prepared, expert: int) -> Rule:
        """Everything."""
        return Whole()


class Ties(KernelTaskVector):
    """Trim each delta to its largest magnitudes, elect a sign for each element, and average what agrees with it.

    `density` is the share of the whole tensor that is kept: rounded down to a number of elements, at least one unless
    it is 0 or less. Among equal magnitudes at the threshold the lowest indices are kept. Under a budget the threshold
    approximates that of the full delta (`magnitude`).

    `prepare` gives, a list entry for each expert: `threshold_bits`, the bit pattern of the threshold magnitude without
    its sign; `cutoff`, the element index up to which magnitudes equal to it are kept; and `threshold`, the magnitude
    itself, None if it is not finite. An element is kept iff its pattern is above the threshold's, or equal to it and
    its index below the cut-off; everything passes (0, numel).

    Source: Yadav et al., "TIES-Merging", arXiv 2306.01708.
    """

    name: ClassVar[str] = "ties"
    parameters: ClassVar[tuple[Parameter, ...]] = (
        _WEIGHT,
        _DENSITY,
        _LAMBDA,
        Parameter("normalize", default=True),
        _INT8_MASK,
    )
    interaction: ClassVar[Literal["additive", "column"]] = "column"
    elects_sign: ClassVar[bool] = True

    def cuts(
        self, work: str, numel: int, parameters: Parameters, histograms: Sequence[Histogram | None]
    ) -> Sequence[Sequence[Cut]]:
        """One for each expert: the density's."""
        densities = self._densities(parameters)
        return [
            () if histogram is None else (cut_of(histogram, keep_count(density, numel)),)
            for density, histogram in zip(densities, histograms, strict=True)
        ]

    def prepare(
        self, context: TensorContext, parameters: Parameters, columns: Callable[[], Iterator[Column]]
    ) -> Prepared:
        """The thresholds: no pass if every density is ≥ 1 or ≤ 0, else one (16-bit), two (float32) or four (float64),
        and one more if only some elements at a threshold are kept. Cuts save the first one.

        Raises:
            ValueError: a column has no base.
        """

        def source(wanted: Set[int]) -> Iterator[tuple[int, Sequence[Patterns | None]]]:
            for piece in _all_pieces(context, columns):
                base = _base_of(context, piece)
                yield (
                    piece.start,
                    [
                        None if expert is None or i not in wanted else patterns(difference(expert, base)).cpu().numpy()
                        for i, expert in enumerate(piece.experts)
                    ],
                )

        return self._thresholds(context, parameters, Streamed(source))

    def condense(
        self, context: TensorContext, parameters: Parameters, kernels: Kernels, columns: BitsColumns
    ) -> Prepared:
        """The thresholds, in as many passes."""
        return self._thresholds(context, parameters, KernelCounts(kernels, context, columns))

    def _thresholds(self, context: TensorContext, parameters: Parameters, counts: Counts) -> Prepared:
        densities = self._densities(parameters)
        none_left_out: Sequence[Sequence[LeftOut]] = [()] * len(densities)
        found = search_thresholds(
            context.work,
            context.numel,
            [keep_count(density, context.numel) for density in densities],
            context.left_out or none_left_out,
            counts,
            cuts=[cuts[0] if cuts else None for cuts in context.cuts],
            counted=context.counted,
        )
        values = [magnitude(t.pattern, context.work) for t in found]
        return {
            "threshold": [v if np.isfinite(v) else None for v in values],
            "threshold_bits": [t.pattern for t in found],
            "cutoff": [t.cutoff for t in found],
        }

    def sparsify(
        self,
        context: TensorContext,
        parameters: Parameters,
        prepared: Prepared,
        expert: int,
        start: int,
        delta: torch.Tensor,
    ) -> torch.Tensor:
        """The elements that pass the threshold, the others zero."""
        threshold = _threshold(prepared, expert)
        if threshold.pattern == 0 and threshold.cutoff >= context.numel:
            return delta
        return torch.where(kept(patterns(delta), threshold, start), delta, delta.new_zeros(()))

    def rule(self, context: TensorContext, parameters: Parameters, prepared: Prepared, expert: int) -> Rule:
        """The elements that pass the threshold."""
        return rule_of(_threshold(prepared, expert), context)


def _threshold(prepared: Prepared, expert: int) -> Threshold:
    bits = cast("Sequence[int]", prepared["threshold_bits"])[expert]
    return Threshold(bits, cast("Sequence[int]", prepared["cutoff"])[expert])


class DareLinear(KernelTaskVector):
    """Drop elements of each delta at random, scale up what is left, and add the weighted sum.

    Element i of an expert's delta is kept iff its random number (`mpfs.merge.random`, keyed by seed, tensor and expert)
    lies below the density. With `rescale` what is kept is scaled so that its L1 norm over the tensor is that of the
    whole delta (over what is read, under a budget), unless either is below 1e-7: this is mergekit's rule, not the
    paper's 1/density. A density of 1 or more changes nothing, one of 0 or less drops all.

    `prepare` gives `factor`, the scale of each expert. The norms are summed in float64 (`LaneSum`: columns must start
    at multiples of 64 elements), then rounded to the work dtype, and so is their quotient; the work dtype is bfloat16
    for bfloat16, float32 for float16 and float32. The scaled delta is rounded once.

    Source: Yu et al., "Language models are Super Mario", arXiv 2311.03099.
    """

    name: ClassVar[str] = "dare_linear"
    version: ClassVar[int] = 2
    draws: ClassVar[bool] = True
    parameters: ClassVar[tuple[Parameter, ...]] = (
        _WEIGHT,
        _DENSITY,
        _LAMBDA,
        Parameter("normalize", default=False),
        Parameter("rescale", default=True),
        _INT8_MASK,
    )

    def prepare(
        self, context: TensorContext, parameters: Parameters, columns: Callable[[], Iterator[Column]]
    ) -> Prepared:
        """The scales: one pass, or none if nothing is dropped or `rescale` is off.

        Raises:
            ValueError: a column has no base, or starts elsewhere than at a multiple of 64.
        """
        densities = self._densities(parameters)
        sums = {i: (LaneSum(), LaneSum()) for i in self._rescaled(parameters)}
        if not sums:
            return self._factors(context, parameters, {})
        wide = accumulator(context.dtype)
        for piece in _all_pieces(context, columns):
            base = _base_of(context, piece)
            for i, (full, masked) in sums.items():
                expert = piece.experts[i]
                if expert is None:
                    continue
                size = difference(expert, base).abs().to(wide).cpu().numpy()
                mask = bernoulli(self._key(context, i), piece.start, len(size), densities[i])
                full.add(size, piece.start)
                masked.add(np.where(mask, size, size.dtype.type(0)), piece.start)
        return self._factors(
            context, parameters, {i: (full.total(), masked.total()) for i, (full, masked) in sums.items()}
        )

    def condense(
        self, context: TensorContext, parameters: Parameters, kernels: Kernels, columns: BitsColumns
    ) -> Prepared:
        """The scales, in one pass or none."""
        densities = self._densities(parameters)
        keys = {i: (self._key(context, i), densities[i]) for i in self._rescaled(parameters)}
        return self._factors(context, parameters, drawn_norms(kernels, context, columns, keys) if keys else {})

    def _rescaled(self, parameters: Parameters) -> list[int]:
        """The experts whose norms have to be matched."""
        if not value_of(self.parameters, parameters.shared, "rescale"):
            return []
        return [i for i, density in enumerate(self._densities(parameters)) if 0 < density < 1]

    def _factors(
        self, context: TensorContext, parameters: Parameters, norms: Mapping[int, tuple[float, float]]
    ) -> Prepared:
        factors = [1.0] * len(parameters.experts)
        for i, (full, masked) in norms.items():
            factors[i] = norm_ratio(full, masked, context.work)
        return {"factor": factors}

    def sparsify(
        self,
        context: TensorContext,
        parameters: Parameters,
        prepared: Prepared,
        expert: int,
        start: int,
        delta: torch.Tensor,
    ) -> torch.Tensor:
        """The elements that the draw keeps, scaled; the others zero."""
        density = self._densities(parameters)[expert]
        if density >= 1:
            return delta
        if density <= 0:
            return torch.zeros_like(delta)
        mask = torch.from_numpy(bernoulli(self._key(context, expert), start, delta.numel(), density))
        dropped = torch.where(mask.to(delta.device), delta, delta.new_zeros(()))
        factor = cast("Sequence[float]", prepared["factor"])[expert]
        return dropped if factor == 1 else scaled(dropped, factor)

    def rule(self, context: TensorContext, parameters: Parameters, prepared: Prepared, expert: int) -> Rule:
        """The elements that the draw keeps, scaled."""
        density = self._densities(parameters)[expert]
        if density >= 1:
            return Whole()
        factor = cast("Sequence[float]", prepared["factor"])[expert]
        return Drawn(self._key(context, expert), keep_limit(density), 1.0 if density <= 0 else factor)

    @staticmethod
    def _key(context: TensorContext, expert: int) -> int:
        return stream_key(context.seed, context.name, context.expert_keys[expert])


class DareTies(DareLinear):
    """DARE's random dropping, then TIES's sign election; by default the sum of what agrees, not its mean.

    Source: arXiv 2311.03099 and 2306.01708.
    """

    name: ClassVar[str] = "dare_ties"
    interaction: ClassVar[Literal["additive", "column"]] = "column"
    elects_sign: ClassVar[bool] = True
