"""Taking over only the differences that matter most."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import ClassVar, cast

import numpy as np

from mpfs.merge.deferred import torch
from mpfs.merge.operators.arithmetic import difference, moved
from mpfs.merge.operators.base import Column, Operator, Parameter, Parameters, Prepared, TensorContext
from mpfs.merge.operators.checks import checked
from mpfs.merge.operators.order import order_statistics
from mpfs.merge.operators.pieces import by_piece
from mpfs.merge.operators.reductions import Floats, base_of, doubles, length, row_sums
from mpfs.merge.operators.rows import measure_cut_rows, row_index, row_values, shape_of, whole_rows
from mpfs.merge.operators.scalars import rounded as rounded_to

_OFFSET = 1e-8
"""What is added to probabilities before their ratio is taken."""

_SPREADS = 1.5
"""The threshold lies this many interquartile ranges above the median."""


class ArceeFusion(Operator):
    """The base, plus the other model's delta where its importance is an outlier.

    The importance of an element is |delta| times its row's divergence KL(softmax(other) || softmax(base)), a row being
    a run along the last axis (a vector is one row). Elements of an importance of at least median + 1.5 · interquartile
    range are taken over; quantile q is the element of rank floor(q · (n - 1)). All steps are rounded to the tensor's
    dtype as in mergekit 0.1.5, exponentials, logarithms and sums are taken in float64. Elements may differ from
    mergekit's whose importance lies within 1e-6 of the threshold, for the divergence of nearly equal rows is mostly
    rounding there.

    Otherwise than in mergekit the output has the tensor's dtype (there it is always float32), and the quantiles are
    those of all elements (there of a random million).

    `prepare` gives the `threshold` (None: nothing is taken over), and the divergence of rows that columns cut. It makes
    two passes for a 16-bit dtype and three for float32, and holds one row of both models. What a budget leaves unread
    counts as equal to the base.

    Source: mergekit, arXiv 2403.13257 (the method is Arcee's).
    """

    name: ClassVar[str] = "arcee_fusion"
    parameters: ClassVar[tuple[Parameter, ...]] = ()
    models: ClassVar[tuple[int, int | None]] = (1, 1)
    by_rows: ClassVar[bool] = True

    def validate(self, parameters: Parameters) -> list[str]:
        """Not one model besides the base."""
        return checked(self, parameters)

    def keeps_base(self, parameters: Parameters) -> bool:
        """It would, but rows may reach into columns that then were not streamed, and all of a row's values count."""
        return False

    def prepare(
        self, context: TensorContext, parameters: Parameters, columns: Callable[[], Iterator[Column]]
    ) -> Prepared:
        """The threshold and the cut rows' divergence.

        Raises:
            ValueError: a column has no base.
        """
        width = shape_of(context)[-1]
        if context.numel == 0:
            return {"threshold": None, "row_numbers": [], "row_values": []}
        stored = measure_cut_rows(columns(), width, _measure(context, width))

        def scores() -> Iterator[torch.Tensor]:
            for rows, _ in whole_rows(columns(), width):
                yield _scores(context, width, {}, rows)

        ranks = [math.floor(q * (context.numel - 1)) for q in (0.25, 0.5, 0.75)]
        low, median, high = order_statistics(context.dtype, ranks, scores)
        threshold = _threshold(low, median, high, context.work)
        return {"threshold": threshold if math.isfinite(threshold) else None, **stored}

    def apply(self, context: TensorContext, parameters: Parameters, prepared: Prepared, column: Column) -> torch.Tensor:
        """One column.

        Raises:
            ValueError: the column has no base.
        """
        base = base_of(context, column)
        threshold = cast("float | None", prepared["threshold"])
        if threshold is None or not column.experts or column.experts[0] is None:
            return base
        scores = _scores(context, shape_of(context)[-1], prepared, column)

        def fuse(piece: Column) -> torch.Tensor:
            ours, other, score = base_of(context, piece), piece.experts[0], piece.experts[1]
            assert other is not None
            assert score is not None
            delta = difference(other, ours)
            return moved(ours, torch.where(score >= threshold, delta, delta.new_zeros(())))

        return by_piece(Column(column.start, base, [column.experts[0], scores]), base, fuse)


def _threshold(low: float, median: float, high: float, work: str) -> float:
    """The median and one and a half times the range between the quartiles, every step rounded to the work dtype."""
    spread = rounded_to(_SPREADS * rounded_to(high - low, work), work)
    return rounded_to(median + spread, work)


def _scores(context: TensorContext, width: int, prepared: Prepared, column: Column) -> torch.Tensor:
    base, other = base_of(context, column), column.experts[0]
    if other is None:
        return torch.zeros_like(base)
    divergence = row_values(column, width, prepared, _measure(context, width))[:, 0]
    each = torch.from_numpy(divergence).to(base.device, context.dtype)
    index = torch.from_numpy(row_index(column.start, length(column), width)).to(base.device)
    return difference(other, base).abs() * each[index]


def _measure(context: TensorContext, width: int) -> Callable[[Column], Floats]:
    """The divergence of each whole row; shape (rows, 1)."""

    def rounded(values: Floats) -> Floats:
        return doubles(torch.from_numpy(values).to(context.dtype))

    def measure(rows: Column) -> Floats:
        base, other = base_of(context, rows), rows.experts[0]
        if other is None:
            return np.zeros((base.numel() // width, 1))
        with np.errstate(all="ignore"):
            q = rounded(_softmax(doubles(base).reshape(-1, width)))
            p = rounded(_softmax(doubles(other).reshape(-1, width)))
            ratio = rounded(rounded(p + _OFFSET) / rounded(q + _OFFSET))
            terms = rounded(p * rounded(np.log(ratio)))
            # Without an offset to speak of (float16) a vanished probability makes 0 · inf: it counts for nothing.
            terms[np.isnan(terms) & (p == 0)] = 0.0
        return rounded(row_sums(terms))[:, None]

    return measure


def _softmax(values: Floats) -> Floats:
    powers = np.exp(values - values.max(axis=1, keepdims=True))
    result: Floats = powers / row_sums(powers)[:, None]
    return result
