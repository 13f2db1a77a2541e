"""Fitting models together: what meets what, and what is said of what does not fit. No store."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from mpfs.errors import MismatchError, RecipeError
from mpfs.merge.inputs import Fit, OnMismatch, TensorInputs, fit, keeps_value
from mpfs.merge.models import Model, ModelTensor
from mpfs.merge.operators import Parameters, get_operator
from mpfs.merge.recipe import Recipe, recipe_from_mapping
from mpfs.objects import ModelRef, Tensor
from mpfs.objects.dtypes import nbytes, promote

BLOCK = 4096


def tensor(dtype: str, shape: Sequence[int], content: str = "x") -> ModelTensor:
    """A tensor whose blocks are named after its content."""
    count = -(-nbytes(dtype, shape) // BLOCK)
    blocks = tuple(hashlib.sha256(f"{content} {index}".encode()).digest()[:16] for index in range(count))
    made = Tensor(dtype, tuple(shape), BLOCK, blocks)
    return ModelTensor(hashlib.sha256(made.encode()).hexdigest(), made)


def model(name: str, tensors: Mapping[str, ModelTensor]) -> Model:
    return Model(ModelRef(name, "c" * 64, name.ljust(64, "0")), dict(tensors))


def fitted(
    models: Mapping[str, Mapping[str, ModelTensor]],
    method: str = "task_arithmetic",
    on_mismatch: OnMismatch = "error",
    weights: Mapping[str, float] | None = None,
    **top: Any,
) -> Fit:
    """Fit models whose first is the base (for `linear` an ordinary one)."""
    names = list(models)
    listed = names if method == "linear" else names[1:]
    value = {
        "merge_method": method,
        "models": [{"model": name, "parameters": {"weight": (weights or {}).get(name, 1.0)}} for name in listed],
        **top,
    }
    if method != "linear":
        value["base_model"] = names[0]
        names = [*listed, names[0]]
    recipe = recipe_from_mapping(value)
    return fit(recipe, [model(name, models[name]) for name in names], get_operator(method), on_mismatch)


def in_force(recipe: Recipe) -> Parameters:
    """The parameters of the only tensor of a recipe's models."""
    models = [model(name, {"a": tensor("F32", (2,), name)}) for name in recipe.model_names]
    return fit(recipe, models, get_operator(recipe.method)).tensors[0].parameters


def by_name(found: Fit) -> dict[str, TensorInputs]:
    return {item.name: item for item in found.tensors}


def test_models_that_fit() -> None:
    weights = {name: tensor("F32", (4, 4), name) for name in ("a", "b")}
    found = fitted({"base": weights, "e0": weights, "e1": weights})
    assert (found.base, found.template, found.notes) == (2, 2, ())
    assert [item.name for item in found.tensors] == ["a", "b"]
    for item in found.tensors:
        assert item.merged
        assert item.base == weights[item.name]
        assert [index for index, _ in item.experts] == [0, 1]


@pytest.mark.parametrize("method", ["task_arithmetic", "linear"])
@pytest.mark.parametrize(("rows", "other"), [(10, 8), (8, 10)])
def test_another_vocabulary(method: str, rows: int, other: int) -> None:
    """Case M7: both shapes, both models and what to do are named."""
    models = {
        "base": {"embed": tensor("F32", (rows, 4)), "w": tensor("F32", (3,))},
        "e0": {"embed": tensor("F32", (other, 4), "y"), "w": tensor("F32", (3,), "y")},
    }
    with pytest.raises(MismatchError) as caught:
        fitted(models, method)
    for part in (f"[{rows}, 4]", f"[{other}, 4]", "embed", "base", "e0", "--on-mismatch base"):
        assert part in caught.value.message
    found = fitted(models, method, "base")
    assert any(f"[{other}, 4]" in note for note in found.notes)
    embed = by_name(found)["embed"]
    assert embed.shape == (rows, 4)
    if method == "task_arithmetic":
        assert not embed.merged
        assert embed.note == "no expert has it in this shape"


