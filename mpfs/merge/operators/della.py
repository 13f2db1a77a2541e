"""Task vectors with elements dropped at random, small ones rather than large ones."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal, cast

import numpy as np
from numpy.typing import NDArray

from mpfs.merge.deferred import torch
from mpfs.merge.operators.arithmetic import accumulator, difference, scaled
from mpfs.merge.operators.base import Column, Parameter, Parameters, Prepared, TensorContext
from mpfs.merge.operators.magnitude import patterns
from mpfs.merge.operators.pieces import PIECE
from mpfs.merge.operators.reductions import Floats, RunningSum, base_of, doubles, length, unchanged
from mpfs.merge.operators.rows import part, shape_of, whole_rows, without_gaps
from mpfs.merge.operators.scalars import norm_ratio
from mpfs.merge.operators.task_vector import TaskVectorOperator
from mpfs.merge.operators.values import value_of
from mpfs.merge.random import stream_key, uniform

Mask = NDArray[np.bool_]


def _parameters(normalize: bool) -> tuple[Parameter, ...]:
    return (
        Parameter("weight", required=True, per_model=True),
        Parameter("density", default=1.0, per_model=True),
        Parameter("epsilon", default=0.15, per_model=True),
        Parameter("lambda", default=1.0),
        Parameter("normalize", default=normalize),
        Parameter("rescale", default=True),
        Parameter("int8_mask", default=False),
    )


def keep_chances(magnitudes: NDArray[np.signedinteger[Any]], density: float, epsilon: float) -> Floats:
    """The chance of each element of a matrix to be kept; shape (rows, width).

    density - epsilon + 2 · epsilon · r, where r is the rank of its magnitude within its row, from 0 for the least to 1
    for the largest. Equal magnitudes share the mean of their ranks; the ranks of a row of one element are 1/2.
    """
    rows, width = magnitudes.shape
    if width == 1:
        return np.full((rows, 1), density)
    order = np.argsort(magnitudes, axis=1, kind="stable")
    ascending = np.take_along_axis(magnitudes, order, axis=1)
    place = np.arange(width)
    new = np.ones((rows, width), dtype=np.bool_)
    new[:, 1:] = ascending[:, 1:] != ascending[:, :-1]
    first = np.maximum.accumulate(np.where(new, place, 0), axis=1)
    ends = np.ones((rows, width), dtype=np.bool_)
    ends[:, :-1] = new[:, 1:]
    last = np.minimum.accumulate(np.where(ends, place, width - 1)[:, ::-1], axis=1)[:, ::-1]
    ranks = np.empty((rows, width))
    np.put_along_axis(ranks, order, (first + last) / 2.0, axis=1)
    chances: Floats = density - epsilon + 2.0 * epsilon * (ranks / (width - 1))
    return chances


class DellaLinear(TaskVectorOperator):
    """Drop elements of each delta at random, by rank of magnitude, scale up what is left, and add the weighted sum.

    Within a row (a run along the last axis; a vector is one row) the smallest magnitude is kept with the chance
    `density` - `epsilon`, the largest with `density` + `epsilon`, those between by rank. Both must lie strictly between
    0 and 1. An element is kept iff its random number (`mpfs.merge.random`, keyed by seed, tensor and expert) lies
    below its chance. `rescale`, and densities of 1 or more and 0 or less, are as in DARE.

    mergekit draws from torch's generator, and ranks in the tensor's dtype, in which bfloat16 tells no ranks above 256
    apart: MPFS gives the distribution that the paper means.

    `prepare` gives `factor`, the scale of each expert, and the masks of rows that columns cut, as bits in base64:
    `row_numbers` and, a list for each expert, `row_masks`; at most numel / 6 bytes an expert where rows are longer than
    columns. It makes one pass and holds one row of every model.

    Source: Deep et al., "DELLA-Merging", arXiv 2406.11617.
    """

    name: ClassVar[str] = "della_linear"
    version: ClassVar[int] = 2
    draws: ClassVar[bool] = True
    by_rows: ClassVar[bool] = True
    parameters: ClassVar[tuple[Parameter, ...]] = _parameters(normalize=False)

    def validate(self, parameters: Parameters) -> list[str]:
        """Also chances that are none: density ± epsilon must lie between 0 and 1."""
        found = super().validate(parameters)
        if found:
            return found
        for i, (density, epsilon) in enumerate(self._chances(parameters)):
            if 0 < density < 1 and not (epsilon >= 0 and density - epsilon > 0 and density + epsilon < 1):
                found.append(
                    f"model {i + 1}: density - epsilon and density + epsilon must lie between 0 and 1, not at "
                    f"{density - epsilon:g} and {density + epsilon:g}"
                )
        return found

    def prepare(
        self, context: TensorContext, parameters: Parameters, columns: Callable[[], Iterator[Column]]
    ) -> Prepared:
        """The scales and the cut rows' masks: one pass, or none if no density lies between 0 and 1.

        Raises:
            ValueError: a column has no base.
        """
        chances = self._chances(parameters)
        drawing = [i for i, (density, _) in enumerate(chances) if 0 < density < 1]
        factors = [1.0] * len(chances)
        numbers: list[int] = []
        masks: list[list[str]] = [[] for _ in chances]
        if drawing:
            width = shape_of(context)[-1]
            wide = accumulator(context.dtype)
            sums = {i: (RunningSum(), RunningSum()) for i in drawing}
            for rows, was_cut in whole_rows(without_gaps(context, columns(), len(chances), width), width):
                if was_cut:
                    numbers.append(rows.start // width)
                for i in drawing:
                    delta = _delta(context, rows, i)
                    mask = self._mask(context, parameters, i, rows.start, delta, width)
                    if was_cut:
                        masks[i].append(base64.b64encode(np.packbits(mask).tobytes()).decode("ascii"))
                    size = doubles(delta.abs().to(wide))
                    sums[i][0].add(size)
                    sums[i][1].add(np.where(mask, size, 0.0))
            if value_of(self.parameters, parameters.shared, "rescale"):
                for i, (full, masked) in sums.items():
                    factors[i] = norm_ratio(full.total(), masked.total(), context.work)
        return {"factor": factors, "row_numbers": numbers, "row_masks": masks}

    def apply(self, context: TensorContext, parameters: Parameters, prepared: Prepared, column: Column) -> torch.Tensor:
        """Merge one column; 1-D, in the context's dtype.

        Raises:
            ValueError: the column has no base.
        """
        if unchanged(column):
            return base_of(context, column)
        masks: list[Mask | None] = []
        for i, (density, _) in enumerate(self._chances(parameters)):
            read = column.experts[i] is not None
            masks.append(
                self._column_mask(context, parameters, prepared, i, column) if read and 0 < density < 1 else None
            )
        return super().apply(context, parameters, {**prepared, "start": column.start, "masks": masks}, column)

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
        density, _ = self._chances(parameters)[expert]
        if density >= 1:
            return delta
        if density <= 0:
            return torch.zeros_like(delta)
        low = start - cast("int", prepared["start"])
        whole = cast("Sequence[Mask]", prepared["masks"])[expert]
        mask = torch.from_numpy(whole[low : low + delta.numel()]).to(delta.device)
        dropped = torch.where(mask, delta, delta.new_zeros(()))
        factor = cast("Sequence[float]", prepared["factor"])[expert]
        return dropped if factor == 1 else scaled(dropped, factor)

    def _chances(self, parameters: Parameters) -> list[tuple[float, float]]:
        epsilons = [float(value_of(self.parameters, values, "epsilon")) for values in parameters.experts]
        return list(zip(self._densities(parameters), epsilons, strict=True))

    def _mask(
        self,
        context: TensorContext,
        parameters: Parameters,
        expert: int,
        start: int,
        delta: torch.Tensor,
        width: int,
    ) -> Mask:
        """Which elements of whole rows are kept; 1-D."""
        density, epsilon = self._chances(parameters)[expert]
        chances = keep_chances(patterns(delta).cpu().numpy().reshape(-1, width), density, epsilon).reshape(-1)
        key = stream_key(context.seed, context.name, context.expert_keys[expert])
        mask: Mask = uniform(key, start, delta.numel()) < chances
        return mask

    def _column_mask(
        self, context: TensorContext, parameters: Parameters, prepared: Prepared, expert: int, column: Column
    ) -> Mask:
        """Which elements of a column are kept: drawn for the rows that lie within it, looked up for those that do not."""
        width = shape_of(context)[-1]
        count = length(column)
        low = min(count, -column.start % width)
        high = max(low, count - (column.start + count) % width)
        found = np.empty(count, dtype=np.bool_)
        if low:
            first = column.start % width
            found[:low] = _stored(prepared, expert, column.start // width, width)[first : first + low]
        rows = max(1, PIECE // width) * width
        for begin in range(low, high, rows):
            piece = part(column, begin, min(begin + rows, high))
            delta = _delta(context, piece, expert)
            found[begin : begin + delta.numel()] = self._mask(context, parameters, expert, piece.start, delta, width)
        if high < count:
            found[high:] = _stored(prepared, expert, (column.start + high) // width, width)[: count - high]
        return found


class Della(DellaLinear):
    """DELLA's random dropping, then TIES's sign election; by default the mean of what agrees.

    Source: arXiv 2406.11617 and 2306.01708.
    """

    name: ClassVar[str] = "della"
    interaction: ClassVar[Literal["additive", "column"]] = "column"
    elects_sign: ClassVar[bool] = True
    parameters: ClassVar[tuple[Parameter, ...]] = _parameters(normalize=True)


def _delta(context: TensorContext, column: Column, expert: int) -> torch.Tensor:
    base, values = base_of(context, column), column.experts[expert]
    return torch.zeros_like(base) if values is None else difference(values, base)


def _stored(prepared: Prepared, expert: int, row: int, width: int) -> Mask:
    numbers = np.asarray(cast("Sequence[int]", prepared["row_numbers"]))
    place = int(np.searchsorted(numbers, row))
    packed = base64.b64decode(cast("Sequence[Sequence[str]]", prepared["row_masks"])[expert][place])
    return np.unpackbits(np.frombuffer(packed, dtype=np.uint8), count=width).astype(np.bool_)
