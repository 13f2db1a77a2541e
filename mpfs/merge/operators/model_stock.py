"""Averaging, and moving back towards the base as far as the models' disagreement says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from typing import ClassVar, Literal, cast

import numpy as np

from mpfs.merge.deferred import torch
from mpfs.merge.operators.arithmetic import difference, quotient
from mpfs.merge.operators.base import Column, Operator, Parameter, Parameters, Prepared, TensorContext
from mpfs.merge.operators.checks import checked
from mpfs.merge.operators.doubled import all_doubled, doubled, is_single, widened
from mpfs.merge.operators.pieces import by_piece
from mpfs.merge.operators.reductions import Floats, base_of, doubles, filled, length, row_sums, sum_each, unchanged
from mpfs.merge.operators.rows import measure_cut_rows, row_index, row_values, shape_of, without_gaps
from mpfs.merge.operators.scalars import rounded
from mpfs.merge.operators.values import value_of

_SMALL_PRODUCT = 1e-6
"""Products of norms are at least this when a product of deltas is divided by them."""

_SMALL_DIVISOR = 1e-6


class ModelStock(Operator):
    """t · mean + (1 - t) · base, where t comes from the angle between the models as seen from the base.

    c is the mean cosine between the N deltas, in pairs, and t = N c / (1 + (N - 1) c); the base where that divides by
    less than 1e-6. With `filter_wise` each row (a run along the last axis) has an angle of its own, else the tensor
    has one. In 16-bit dtypes sums are taken in float64 and every other step is rounded as in mergekit 0.1.5, from which
    the results differ by at most 1 ulp of the larger operand; float32 is worked on in float64 and rounded once, at most
    4 ulp from it (more where a row's t is above 1: there mergekit's rounding grows). An element in which all models
    equal the base keeps its bits.

    `prepare` makes one pass. With `filter_wise` it holds one row of every model.

    Source: Jang et al., "Model Stock: all we need is just a few fine-tuned models", arXiv 2403.19522.
    """

    name: ClassVar[str] = "model_stock"
    parameters: ClassVar[tuple[Parameter, ...]] = (Parameter("filter_wise", default=False),)
    interaction: ClassVar[Literal["additive", "column"]] = "column"
    models: ClassVar[tuple[int, int | None]] = (2, None)
    by_rows: ClassVar[bool] = True
    version: ClassVar[int] = 2

    def validate(self, parameters: Parameters) -> list[str]:
        """Fewer than two models besides the base."""
        return checked(self, parameters)

    def held(self, context: TensorContext, parameters: Parameters) -> int:
        """Rows with `filter_wise`, else nothing."""
        rows = value_of(self.parameters, parameters.shared, "filter_wise")
        return super().held(context, parameters) if rows else 0

    def prepare(
        self, context: TensorContext, parameters: Parameters, columns: Callable[[], Iterator[Column]]
    ) -> Prepared:
        """`t`, or that of the rows that columns cut: one pass.

        Raises:
            ValueError: a column has no base, or starts elsewhere than at a multiple of 64.
        """
        if is_single(context):
            return self.prepare(widened(context), parameters, all_doubled(columns))
        if value_of(self.parameters, parameters.shared, "filter_wise"):
            width = shape_of(context)[-1]
            streamed = without_gaps(context, columns(), len(parameters.experts), width)
            return measure_cut_rows(streamed, width, lambda rows: _measure(context, rows, width))
        count = len(parameters.experts)
        sums = sum_each(columns, count + count * (count - 1) // 2, lambda piece: _products(context, piece))
        return {"t": float(_ratio(context, count, np.array([sums]))[0])}

    def apply(self, context: TensorContext, parameters: Parameters, prepared: Prepared, column: Column) -> torch.Tensor:
        """One column.

        Raises:
            ValueError: the column has no base.
        """
        if is_single(context):
            return self.apply(widened(context), parameters, prepared, doubled(column)).float()
        base = base_of(context, column)
        if len(column.experts) < 2 or unchanged(column):
            return base
        if value_of(self.parameters, parameters.shared, "filter_wise"):
            width = shape_of(context)[-1]
            values = row_values(column, width, prepared, lambda rows: _measure(context, rows, width))[:, 0]
            each = torch.from_numpy(values).to(base.device, context.dtype)
            share = each[torch.from_numpy(row_index(column.start, length(column), width)).to(base.device)]
        else:
            share = base.new_tensor(cast("float", prepared["t"])).expand(base.shape)

        def average(piece: Column) -> torch.Tensor:
            ours, t = base_of(context, piece), piece.experts[-1]
            assert t is not None
            models = filled(context, Column(piece.start, ours, piece.experts[:-1]))
            total = models[0]
            agree = models[0] == ours
            for model in models[1:]:
                total = total + model
                agree &= model == ours
            mean = quotient(total, total.new_tensor(float(len(models))))
            mixed = t * mean + (1 - t) * ours
            return torch.where(agree | ((t == 0) & torch.isfinite(mean)), ours, mixed)

        return by_piece(Column(column.start, base, [*column.experts, share]), base, average)


def _products(context: TensorContext, column: Column) -> list[torch.Tensor | None]:
    """Squares of the deltas (exact), then their products in pairs (rounded to the dtype)."""
    base = base_of(context, column)
    deltas = [None if expert is None else difference(expert, base) for expert in column.experts]
    squares = [None if delta is None else delta.double().square() for delta in deltas]
    pairs = [
        None if first is None or second is None else (first * second).double()
        for first, second in combinations(deltas, 2)
    ]
    return squares + pairs


def _measure(context: TensorContext, rows: Column, width: int) -> Floats:
    """t of each whole row; shape (rows, 1)."""
    count = base_of(context, rows).numel() // width
    sums = [
        np.zeros(count) if values is None else row_sums(doubles(values).reshape(count, width))
        for values in _products(context, rows)
    ]
    return _ratio(context, len(rows.experts), np.stack(sums, axis=1))[:, None]


def _ratio(context: TensorContext, count: int, sums: Floats) -> Floats:
    """t from the sums of `_products`, each step rounded to the dtype; shapes (rows, sums) and (rows,).

    0 where it is not to be had: the base.
    """

    def at(values: Floats) -> Floats:
        return doubles(torch.from_numpy(values).to(context.dtype))

    with np.errstate(all="ignore"):
        norms = at(np.sqrt(sums[:, :count]))
        cosines = []
        for place, (i, j) in enumerate(combinations(range(count), 2)):
            scale = np.maximum(at(norms[:, i] * norms[:, j]), rounded(_SMALL_PRODUCT, context.work))
            cosines.append(np.clip(at(at(sums[:, count + place]) / scale), -1.0, 1.0))
        mean = np.zeros(len(sums))
        for cosine in cosines:
            mean += cosine
        mean = at(mean / max(len(cosines), 1))
        divisor = at(1 + at((count - 1) * mean))
        ratio = at(at(count * mean) / divisor)
    found: Floats = np.where((np.abs(divisor) >= _SMALL_DIVISOR) & np.isfinite(ratio), ratio, 0.0)
    return found