def test_mismatches_are_told_together() -> None:
    models = {
        "base": {"a": tensor("F32", (2,)), "b": tensor("F32", (2,)), "n": tensor("I64", (2,))},
        "e0": {"a": tensor("F32", (3,)), "b": tensor("F32", (2,)), "n": tensor("I64", (2,), "other")},
        "e1": {"a": tensor("F32", (2,)), "b": tensor("F32", (4,)), "x": tensor("F32", (1,))},
    }
    with pytest.raises(MismatchError) as caught:
        fitted(models)
    problems = caught.value.details["problems"]
    assert isinstance(problems, list)
    assert len(problems) == 3
    for part in ("a is [3] in e0", "b is [4] in e1", "n (I64)", "e1 has 1 tensor that the base has not: x"):
        assert part in caught.value.message
    found = fitted(models, on_mismatch="base")
    assert list(by_name(found)) == ["a", "b", "n"]
    assert [[index for index, _ in item.experts] for item in found.tensors] == [[1], [0], []]


def test_long_lists_are_cut() -> None:
    base = {f"t{i}": tensor("F32", (2,)) for i in range(30)}
    with pytest.raises(MismatchError, match="and 27 more"):
        fitted({"base": base, "e0": {name: tensor("F32", (3,)) for name in base}})


def test_tensors_that_experts_lack() -> None:
    models = {
        "base": {"a": tensor("F32", (2,)), "b": tensor("F32", (2,))},
        "e0": {"a": tensor("F32", (2,), "y")},
        "e1": {"a": tensor("F32", (2,), "z")},
    }
    found = fitted(models)
    assert by_name(found)["b"].note == "no expert has it"
    assert not by_name(found)["b"].merged
    assert any(note == "e0 lacks 1 tensor, merged without it there: b" for note in found.notes)


def test_a_tensor_without_experts_still_gets_the_dtype_that_was_asked_for() -> None:
    models = {
        "base": {"a": tensor("F32", (2,)), "b": tensor("F32", (2,)), "n": tensor("I64", (1,))},
        "e0": {"a": tensor("F32", (2,), "y"), "n": tensor("I64", (1,))},
    }
    tops: list[dict[str, Any]] = [{"dtype": "float16"}, {"out_dtype": "float16"}]
    for top in tops:
        found = by_name(fitted(models, **top))
        assert (found["b"].merged, found["b"].experts, found["b"].out_dtype) == (True, (), "F16")
        assert (found["n"].merged, found["n"].out_dtype) == (False, "I64")


def test_linear_takes_what_is_there() -> None:
    models = {
        "m0": {"a": tensor("F32", (2,))},
        "m1": {"a": tensor("F32", (2,)), "b": tensor("F32", (3,), "y")},
        "m2": {"b": tensor("F32", (3,))},
    }
    found = fitted(models, "linear")
    assert (found.base, found.template) == (None, 0)
    assert {name: [index for index, _ in item.experts] for name, item in by_name(found).items()} == {
        "a": [0, 1],
        "b": [1, 2],
    }
    assert all(item.base is None for item in found.tensors)


def test_shapes_of_tensors_that_the_first_model_lacks() -> None:
    models = {
        "m0": {"a": tensor("F32", (2,))},
        "m1": {"a": tensor("F32", (2,)), "b": tensor("F32", (3,))},
        "m2": {"a": tensor("F32", (2,)), "b": tensor("F32", (4,))},
    }
    with pytest.raises(MismatchError, match=r"b is \[4\] in m2, \[3\] in m1"):
        fitted(models, "linear")


def test_weights_that_cancel_where_a_model_lacks_a_tensor() -> None:
    models = {
        "m0": {"a": tensor("F32", (2,)), "b": tensor("F32", (2,))},
        "m1": {"a": tensor("F32", (2,)), "b": tensor("F32", (2,))},
        "m2": {"a": tensor("F32", (2,))},
    }
    with pytest.raises(MismatchError, match="b: the weights sum to zero"):
        fitted(models, "linear", weights={"m0": 1.0, "m1": -1.0, "m2": 1.0})
    with pytest.raises(RecipeError, match="the weights sum to zero"):
        fitted(models, "linear", weights={"m0": 1.0, "m1": -1.0, "m2": 0.0})


