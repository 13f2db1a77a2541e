"""The explanation of a plan by layer and by model: the sums of what its tensors say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from merge_cases import Lab, family, recipe

from mpfs.history.explain import Explanation, explain_plan
from mpfs.objects import Budget
from mpfs.objects.dtypes import nbytes

SHAPES = {f"model.layers.{i}.{name}.weight": (33, 64) for i in range(11) for name in ("q", "mlp")} | {"head": (70, 64)}


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    made = Lab(tmp_path)
    family(3, shapes=SHAPES, seed=2, changed=0.5, same_tensors=["model.layers.3.q.weight"]).add_to(made)
    yield made
    made.close()


def explained(lab: Lab, budget: float) -> Explanation:
    asked = recipe("task_arithmetic", 3, weights=[0.3, 0.8, 0.5])
    asked["models"][1]["parameters"]["weight"] = [0.1, 1.1]
    return explain_plan(lab.repository.plan(asked, budget=Budget("percent", budget)).plan)


@pytest.mark.parametrize("budget", [0.0, 20.0, 100.0])
def test_layers_add_up(lab: Lab, budget: float) -> None:
    found = explained(lab, budget)
    plan = found.plan
    assert [layer.name for layer in found.layers] == ["head", *(f"model.layers.{i}" for i in range(11))]
    assert sum(layer.tensors for layer in found.layers) == len(SHAPES)
    assert sum(layer.computed for layer in found.layers) == sum(tensor.action == "compute" for tensor in plan.tensors)
    for place, expert in enumerate(found.experts):
        assert expert.model == f"e{place}"
        assert expert.columns_read == sum(layer.experts[place].columns_read for layer in found.layers)
        assert expert.columns == sum(layer.experts[place].columns for layer in found.layers)
        assert expert.columns_read == sum(
            item.columns_read for tensor in found.tensors for item in tensor.experts if item.model == expert.model
        )
        changed = [tensor for tensor in plan.tensors if tensor.energy > 0.0]
        assert expert.columns == sum(tensor.column_count for tensor in changed)
    for layer in found.layers:
        mine = [
            tensor for tensor in plan.tensors if tensor.name.startswith(f"{layer.name}.") or tensor.name == layer.name
        ]
        energy, left = (sum(getattr(tensor, name) for tensor in mine) for name in ("energy", "energy_left_out"))
        assert layer.kept == pytest.approx(1.0 - left / energy)
        assert sum(layer.reasons.values()) == layer.tensors == len(mine)
    assert found.layers[4].reasons["same"] == 1
    assert "1 unchanged" in found.layers[4].why
    reasons = {reason for layer in found.layers for reason in layer.reasons}
    assert reasons - {"same"} <= {0.0: {"skipped"}, 20.0: {"full", "part", "skipped"}, 100.0: {"full"}}[budget]


def test_parameters_of_a_gradient(lab: Lab) -> None:
    found = explained(lab, 100.0)
    assert found.experts[0].parameters == {"weight": (0.3, 0.3)}
    assert found.experts[1].parameters["weight"] == pytest.approx((0.1, 1.1))
    first, last = (found.layers[i].experts[1].parameters["weight"] for i in (1, 11))
    assert first[0] < last[0]
    (shown,) = [tensor for tensor in found.as_json()["tensors"] if tensor["name"] == "head"]
    assert [item["parameters"]["weight"] == item["weight"] for item in shown["experts"]] == [True] * 3


@pytest.mark.parametrize("budget", [0.0, 20.0, 100.0])
def test_what_is_touched_and_what_is_only_referenced(lab: Lab, budget: float) -> None:
    found = explained(lab, budget)
    cost = found.plan.cost
    assert found.touched == cost.blocks_computed / (cost.blocks_computed + cost.blocks_kept)
    total = sum(nbytes("F32", shape) for shape in SHAPES.values())
    assert found.plan.bytes_kept + cost.bytes_written == total
    lab.merge(found.plan, "merged")
    ran = lab.repository.explain("merged")
    assert ran.figures is not None
    assert ran.touched == found.touched
    assert ran.as_json()["cost"]["bytes_kept"] == found.plan.bytes_kept
