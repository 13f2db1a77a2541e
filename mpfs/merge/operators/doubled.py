"""Working on float32 in float64: for methods whose whole-tensor sums, and factors above 1, make float32's steps show.

Such a method runs as it would on a float64 tensor, and its result is rounded once. 16-bit types are not widened so:
there mergekit's own steps are followed, which is what makes the results comparable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from mpfs.merge.deferred import torch
from mpfs.merge.operators.base import Column, TensorContext


def is_single(context: TensorContext) -> bool:
    """Whether the work dtype is float32."""
    return context.work == "F32"


def widened(context: TensorContext) -> TensorContext:
    """The same tensor, to be worked on in float64."""
    return replace(context, work="F64")


def doubled(column: Column) -> Column:
    """The column in float64; an expert that is the base itself stays so."""
    base = None if column.base is None else column.base.double()

    def double(values: torch.Tensor | None) -> torch.Tensor | None:
        return base if values is column.base else None if values is None else values.double()

    return Column(column.start, base, [double(expert) for expert in column.experts])


def all_doubled(columns: Callable[[], Iterator[Column]]) -> Callable[[], Iterator[Column]]:
    """The tensor's columns in float64."""
    return lambda: map(doubled, columns())
