"""Budgets in recipes hold, each by itself, whatever else is asked for; and what cannot be says what is in the way."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from merge_cases import Lab, block_sizes, counted_reads, family, problems_of, recipe

from mpfs.errors import BadInputError, BudgetInfeasibleError, FidelityInfeasibleError
from mpfs.merge.planner import POLICIES
from mpfs.merge.recipe import recipe_from_mapping
from mpfs.objects import BlockId, Budget, Plan, Tensor

pytest_plugins = ["merge_fixtures"]

SHAPES = {f"layer.{i}.{part}": (64, 48 + i) for i in range(4) for part in ("attn", "mlp")}


@pytest.fixture
def models(lab: Lab) -> Lab:
    """Three experts of many columns."""
    family(3, shapes=SHAPES, seed=1).add_to(lab)
    return lab


def planned(lab: Lab, asked: Mapping[str, Any], **options: Any) -> Plan:
    return lab.repository.plan(asked, **options).plan


def with_budgets(method: str = "task_arithmetic", top: Any = None, **experts: Any) -> dict[str, Any]:
    densities = None if method in ("linear", "task_arithmetic") else [0.4, 0.7, 1.0]
    asked = recipe(method, 3, densities=densities)
    if top is not None:
        asked["budget"] = top
    for entry in asked["models"]:
        if entry["model"] in experts:
            entry["budget"] = experts[entry["model"]]
    return asked


def bytes_by_model(plan: Plan, lab: Lab, part: str = "") -> dict[str, int]:
    """What a plan reads of each expert, of tensors whose name contains `part`: from its selections, block by block."""
    base = lab.blocks("base")
    found: dict[str, int] = {}
    for tensor in plan.tensors:
        for (model, _), selection in zip(tensor.experts, tensor.selections, strict=True):
            name = plan.models[model].name
            sizes: dict[BlockId, int] = {}
            if part in tensor.name and name != "base":
                theirs: Tensor = lab.blocks(name)[tensor.name]
                listed = list(theirs.sized_blocks())
                for column in selection.columns():
                    if listed[column][0] != base[tensor.name].blocks[column]:
                        sizes.update([listed[column]])
            found[name] = found.get(name, 0) + sum(sizes.values())
    return found


def test_a_models_budget_bounds_that_model_only(models: Lab) -> None:
    plan = planned(models, with_budgets(e1="10%"))
    used = bytes_by_model(plan, models)
    full = bytes_by_model(planned(models, with_budgets()), models)
    # A block that cancels what is not read of e1 is better left out.
    assert used["e0"] >= 0.9 * full["e0"]
    assert used["e2"] >= 0.9 * full["e2"]
    # A column of one block is about one in a hundred.
    assert 0.085 * full["e1"] <= used["e1"] <= 0.1 * full["e1"]
    (bound,) = plan.bounds
    assert (bound.path, bound.filter, bound.planned, bound.full) == ("models[1].budget", None, used["e1"], full["e1"])
    assert bound.model == [model.name for model in plan.models].index("e1")
    assert bound.limit == int(full["e1"] * 0.1)


def test_filters_bound_the_tensors_that_they_name(models: Lab) -> None:
    plan = planned(models, with_budgets(top=[{"filter": "mlp", "value": "20%"}, {"value": "50%"}]))
    full = planned(models, with_budgets())
    for part, share in (("mlp", 0.2), ("attn", 0.5)):
        used = sum(bytes_by_model(plan, models, part).values())
        allowed = share * sum(bytes_by_model(full, models, part).values())
        assert 0.98 * allowed - 4096 <= used <= allowed
    assert [bound.path for bound in plan.bounds] == ["budget[0]", "budget[1]"]


def test_the_tightest_holds(models: Lab) -> None:
    asked = with_budgets(top="30%")
    full = planned(models, with_budgets()).cost.expert_bytes_full
    for budget, share in ((None, 0.3), (Budget("percent", 50), 0.3), (Budget("percent", 10), 0.1)):
        plan = planned(models, asked, budget=budget)
        assert 0.97 * share * full <= plan.cost.expert_bytes_planned <= share * full
    # The same choice as the same budget makes from outside.
    alone = planned(models, with_budgets(), budget=Budget("percent", 30))
    assert [t.selections for t in planned(models, asked).tensors] == [t.selections for t in alone.tensors]


def test_a_fidelity_of_some_tensors_is_reached_and_no_more(models: Lab) -> None:
    plan = planned(models, with_budgets(top=[{"filter": "mlp", "value": {"fidelity": 0.6}}, {"value": "5%"}]))
    left = {"mlp": 0.0, "attn": 0.0}
    energy = dict(left)
    for tensor in plan.tensors:
        part = "mlp" if "mlp" in tensor.name else "attn"
        left[part] += tensor.energy_left_out
        energy[part] += tensor.energy
    assert 0.6 - 1e-9 <= 1 - (left["mlp"] / energy["mlp"]) ** 0.5 <= 0.63
    full = sum(bytes_by_model(planned(models, with_budgets()), models, "attn").values())
    assert sum(bytes_by_model(plan, models, "attn").values()) <= 0.05 * full


def test_a_fidelity_of_one_model(models: Lab) -> None:
    plan = planned(models, with_budgets(e0={"fidelity": 0.5}, e2="0%"))
    used, full = bytes_by_model(plan, models), bytes_by_model(planned(models, with_budgets()), models)
    assert used["e2"] == 0
    assert used["e1"] >= 0.9 * full["e1"]
    assert 0 < used["e0"] < full["e0"]


@pytest.mark.parametrize("method", ["task_arithmetic", "ties"])
def test_an_expert_that_may_not_be_read_does_not_keep_the_others_out(models: Lab, method: str) -> None:
    plan = planned(models, with_budgets(method, e0="0%"))
    used, full = bytes_by_model(plan, models), bytes_by_model(planned(models, with_budgets(method)), models)
    assert used["e0"] == 0
    assert used["e1"] + used["e2"] >= 0.9 * (full["e1"] + full["e2"])


def test_what_is_in_the_way_is_named(models: Lab) -> None:
    with pytest.raises(
        FidelityInfeasibleError, match=r"the budget of the merge \(fidelity 0\.9\).*models\[0\]\.budget"
    ):
        planned(models, with_budgets(e0="1%"), budget=Budget("fidelity", 0.9))
    with pytest.raises(
        FidelityInfeasibleError, match=r"budget \(fidelity 0\.9\).*the budget of the merge \(5%\)"
    ) as caught:
        planned(models, with_budgets(top={"fidelity": 0.9}), budget=Budget("percent", 5))
    assert caught.value.exit_code == 14
    assert caught.value.details["bound"] == "budget"
    asked = recipe("linear", 2, base=None, budget="10%")
    with pytest.raises(BudgetInfeasibleError, match=r"budget \(10%\).*must read"):
        planned(models, asked)


def test_mistakes_are_told(models: Lab) -> None:
    asked = with_budgets(
        top=[{"filter": "mlp", "value": "200%"}, {"filter": 3, "value": 1}], e0=0.5, e1={"fidelity": 2}
    )
    asked["models"][2]["budget"] = [{"value": "5%"}, {"filter": "x", "value": "1MiB"}, {"valeu": 1}]
    found = problems_of(lambda: recipe_from_mapping(asked))
    assert set(found) == {
        "budget[0].value",
        "budget[1].filter",
        "models[0].budget",
        "models[1].budget.fidelity",
        "models[2].budget[1]",
        "models[2].budget[2]",
    }


def test_a_stored_plan_keeps_its_bounds(models: Lab) -> None:
    report = models.repository.plan(with_budgets(top="40%", e1="10%"))
    again = models.repository.find_plan(report.identity).plan
    assert again == report.plan
    assert len(again.bounds) == 2
    assert recipe_from_mapping(again.recipe).has_budgets


def test_an_edited_plan_that_reads_more_is_refused(models: Lab, tmp_path: Path) -> None:
    document = json.loads(models.repository.plan(with_budgets(e1="10%"), save=False).plan.encode())
    document["bounds"][0]["limit"] = 4096
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    with pytest.raises(BadInputError, match=r"models\[1\]\.budget of its recipe allows 4,096"):
        models.repository.merge(models.repository.find_plan(path).plan, "merged")


def test_fidelity_is_measured_against_the_merge_without_budgets(models: Lab) -> None:
    report = models.merge(with_budgets(top="40%"), verify_fidelity=True)
    assert report.figures.fidelity is not None
    assert report.figures.fidelity < 0.9
    assert report.figures.fidelity == pytest.approx(report.fidelity_predicted, abs=0.05)


amounts = st.one_of(
    st.floats(0, 100).map(lambda value: f"{value:.9f}%"),
    st.integers(0, 100_000),
)
rules = st.one_of(
    amounts,
    st.lists(
        st.builds(lambda f, v: {"filter": f, "value": v}, st.sampled_from(["mlp", "0", "attn"]), amounts), max_size=3
    ),
)


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_no_bound_is_ever_exceeded(monkeypatch: pytest.MonkeyPatch, data: st.DataObject) -> None:
    made = family(
        3, shapes={"0.mlp": (40, 64), "1.mlp": (64, 64), "0.attn": (33, 61)}, seed=data.draw(st.integers(0, 99))
    )
    method = data.draw(st.sampled_from(["linear", "task_arithmetic", "ties", "dare_ties"]))
    asked = with_budgets(
        method,
        top=data.draw(st.none() | rules),
        **{name: data.draw(rules) for name in data.draw(st.sets(st.sampled_from(["e0", "e1", "e2"])))},
    )
    with tempfile.TemporaryDirectory() as folder:
        lab = Lab(Path(folder))
        try:
            made.add_to(lab)
            if data.draw(st.booleans()):  # an expert twice, under two names
                lab.add("e1", made.experts[0], {"config.json": b"{}"})
            budget = data.draw(st.none() | st.builds(Budget, st.just("percent"), st.floats(0, 100)))
            with counted_reads(monkeypatch) as read:
                report = lab.merge(
                    asked, budget=budget, policy=data.draw(st.sampled_from(POLICIES)), threads=1, reuse=False
                )
            plan = lab.repository.find_plan(report.plan).plan
            base = block_sizes(lab.blocks("base"))
            for bound in plan.bounds:
                assert bound.limit is not None
                assert bound.planned <= bound.limit
                if bound.filter is None and "[" not in bound.path.removeprefix("models"):
                    mine = [model.name for index, model in enumerate(plan.models) if bound.model in (None, index)]
                    if len({"e0", "e1"} & set(mine)) == 1:
                        continue  # what is read of one may be read for the other's sake
                    blocks = {b: n for name in mine for b, n in block_sizes(lab.blocks(name)).items() if b not in base}
                    assert sum(blocks.get(block, 0) for block in read) <= bound.limit
            if budget is not None:
                assert report.figures.expert_bytes_read <= plan.cost.expert_bytes_full * budget.value / 100
        finally:
            lab.close()