@pytest.mark.parametrize("dtype", ["I64", "BOOL", "F8_E4M3", "U8", "F4"])
def test_what_is_not_floating_point(dtype: str) -> None:
    same = {"n": tensor(dtype, (4,))}
    found = fitted({"base": same, "e0": same})
    assert not found.tensors[0].merged
    assert found.tensors[0].note == ("quantised" if dtype.startswith("F") else "not floating point")
    assert any(f"n ({dtype})" in note for note in found.notes)
    other = {"n": tensor(dtype, (4,), "other")}
    said = "quantised weights cannot be merged" if dtype.startswith("F") else "cannot be averaged"
    with pytest.raises(MismatchError, match=said):
        fitted({"base": same, "e0": other})
    assert fitted({"base": same, "e0": other}, on_mismatch="base").tensors[0].base == same["n"]
    with pytest.raises(MismatchError, match=rf"n \({dtype}|n \(F32, {dtype}\)"):
        fitted({"base": same, "e0": {"n": tensor("F32", (4,))}})


@pytest.mark.parametrize(
    ("dtypes", "work", "elements"),
    [
        (("F32", "F32"), "F32", 1024),
        (("BF16", "BF16"), "BF16", 2048),
        (("F32", "BF16"), "F32", 2048),
        (("BF16", "F16"), "F32", 2048),
        (("F16", "F64"), "F64", 2048),
        (("F64", "F64"), "F64", 512),
    ],
)
def test_dtypes_are_promoted_as_torch_does(dtypes: tuple[str, str], work: str, elements: int) -> None:
    base, expert = dtypes
    item = fitted({"base": {"a": tensor(base, (9,))}, "e0": {"a": tensor(expert, (9,))}}).tensors[0]
    assert (item.work_dtype, item.out_dtype, item.column_elements) == (work, work, elements)
    item = fitted(
        {"base": {"a": tensor(base, (9,))}, "e0": {"a": tensor(expert, (9,))}}, dtype="float32", out_dtype="float16"
    ).tensors[0]
    assert (item.work_dtype, item.out_dtype, item.column_elements) == ("F32", "F16", 2048)


def test_promotion_is_symmetric_and_loses_nothing() -> None:
    for a in ("F16", "BF16", "F32", "F64"):
        for b in ("F16", "BF16", "F32", "F64"):
            promoted = promote([a, b])
            assert promoted == promote({b, a})
            assert keeps_value(a, promoted)
            assert keeps_value(b, promoted)
    assert not keeps_value("F16", "BF16")
    assert not keeps_value("BF16", "F16")
    assert not keeps_value("F32", "BF16")


def test_parameters_are_looked_up_from_the_model_outwards() -> None:
    recipe = recipe_from_mapping(
        {
            "merge_method": "ties",
            "base_model": "base",
            "models": [
                {"model": "e0", "parameters": {"weight": 2.0}},
                {"model": "base", "parameters": {"weight": 9.0}},
                {"model": "e1", "parameters": {"density": 0.25, "lambda": 9.0}},
            ],
            "parameters": {"weight": 0.5, "density": 0.75, "lambda": 0.7, "gamma": 0.1},
        }
    )
    found = in_force(recipe)
    assert [dict(values) for values in found.experts] == [
        {"weight": 2.0, "density": 0.75},
        {"weight": 0.5, "density": 0.25},
    ]
    assert dict(found.shared) == {"lambda": 0.7, "normalize": True, "int8_mask": False}


def test_values_that_the_method_cannot_use() -> None:
    models = {"base": {"a": tensor("F32", (2,))}, "e0": {"a": tensor("F32", (2,))}}
    with pytest.raises(RecipeError, match="density"):
        fitted(models, "ties", parameters={"density": -0.5})


def test_explicit_zero_and_false_are_values() -> None:
    recipe = recipe_from_mapping(
        {
            "merge_method": "ties",
            "base_model": "base",
            "models": [{"model": "e0", "parameters": {"weight": 0, "density": 0}}],
            "parameters": {"weight": 1, "density": 1, "normalize": False},
        }
    )
    found = in_force(recipe)
    assert dict(found.experts[0]) == {"weight": 0, "density": 0}
    assert found.shared["normalize"] is False
