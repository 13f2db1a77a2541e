"""Merging with some of the experts' elements unread."""

from __future__ import annotations

import operator_cases as cases
import pytest
import torch

from mpfs.merge.operators import Column, LeftOut, get_operator

NUMEL = 65_536


def thresholds(
    experts: list[torch.Tensor], density: float, unread: tuple[int, int], left_out: list[list[LeftOut]]
) -> dict[str, list[float]]:
    """What ties prepares over a zero base when `unread` of expert 0 is not read."""
    dtype = experts[0].dtype
    base = torch.zeros(NUMEL, dtype=dtype)
    columns = []
    for start in range(0, NUMEL, 4096):
        part = slice(start, start + 4096)
        hidden = unread[0] <= start < unread[1]
        columns.append(
            Column(start, base[part], [None if hidden and not i else x[part] for i, x in enumerate(experts)])
        )
    values = cases.parameters([1.0] * len(experts), [density] * len(experts))
    where = cases.context(NUMEL, len(experts), dtype, left_out=left_out)
    return get_operator("ties").prepare(where, values, lambda: iter(columns))  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", [*cases.DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("density", [0.05, 0.2, 0.5, 0.9])
def test_the_threshold_approximates_the_full_one(dtype: torch.dtype, density: float) -> None:
    generator = torch.Generator().manual_seed(1)
    expert = torch.randn(NUMEL, generator=generator, dtype=torch.float64) * 0.01
    expert[: NUMEL // 2] *= 0.2  # what is left out is the small part, as a planner would have it
    expert = expert.to(dtype)
    runs = [
        LeftOut(NUMEL // 4, float(expert[part].double().square().mean().sqrt()))
        for part in (slice(0, NUMEL // 4), slice(NUMEL // 4, NUMEL // 2))
    ]
    full = thresholds([expert], density, (0, 0), [[]])
    part = thresholds([expert], density, (0, NUMEL // 2), [runs])
    assert part["threshold"][0] == pytest.approx(full["threshold"][0], rel=0.05)
    kept = int((expert[NUMEL // 2 :].abs() > part["threshold"][0]).sum())
    assert kept == pytest.approx(int((expert[NUMEL // 2 :].abs() > full["threshold"][0]).sum()), rel=0.02)


def test_nothing_left_out_is_exact_whatever_the_context_says() -> None:
    _, [expert] = cases.inputs(NUMEL, 1, torch.float32)
    assert thresholds([expert], 0.3, (0, 0), [[]]) == thresholds([expert], 0.3, (0, 0), [])
    assert thresholds([expert], 0.3, (0, 0), [[LeftOut(0, 0.0)]]) == thresholds([expert], 0.3, (0, 0), [])


def test_all_that_is_read_is_kept_if_that_is_too_little() -> None:
    _, [expert] = cases.inputs(NUMEL, 1, torch.float32)
    found = thresholds([expert], 0.9, (0, NUMEL // 2), [[]])
    assert found["threshold_bits"] == [0]
    assert found["cutoff"] == [NUMEL]


def test_left_out_zeros_leave_the_threshold_to_what_is_read() -> None:
    _, [expert] = cases.inputs(NUMEL, 1, torch.float32)
    expert[: NUMEL // 2] = 0
    full = thresholds([expert], 0.3, (0, 0), [[]])
    assert thresholds([expert], 0.3, (0, NUMEL // 2), [[LeftOut(NUMEL // 2, 0.0)]]) == full


def test_one_expert_left_out_does_not_disturb_the_other() -> None:
    _, experts = cases.inputs(NUMEL, 2, torch.bfloat16)
    full = thresholds(experts, 0.3, (0, 0), [[], []])
    part = thresholds(experts, 0.3, (0, NUMEL // 2), [[LeftOut(NUMEL // 2, 0.0204)], []])
    assert part["threshold_bits"][1] == full["threshold_bits"][1]
    assert part["cutoff"][1] == full["cutoff"][1]
    assert part["threshold"][0] == pytest.approx(full["threshold"][0], rel=0.02)


@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "dare_linear", "dare_ties"])
@pytest.mark.parametrize("normalize", [True, False])
def test_an_unread_delta_counts_as_zero(method: str, normalize: bool) -> None:
    base, models = cases.inputs(512, 3, torch.float32)
    values = cases.parameters([0.3, 0.9, 0.5], normalize=normalize)  # density 1: no thresholds, no norms
    found = cases.merge(method, base, models, values, cuts=[128, 256], unread=[(1, 128, 256), (2, 256, 512)])
    expected = [x.clone() for x in models]
    expected[1][128:256] = base[128:256]
    expected[2][256:] = base[256:]
    assert torch.equal(found, cases.merge(method, base, expected, values))


@pytest.mark.parametrize("method", ["dare_linear", "dare_ties"])
def test_dare_matches_norms_over_what_is_read(method: str) -> None:
    base, models = cases.inputs(512, 2, torch.bfloat16)
    values = cases.parameters([0.3, 0.9], [0.5, 0.4])
    found = cases.merge(method, base, models, values, cuts=[128, 256], unread=[(1, 128, 256)])
    models[1][128:256] = base[128:256]
    assert torch.equal(found, cases.merge(method, base, models, values))


@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "dare_linear", "dare_ties"])
def test_a_column_that_no_expert_is_read_of_is_the_base(method: str) -> None:
    base, models = cases.inputs(256, 2, torch.bfloat16)
    values = cases.parameters([0.3, 0.9], [0.5, 0.4])
    found = cases.merge(method, base, models, values, cuts=[128], unread=[(0, 128, 256), (1, 128, 256)])
    assert torch.equal(found[128:], base[128:])
