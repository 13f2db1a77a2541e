"""Thresholds from histograms against a stable sort."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import Any

import numpy as np
import operator_cases as cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpfs.merge.numeric import dtype_name
from mpfs.merge.operators import LeftOut
from mpfs.merge.operators import magnitude as m

ALL_DTYPES = (*cases.DTYPES, torch.float64)


class Source:
    """Streams deltas in columns and counts the passes."""

    def __init__(self, deltas: Sequence[torch.Tensor], step: int) -> None:
        self.deltas, self.step, self.passes = deltas, step, 0

    def __call__(self, wanted: Set[int]) -> Iterator[tuple[int, list[Any]]]:
        self.passes += 1
        for start in range(0, self.deltas[0].numel(), self.step):
            yield (
                start,
                [
                    m.patterns(x[start : start + self.step]).numpy() if i in wanted else None
                    for i, x in enumerate(self.deltas)
                ],
            )


def kept_by_sort(delta: torch.Tensor, k: int) -> torch.Tensor:
    mask = torch.zeros(delta.numel(), dtype=torch.bool)
    mask[torch.sort(delta.abs(), stable=True, descending=True).indices[:k]] = True
    return mask


def check(deltas: Sequence[torch.Tensor], keep: Sequence[int], step: int) -> Source:
    numel = deltas[0].numel()
    source = Source(deltas, step)
    found = m.find_thresholds(dtype_name(deltas[0].dtype), numel, keep, [[]] * len(keep), source)
    for delta, k, threshold in zip(deltas, keep, found, strict=True):
        parts = [m.kept(m.patterns(delta[start : start + step]), threshold, start) for start in range(0, numel, step)]
        # Which zeros are kept does not matter.
        matters = delta != 0
        assert torch.equal(torch.cat(parts) & matters, kept_by_sort(delta, k) & matters)
    return source


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@settings(max_examples=60, deadline=None)
@given(
    numel=st.integers(1, 700),
    share=st.floats(0, 1),
    step=st.integers(1, 300),
    seed=st.integers(0, 2**32),
    levels=st.sampled_from([None, 1, 3, 30]),
)
def test_keeps_what_a_stable_sort_keeps(
    dtype: torch.dtype, numel: int, share: float, step: int, seed: int, levels: int | None
) -> None:
    generator = torch.Generator().manual_seed(seed)
    deltas = torch.randn(2, numel, generator=generator, dtype=torch.float64)
    if levels:
        deltas = (deltas * levels).round() / levels
    else:
        deltas = deltas * 10.0 ** torch.randint(-7, 5, (2, numel), generator=generator)
    check(list(deltas.to(dtype)), [int(share * numel), numel - int(share * numel)], step)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_infinities_and_nan_are_the_largest(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    delta = torch.randn(300, generator=generator).to(dtype)
    delta[10], delta[20], delta[30], delta[40] = float("inf"), float("nan"), float("-inf"), -float("nan")
    cases.bits(delta)[50] = cases.bits(delta)[20] + 1  # another NaN
    for k in range(1, 12):
        check([delta], [k], 64)


@pytest.mark.parametrize(
    ("dtype", "passes"), [(torch.bfloat16, 1), (torch.float16, 1), (torch.float32, 2), (torch.float64, 4)]
)
def test_passes(dtype: torch.dtype, passes: int) -> None:
    delta = torch.arange(1, 129, dtype=torch.float64).to(dtype)
    assert check([delta], [40], 64).passes == passes
    assert check([torch.ones(128, dtype=dtype)], [40], 64).passes == passes + 1
    assert check([delta, delta], [0, 128], 64).passes == 0


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_patterns_order_magnitudes(dtype: torch.dtype) -> None:
    values = torch.tensor([0.0, -0.0, 1e-7, -2e-7, 0.1, -0.25, 3.0, -60000.0, float("inf"), float("nan")]).to(dtype)
    found = m.patterns(values).tolist()
    assert found == sorted(found)
    assert found[0] == found[1] == 0
    assert found[-1] == m.LAYOUTS[dtype_name(dtype)].nan
    assert m.patterns(-values).tolist() == found
    for value, pattern in zip(values.abs().tolist()[:-1], found, strict=False):
        assert m.magnitude(pattern, dtype_name(dtype)) == value
    assert np.isnan(m.magnitude(found[-1], dtype_name(dtype)))


@pytest.mark.parametrize(
    ("density", "numel", "k"), [(0.1, 4, 1), (0.0, 4, 0), (-1.0, 4, 0), (1.0, 4, 4), (9.0, 4, 4), (0.29, 100, 28)]
)
def test_keep_count(density: float, numel: int, k: int) -> None:
    # 0.29 · 100 is 28.999999999999996 in floats, as mergekit has it.
    assert m.keep_count(density, numel) == k


def test_expected_at_least_is_the_half_normal_tail() -> None:
    runs = [LeftOut(1000, 0.5), LeftOut(500, 0.0)]
    at_half = int(m.patterns(torch.tensor([0.5], dtype=torch.float32)))
    assert m.expected_at_least(0, "F32", runs) == 1500
    assert m.expected_at_least(at_half, "F32", runs) == pytest.approx(1000 * 0.31731, rel=1e-4)
    assert m.expected_at_least(m.LAYOUTS["F32"].nan, "F32", runs) == 0
