"""Arithmetic on single numbers gives what torch gives."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mpfs.merge.numeric import torch_dtype
from mpfs.merge.operators import scalars

ALL = ("BF16", "F16", "F32", "F64")
NUMBERS = st.floats() | st.floats(-1e-3, 1e-3) | st.floats(width=16) | st.floats(width=32)


def same(found: float, expected: float) -> bool:
    return math.copysign(1, found) == math.copysign(1, expected) and found == expected


@pytest.mark.parametrize("dtype", ALL)
@given(value=NUMBERS)
def test_rounding(dtype: str, value: float) -> None:
    found, expected = scalars.rounded(value, dtype), float(torch.tensor(value, dtype=torch_dtype(dtype)))
    assert (math.isnan(found) and math.isnan(expected)) or same(found, expected)


@pytest.mark.parametrize("dtype", ALL)
@given(x=NUMBERS, divisor=NUMBERS)
def test_quotients(dtype: str, x: float, divisor: float) -> None:
    a, b = scalars.rounded(x, dtype), scalars.rounded(divisor, dtype)
    ours = scalars.quotient_of(a, b, dtype)
    theirs = float(torch.tensor(a, dtype=torch_dtype(dtype)) / torch.tensor(b, dtype=torch_dtype(dtype)))
    assert (math.isnan(ours) and math.isnan(theirs)) or same(ours, theirs)
