"""The result does not depend on how a tensor is cut into columns."""

from __future__ import annotations

import operator_cases as cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.mark.parametrize("dtype", [*cases.DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("method", cases.METHODS)
@settings(max_examples=12, deadline=None)
@given(
    numel=st.integers(1, 1500),
    experts=st.integers(1, 7),
    blocks=st.sets(st.integers(1, 24), max_size=8),
    seed=st.integers(0, 2**32),
    density=st.floats(0.0, 1.0),
    coarse=st.booleans(),
    normalize=st.booleans(),
)
def test_any_cut_gives_the_same_bits(
    method: str,
    dtype: torch.dtype,
    numel: int,
    experts: int,
    blocks: set[int],
    seed: int,
    density: float,
    coarse: bool,
    normalize: bool,
) -> None:
    base, models = cases.inputs(numel, experts, dtype, seed, coarse=coarse)
    values = cases.parameters([1.0, 0.7, 0.3, 0.11, 1.9, 0.45, 0.6][:experts], [density] * experts, normalize=normalize)
    whole = cases.merge(method, base, models, values)
    cut = cases.merge(method, base, models, values, cuts=[64 * b for b in blocks if 64 * b < numel])
    assert torch.equal(cases.bits(whole), cases.bits(cut))
    assert bool(torch.isfinite(whole).all())


@pytest.mark.parametrize("method", cases.METHODS)
def test_inputs_are_left_alone(method: str) -> None:
    base, models = cases.inputs(640, 3, torch.float32)
    copies = [tensor.clone() for tensor in (base, *models)]
    cases.merge(method, base, models, cases.parameters([1.0] * 3, [0.5] * 3))
    assert all(torch.equal(x, y) for x, y in zip((base, *models), copies, strict=True))
