"""Operators, run column by column, against whole-tensor formulas written here from the semantics page."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import operator_cases as cases
import pytest
import torch
import xxhash

WEIGHTS = [0.3, 0.55, 1.1, -0.2, 0.17, 0.31, 0.9, 0.123]
MASK64 = 2**64 - 1
MASK32 = 2**32 - 1


def trim(delta: torch.Tensor, density: float) -> torch.Tensor:
    if density >= 1:
        return delta
    if density <= 0:
        return torch.zeros_like(delta)
    order = torch.sort(delta.abs().float(), stable=True, descending=True).indices
    mask = torch.zeros_like(delta)
    mask[order[: max(1, int(density * delta.numel()))]] = 1
    return delta * mask


@cache
def draw(seed: int, expert: str, numel: int, density: float) -> torch.Tensor:
    """The generator in plain integers."""
    encoded = seed.to_bytes(8, "little")
    for text in ("t", expert):
        encoded += len(text).to_bytes(8, "little") + text.encode()
    state = xxhash.xxh3_64_intdigest(encoded)
    result = []
    for i in range(numel):
        if i % 1024 == 0:
            state = (state + 0x9E3779B97F4A7C15) & MASK64
            z = state
            z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & MASK64
            z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK64
            z ^= z >> 31
        x = (z + i % 1024) & MASK32
        x = ((x ^ x >> 16) * 0x7FEB352D) & MASK32
        x = ((x ^ x >> 15 ^ z >> 32) * 0x846CA68B) & MASK32
        result.append((x ^ x >> 16 ^ 2**31) / 2**32 < density)
    return torch.tensor(result)


def norm(values: torch.Tensor) -> float:
    lanes = [0.0] * 64
    for i, value in enumerate(values.double().abs().tolist()):
        lanes[i % 64] += value
    total = 0.0
    for lane in lanes:
        total += lane
    return total


def drop(delta: torch.Tensor, density: float, expert: str, rescale: bool) -> torch.Tensor:
    if density >= 1:
        return delta
    masked = torch.where(draw(0, expert, delta.numel(), density), delta, torch.zeros_like(delta))
    work = torch.bfloat16 if delta.dtype == torch.bfloat16 else torch.float32
    before, after = (torch.tensor(norm(x), dtype=work) for x in (delta, masked))
    if not rescale or before < 1e-7 or after < 1e-7:
        return masked
    return (masked.to(work) * (before / after)).to(delta.dtype)


def formula(
    method: str,
    base: torch.Tensor,
    experts: Sequence[torch.Tensor],
    weights: Sequence[float],
    densities: Sequence[float],
    *,
    normalize: bool,
    factor: float = 1.0,
    rescale: bool = True,
) -> torch.Tensor:
    dtype = base.dtype
    if method == "linear":
        total = torch.zeros_like(base, dtype=torch.float32)
        for x, share in zip(experts, weights, strict=True):
            total = (x.double() * torch.tensor(share).double() + total.double()).float()
        if normalize:
            total = total / torch.tensor(list(weights)).sum()
        return total.to(dtype)
    deltas = [x - base for x in experts]
    if method == "ties":
        deltas = [trim(delta, density) for delta, density in zip(deltas, densities, strict=True)]
    if method.startswith("dare"):
        deltas = [
            drop(x, density, f"expert{i}", rescale)
            for i, (x, density) in enumerate(zip(deltas, densities, strict=True))
        ]
    weight = torch.tensor(list(weights), dtype=dtype)[:, None]
    weighted = torch.stack(deltas) * weight
    if method in ("ties", "dare_ties"):
        elected = torch.where(weighted.sum(0) >= 0, 1, -1)
        agree = (weighted.sign() == elected).to(dtype)
        mixed, shares = (weighted * agree).sum(0), (weight * agree).sum(0)
        shares[shares == 0] = 1
    else:
        mixed, shares = weighted.sum(0), weight.sum(0)
        shares[shares.abs() < 1e-8] = 1
    if normalize:
        mixed = mixed / shares
    return torch.where(mixed == 0, base, base + mixed * factor)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("method", cases.METHODS)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("numel", [1000, 2048, 37, 5, 1])
@pytest.mark.parametrize("experts", [2, 3, 5, 8])
def test_equals_the_whole_tensor_formula(
    method: str, dtype: torch.dtype, normalize: bool, numel: int, experts: int
) -> None:
    for density in (0.1, 0.5, 1.0):
        for coarse in (False, True):
            base, models = cases.inputs(numel, experts, dtype, seed=numel + experts, coarse=coarse)
            densities = [density, 0.33, *[density] * (experts - 2)]
            factor = 1.0 if method == "linear" or density == 0.1 else 0.7
            values = cases.parameters(WEIGHTS[:experts], densities, normalize=normalize, lambda_=factor)
            expected = formula(method, base, models, WEIGHTS[:experts], densities, normalize=normalize, factor=factor)
            found = cases.merge(method, base, models, values, cuts=range(64, numel, 64))
            assert torch.equal(cases.bits(found), cases.bits(expected)), (density, coarse)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_defaults(dtype: torch.dtype) -> None:
    base, models = cases.inputs(640, 3, dtype)
    weights, ones = WEIGHTS[:3], [1.0] * 3
    for method in cases.METHODS:
        expected = formula(method, base, models, weights, ones, normalize=method in ("linear", "ties"))
        assert torch.equal(cases.merge(method, base, models, cases.parameters(weights)), expected), method


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("method", ["dare_linear", "dare_ties"])
def test_rescale_can_be_turned_off(method: str, dtype: torch.dtype) -> None:
    base, models = cases.inputs(640, 2, dtype)
    values = cases.parameters([1.0, 0.5], [0.4, 0.6], rescale=False)
    expected = formula(method, base, models, [1.0, 0.5], [0.4, 0.6], normalize=False, rescale=False)
    assert torch.equal(cases.merge(method, base, models, values, cuts=[128]), expected)
    assert not torch.equal(cases.merge(method, base, models, cases.parameters([1.0, 0.5], [0.4, 0.6])), expected)


def test_int8_mask_changes_nothing() -> None:
    base, models = cases.inputs(640, 3, torch.bfloat16)
    for method in ("ties", "dare_ties"):
        with_mask = cases.parameters([1.0] * 3, [0.4] * 3, int8_mask=True)
        without = cases.parameters([1.0] * 3, [0.4] * 3)
        assert torch.equal(cases.merge(method, base, models, with_mask), cases.merge(method, base, models, without))
