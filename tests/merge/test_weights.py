"""Weights as the planner sees them, and fidelity where a sum of models also scales the base."""

from __future__ import annotations

from typing import Any

import pytest
from merge_cases import Lab, family, recipe

from mpfs.merge.operators import Parameters, get_operator
from mpfs.merge.weights import DeltaWeights, delta_weights
from mpfs.objects import Budget

pytest_plugins = ["merge_fixtures"]

TWO = [{"weight": 0.5}, {"weight": 1.5}]


@pytest.mark.parametrize(
    ("method", "shared", "wanted"),
    [
        ("task_arithmetic", {}, DeltaWeights((0.5, 1.5))),
        ("task_arithmetic", {"lambda": 0.5}, DeltaWeights((0.25, 0.75))),
        ("task_arithmetic", {"normalize": True}, DeltaWeights((0.25, 0.75))),
        ("ties", {"normalize": True}, DeltaWeights((0.5, 1.5))),
        ("linear", {}, DeltaWeights((0.25, 0.75))),
        ("linear", {"normalize": False}, DeltaWeights((0.5, 1.5), 1.0)),
    ],
)
def test_weights(method: str, shared: dict[str, Any], wanted: DeltaWeights) -> None:
    assert delta_weights(get_operator(method), Parameters(shared, TWO)) == wanted


@pytest.mark.parametrize("weights", [[0.3, 0.4], [0.7, 0.6]])
def test_a_sum_of_models_also_scales_the_base(lab: Lab, weights: list[float]) -> None:
    family(2, shapes={f"layer.{i}": (64, 80) for i in range(20)}, seed=9).add_to(lab)
    asked = recipe("linear", 2, weights=weights, parameters={"normalize": False})
    asked["models"][0]["parameters"]["weight"] = 0.2
    report = lab.merge(asked, budget=Budget("percent", 30), verify_fidelity=True)
    assert report.figures.fidelity == pytest.approx(report.fidelity_predicted, abs=0.02)
