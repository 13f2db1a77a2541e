"""Methods that work along a tensor's rows, though columns may end anywhere within a row.

A row is a run along the last axis; a tensor of one axis is one row. What a method needs to know of a row (a norm, an
angle) it *measures* from the whole row. Rows that lie within a column are measured where they are merged; only those
that a column's end cuts are measured in `prepare`, which puts them together (holding one row of every model at a time)
and keeps their values: at most one row more than there are columns, or all rows where a row is longer than a column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from mpfs.merge.deferred import torch
from mpfs.merge.operators.base import Column, Prepared, TensorContext
from mpfs.merge.operators.pieces import PIECE
from mpfs.merge.operators.reductions import Floats, length

Measure: TypeAlias = Callable[[Column], Floats]
"""Given whole rows as one column, their values; shape (rows, K)."""


def shape_of(context: TensorContext) -> tuple[int, ...]:
    """The tensor's shape, as a vector where the context does not say or it has none."""
    if context.shape and prod(context.shape) == context.numel:
        return context.shape
    return (context.numel,)


def without_gaps(
    context: TensorContext, columns: Iterator[Column], experts: int, width: int = PIECE
) -> Iterator[Column]:
    """The columns, and in place of those that are not streamed, because nothing differs there, columns without a delta.

    Only for methods that look at nothing but deltas: the base of what is put in is zero. It ends where rows of `width`
    elements do, if it can.
    """
    rows = max(1, PIECE // width)
    reached = 0
    device = torch.device("cpu")

    def fill(end: int) -> Iterator[Column]:
        nonlocal reached
        while reached < end:
            stop = min((reached // width + rows) * width, end)
            zeros = torch.zeros(stop - reached, dtype=context.dtype, device=device)
            yield Column(reached, zeros, [zeros] * experts)
            reached = stop

    for column in columns:
        device = next((x.device for x in (column.base, *column.experts) if x is not None), device)
        yield from fill(column.start)
        yield column
        reached = column.start + length(column)
    yield from fill(context.numel)


def part(column: Column, low: int, high: int, *, copy: bool = False) -> Column:
    """Elements [low, high) of a column."""

    def cut(values: torch.Tensor | None) -> torch.Tensor | None:
        if values is None:
            return None
        return values[low:high].clone() if copy else values[low:high]

    return Column(column.start + low, cut(column.base), [cut(expert) for expert in column.experts])


def whole_rows(columns: Iterator[Column], width: int) -> Iterator[tuple[Column, bool]]:
    """The tensor as columns of whole rows, in order, each with whether it is a row that was cut (then it is one row).

    There must be no gap between columns (`without_gaps`). Others are of as many rows as make a piece, at least one.
    """
    parts: list[Column] = []
    rows = max(1, PIECE // width) * width
    for column in columns:
        end = length(column)
        low = 0
        if parts:
            low = min(end, -column.start % width)
            parts.append(part(column, 0, low, copy=True))
            if (column.start + low) % width:
                continue
            yield _joined(parts), True
            parts = []
        high = max(low, end - (column.start + end) % width)
        for first in range(low, high, rows):
            yield part(column, first, min(first + rows, high)), False
        if high < end:
            parts.append(part(column, high, end, copy=True))
    if parts:
        raise ValueError(f"the tensor ends within a row of {width} elements")


def _joined(parts: Sequence[Column]) -> Column:
    base = None if parts[0].base is None else torch.cat([cast("torch.Tensor", item.base) for item in parts])
    experts: list[torch.Tensor | None] = []
    for fragments in zip(*(item.experts for item in parts), strict=True):
        if all(fragment is None for fragment in fragments):
            experts.append(None)
            continue
        # What is not read is the base's.
        values = [item.base if fragment is None else fragment for fragment, item in zip(fragments, parts, strict=True)]
        experts.append(torch.cat([cast("torch.Tensor", value) for value in values]))
    return Column(parts[0].start, base, experts)


def measure_cut_rows(columns: Iterator[Column], width: int, measure: Measure) -> Prepared:
    """One pass: the values of the rows that columns' ends cut: `row_numbers`, and `row_values` a list each."""
    numbers: list[int] = []
    values: list[list[float]] = []
    for rows, was_cut in whole_rows(columns, width):
        if was_cut:
            numbers.append(rows.start // width)
            values.append(measure(rows)[0].tolist())
    return {"row_numbers": numbers, "row_values": values}


def row_values(column: Column, width: int, prepared: Prepared, measure: Measure) -> Floats:
    """The values of the rows that a column touches, in order; shape (rows, K)."""
    end = length(column)
    low = min(end, -column.start % width)
    high = max(low, end - (column.start + end) % width)
    found: list[Floats] = []
    if low:
        found.append(_stored(prepared, column.start // width))
    rows = max(1, PIECE // width) * width
    found.extend(measure(part(column, first, min(first + rows, high))) for first in range(low, high, rows))
    if high < end:
        found.append(_stored(prepared, (column.start + high) // width))
    return np.concatenate(found)


def _stored(prepared: Mapping[str, object], row: int) -> Floats:
    numbers = cast("Sequence[int]", prepared["row_numbers"])
    place = int(np.searchsorted(np.asarray(numbers), row))
    if place >= len(numbers) or numbers[place] != row:
        raise ValueError(f"row {row} was not measured: columns must be cut as they were in prepare")
    values = cast("Sequence[Sequence[float]]", prepared["row_values"])[place]
    return np.asarray([values], dtype=np.float64)


def row_index(start: int, count: int, width: int) -> NDArray[np.int64]:
    """For each element of [start, start + count) the place of its row among those that are touched."""
    index: NDArray[np.int64] = np.arange(start, start + count, dtype=np.int64) // width
    return index - start // width
