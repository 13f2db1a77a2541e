"""Budgets hold: in the plan, in the engine's own counts, and in what is really read."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from merge_cases import Lab, block_sizes, counted_reads, expected, family, recipe

from mpfs.errors import BudgetInfeasibleError, MPFSError, UsageError
from mpfs.merge.planner import POLICIES
from mpfs.objects import Budget, Plan

pytest_plugins = ["merge_fixtures"]

METHODS = ["linear", "task_arithmetic", "ties", "dare_linear", "dare_ties"]
SMALL = {"embed": (70, 64), "layer.weight": (64, 64), "bias": (64,), "tail": (33, 61), "none": (0,)}


def densities(method: str, count: int) -> list[float] | None:
    return None if method in ("linear", "task_arithmetic") else [0.4, 0.7, 1.0, 0.2, 0.9][:count]


budgets = st.one_of(
    st.builds(Budget, st.just("percent"), st.floats(0, 100)),
    st.builds(Budget, st.just("bytes"), st.integers(0, 300_000).map(float)),
    st.builds(Budget, st.just("fidelity"), st.floats(0, 1)),
    st.just(Budget()),
)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_merge_reads_more_than_its_budget(monkeypatch: pytest.MonkeyPatch, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 4))
    models = family(
        count,
        dtype=data.draw(dtypes),
        expert_dtypes=data.draw(st.lists(dtypes, min_size=count, max_size=count)),
        shapes=SMALL,
        seed=data.draw(st.integers(0, 1000)),
        same_tensors=data.draw(st.lists(st.sampled_from(list(SMALL)), max_size=2)),
        changed=data.draw(st.sampled_from([1.0, 0.5])),
    )
    method = data.draw(st.sampled_from(METHODS))
    asked = recipe(method, count, densities=densities(method, count))
    if data.draw(st.booleans()):
        asked["dtype"] = data.draw(st.sampled_from(["float32", "bfloat16"]))
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab(Path(folder))
        try:
            models.add_to(lab)
            if count > 1 and data.draw(st.booleans()):  # an expert twice, under two names
                lab.add("e1", models.experts[0], {"config.json": b"{}"})
            for _ in range(2):
                budget = data.draw(budgets)
                check(
                    lab,
                    monkeypatch,
                    asked,
                    budget=budget,
                    policy=data.draw(st.sampled_from(POLICIES)),
                    threads=data.draw(st.sampled_from([1, 3])),
                    reuse=data.draw(st.booleans()),
                )
        finally:
            lab.close()


def check(lab: Lab, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], **options: Any) -> None:
    with counted_reads(monkeypatch) as read:
        report = lab.merge(asked, **options)
    plan = lab.repository.find_plan(report.plan).plan
    cost, figures, budget = plan.cost, report.figures, plan.budget
    assert figures.expert_bytes_read <= cost.expert_bytes_planned <= cost.expert_bytes_full
    assert figures.base_bytes_read <= cost.base_bytes_read
    if budget.kind == "bytes":
        assert cost.expert_bytes_planned <= budget.value
    if budget.kind == "percent":
        assert cost.expert_bytes_planned <= cost.expert_bytes_full * budget.value / 100
    if budget.kind == "fidelity":
        assert plan.fidelity_predicted >= budget.value - 1e-6
    base = block_sizes(lab.blocks("base"))
    experts = {
        block: size
        for model in plan.models
        if model.name != "base"
        for block, size in block_sizes(lab.blocks(model.name)).items()
        if block not in base
    }
    # Counted by what was read, not by the engine.
    assert sum(experts.get(block, 0) for block in read) == figures.expert_bytes_read
    assert sum(base.get(block, 0) for block in read) == figures.base_bytes_read
    assert figures.blocks_computed + figures.blocks_reused == cost.blocks_computed
    assert figures.blocks_kept == cost.blocks_kept
    assert figures.bytes_written <= cost.bytes_written + (1 << 16)  # headers
    if not figures.blocks_reused:
        assert figures.expert_bytes_read == cost.expert_bytes_planned
        assert figures.base_bytes_read == cost.base_bytes_read


@pytest.fixture
def models(lab: Lab) -> Lab:
    """Three experts of many columns."""
    family(3, shapes={f"layer.{i}": (64, 64 + i) for i in range(12)}, seed=1).add_to(lab)
    return lab


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("policy", POLICIES)
def test_budgets_are_used_up(models: Lab, method: str, policy: str) -> None:
    asked = recipe(method, 3, densities=densities(method, 3))
    for percent in (30, 60):
        plan = models.repository.plan(asked, budget=Budget("percent", percent), policy=policy).plan  # type: ignore[arg-type]
        share = plan.cost.expert_bytes_planned / plan.cost.expert_bytes_full
        # A column of three blocks is about one in seventy.
        assert percent / 100 - 0.015 <= share <= percent / 100


def test_blocks_that_experts_share_are_read_once_and_free_budget(lab: Lab) -> None:
    models = family(1, shapes={"w": (64, 256)}, seed=2)
    lab.add("base", models.base)
    for index in range(3):
        lab.add(f"e{index}", models.experts[0], {"note.txt": str(index).encode()})
    asked = recipe("task_arithmetic", 3, weights=[0.5, 0.5, 0.5])
    full = lab.repository.plan(asked).plan.cost.expert_bytes_full
    assert full == 16 * 4096
    plan = lab.repository.plan(asked, budget=Budget("percent", 50)).plan
    assert 0.4 * full < plan.cost.expert_bytes_planned <= 0.5 * full


def test_no_budget_and_nothing_at_all(models: Lab) -> None:
    asked = recipe("task_arithmetic", 3)
    assert models.merge(asked, budget=Budget("percent", 100)).figures.expert_bytes_read > 0
    report = models.merge(asked, budget=Budget("bytes", 0), into="nothing")
    assert report.figures.expert_bytes_read == report.figures.base_bytes_read == 0
    assert report.fidelity_predicted == 0.0
    assert models.blocks("nothing") == models.blocks("base")


def test_a_budget_on_a_mean_with_a_base(models: Lab) -> None:
    """The base stands in for what is not read, under the expert's weight."""
    asked = recipe("linear", 3, weights=[0.3, 0.8, 0.4])
    models.merge(asked, budget=Budget("bytes", 0))
    base, merged = models.load("base"), models.load("merged")
    for name, values in base.items():
        torch.testing.assert_close(merged[name], values, rtol=1e-6, atol=1e-6)


