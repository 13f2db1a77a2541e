"""The Riemannian centre of mass of models on a sphere."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, cast

import numpy as np

from mpfs.merge.deferred import torch
from mpfs.merge.operators.base import Column, Operator, Parameter, Parameters, Prepared, TensorContext
from mpfs.merge.operators.checks import checked
from mpfs.merge.operators.pieces import by_piece
from mpfs.merge.operators.reductions import Floats, filled, sum_each
from mpfs.merge.operators.values import value_of

_OPPOSITE = 1e-12
"""A mean direction shorter than this is none."""


class Karcher(Operator):
    """The Karcher mean: the direction from which the models' directions pull equally, at the mean of their lengths.

    Directions are the models as vectors, divided by their norm; the mean direction is found by at most `max_iter` steps
    u ← exp_u(mean of log_u(u_i)), until a step is shorter than `tol`. Models with a norm of at most `tol` have no
    direction but count towards the length; if none has one, or they cancel, the result is the arithmetic mean. All
    models weigh the same; a base model is one of them.

    Every u is a combination of the models, so one pass takes their products in float64, the steps are made on these
    alone, and the result is the combination, in float64, rounded once. mergekit 0.1.5 iterates on the tensors in their
    dtype; in float32 its results differ by at most 4 ulp of the larger operand. In 16-bit dtypes its steps are mostly
    rounding: what MPFS gives there is, within 1 ulp, what mergekit gives with `dtype: float32` and the 16-bit
    `out_dtype`.

    Source: Karcher, "Riemannian center of mass and mollifier smoothing", CPAM 30 (1977); mergekit, arXiv 2403.13257.
    """

    name: ClassVar[str] = "karcher"
    parameters: ClassVar[tuple[Parameter, ...]] = (Parameter("max_iter", default=10), Parameter("tol", default=1e-5))
    needs_base: ClassVar[bool] = False

    def validate(self, parameters: Parameters) -> list[str]:
        """Limits that are negative or no numbers."""
        found = checked(self, parameters)
        if not found:
            found = [
                f"{name} must not be negative"
                for name in ("max_iter", "tol")
                if float(value_of(self.parameters, parameters.shared, name)) < 0
            ]
        return found

    def prepare(
        self, context: TensorContext, parameters: Parameters, columns: Callable[[], Iterator[Column]]
    ) -> Prepared:
        """`factors`, of each model: one pass.

        Raises:
            ValueError: a column starts elsewhere than at a multiple of 64, or a model is missing.
        """
        count = len(parameters.experts)
        pairs = [(i, j) for i in range(count) for j in range(i + 1)]

        def products(piece: Column) -> list[torch.Tensor]:
            models = [values.double() for values in filled(context, piece)]
            return [models[i] * models[j] for i, j in pairs]

        gram = np.zeros((count, count))
        for (i, j), total in zip(pairs, sum_each(columns, len(pairs), products), strict=True):
            gram[i, j] = gram[j, i] = total
        steps = int(value_of(self.parameters, parameters.shared, "max_iter"))
        tol = float(value_of(self.parameters, parameters.shared, "tol"))
        factors = _factors(gram, steps, tol)
        return {"factors": factors.tolist()}

    def apply(self, context: TensorContext, parameters: Parameters, prepared: Prepared, column: Column) -> torch.Tensor:
        """One column.

        Raises:
            ValueError: a model is missing.
        """
        factors = cast("Sequence[float]", prepared["factors"])

        def combine(piece: Column) -> torch.Tensor:
            models = filled(context, piece)
            total = models[0].double() * factors[0]
            for values, factor in zip(models[1:], factors[1:], strict=True):
                total += values.double() * factor
            return total.to(context.dtype)

        return by_piece(column, filled(context, column)[0], combine)


def _factors(gram: Floats, steps: int, tol: float) -> Floats:
    """Of each model, from their products; shape (models,)."""
    count = len(gram)
    plain = np.full(count, 1.0 / count)
    norms = np.sqrt(np.diagonal(gram))
    live = np.flatnonzero(norms > tol)
    if not np.isfinite(gram).all() or not len(live):
        return plain
    # From here on in units of the live models' directions: u = sum of c_i u_i, and products are c' units c.
    units = gram[np.ix_(live, live)] / np.outer(norms[live], norms[live])
    c = np.full(len(live), 1.0 / len(live))
    size = _size(units, c)
    if size < _OPPOSITE:
        return plain
    c /= size
    for _ in range(steps):
        pull = np.zeros(len(live))
        for i, cosine in enumerate(np.clip(units @ c, -1.0, 1.0)):
            theta = math.acos(cosine)
            sine = math.sin(theta)
            # An opposite model pulls in no direction rather than in another.
            rate = 0.0 if sine < _OPPOSITE else theta / sine / len(live)
            pull[i] += rate
            pull -= rate * cosine * c
        size = _size(units, pull)
        if size < max(tol, _OPPOSITE):
            break
        c = math.cos(size) * c + math.sin(size) / size * pull
        c /= _size(units, c)
    factors = np.zeros(count)
    factors[live] = c / norms[live] * norms.mean()
    return factors


def _size(units: Floats, c: Floats) -> float:
    return math.sqrt(max(float(c @ units @ c), 0.0))
