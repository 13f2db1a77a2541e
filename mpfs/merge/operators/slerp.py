"""Spherical interpolation between two models, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, cast

from mpfs.merge.deferred import torch
from mpfs.merge.kernels.backend import Kernels
from mpfs.merge.kernels.columns import BIT_TYPES
from mpfs.merge.operators.arithmetic import accumulator, one_nan
from mpfs.merge.operators.base import Column, FastPath, Operator, Parameter, Parameters, Prepared, TensorContext
from mpfs.merge.operators.checks import checked
from mpfs.merge.operators.fast import BlendPath
from mpfs.merge.operators.pieces import by_piece
from mpfs.merge.operators.reductions import base_of, sum_each
from mpfs.merge.operators.values import value_of

_PARALLEL = 0.9995
"""A cosine beyond this, of either sign, is interpolated linearly."""

_SMALL_NORM = 1e-8
"""A vector that is no longer than this is not normalised."""


class Slerp(Operator):
    """Along the great circle from the base (t = 0) to the other model (t = 1).

    theta is the angle between the two tensors as vectors; the result is (sin((1 - t) theta) · base + sin(t theta) ·
    other) / sin(theta), on the original magnitudes, or (1 - t) · base + t · other where |cos(theta)| > 0.9995. `t` may
    be a gradient over layers; what arrives here is a number a tensor.

    One pass takes the norms and the product in float64. mergekit 0.1.5 takes them in float32: the results differ by at
    most 1 ulp of a 16-bit dtype, and by 4 ulp of float32, of the larger operand. Where the interpolation is linear, an
    element in which both agree keeps its bits.

    Source: Shoemake, "Animating rotation with quaternion curves", SIGGRAPH 1985; mergekit, arXiv 2403.13257.
    """

    name: ClassVar[str] = "slerp"
    parameters: ClassVar[tuple[Parameter, ...]] = (Parameter("t", required=True),)
    models: ClassVar[tuple[int, int | None]] = (1, 1)

    def validate(self, parameters: Parameters) -> list[str]:
        """No t, or not one model besides the base."""
        return checked(self, parameters)

    def keeps_base(self, parameters: Parameters) -> bool:
        """Only at t = 0: elsewhere the base is scaled where the other model equals it."""
        return float(value_of(self.parameters, parameters.shared, "t")) == 0

    def prepare(
        self, context: TensorContext, parameters: Parameters, columns: Callable[[], Iterator[Column]]
    ) -> Prepared:
        """`factors`, of the base and of the other model, and whether the interpolation is `linear`: one pass.

        Raises:
            ValueError: a column has no base, or starts elsewhere than at a multiple of 64.
        """

        def products(piece: Column) -> Sequence[torch.Tensor]:
            ours = base_of(context, piece).double()
            expert = piece.experts[0]
            other = ours if expert is None else expert.double()
            return ours * ours, other * other, ours * other

        return self._factors(parameters, sum_each(columns, 3, products))

    def _factors(self, parameters: Parameters, sums: Sequence[float]) -> Prepared:
        """What is made of the two squared norms and the product."""
        first, second, both = sums
        t = float(value_of(self.parameters, parameters.shared, "t"))
        lengths = [math.sqrt(square) for square in (first, second)]
        scale = math.prod(norm if norm > _SMALL_NORM else 1.0 for norm in lengths)
        cosine = min(max(both / scale, -1.0), 1.0)
        if not abs(cosine) <= _PARALLEL:
            return {"factors": [1 - t, t], "linear": True}
        theta = math.acos(cosine)
        factors = [math.sin((1 - t) * theta) / math.sin(theta), math.sin(t * theta) / math.sin(theta)]
        return {"factors": factors, "linear": False}

    def fast(self, context: TensorContext, parameters: Parameters, kernels: Kernels) -> FastPath | None:
        """By the kernels for two models."""
        if context.work not in BIT_TYPES:
            return None
        return BlendPath(kernels, context, lambda sums: self._factors(parameters, sums))

    def apply(self, context: TensorContext, parameters: Parameters, prepared: Prepared, column: Column) -> torch.Tensor:
        """One column: two products and a sum in float32 (float64 stays), rounded once.

        Raises:
            ValueError: the column has no base.
        """
        ours_factor, other_factor = cast("Sequence[float]", prepared["factors"])
        linear = bool(prepared["linear"])
        wide = accumulator(context.dtype)

        def mix(piece: Column) -> torch.Tensor:
            ours = base_of(context, piece)
            other = ours if piece.experts[0] is None else piece.experts[0]
            mixed = one_nan((ours.to(wide) * ours_factor + other.to(wide) * other_factor).to(context.dtype))
            return torch.where(ours == other, ours, mixed) if linear else mixed

        return by_piece(column, base_of(context, column), mix)
