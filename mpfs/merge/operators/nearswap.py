"""Interpolation that is strong where two models nearly agree."""

from __future__ import annotations

from typing import ClassVar

from mpfs.merge.deferred import torch
from mpfs.merge.operators.arithmetic import quotient, scaled
from mpfs.merge.operators.base import Column, Operator, Parameter, Parameters, Prepared, TensorContext
from mpfs.merge.operators.checks import checked
from mpfs.merge.operators.pieces import by_piece
from mpfs.merge.operators.reductions import base_of
from mpfs.merge.operators.values import value_of

_SMALLEST = 1e-6


class NearSwap(Operator):
    """The other model's value where it is within `t` of the base's, and the less of it the farther it is off.

    u = t / max(|base - other|, 1e-6), at most 1 and at least 0; result = u · other + (1 - u) · base, each step rounded
    to the tensor's dtype: bit for bit as mergekit 0.1.5, except that an element in which the two agree (also at
    infinity) keeps the base's bits, and that t = 0 is the base in float16 too (there mergekit gives NaN).

    Source: mergekit, arXiv 2403.13257 (the method is alchemonaut's).
    """

    name: ClassVar[str] = "nearswap"
    parameters: ClassVar[tuple[Parameter, ...]] = (Parameter("t", required=True),)
    models: ClassVar[tuple[int, int | None]] = (1, 1)

    def validate(self, parameters: Parameters) -> list[str]:
        """No t, or not one model besides the base."""
        return checked(self, parameters)

    def apply(self, context: TensorContext, parameters: Parameters, prepared: Prepared, column: Column) -> torch.Tensor:
        """One column.

        Raises:
            ValueError: the column has no base.
        """
        base = base_of(context, column)
        t = float(value_of(self.parameters, parameters.shared, "t"))
        if t <= 0 or not column.experts or column.experts[0] is None:
            return base

        def near(piece: Column) -> torch.Tensor:
            ours, other = base_of(context, piece), piece.experts[0]
            assert other is not None  # the column's is not
            distance = (ours - other).abs().clamp_(min=_SMALLEST)
            share = scaled(quotient(torch.ones_like(distance), distance), t).clamp_(0, 1)
            mixed = share * other + (1 - share) * ours
            return torch.where(ours == other, ours, mixed)

        return by_piece(column, base, near)
