"""Laws that every method keeps: scaling, weights, and finite results; over all methods, the first five too."""

from __future__ import annotations

import dataclasses

import operator_cases as cases
import pytest
import torch
from method_cases import ASKS, Ask, context, merge
from test_methods import awkward

from mpfs.merge.operators import Parameters, get_operator, operator_names

FIRST = (
    Ask("linear", 3, {}, {"weight": 0.5}, base=False),
    Ask("linear", 3, {"normalize": False}, {"weight": 0.4}, base=False),
    Ask("task_arithmetic", 3, {"lambda": 0.7}, {"weight": 0.5}),
    Ask("ties", 3, {}, {"weight": 0.5, "density": 0.3}),
    Ask("dare_linear", 3, {}, {"weight": 0.5, "density": 0.4}),
    Ask("dare_ties", 3, {"normalize": True}, {"weight": 0.5, "density": 0.4}),
)
ALL = (*FIRST, *ASKS)

LENGTHS = {"nearswap": ("t",), "ram": ("epsilon",), "ramplus_tl": ("epsilon",), "multislerp": ("eps",)}
"""Parameters in units of the weights, which scale with them."""

NOT_SCALING = ("arcee_fusion", "sce")
"""Methods with constants in units of the weights: a softmax, and 1e-6 for a sum of mean squares."""


def test_every_method_is_tried() -> None:
    assert {ask.method for ask in ALL} == set(operator_names())


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("ask", [ask for ask in ALL if ask.method not in NOT_SCALING], ids=str)
def test_scaling_all_models_scales_the_result(ask: Ask, dtype: torch.dtype) -> None:
    """By a power of two, which no rounding sees."""
    base, models = cases.inputs(480, ask.experts, dtype)
    defaults = {p.name: p.default for p in get_operator(ask.method).parameters if p.default is not None}
    lengths = {name: 8 * ask.shared.get(name, defaults.get(name, 0)) for name in LENGTHS.get(ask.method, ())}
    larger = dataclasses.replace(ask, shared={**ask.shared, **lengths})
    plain = merge(ask, base, models, (30, 16))
    scaled = merge(larger, base * 8, [model * 8 for model in models], (30, 16))
    if ask.method in ("multislerp", "model_stock") and dtype == torch.float16:
        # eps, 1e-8, is nothing in float16 and 8e-8 is something; products of norms are at least 1e-6 for model_stock.
        torch.testing.assert_close(scaled, plain * 8, rtol=2e-3, atol=6e-3)
    else:
        small = (plain.abs() < 16 * torch.finfo(dtype).smallest_normal) | (dtype == torch.float16)
        # Deltas in float16 are near its smallest numbers, where rounding is coarser.
        assert torch.equal(scaled[~small], (plain * 8)[~small])
        torch.testing.assert_close(scaled, plain * 8, rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize(
    "ask", [ask for ask in ALL if any(p.name == "lambda" for p in get_operator(ask.method).parameters)], ids=str
)
def test_lambda_scales_the_change(ask: Ask) -> None:
    base, models = cases.inputs(480, ask.experts, torch.float64)
    changes = [
        merge(
            ask,
            base,
            models,
            (30, 16),
            parameters=Parameters({**ask.shared, "lambda": factor}, [ask.own] * ask.experts),
        )
        - base
        for factor in (1.0, -2.5, 0.0)
    ]
    torch.testing.assert_close(changes[1], -2.5 * changes[0], rtol=1e-9, atol=1e-12)
    assert not bool(changes[2].any())
    assert bool(changes[0].any())


@pytest.mark.parametrize("method", ["linear", "task_arithmetic", "dare_linear", "breadcrumbs", "della_linear"])
def test_weights_scale_the_change_where_they_are_not_normalised(method: str) -> None:
    base, models = cases.inputs(480, 2, torch.float64)
    own = {"density": 0.6} if method != "linear" else {}
    changes = []
    for factor in (1.0, 3.0):
        values = Parameters({"normalize": False}, [{**own, "weight": factor * w} for w in (0.3, 0.8)])
        found = cases.merge(method, None if method == "linear" else base, models, values)
        changes.append(found if method == "linear" else found - base)
    torch.testing.assert_close(changes[1], 3 * changes[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", ["linear", "ties", "della", "breadcrumbs_ties", "nuslerp", "multislerp"])
def test_only_the_ratio_of_normalised_weights_counts(method: str) -> None:
    base, models = cases.inputs(480, 2, torch.float64)
    shared = {"normalize": True} if any(p.name == "normalize" for p in get_operator(method).parameters) else {}
    found = [
        cases.merge(
            method,
            None if method == "linear" else base,
            models,
            Parameters(shared, [{"weight": factor * w} for w in (0.3, 0.8)]),
        )
        for factor in (1.0, 5.0)
    ]
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("ask", ALL, ids=str)
def test_what_is_held_besides_columns_is_told(ask: Ask) -> None:
    """A row of every model, or a few numbers for each run along the first axis; never what grows with both axes."""
    sizes = [
        get_operator(ask.method).held(context(shape, ask.experts, torch.float32), ask.parameters())
        for shape in ((1000, 50), (10, 50), (10, 5000))
    ]
    by_rows = ask.method in ("della", "della_linear", "arcee_fusion") or {"filter_wise", "nuslerp_flatten"} & {
        *ask.shared
    }
    assert sizes[0] == sizes[1]
    assert (sizes[2] > 0) == bool(by_rows)
    assert sizes[2] == 100 * sizes[1]


@pytest.mark.parametrize("based", [True, False])
def test_a_model_of_weight_zero_has_no_say_in_multislerp(based: bool) -> None:
    base, models = cases.inputs(480, 3, torch.float64)
    given = base if based else None
    weights = [{"weight": 0.4}, {"weight": 0.7}, {"weight": 0.0}]
    found = cases.merge("multislerp", given, models, Parameters({}, weights))
    without = cases.merge("multislerp", given, models[:2], Parameters({}, weights[:2]))
    torch.testing.assert_close(found, without, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("ask", FIRST, ids=str)
def test_finite_input_never_gives_nan(ask: Ask, dtype: torch.dtype) -> None:
    found = awkward(dtype)
    names = list(found)
    for i, name in enumerate(names):
        for step in range(len(names)):
            others = [found[names[(i + (k + 1) * step) % len(names)]] for k in range(ask.experts)]
            assert bool(torch.isfinite(merge(ask, found[name], others, (6, 16))).all()), (name, step)
