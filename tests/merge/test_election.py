"""What is tried out for methods that elect signs is what they do to normal deltas; and plans foresee what such merges keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from merge_cases import Lab
from numpy.typing import NDArray

from mpfs.merge.election import elected_weights
from mpfs.merge.operators import Column, Parameters, TensorContext, get_operator
from mpfs.objects import Budget

pytest_plugins = ["merge_fixtures"]

N = 1 << 14
SIZES = (1.0, 0.4, 2.0)
WEIGHTS = (0.6, 0.9, -0.3)


def deltas(cosine: float) -> NDArray[np.float64]:
    """(3, N): normal, of these sizes, each two with this cosine."""
    rng = np.random.default_rng(3)
    shared = rng.normal(size=N)
    own = rng.normal(size=(3, N))
    found: NDArray[np.float64] = np.array(SIZES)[:, None] * (np.sqrt(cosine) * shared + np.sqrt(1 - cosine) * own)
    return found


def change(method: str, parameters: Parameters, values: NDArray[np.float64]) -> float:
    """The squared norm of what the method really changes."""
    operator = get_operator(method)
    context = TensorContext("w", N, "F64", 0, ["a", "b", "c"][: len(values)], shape=(N,))
    base = torch.zeros(N, dtype=torch.float64)
    column = Column(0, base, [torch.from_numpy(row.copy()) for row in values])
    prepared = operator.prepare(context, parameters, lambda: iter([column]))
    return float((operator.apply(context, parameters, prepared, column) ** 2).sum())


def elected(
    method: str, parameters: Parameters, weights: Sequence[float], gram: NDArray[np.float64], normalize: bool
) -> list[float]:
    """Of a single tensor."""
    found = elected_weights(get_operator(method), [parameters], np.array([weights]), gram[None], [normalize])
    values: list[float] = found[0].tolist()
    return values


@pytest.mark.parametrize("cosine", [0.0, 0.5])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("method", ["ties", "dare_ties", "breadcrumbs_ties"])
def test_sizes_are_those_of_the_methods(method: str, normalize: bool, cosine: float) -> None:
    values = deltas(cosine)
    own: list[dict[str, Any]] = [{"weight": weight, "density": 0.5} for weight in WEIGHTS]
    parameters = Parameters({"normalize": normalize}, own)
    gram = values @ values.T
    found = elected(method, parameters, WEIGHTS, gram, normalize)
    assert [value < 0 for value in found] == [weight < 0 for weight in WEIGHTS]
    assert np.array(found) @ gram @ np.array(found) == pytest.approx(change(method, parameters, values), rel=0.1)


def test_a_single_expert_keeps_what_is_not_trimmed() -> None:
    values = deltas(0.0)[:1]
    gram = values @ values.T
    for normalize in (False, True):
        parameters = Parameters({"normalize": normalize}, [{"weight": 0.6, "density": 1.0}])
        (found,) = elected("ties", parameters, [0.6], gram, normalize)
        assert found == pytest.approx(1.0 if normalize else 0.6, rel=1e-9)


def test_experts_without_a_delta_have_no_part() -> None:
    gram = np.diag([4.0, 0.0, 1.0])
    parameters = Parameters({}, [{"weight": 1.0, "density": 1.0}] * 3)
    found = elected("ties", parameters, [1.0, 1.0, 1.0], gram, True)
    assert found[1] == 0.0
    nothing = elected("ties", parameters, [1.0, 1.0, 1.0], np.zeros((3, 3)), True)
    assert nothing == [1.0, 1.0, 1.0]


def test_opposite_deltas_stay_finite() -> None:
    gram = np.array([[1.0, -1.0], [-1.0, 1.0]])
    parameters = Parameters({}, [{"weight": 1.0, "density": 1.0}] * 2)
    found = elected("dare_ties", parameters, [1.0, 1.0], gram, False)
    assert np.isfinite(found).all()


def test_what_comes_out_for_a_tensor_does_not_depend_on_the_others() -> None:
    rng = np.random.default_rng(5)
    tensors, experts = 23, 4
    made = rng.normal(size=(tensors, experts, 9)) * np.exp(rng.normal(size=(tensors, experts, 1)))
    made[rng.random((tensors, experts)) < 0.2] = 0.0
    gram = np.einsum("tik,tjk->tij", made, made)
    weights = rng.choice([0.5, 1.0, -0.3, 0.0], size=(tensors, experts))
    normalize = rng.random(tensors) < 0.5
    for method in ("ties", "dare_ties", "breadcrumbs_ties"):
        parameters = [
            Parameters({"rescale": bool(rng.integers(2))}, [{"density": float(d), "gamma": 0.05} for d in densities])
            for densities in rng.choice([0.0, 0.3, 0.5, 1.0], size=(tensors, experts))
        ]
        together = elected_weights(get_operator(method), parameters, weights, gram, normalize.tolist())
        alone = [
            elected(method, own, weights[i].tolist(), gram[i], bool(normalize[i])) for i, own in enumerate(parameters)
        ]
        np.testing.assert_array_equal(together, alone)


def test_plans_foresee_tensors_that_few_experts_change(lab: Lab) -> None:
    generator = torch.Generator().manual_seed(1)
    base = {f"layer.{i}": torch.randn(64, 128, generator=generator) for i in range(6)}
    lab.add("base", base)
    for expert in range(4):
        # The first half is changed by all, of the other each tensor by one.
        moved = {
            name: values
            + (0.1 if place < 3 or place - 3 == expert % 3 else 0.0) * torch.randn(64, 128, generator=generator)
            for place, (name, values) in enumerate(base.items())
        }
        lab.add(f"e{expert}", moved)
    for method in ("ties", "dare_ties"):
        entries = [{"model": f"e{i}", "parameters": {"weight": 0.3, "density": 0.5}} for i in range(4)]
        asked = {"merge_method": method, "base_model": "base", "models": entries}
        for percent in (20, 50):
            report = lab.merge(asked, budget=Budget("percent", percent), verify_fidelity=True, reuse=False)
            assert report.figures.fidelity == pytest.approx(report.fidelity_predicted, abs=0.03)