def test_what_has_no_base_must_be_read(lab: Lab) -> None:
    models = family(2, shapes={"w": (64, 64), "v": (64,)})
    lab.add("base", {"v": models.base["v"]})
    for index, expert in enumerate(models.experts):
        lab.add(f"e{index}", expert)
    asked = recipe("linear", 2, weights=[1.0, 1.0])
    with pytest.raises(BudgetInfeasibleError) as caught:
        lab.merge(asked, budget=Budget("percent", 50))
    needed = 2 * 64 * 64 * 4
    assert f"{needed:,} bytes" in caught.value.message
    assert caught.value.details["required"] == needed
    plan = lab.repository.plan(asked, budget=Budget("bytes", needed)).plan
    assert plan.cost.expert_bytes_planned == needed
    without = recipe("linear", 2, base=None)
    with pytest.raises(BudgetInfeasibleError):
        lab.merge(without, budget=Budget("percent", 99))


@pytest.mark.parametrize(
    "budget",
    [
        Budget("percent", 101),
        Budget("percent", -1),
        Budget("bytes", -1),
        Budget("fidelity", 1.5),
        Budget("fidelity", -0.1),
        Budget("percent", float("nan")),
        Budget("bytes", float("inf")),
    ],
)
def test_budgets_that_cannot_be_meant(models: Lab, budget: Budget) -> None:
    with pytest.raises(UsageError, match="must be"):
        models.repository.plan(recipe("ties", 3), budget=budget)


