"""The fixed orders of summation and the single roundings."""

from __future__ import annotations

import random
from fractions import Fraction

import numpy as np
import operator_cases as cases
import pytest
import torch

from mpfs.merge.numeric import dtype_name
from mpfs.merge.operators import arithmetic as a
from mpfs.merge.operators import scalars

ALL_DTYPES = (*cases.DTYPES, torch.float64)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("experts", [1, 2, 3, 4, 5, 6, 7, 8, 11, 16, 17, 20, 40])
def test_sums_over_experts_equal_torch(dtype: torch.dtype, experts: int) -> None:
    generator = torch.Generator().manual_seed(experts)
    for numel in (1, 2, 3, 4, 5, 7, 8, 9, 16, 31, 32, 33, 63, 64, 100, 1000, 4096, 5003):
        stack = torch.randn(experts, numel, generator=generator, dtype=torch.float64).to(dtype)
        found = a.sum_experts(list(stack), 0, numel, stack[0])
        assert torch.equal(cases.bits(found), cases.bits(stack.sum(0))), numel
        for cut in range(1, numel, max(1, numel // 5)):
            parts = [
                a.sum_experts([x[:cut] for x in stack], 0, numel, stack[0, :cut]),
                a.sum_experts([x[cut:] for x in stack], cut, numel, stack[0, cut:]),
            ]
            assert torch.equal(torch.cat(parts), found)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_a_missing_term_is_zero(dtype: torch.dtype) -> None:
    stack = torch.randn(6, 77, generator=torch.Generator().manual_seed(0)).to(dtype)
    stack[4] = 0
    terms: list[torch.Tensor | None] = list(stack)
    terms[4] = None
    assert torch.equal(a.sum_experts(terms, 0, 77, stack[0]), stack.sum(0))
    nothing = a.sum_experts([None, None], 0, 77, stack[0])
    assert nothing.dtype == dtype
    assert not nothing.any()


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_sums_of_weights_equal_torch(dtype: torch.dtype) -> None:
    generator = random.Random(5)
    for n in range(1, 50):
        for _ in range(20):
            weights = [generator.uniform(-1, 3) for _ in range(n)]
            assert scalars.sum_weights(weights, dtype_name(dtype)) == torch.tensor(weights, dtype=dtype).sum().item()


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_scaled_and_quotient_equal_torch(dtype: torch.dtype) -> None:
    x, y = torch.randn(2, 999, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    assert torch.equal(a.scaled(x, 0.7), x * 0.7)
    assert torch.equal(a.quotient(x, y), x / y)


def nearest(value: Fraction, dtype: type[np.floating]) -> float:
    """Round to nearest, ties to even."""
    near = dtype(float(value))
    neighbours = [np.nextafter(near, dtype(-np.inf)), near, np.nextafter(near, dtype(np.inf))]
    kind = {4: np.int32, 8: np.int64}[near.itemsize]
    return float(min(neighbours, key=lambda c: (abs(Fraction(float(c)) - value), int(c.view(kind)) & 1)))


@pytest.mark.parametrize(("dtype", "kind"), [(torch.float32, np.float32), (torch.float64, np.float64)])
def test_fused_multiply_add_rounds_once(dtype: torch.dtype, kind: type[np.floating]) -> None:
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(4000, generator=generator, dtype=torch.float64).to(dtype)
    exponents = torch.randint(-40, 40, (4000,), generator=generator)
    addend = (torch.randn(4000, generator=generator, dtype=torch.float64) * 2.0**exponents).to(dtype)
    for weight in (0.3, -1.7, 1 + 2.0**-15, 1e-3):
        factor = Fraction(float(torch.tensor(weight, dtype=dtype)))
        addend[:500] = -(x[:500] * weight)  # almost cancels
        expected = [
            nearest(Fraction(u) * factor + Fraction(v), kind) for u, v in zip(x.tolist(), addend.tolist(), strict=True)
        ]
        assert a.exact_multiply_add(x, weight, addend).tolist() == expected
        assert torch.equal(a.fused_multiply_add(x, weight, addend), a.exact_multiply_add(x, weight, addend))


def test_fused_multiply_add_is_not_rounded_twice() -> None:
    # 1 + 2^-23 + 2^-24 - 2^-54: just below the middle of two float32, and in float64 rounded to the middle.
    x = torch.tensor([(1 - 2.0**-15) * 2.0**-24])
    addend = torch.tensor([1 + 2.0**-23])
    assert a.exact_multiply_add(x, 1 + 2.0**-15, addend).item() == 1 + 2.0**-23
    assert (x.double() * (1 + 2.0**-15) + addend.double()).float().item() != 1 + 2.0**-23


def test_fused_multiply_add_takes_what_is_not_finite() -> None:
    x = torch.tensor([float("inf"), float("nan"), 1.0, 3e38, 0.0])
    addend = torch.tensor([1.0, 1.0, float("-inf"), 3e38, -0.0])
    for dtype in (torch.float32, torch.float64):
        found = a.exact_multiply_add(x.to(dtype), 1.5, addend.to(dtype))
        expected = x.to(dtype) * 1.5 + addend.to(dtype)
        assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7))
