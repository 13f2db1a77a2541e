"""What the kernel tests share: awkward numbers, and an operator run on bit patterns beside the reference."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch

from mpfs.merge.kernels.backend import Kernels, kernels
from mpfs.merge.kernels.columns import BIT_TYPES, Bits, BitsColumn, Only
from mpfs.merge.numeric import dtype_name
from mpfs.merge.operators import Column, LeftOut, Parameters, Prepared, Scalar, TensorContext, get_operator

METHODS = ("linear", "task_arithmetic", "ties", "dare_linear", "dare_ties", "breadcrumbs", "breadcrumbs_ties")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_T = TypeVar("_T")
_INTEGERS = {2: torch.int16, 4: torch.int32}

SPECIAL = {
    torch.bfloat16: (
        *(0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x0080, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0, 0xFFFF),
        *(0x3F80, 0xBF80, 0x3F81, 0x7F00, 0x3380),
    ),
    torch.float16: (
        *(0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x83FF, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00),
        *(0xFFFF, 0x3C00, 0xBC00, 0x3C01, 0x7BFE, 0x0401, 0x7800),
    ),
    torch.float32: (
        *(0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF),
        *(0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF, 0x3F800000, 0x3F800001, 0x33800000, 0x7F000000),
    ),
}
"""Bit patterns: zeros, the least and the greatest subnormal and normal numbers, infinities, NaNs, ones."""


def available() -> Kernels:
    """The kernels; the tests here are about them, so they must be there."""
    found = kernels()
    assert found is not None
    return found


def to_bits(tensor: torch.Tensor) -> Bits:
    """A tensor's bit patterns as kernels take them."""
    return tensor.view(_INTEGERS[tensor.element_size()]).numpy().view(BIT_TYPES[dtype_name(tensor.dtype)])


def to_tensor(bits: Bits, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of `to_bits`."""
    return torch.from_numpy(bits.view(np.dtype(f"i{bits.itemsize}")).copy()).view(dtype)


def patterns(numel: int, dtype: torch.dtype, seed: int, kind: str, like: Bits | None = None) -> Bits:
    """Bit patterns: "special" ones, "random" ones, a model's weights, or "near" `like` (with many ties)."""
    generator = np.random.default_rng(seed)
    bits = BIT_TYPES[dtype_name(dtype)]
    unsigned = np.dtype(f"u{bits.itemsize}")
    if kind == "special":
        return generator.choice(np.array(SPECIAL[dtype], unsigned), numel).view(bits)
    if kind == "random":
        return generator.integers(0, np.iinfo(unsigned).max, numel, unsigned, endpoint=True).view(bits)
    if kind == "near" and like is not None:
        step = generator.integers(-3, 4, numel) / 64
        return to_bits((to_tensor(like, dtype).float() + torch.from_numpy(step).float()).to(dtype)).copy()
    values = torch.from_numpy(generator.standard_normal(numel) * 0.02)
    return to_bits(values.to(dtype)).copy()


def context(numel: int, experts: int, dtype: torch.dtype, left_out: Sequence[Sequence[LeftOut]] = ()) -> TensorContext:
    """The context of a tensor named "t"."""
    return TensorContext("t", numel, dtype_name(dtype), 7, [f"expert{i}" for i in range(experts)], left_out)


def parameters(weights: Sequence[float], densities: Sequence[float], **shared: Scalar) -> Parameters:
    """Parameters from lists."""
    return Parameters(shared, [{"weight": w, "density": d} for w, d in zip(weights, densities, strict=True)])


class Columns:
    """A tensor cut into columns, in which the experts in `hidden[column]` are not read."""

    def __init__(
        self, base: Bits | None, experts: Sequence[Bits], cuts: Sequence[int], hidden: Sequence[Container[int]] = ()
    ) -> None:
        edges = sorted({0, *cuts, experts[0].size})
        self.columns = []
        for number, (low, high) in enumerate(pairwise(edges)):
            absent = hidden[number % len(hidden)] if hidden else ()
            self.columns.append(
                BitsColumn(
                    number,
                    low,
                    high - low,
                    None if base is None else base[low:high],
                    [None if i in absent else expert[low:high] for i, expert in enumerate(experts)],
                )
            )

    def numbers(self) -> list[int]:
        return [column.number for column in self.columns]

    def map(self, function: Callable[[BitsColumn], _T], only: Only | None = None) -> Iterator[tuple[int, _T]]:
        for column in self.columns:
            if only is None:
                yield column.number, function(column)
            elif column.number in only:
                chosen = only[column.number]
                experts = [expert if i in chosen else None for i, expert in enumerate(column.experts)]
                yield column.number, function(replace(column, experts=experts))

    def in_order(self, function: Callable[[BitsColumn], None]) -> None:
        for column in self.columns:
            function(column)

    def tensors(self, dtype: torch.dtype) -> Iterator[Column]:
        """The same for the reference."""
        for column in self.columns:
            base = None if column.base is None else to_tensor(column.base, dtype)
            experts = [None if expert is None else to_tensor(expert, dtype) for expert in column.experts]
            yield Column(column.start, base, experts)


def run_reference(
    method: str, where: TensorContext, values: Parameters, columns: Columns
) -> tuple[Prepared, list[Bits]]:
    """Scalars and results of the torch operator."""
    operator = get_operator(method)
    prepared = operator.prepare(where, values, lambda: columns.tensors(where.dtype))
    return prepared, [
        to_bits(operator.apply(where, values, prepared, column)) for column in columns.tensors(where.dtype)
    ]


def run_fast(method: str, where: TensorContext, values: Parameters, columns: Columns) -> tuple[Prepared, list[Bits]]:
    """Scalars and results of the kernels."""
    path = get_operator(method).fast(where, values, available())
    assert path is not None
    prepared = path.prepare(columns)
    return prepared, [path.apply(prepared, column) for column in columns.columns]


def check(method: str, where: TensorContext, values: Parameters, columns: Columns) -> None:
    """Reference and kernels give the same scalars and the same bits."""
    expected, references = run_reference(method, where, values, columns)
    prepared, results = run_fast(method, where, values, columns)
    assert prepared == expected
    for column, reference, result in zip(columns.columns, references, results, strict=True):
        assert result.dtype == reference.dtype
        np.testing.assert_array_equal(result, reference, f"at {column.start}")