def test_the_ledger_refuses_what_the_plan_does_not_list(models: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpfs.merge import engine
    from mpfs.merge.delta import PlanInputs, planned_blocks
    from mpfs.objects import BlockId, PlanTensor

    def fewer(tensor: PlanTensor, inputs: PlanInputs) -> set[BlockId]:
        return set(sorted(planned_blocks(tensor, inputs))[1:])

    monkeypatch.setattr(engine, "planned_blocks", fewer)
    with pytest.raises(MPFSError, match="not in the plan"):
        models.merge(recipe("ties", 3, densities=[0.5, 0.5, 0.5]))
    assert "merged" not in [ref.name for ref in models.repository.refs()]


def test_more_budget_is_never_worse(models: Lab) -> None:
    asked = recipe("task_arithmetic", 3)
    plans = [models.repository.plan(asked, budget=Budget("percent", p)).plan for p in range(0, 101, 10)]
    predicted = [plan.fidelity_predicted for plan in plans]
    assert all(a <= b for a, b in itertools.pairwise(predicted))
    assert predicted[-1] == 1.0


@pytest.mark.parametrize("method", ["task_arithmetic", "linear"])
@pytest.mark.parametrize("policy", POLICIES)
def test_predicted_fidelity_is_the_measured_one(lab: Lab, method: str, policy: str) -> None:
    shapes = {f"layer.{i}": (64, 80) for i in range(40)}
    family(3, shapes=shapes, seed=5).add_to(lab)
    asked = recipe(method, 3, weights=[0.5, 0.7, 0.4])
    full = expected(lab, asked)
    base = lab.load("base")
    for percent in (10, 30, 60):
        report = lab.merge(asked, budget=Budget("percent", percent), policy=policy, verify_fidelity=True)
        measured = report.figures.fidelity
        assert measured is not None
        assert report.fidelity_predicted == pytest.approx(measured, abs=0.02)
        merged = lab.load()
        error = sum(float(((merged[n].double() - full[n].double()) ** 2).sum()) for n in full)
        change = sum(float(((full[n].double() - base[n].double()) ** 2).sum()) for n in full)
        assert measured == pytest.approx(1 - (error / change) ** 0.5, abs=1e-5)  # but for rounding to float32


@pytest.mark.parametrize("method", ["ties", "dare_ties", "dare_linear"])
def test_measured_fidelity_of_the_other_methods(models: Lab, method: str) -> None:
    asked = recipe(method, 3, densities=densities(method, 3), dtype="float64", out_dtype="float64")
    full = expected(models, asked)
    base = models.load("base")
    report = models.merge(asked, budget=Budget("percent", 50), verify_fidelity=True)
    merged = models.load()
    error = sum(float(((merged[n] - full[n]) ** 2).sum()) for n in full)
    change = sum(float(((full[n] - base[n].double()) ** 2).sum()) for n in full)
    assert report.figures.fidelity == pytest.approx(1 - (error / change) ** 0.5, abs=1e-9)
    assert models.merge(asked, verify_fidelity=True).figures.fidelity == pytest.approx(1.0, abs=1e-12)


def test_fidelity_as_the_aim(models: Lab) -> None:
    asked = recipe("task_arithmetic", 3)
    costs = []
    for target in (0.0, 0.5, 0.9, 1.0):
        report = models.merge(asked, budget=Budget("fidelity", target), verify_fidelity=True)
        assert report.fidelity_predicted >= target - 1e-9
        assert report.figures.fidelity == pytest.approx(report.fidelity_predicted, abs=0.05)
        costs.append(report.figures.expert_bytes_planned)
    assert costs == sorted(costs)
    assert costs[0] == 0
    assert costs[-1] == report.figures.expert_bytes_full


def test_plans_state_energy_and_conflict(models: Lab) -> None:
    asked = recipe("task_arithmetic", 3)
    plan: Plan = models.repository.plan(asked, budget=Budget("percent", 30)).plan
    base, experts = models.load("base"), [models.load(f"e{i}") for i in range(3)]
    energy = sum(tensor.energy for tensor in plan.tensors)
    true = 0.0
    for name, values in base.items():
        delta = torch.zeros_like(values)
        for weight, expert in zip([0.3, 0.8, -0.4], experts, strict=True):
            delta += weight * (expert[name] - values)
        true += float((delta**2).sum())
    assert energy == pytest.approx(true, rel=0.1)
    left = sum(tensor.energy_left_out for tensor in plan.tensors)
    assert plan.fidelity_predicted == pytest.approx(1 - (left / energy) ** 0.5, abs=1e-8)
    assert all(tensor.cosine is not None and abs(tensor.cosine) < 0.4 for tensor in plan.tensors)


@pytest.mark.parametrize("weight", [0.0, 1e-200, 1e200, -1e300])
def test_extreme_weights_still_plan(models: Lab, weight: float) -> None:
    """Energies are products of weights: they must stay numbers that JSON can hold."""
    asked = recipe("task_arithmetic", 3, weights=[weight, 1.0, weight])
    plan = models.repository.plan(asked, budget=Budget("percent", 50)).plan
    assert Plan.decode(plan.encode()) == plan
    assert 0.0 <= plan.fidelity_predicted <= 1.0
    assert plan.cost.expert_bytes_planned <= plan.cost.expert_bytes_full / 2
