"""Whole-tensor sums for methods that need norms, products and counts: in float64, the same for any cut into columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from mpfs.merge.deferred import torch
from mpfs.merge.operators.base import Column, TensorContext
from mpfs.merge.operators.pieces import pieces
from mpfs.stats.hashing import GROUP
from mpfs.stats.lanesum import LaneSum

Floats: TypeAlias = NDArray[np.float64]


def doubles(values: torch.Tensor) -> Floats:
    """The values as a float64 array on the CPU, of the same shape."""
    array: Floats = values.detach().to(torch.float64).cpu().numpy()
    return array


def length(column: Column) -> int:
    """Elements of a column.

    Raises:
        ValueError: it holds nothing that would tell.
    """
    for values in (column.base, *column.experts):
        if values is not None:
            return values.numel()
    raise ValueError(f"the column at {column.start} is empty")


def base_of(context: TensorContext, column: Column) -> torch.Tensor:
    """The column's base.

    Raises:
        ValueError: it has none.
    """
    if column.base is None:
        raise ValueError(f"{context.name}: the column at {column.start} has no base")
    return column.base


def unchanged(column: Column) -> bool:
    """Whether no expert differs from the base here, as far as it is read."""
    return column.base is not None and all(expert is None or expert is column.base for expert in column.experts)


def filled(context: TensorContext, column: Column) -> list[torch.Tensor]:
    """The experts' values, the base's where an expert is not read.

    Raises:
        ValueError: an expert is not read and there is no base to stand in for it.
    """
    found: list[torch.Tensor] = []
    for expert in column.experts:
        values = column.base if expert is None else expert
        if values is None:
            raise ValueError(f"{context.name}: a model is missing at {column.start}, and there is no base to stand in")
        found.append(values)
    return found


def all_pieces(columns: Callable[[], Iterator[Column]]) -> Iterator[Column]:
    """The tensor's columns, cut into pieces."""
    for column in columns():
        yield from pieces(column, length(column))


def sum_each(
    columns: Callable[[], Iterator[Column]], count: int, terms: Callable[[Column], Sequence[torch.Tensor | None]]
) -> list[float]:
    """One pass: the sums over the tensor of `count` quantities.

    `terms` gives their elements for a piece, of the piece's size, or None for zeros. Columns must start at multiples
    of 64 elements.
    """
    sums = [LaneSum() for _ in range(count)]
    for piece in all_pieces(columns):
        for total, values in zip(sums, terms(piece), strict=True):
            if values is not None:
                total.add(doubles(values), piece.start)
    return [total.total() for total in sums]


class RunningSum:
    """A `LaneSum` that is fed without gaps, in runs of any length."""

    def __init__(self) -> None:
        self._sum = LaneSum()
        self._next = 0
        self._rest: Floats = np.zeros(0)

    def add(self, values: Floats) -> None:
        """Add the next elements; 1-D."""
        values = np.concatenate([self._rest, values])
        whole = len(values) - len(values) % GROUP
        if whole:
            self._sum.add(values[:whole], self._next)
            self._next += whole
        self._rest = values[whole:]

    def total(self) -> float:
        """The sum; nothing may be added afterwards."""
        if len(self._rest):
            self._sum.add(self._rest, self._next)
        return self._sum.total()


def row_sums(values: Floats) -> Floats:
    """The sums along the rows of a matrix; shape (rows,).

    Element j of a row is added to lane j mod 64, in order of j, and then the lanes in order: a row's sum does not
    depend on which other rows are there.
    """
    rows, width = values.shape
    lanes = np.zeros((rows, min(GROUP, width)))
    for start in range(0, width, GROUP):
        part = values[:, start : start + GROUP]
        lanes[:, : part.shape[1]] += part
    total = np.zeros(rows)
    for lane in range(lanes.shape[1]):
        total += lanes[:, lane]
    return total
