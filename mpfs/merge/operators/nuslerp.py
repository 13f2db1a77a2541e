"""Spherical interpolation between two models or two task vectors, of whole tensors or row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, cast

import numpy as np

from mpfs.merge.deferred import torch
from mpfs.merge.operators.arithmetic import accumulator, difference, moved, quotient
from mpfs.merge.operators.base import Column, Operator, Parameter, Parameters, Prepared, TensorContext
from mpfs.merge.operators.checks import checked
from mpfs.merge.operators.doubled import all_doubled, doubled, is_single, widened
from mpfs.merge.operators.pieces import by_piece
from mpfs.merge.operators.reductions import Floats, all_pieces, doubles, filled, length, row_sums, sum_each, unchanged
from mpfs.merge.operators.rows import measure_cut_rows, row_index, row_values, shape_of, without_gaps
from mpfs.merge.operators.scalars import rounded
from mpfs.merge.operators.values import value_of

_SMALL_NORM = 1e-7
"""Vectors are divided by their norm, or by this if that is less."""

_SMALL_SUM = 1e-6
"""Weights whose sum is closer to zero than this count as equal."""

_COLLINEAR = 1 - 1e-6
"""Vectors with a larger cosine, of either sign, are interpolated linearly."""


class NuSlerp(Operator):
    """(sin((1 - t) theta) · first + sin(t theta) · second) / sin(theta), with t = second weight / sum of weights.

    theta is the angle between the two as vectors: of the whole tensor with `nuslerp_flatten` (the default); else of
    each row (a run along the last axis), or, with `nuslerp_row_wise`, of each run along the first axis. Where the
    recipe names a base, the two deltas are interpolated and added to it. In 16-bit dtypes sums
    are taken in float64 and every other step is rounded as in mergekit 0.1.5, from which the results differ by at most 1
    ulp of the larger operand; float32 is worked on in float64 and rounded once, at most 4 ulp from it. Opposite vectors have no great circle: they, too, are interpolated
    linearly (mergekit divides by nearly zero there).

    `prepare` makes two passes for whole tensors; one for rows, holding one row of every model; two for runs along the
    first axis, holding three numbers for each.

    Source: Shoemake, "Animating rotation with quaternion curves", SIGGRAPH 1985; mergekit, arXiv 2403.13257.
    """

    name: ClassVar[str] = "nuslerp"
    parameters: ClassVar[tuple[Parameter, ...]] = (
        Parameter("weight", required=True, per_model=True),
        Parameter("nuslerp_flatten", default=True),
        Parameter("nuslerp_row_wise", default=False),
    )
    needs_base: ClassVar[bool] = False
    optional_base: ClassVar[bool] = True
    models: ClassVar[tuple[int, int | None]] = (2, 2)
    by_rows: ClassVar[bool] = True
    version: ClassVar[int] = 2

    def validate(self, parameters: Parameters) -> list[str]:
        """A weight that is missing, or not two models."""
        return checked(self, parameters)

    def keeps_base(self, parameters: Parameters) -> bool:
        """With a base only deltas are interpolated, and none gives none."""
        return True

    def held(self, context: TensorContext, parameters: Parameters) -> int:
        """Rows; or sums, norms and factors of runs along the first axis."""
        along = self._along(context, parameters)
        if along == "first axis":
            return 16 * 8 * (context.numel // max(1, shape_of(context)[0]))
        return super().held(context, parameters) if along == "rows" else 0

    def prepare(
        self, context: TensorContext, parameters: Parameters, columns: Callable[[], Iterator[Column]]
    ) -> Prepared:
        """`factors`: of the first, of the second, and the divisor; along the first axis a list of each.

        Raises:
            ValueError: a column starts elsewhere than at a multiple of 64.
        """
        if is_single(context):
            return self.prepare(widened(context), parameters, all_doubled(columns))
        share = self._share(parameters)
        along = self._along(context, parameters)
        if along == "rows":
            width = shape_of(context)[-1]
            streamed = without_gaps(context, columns(), 2, width)
            return measure_cut_rows(streamed, width, lambda rows: _measure(context, rows, width, share))
        if along == "tensor":
            squares = sum_each(columns, 2, lambda piece: [x.double().square() for x in _pair(context, piece)])
            norms = [_norm(context, np.array([square])) for square in squares]
            product = sum_each(columns, 1, lambda piece: [_cosine_terms(_pair(context, piece), norms, None)])
            return {"factors": _factors(context, np.array(product), share)[0].tolist()}
        inner = max(1, context.numel // shape_of(context)[0])
        totals = np.zeros((2, inner))
        for piece in all_pieces(columns):
            for total, values in zip(totals, _pair(context, piece), strict=True):
                np.add.at(total, _places(piece, inner), doubles(values.double().square()))
        norms = [_norm(context, total) for total in totals]
        products = np.zeros(inner)
        for piece in all_pieces(columns):
            places = _places(piece, inner)
            np.add.at(products, places, doubles(_cosine_terms(_pair(context, piece), norms, places)))
        return {"factors": _factors(context, products, share).tolist()}

    def apply(self, context: TensorContext, parameters: Parameters, prepared: Prepared, column: Column) -> torch.Tensor:
        """One column."""
        if is_single(context):
            return self.apply(widened(context), parameters, prepared, doubled(column)).float()
        if column.base is not None and unchanged(column):
            return column.base
        share = self._share(parameters)
        along = self._along(context, parameters)
        count = length(column)
        places = np.zeros(0, dtype=np.int64)
        if along == "rows":
            width = shape_of(context)[-1]
            table = row_values(column, width, prepared, lambda rows: _measure(context, rows, width, share))
            places = row_index(column.start, count, width)
        elif along == "tensor":
            table = np.asarray([prepared["factors"]], dtype=np.float64)
        else:
            table = np.asarray(prepared["factors"], dtype=np.float64)
            places = _places(column, len(table))
        wide = accumulator(context.dtype)

        def mix(piece: Column) -> torch.Tensor:
            first, second = _pair(context, piece)
            low = piece.start - column.start
            chosen = table if along == "tensor" else table[places[low : low + first.numel()]]
            one, two, divisor = torch.from_numpy(chosen).to(first.device, wide).unbind(1)
            parts = [(x.to(wide) * factor).to(context.dtype) for x, factor in ((first, one), (second, two))]
            mixed = quotient(parts[0] + parts[1], divisor)
            return mixed if piece.base is None else moved(piece.base, mixed)

        like = column.base if column.base is not None else filled(context, column)[0]
        return by_piece(column, like, mix)

    def _share(self, parameters: Parameters) -> float:
        first, second = (float(value_of(self.parameters, values, "weight")) for values in parameters.experts)
        return 0.5 if abs(first + second) < _SMALL_SUM else second / (first + second)

    def _along(self, context: TensorContext, parameters: Parameters) -> str:
        flatten, by_first = (
            bool(value_of(self.parameters, parameters.shared, name)) for name in ("nuslerp_flatten", "nuslerp_row_wise")
        )
        if flatten or len(shape_of(context)) == 1:
            return "tensor"
        return "first axis" if by_first else "rows"


def _pair(context: TensorContext, piece: Column) -> list[torch.Tensor]:
    """The two vectors: the models, or their deltas where there is a base."""
    models = filled(context, piece)
    base = piece.base
    return models if base is None else [difference(model, base) for model in models]


def _places(piece: Column, inner: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """For each element which run along the first axis it belongs to."""
    return np.arange(piece.start, piece.start + length(piece), dtype=np.int64) % inner


def _norm(context: TensorContext, squares: Floats) -> Floats:
    """Norms to divide by, rounded to the dtype."""
    norms = doubles(torch.from_numpy(np.sqrt(squares)).to(context.dtype))
    found: Floats = np.maximum(norms, rounded(_SMALL_NORM, context.work))
    return found


def _cosine_terms(
    pair: Sequence[torch.Tensor], norms: Sequence[Floats], places: np.ndarray[tuple[int], np.dtype[np.int64]] | None
) -> torch.Tensor:
    """The products of the normalised vectors' elements, each step rounded to the dtype."""
    units = []
    for values, norm in zip(pair, norms, strict=True):
        each = norm[0] if places is None else norm[places]
        units.append(quotient(values, torch.as_tensor(each, device=values.device).to(values.dtype)))
    return units[0] * units[1]


def _measure(context: TensorContext, rows: Column, width: int, share: float) -> Floats:
    """The factors of each whole row; shape (rows, 3)."""
    pair = _pair(context, rows)
    norms = [_norm(context, row_sums(doubles(values).reshape(-1, width) ** 2)) for values in pair]
    index = row_index(0, pair[0].numel(), width)
    terms = doubles(_cosine_terms(pair, norms, cast("np.ndarray[tuple[int], np.dtype[np.int64]]", index)))
    return _factors(context, row_sums(terms.reshape(-1, width)), share)


def _factors(context: TensorContext, products: Floats, share: float) -> Floats:
    """The two factors and the divisor from the cosine, each step rounded to the dtype; shape (n, 3)."""

    def at(values: Floats) -> Floats:
        return doubles(torch.from_numpy(values).to(context.dtype))

    cosine = np.clip(at(products), -1.0, 1.0)
    linear = ~(np.abs(cosine) <= _COLLINEAR)
    theta = at(np.arccos(np.where(linear, 0.0, cosine)))
    factors = np.stack([at(np.sin(at((1 - share) * theta))), at(np.sin(at(share * theta))), at(np.sin(theta))], axis=1)
    factors[linear] = (1 - share, share, 1.0)
    return factors
