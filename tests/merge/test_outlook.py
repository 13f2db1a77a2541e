"""What a merge will find done is told before it runs, and comes true."""

from __future__ import annotations

import pytest
from merge_cases import Lab, counted_reads, family, recipe

from mpfs.merge.reports import MergeReport, Outlook
from mpfs.objects import Budget

pytest_plugins = ["merge_fixtures"]

DENSITIES = [0.4, 0.7, 0.9]


@pytest.fixture
def models(lab: Lab) -> Lab:
    """Three experts."""
    family(3, shapes={"a": (64, 80), "b": (33, 64), "c": (7,), "d": (64, 64)}, seed=4, changed=0.8).add_to(lab)
    return lab


def came_true(outlook: Outlook, report: MergeReport) -> bool:
    figures = report.figures
    assert figures.bytes_written >= 0
    return (outlook.expert_bytes, outlook.base_bytes, outlook.blocks_computed, outlook.blocks_reused) == (
        figures.expert_bytes_read,
        figures.base_bytes_read,
        figures.blocks_computed,
        figures.blocks_reused,
    )


@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "dare_linear"])
def test_what_is_known_already(models: Lab, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = recipe(method, 3, densities=None if method == "task_arithmetic" else DENSITIES)
    plan = models.repository.plan(asked, budget=Budget("percent", 50)).plan
    with counted_reads(monkeypatch) as seen:
        first = models.repository.outlook(plan)
    assert not seen, "no block is read"
    cost = plan.cost
    assert first.seconds_estimated is None
    assert first.blocks_reused == 0
    assert (first.expert_bytes, first.base_bytes, first.bytes_written, first.blocks_computed) == (
        cost.expert_bytes_planned, cost.base_bytes_read, cost.bytes_written, cost.blocks_computed
    )  # fmt: skip
    assert first.disk_bytes >= first.bytes_written
    assert came_true(first, models.merge(plan))
    again = models.repository.outlook(plan)
    assert again.blocks_reused == cost.blocks_computed
    assert again.seconds_estimated == 0.0
    assert (again.expert_bytes, again.base_bytes, again.bytes_written, again.disk_bytes) == (0, 0, 0, 0)
    assert came_true(again, models.merge(plan, into="again"))
    more = models.repository.plan(asked, budget=Budget("percent", 80)).plan
    told = models.repository.outlook(more)
    assert told.seconds_estimated is not None
    assert came_true(told, models.merge(more, into="more"))
    if method == "task_arithmetic":
        assert 0 < told.blocks_reused < more.cost.blocks_computed


def test_a_plan_says_nothing_of_it(models: Lab) -> None:
    asked = recipe("task_arithmetic", 3)
    before = models.repository.plan(asked)
    models.merge(asked)
    assert models.repository.plan(asked).identity == before.identity


def test_one_layer_with_other_parameters(models: Lab) -> None:
    models.merge(recipe("task_arithmetic", 3))
    changed = recipe("task_arithmetic", 3)
    changed["models"][0]["parameters"]["weight"] = [{"filter": "d", "value": 0.9}, {"value": 0.3}]
    plan = models.repository.plan(changed).plan
    told = models.repository.outlook(plan)
    size = next(tensor for tensor in plan.tensors if tensor.name == "d").bytes_computed
    assert 0 < told.bytes_written == size
    assert came_true(told, models.merge(plan, into="changed"))
