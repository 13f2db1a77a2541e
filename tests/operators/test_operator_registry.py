"""Finding methods by name, and checking their parameters."""

from __future__ import annotations

import operator_cases as cases
import pytest

from mpfs.errors import NotFoundError
from mpfs.merge.operators import Operator, Parameters, get_operator, operator_names


def test_every_name_gives_an_operator() -> None:
    assert set(cases.METHODS) <= set(operator_names())
    assert list(operator_names()) == sorted(operator_names())
    for name in operator_names():
        operator = get_operator(name)
        assert isinstance(operator, Operator)
        assert operator.name == name
        assert operator.__doc__
        assert "arXiv" in operator.__doc__


@pytest.mark.parametrize(("name", "near"), [("tie", "ties"), ("Task-Arithmetic", "task_arithmetic"), ("zzz", None)])
def test_an_unknown_name_is_answered_with_the_nearest(name: str, near: str | None) -> None:
    with pytest.raises(NotFoundError) as caught:
        get_operator(name)
    assert caught.value.details["nearest"] == near
    assert caught.value.details["available"] == list(operator_names())
    assert (f"did you mean {near}?" in caught.value.message) == (near is not None)


@pytest.mark.parametrize("name", cases.METHODS)
def test_defaults_are_mergekits(name: str) -> None:
    operator = get_operator(name)
    spec = {parameter.name: parameter for parameter in operator.parameters}
    assert spec["weight"].required
    assert spec["weight"].per_model
    assert spec["normalize"].default is (name in ("linear", "ties"))
    if name != "linear":
        assert spec["lambda"].default == 1.0
        assert spec["int8_mask"].default is False
    if name in ("ties", "dare_linear", "dare_ties"):
        assert spec["density"].default == 1.0
        assert spec["density"].per_model
    if name.startswith("dare"):
        assert spec["rescale"].default is True
    assert operator.needs_base is (name != "linear")
    assert operator.interaction == ("column" if name in ("ties", "dare_ties") else "additive")


@pytest.mark.parametrize("name", cases.METHODS)
def test_good_values_pass(name: str) -> None:
    assert get_operator(name).validate(cases.parameters([1, 0.5], [0.5, 3.0], lambda_=1, normalize=True)) == []


def test_all_mistakes_are_reported_together() -> None:
    values = Parameters(
        {"lambda": float("inf"), "normalize": "yes"},  # type: ignore[dict-item]
        [{"density": -0.5}, {"weight": float("nan"), "density": 0.5}],
    )
    found = get_operator("ties").validate(values)
    assert len(found) == 5
    text = "\n".join(found)
    for part in ("model 1: weight is required", "model 2: weight", "model 1: density", "lambda", "normalize"):
        assert part in text
