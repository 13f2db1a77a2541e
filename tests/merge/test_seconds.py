"""Estimates of time come from runs of about the same size."""

from __future__ import annotations

import pytest
from merge_cases import Lab, family, recipe

from mpfs.merge.seconds import estimate_seconds
from mpfs.objects import Cost, Figures

pytest_plugins = ["merge_fixtures"]


def cost(nbytes: int) -> Cost:
    return Cost(nbytes, nbytes // 2, nbytes // 4, nbytes - nbytes // 2 - nbytes // 4, 0, 1)


def ran(nbytes: int, seconds: float, *, reused: int = 0, fidelity: float | None = None) -> Figures:
    return Figures(
        expert_bytes_read=nbytes, blocks_computed=1, blocks_reused=reused, seconds=seconds, fidelity=fidelity
    )


def test_nothing_to_go_by() -> None:
    assert estimate_seconds(cost(100), []) is None
    assert estimate_seconds(cost(100), [ran(100, 1.0, reused=3), ran(100, 1.0, fidelity=0.5), Figures()]) is None


def test_the_nearest_runs_count() -> None:
    large = [ran(10**9 + i, 2.0) for i in range(9)]
    small = [ran(1000 + i, 0.1) for i in range(9)]
    assert estimate_seconds(cost(10**9), large + small) == pytest.approx(2.0, rel=0.01)
    assert estimate_seconds(cost(1000), large + small) == pytest.approx(0.1, rel=0.02)
    assert estimate_seconds(cost(2 * 10**9), [*large, ran(10**9, 900.0)]) == pytest.approx(4.0, rel=0.01)
    assert estimate_seconds(cost(0), large) == 0.0


def test_plans_know_after_the_first_merge(lab: Lab) -> None:
    family(2).add_to(lab)
    asked = recipe("task_arithmetic", 2)
    first = lab.repository.plan(asked)
    assert first.seconds_estimated is None
    assert first.as_json()["run"]["seconds_estimated"] is None
    report = lab.merge(asked)
    again = lab.repository.plan(asked)
    assert again.identity == first.identity
    assert again.seconds_estimated == pytest.approx(report.figures.seconds, rel=1.0)
