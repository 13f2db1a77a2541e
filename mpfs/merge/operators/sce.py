"""Select, calculate, erase: task vectors weighted by their own energy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from typing import ClassVar, Literal, cast

from mpfs.merge.deferred import torch
from mpfs.merge.operators.arithmetic import difference, moved, quotient, scaled, sum_experts
from mpfs.merge.operators.base import Column, Operator, Parameter, Parameters, Prepared, TensorContext
from mpfs.merge.operators.checks import checked
from mpfs.merge.operators.consensus import counting
from mpfs.merge.operators.magnitude import Patterns, Threshold, find_thresholds, keep_everything, kept, patterns
from mpfs.merge.operators.pieces import by_piece
from mpfs.merge.operators.reductions import all_pieces, base_of, sum_each
from mpfs.merge.operators.scalars import bounded, rounded, sum_weights
from mpfs.merge.operators.values import value_of

_SMALL_SUM = 1e-6
"""If the mean squares add up to less, all models weigh the same; a divisor is at least this."""


class Sce(Operator):
    """Keep the elements in which the models vary most, weight each model by its energy, and elect signs as TIES does.

    Of the elements with a variance, the `select_topk` share (rounded down) of the largest is kept, over the whole
    tensor; of equal ones the lowest indices. A model's weight is the mean square of what is kept of its delta, over the
    sum of these. Then the sign of the unweighted sum is elected, and what agrees is averaged by weight. All steps are
    rounded to the tensor's dtype as in mergekit 0.1.5, sums are taken in float64: bit for bit its results, save
    elements whose variance is all but equal to the threshold. With nothing to keep the result is the base (mergekit
    gives a tensor of another shape).

    Where the mean squares add up to less than 1e-6, as is common for small deltas, all models weigh the same.

    `prepare` makes one pass if everything is kept, else up to four (16-bit) or five (float32). It gives the
    `weights`, and the pattern and cutoff of the variance's `threshold` (`magnitude`).

    Source: Wan et al., "FuseChat: knowledge fusion of chat models", arXiv 2408.07990.
    """

    name: ClassVar[str] = "sce"
    parameters: ClassVar[tuple[Parameter, ...]] = (
        Parameter("select_topk", default=1.0),
        Parameter("int8_mask", default=False),
    )
    interaction: ClassVar[Literal["additive", "column"]] = "column"

    def validate(self, parameters: Parameters) -> list[str]:
        """A share that is negative or no number."""
        found = checked(self, parameters)
        if not found and self._share(parameters) < 0:
            found.append(f"select_topk must lie between 0 and 1, not {self._share(parameters)!r}")
        return found

    def prepare(
        self, context: TensorContext, parameters: Parameters, columns: Callable[[], Iterator[Column]]
    ) -> Prepared:
        """The threshold and the weights.

        Raises:
            ValueError: a column has no base, or starts elsewhere than at a multiple of 64.
        """
        count = len(parameters.experts)
        share = self._share(parameters)
        threshold = keep_everything(context.numel)
        if share < 1 and count:
            [varying] = sum_each(columns, 1, lambda piece: [_variance(context, piece) != 0])
            keep = int(share * int(varying))
            if keep == 0:
                return {"threshold": None, "weights": []}

            def source(wanted: Set[int]) -> Iterator[tuple[int, Sequence[Patterns | None]]]:
                for piece in all_pieces(columns):
                    yield piece.start, [patterns(_variance(context, piece)).cpu().numpy()]

            [threshold] = find_thresholds(context.work, context.numel, [keep], [()], source)
        found: dict[str, object] = {"threshold": [threshold.pattern, threshold.cutoff]}

        def squares(piece: Column) -> list[torch.Tensor | None]:
            deltas = _selected(context, found, piece)
            return [None if delta is None else delta * delta for delta in deltas]

        means = [bounded(total / context.numel, context.work) for total in sum_each(columns, count, squares)]
        total = sum_weights(means, context.work) if means else 0.0
        small = not total >= rounded(_SMALL_SUM, context.work)
        found["weights"] = [rounded(1.0 / count if small else mean / total, context.work) for mean in means]
        return found

    def apply(self, context: TensorContext, parameters: Parameters, prepared: Prepared, column: Column) -> torch.Tensor:
        """One column.

        Raises:
            ValueError: the column has no base.
        """
        base = base_of(context, column)
        if prepared["threshold"] is None or not column.experts:
            return base
        weights = cast("Sequence[float]", prepared["weights"])

        def average(piece: Column) -> torch.Tensor:
            ours = base_of(context, piece)
            deltas = _selected(context, prepared, piece)
            agree = counting(deltas, piece.start, context.numel, ours)
            zero = ours.new_zeros(())
            shares = [
                None if mask is None else torch.where(mask, ours.new_tensor(weight), zero)
                for mask, weight in zip(agree, weights, strict=True)
            ]
            terms = [
                None if delta is None or mask is None else torch.where(mask, scaled(delta, weight), zero)
                for delta, mask, weight in zip(deltas, agree, weights, strict=True)
            ]
            divisor = sum_experts(shares, piece.start, context.numel, ours).clamp_(min=_SMALL_SUM)
            return moved(ours, quotient(sum_experts(terms, piece.start, context.numel, ours), divisor))

        return by_piece(column, base, average)

    def _share(self, parameters: Parameters) -> float:
        return float(value_of(self.parameters, parameters.shared, "select_topk"))


def _deltas(context: TensorContext, piece: Column) -> list[torch.Tensor | None]:
    base = base_of(context, piece)
    return [None if expert is None else difference(expert, base) for expert in piece.experts]


def _variance(context: TensorContext, piece: Column) -> torch.Tensor:
    """The population variance of the deltas across models, rounded to the dtype; unread ones are zero."""
    zero = torch.zeros_like(base_of(context, piece), dtype=torch.float64)
    deltas = [zero if delta is None else delta.double() for delta in _deltas(context, piece)]
    mean = zero
    for delta in deltas:
        mean = mean + delta
    mean = mean / len(deltas)
    total = zero
    for delta in deltas:
        total = total + (delta - mean).square()
    return (total / len(deltas)).to(context.dtype)


def _selected(context: TensorContext, prepared: Prepared, piece: Column) -> list[torch.Tensor | None]:
    """The deltas, zero where the variance is below the threshold."""
    pattern, cutoff = cast("Sequence[int]", prepared["threshold"])
    deltas = _deltas(context, piece)
    if pattern == 0 and cutoff >= context.numel:
        return deltas
    mask = kept(patterns(_variance(context, piece)), Threshold(pattern, cutoff), piece.start)
    return [None if delta is None else torch.where(mask, delta, delta.new_zeros(())) for delta in deltas]
