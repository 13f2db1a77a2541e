"""Merging by which models touched an element: RAM and RAM+ (reinforced agent merging)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Literal, cast

from mpfs.merge.deferred import torch
from mpfs.merge.operators.arithmetic import accumulator, difference, moved, quotient, sum_experts
from mpfs.merge.operators.base import Column, Operator, Parameter, Parameters, Prepared, TensorContext
from mpfs.merge.operators.checks import checked
from mpfs.merge.operators.pieces import by_piece
from mpfs.merge.operators.reductions import base_of, sum_each
from mpfs.merge.operators.scalars import accumulator_name, rounded
from mpfs.merge.operators.values import value_of

_EPSILON = Parameter("epsilon", default=1e-5)


class Ram(Operator):
    """Where one model changed an element, its delta; where several did, the mean of their deltas.

    A model touches an element if its delta is larger than `epsilon` (rounded to the tensor's dtype). Each delta is
    divided by the number of models that touch the element and the quotients are summed, in the tensor's dtype: bit for
    bit as mergekit 0.1.5.

    Source: Yuan et al., "Behavior knowledge merge in reinforced agentic models", arXiv 2601.13572.
    """

    name: ClassVar[str] = "ram"
    parameters: ClassVar[tuple[Parameter, ...]] = (_EPSILON,)
    interaction: ClassVar[Literal["additive", "column"]] = "column"

    def validate(self, parameters: Parameters) -> list[str]:
        """An epsilon that is negative or no number."""
        found = checked(self, parameters)
        if not found and self._value(parameters, "epsilon") < 0:
            found.append("epsilon must not be negative")
        return found

    def apply(self, context: TensorContext, parameters: Parameters, prepared: Prepared, column: Column) -> torch.Tensor:
        """One column.

        Raises:
            ValueError: the column has no base.
        """

        def merge(piece: Column) -> torch.Tensor:
            base = base_of(context, piece)
            deltas, touched, count = self._touched(context, parameters, piece)
            return self._combine(context, prepared, piece.start, base, deltas, touched, count)

        return by_piece(column, base_of(context, column), merge)

    def _combine(
        self,
        context: TensorContext,
        prepared: Prepared,
        start: int,
        base: torch.Tensor,
        deltas: Sequence[torch.Tensor | None],
        touched: Sequence[torch.Tensor | None],
        count: torch.Tensor,
    ) -> torch.Tensor:
        return moved(base, sum_experts(_shares(deltas, touched, count), start, context.numel, base))

    def _touched(
        self, context: TensorContext, parameters: Parameters, piece: Column
    ) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None], torch.Tensor]:
        """The deltas, where they touch, and how many touch each element."""
        base = base_of(context, piece)
        epsilon = rounded(self._value(parameters, "epsilon"), context.work)
        deltas = [None if expert is None else difference(expert, base) for expert in piece.experts]
        touched = [None if delta is None else delta.abs() > epsilon for delta in deltas]
        count = torch.zeros(base.numel(), dtype=torch.int32, device=base.device)
        for mask in touched:
            if mask is not None:
                count += mask
        return deltas, touched, count

    def _value(self, parameters: Parameters, name: str) -> float:
        return float(value_of(self.parameters, parameters.shared, name))


class RamPlus(Ram):
    """RAM, with what only one model changed amplified, the more so the more of that model's changes others share.

    A model's factor is 1 + r · min(shared / unique, alpha), where `unique` counts the elements that only it touches and
    `shared` those that others touch too (1 where it has no unique ones). Factors, products and the sum are float32
    (float64 stays), rounded once at the end. The output has the dtype that was asked for; mergekit 0.1.5 gives float32
    whatever the inputs are, which rounded is the same to the bit.

    Source: arXiv 2601.13572.
    """

    name: ClassVar[str] = "ramplus_tl"
    parameters: ClassVar[tuple[Parameter, ...]] = (
        _EPSILON,
        Parameter("r", default=0.1),
        Parameter("alpha", default=0.2),
    )

    def prepare(
        self, context: TensorContext, parameters: Parameters, columns: Callable[[], Iterator[Column]]
    ) -> Prepared:
        """`factor`, each model's: one pass that counts.

        Raises:
            ValueError: a column has no base, or starts elsewhere than at a multiple of 64.
        """
        experts = len(parameters.experts)

        def counts(piece: Column) -> list[torch.Tensor | None]:
            _, touched, count = self._touched(context, parameters, piece)
            unique = [None if mask is None else mask & (count == 1) for mask in touched]
            shared = [None if mask is None else mask & (count > 1) for mask in touched]
            return unique + shared

        found = sum_each(columns, 2 * experts, counts)
        wide = accumulator_name(context.work)
        r, alpha = self._value(parameters, "r"), self._value(parameters, "alpha")
        factors = []
        for unique, shared in zip(found[:experts], found[experts:], strict=True):
            ratio = min(max(shared / unique, 0.0), alpha) if unique else 0.0
            factors.append(rounded(1 + rounded(rounded(r, wide) * rounded(ratio, wide), wide), wide))
        return {"factor": factors}

    def _combine(
        self,
        context: TensorContext,
        prepared: Prepared,
        start: int,
        base: torch.Tensor,
        deltas: Sequence[torch.Tensor | None],
        touched: Sequence[torch.Tensor | None],
        count: torch.Tensor,
    ) -> torch.Tensor:
        wide = accumulator(context.dtype)
        factors = cast("Sequence[float]", prepared["factor"])
        only = count == 1
        terms = [
            None if share is None else torch.where(only, share.to(wide) * share.new_tensor(factor, dtype=wide), share)
            for share, factor in zip(_shares(deltas, touched, count), factors, strict=True)
        ]
        base_wide = base.to(wide)
        return moved(base_wide, sum_experts(terms, start, context.numel, base_wide)).to(context.dtype)


def _shares(
    deltas: Sequence[torch.Tensor | None], touched: Sequence[torch.Tensor | None], count: torch.Tensor
) -> list[torch.Tensor | None]:
    return [
        None
        if delta is None or mask is None
        else quotient(torch.where(mask, delta, delta.new_zeros(())), count.clamp(min=1))
        for delta, mask in zip(deltas, touched, strict=True)
    ]
