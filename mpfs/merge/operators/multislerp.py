"""Spherical averaging of any number of models or task vectors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Literal, cast

from mpfs.merge.deferred import torch
from mpfs.merge.operators.arithmetic import accumulator, difference, moved, quotient, scaled, sum_experts
from mpfs.merge.operators.base import Column, Operator, Parameter, Parameters, Prepared, TensorContext
from mpfs.merge.operators.checks import checked
from mpfs.merge.operators.doubled import all_doubled, doubled, is_single, widened
from mpfs.merge.operators.pieces import by_piece
from mpfs.merge.operators.reductions import filled, sum_each
from mpfs.merge.operators.scalars import bounded, rounded, sum_weights
from mpfs.merge.operators.values import value_of


class MultiSlerp(Operator):
    """The weighted mean direction of the models, at the weighted mean of their lengths.

    With unit vectors u_i and weights w_i (divided by their sum if `normalize_weights`): m = sum w_i u_i, result =
    m / |m| · sum w_i |x_i|. Where the recipe names a base, that is done with the deltas and added to it. A single
    model comes out as it is. Where |m| < `eps` there is no direction, and the result is sum w_i x_i (mergekit 0.1.5
    does so for two models, and fails for more, as soon as a tensor is unchanged in all of them).

    mergekit goes on to a weighted sum of the tangents u_i - (u_i · m) m, which is zero but for its rounding. In a
    16-bit dtype that rounding shows, so there it is followed, every step rounded to the dtype but sums in float64: the
    results differ from mergekit's by at most 1 ulp of a 16-bit dtype. Float32 is worked on in float64 and rounded once;
    mergekit's results are within 4 ulp of the larger operand of that, more if weights are not normalised.

    `prepare` makes two passes, for 16-bit dtypes four.

    Source: Buss and Fillmore, "Spherical averages and applications to spherical splines and interpolation", ACM
    Transactions on Graphics 20 (2001); mergekit, arXiv 2403.13257.
    """

    name: ClassVar[str] = "multislerp"
    parameters: ClassVar[tuple[Parameter, ...]] = (
        Parameter("weight", required=True, per_model=True),
        Parameter("normalize_weights", default=True),
        Parameter("eps", default=1e-8),
    )
    needs_base: ClassVar[bool] = False
    optional_base: ClassVar[bool] = True
    interaction: ClassVar[Literal["additive", "column"]] = "column"
    version: ClassVar[int] = 2

    def validate(self, parameters: Parameters) -> list[str]:
        """Also: weights that sum to zero cannot be normalised."""
        found = checked(self, parameters)
        averaged = not found and len(parameters.experts) > 1 and self._normalize(parameters)
        if averaged and sum_weights(self._given(parameters), "F32") == 0:
            found.append("the weights sum to zero; change a weight or set normalize_weights: false")
        return found

    def keeps_base(self, parameters: Parameters) -> bool:
        """With a base only deltas are averaged, and the average of none is none."""
        return True

    def prepare(
        self, context: TensorContext, parameters: Parameters, columns: Callable[[], Iterator[Column]]
    ) -> Prepared:
        """`lengths` of the models and of their `mean` direction, the result's `length`, and whether that is `linear`.

        For 16-bit dtypes also `cosines`, of each model to the mean, and the length of the `tangent`.

        Raises:
            ValueError: a column starts elsewhere than at a multiple of 64.
        """
        if is_single(context):
            return self.prepare(widened(context), parameters, all_doubled(columns))
        dtype = context.dtype
        count = len(parameters.experts)
        if count < 2:
            return {}
        weights = self._weights(context, parameters)
        squares = sum_each(columns, count, lambda piece: [x.double().square() for x in _vectors(context, piece)])
        lengths = [bounded(math.sqrt(square), context.work) for square in squares]
        eps = float(value_of(self.parameters, parameters.shared, "eps"))
        length = sum_weights(
            [rounded(w * n, context.work) for w, n in zip(weights, lengths, strict=True)], context.work
        )
        found: dict[str, object] = {
            "divisors": [bounded(n + rounded(eps, context.work), context.work) for n in lengths],
            "length": length if math.isfinite(length) else 0.0,
        }
        [square] = sum_each(
            columns, 1, lambda piece: [_total(context, piece, _units(context, found, piece), weights).double().square()]
        )
        mean = bounded(math.sqrt(square), context.work)
        found["mean"] = mean
        found["linear"] = not mean >= eps or mean == 0
        if not all(math.isfinite(value) for value in (mean, *cast("Sequence[float]", found["divisors"]))):
            return {"linear": True}
        if found["linear"] or accumulator(dtype) == dtype:
            return found

        def products(piece: Column) -> Sequence[torch.Tensor]:
            units = _units(context, found, piece)
            direction = _direction(context, found, piece, units, weights)
            return [unit * direction for unit in units]

        found["cosines"] = [bounded(value, context.work) for value in sum_each(columns, count, products)]
        [square] = sum_each(columns, 1, lambda piece: [_tangent(context, found, piece, weights)[1].double().square()])
        found["tangent"] = bounded(math.sqrt(square), context.work)
        return found

    def apply(self, context: TensorContext, parameters: Parameters, prepared: Prepared, column: Column) -> torch.Tensor:
        """One column."""
        if is_single(context):
            return self.apply(widened(context), parameters, prepared, doubled(column)).float()
        models = filled(context, column)
        if len(models) == 1:
            return models[0]
        weights = self._weights(context, parameters)

        def average(piece: Column) -> torch.Tensor:
            if prepared["linear"]:
                mixed = _total(context, piece, _vectors(context, piece), weights)
            else:
                mixed = _spherical(context, prepared, piece, weights)
            return mixed if piece.base is None else moved(piece.base, mixed)

        return by_piece(column, models[0], average)

    def _given(self, parameters: Parameters) -> list[float]:
        return [float(value_of(self.parameters, values, "weight")) for values in parameters.experts]

    def _normalize(self, parameters: Parameters) -> bool:
        return bool(value_of(self.parameters, parameters.shared, "normalize_weights"))

    def _weights(self, context: TensorContext, parameters: Parameters) -> list[float]:
        weights = [rounded(weight, context.work) for weight in self._given(parameters)]
        if not self._normalize(parameters):
            return weights
        total = sum_weights(weights, context.work)
        return [rounded(weight / total, context.work) if total else 0.0 for weight in weights]


def _vectors(context: TensorContext, piece: Column) -> list[torch.Tensor]:
    """The models, or their deltas where there is a base."""
    models = filled(context, piece)
    base = piece.base
    return models if base is None else [difference(model, base) for model in models]


def _units(context: TensorContext, prepared: Prepared, piece: Column) -> list[torch.Tensor]:
    divisors = cast("Sequence[float]", prepared["divisors"])
    return [
        quotient(values, values.new_tensor(divisor)) if divisor else torch.zeros_like(values)
        for values, divisor in zip(_vectors(context, piece), divisors, strict=True)
    ]


def _total(
    context: TensorContext, piece: Column, vectors: Sequence[torch.Tensor], weights: Sequence[float]
) -> torch.Tensor:
    terms = [scaled(values, weight) for values, weight in zip(vectors, weights, strict=True)]
    return sum_experts(terms, piece.start, context.numel, vectors[0])


def _direction(
    context: TensorContext,
    prepared: Prepared,
    piece: Column,
    units: Sequence[torch.Tensor],
    weights: Sequence[float],
) -> torch.Tensor:
    total = _total(context, piece, units, weights)
    return quotient(total, total.new_tensor(cast("float", prepared["mean"])))


def _tangent(
    context: TensorContext, prepared: Prepared, piece: Column, weights: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean direction, and the weighted sum of the models' tangents there."""
    units = _units(context, prepared, piece)
    direction = _direction(context, prepared, piece, units, weights)
    cosines = cast("Sequence[float]", prepared["cosines"])
    tangents = [unit - scaled(direction, cosine) for unit, cosine in zip(units, cosines, strict=True)]
    return direction, _total(context, piece, tangents, weights)


def _spherical(context: TensorContext, prepared: Prepared, piece: Column, weights: Sequence[float]) -> torch.Tensor:
    length = cast("float", prepared["length"])
    if "tangent" not in prepared:
        return scaled(_direction(context, prepared, piece, _units(context, prepared, piece), weights), length)
    direction, tangent = _tangent(context, prepared, piece, weights)
    size = cast("float", prepared["tangent"])
    if size == 0:
        return scaled(direction, length)
    work = context.work
    cosine, rate = rounded(math.cos(size), work), rounded(rounded(math.sin(size), work) / size, work)
    return scaled(scaled(direction, cosine) + scaled(tangent, rate), length)
