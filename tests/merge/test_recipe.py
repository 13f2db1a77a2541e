"""Recipes: every mistake has its key path, all are told at once, and what is right survives normalisation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from merge_cases import problems_of

from mpfs.errors import NotFoundError, RecipeError
from mpfs.merge.operators import operator_names
from mpfs.merge.recipe import DTYPES, MAX_RECIPE_BYTES, Recipe, load_recipe, parse_recipe, recipe_from_mapping
from mpfs.merge.recipe.documents import load_mappings

GOOD = """
merge_method: ties
base_model: base
models:
  - model: base
  - model: e0
    parameters: {weight: 0.3, density: 0.5}
  - model: {model: {path: e1}}
    parameters: {weight: 1}
parameters:
  normalize: false
  int8_mask: true
dtype: bfloat16
out_dtype: torch.float32
"""


def wrong(text: str) -> dict[str, str]:
    """The problems of a recipe's text."""
    return problems_of(lambda: parse_recipe(text))


def changed(**changes: object) -> dict[str, str]:
    """The problems of the good recipe with top-level keys changed; None takes a key away."""
    value = yaml.safe_load(GOOD)
    for key, item in changes.items():
        value.pop(key, None)
        if item is not None:
            value[key] = item
    return problems_of(lambda: recipe_from_mapping(value))


def test_a_good_recipe() -> None:
    recipe = parse_recipe(GOOD)
    assert (recipe.method, recipe.base, recipe.dtype, recipe.out_dtype) == ("ties", "base", "BF16", "F32")
    assert [(item.name, dict(item.parameters)) for item in recipe.models] == [
        ("base", {}),
        ("e0", {"weight": 0.3, "density": 0.5}),
        ("e1", {"weight": 1}),
    ]
    assert dict(recipe.parameters) == {"normalize": False, "int8_mask": True}


def test_normalised_form_is_a_recipe() -> None:
    recipe = parse_recipe(GOOD)
    assert recipe_from_mapping(recipe.as_json()) == recipe
    assert parse_recipe(yaml.safe_dump(recipe.as_json())) == recipe


def models(names: st.SearchStrategy[str]) -> st.SearchStrategy[list[dict[str, Any]]]:
    """Entries with a weight, and some with a density; names are distinct."""
    weight = st.one_of(st.integers(-3, 3), st.floats(-3, 3), st.booleans())
    parameters = st.fixed_dictionaries({"weight": weight}, optional={"density": st.floats(0, 1)})
    entry = st.fixed_dictionaries({"model": names, "parameters": parameters})
    return st.lists(entry, min_size=1, max_size=4, unique_by=lambda item: str(item["model"]))


@given(
    method=st.sampled_from(["task_arithmetic", "ties", "dare_linear", "dare_ties"]),
    entries=models(st.text("abc/._-: #", min_size=1, max_size=6).filter(lambda name: bool(name.strip()))),
    dtype=st.one_of(st.none(), st.sampled_from(list(DTYPES))),
    shared=st.dictionaries(st.sampled_from(["lambda", "normalize", "density"]), st.floats(0.1, 2)),
)
def test_any_recipe_survives_normalisation(
    method: str, entries: list[dict[str, Any]], dtype: str | None, shared: dict[str, float]
) -> None:
    value = {"merge_method": method, "base_model": "the base", "models": entries, "parameters": shared, "dtype": dtype}
    recipe = recipe_from_mapping(value)
    assert recipe_from_mapping(recipe.as_json()) == recipe
    assert parse_recipe(yaml.safe_dump(recipe.as_json())) == recipe


def test_weight_beside_parameters() -> None:
    """Case M13: mergekit ignores it, and merges without it or fails halfway."""
    found = wrong("merge_method: ties\nbase_model: base\nmodels:\n  - model: e0\n    parameters:\n    weight: 0.5\n")
    assert "under `parameters:`" in found["models[0].weight"]


def test_everything_wrong_is_told_at_once() -> None:
    found = wrong(
        """
merge_method: tise
base_mode: base
models:
  - model: e0
    parameters: {wieght: 1.0, weight: .nan, density: [0.1, 0.9]}
  - model: e0
  - parameters: {weight: yes please}
  - model: a+lora
    wait: 3
dtype: bf16
slices: []
"""
    )
    assert "slices" in found
    assert "base_model" in found["base_mode"]
    assert found["models[2].model"] == "missing"
    assert "models[3].wait" in found


def test_values_are_checked_together() -> None:
    found = wrong(
        """
merge_method: tise
models:
  - model: e0
    parameters: {wieght: 1.0, weight: .nan, density: [0.1, 0.9], gamma: text}
  - model: e0
  - model: a+lora+more
  - model: ' '
dtype: bfloat
out_dtype: int64
parameters: {lambda: .inf, epsilon: {value: 1}, normalise: true}
"""
    )
    assert "ties" in found["merge_method"]
    assert "weight" in found["models[0].parameters.wieght"]
    assert "finite" in found["models[0].parameters.weight"]
    assert "number" in found["models[0].parameters.gamma"]
    assert "twice" in found["models[1].model"]
    assert "one adapter" in found["models[2].model"]
    assert "empty" in found["models[3].model"]
    assert "bfloat16" in found["dtype"]
    assert "int64" in found["out_dtype"]
    assert "finite" in found["parameters.lambda"]
    assert "normalize" in found["parameters.normalise"]


def test_what_is_missing() -> None:
    assert "merge_method" in changed(merge_method=None)
    assert all(name in changed(merge_method=None)["merge_method"] for name in operator_names())
    assert "missing; a recipe has one of models, slices, modules" in changed(models=None)["models"]
    assert "empty" in changed(models=[])["models"]
    assert "base_model" in changed(base_model=None)
    assert "besides the base" in changed(models=[{"model": "base"}])["models"]
    assert changed(models=[{"model": "base"}, {"model": "e0"}]) == {
        "models[1].parameters.weight": "missing: ties needs it for e0"
    }


def test_a_base_of_linear_is_an_ordinary_model() -> None:
    entries = [{"model": "e0", "parameters": {"weight": 1}}]
    assert "weight of its own" in changed(merge_method="linear", models=entries)["models"]
    listed = [*entries, {"model": "base"}]
    assert "models[1].parameters.weight" in changed(merge_method="linear", models=listed)
    recipe = recipe_from_mapping({"merge_method": "linear", "models": entries})
    assert recipe.base is None


@pytest.mark.parametrize("value", [5, ["ties"], {"a": 1}, True])
def test_wrong_kinds(value: object) -> None:
    for key in ("merge_method", "models", "base_model", "parameters", "dtype"):
        if isinstance(value, dict) and key == "parameters":
            continue
        found = changed(**{key: value})
        assert any(path == key or path.startswith((f"{key}.", f"{key}[")) for path in found)
        assert not any("_" in message and "Model" in message for message in found.values())


@pytest.mark.parametrize("entry", ["e0", 5, None, {"model": 5}, {"model": {"path": "x"}}, {"model": ["x"]}, {}])
def test_wrong_entries(entry: object) -> None:
    found = changed(models=[entry])
    assert all(path.startswith("models[0]") for path in found)
    assert not any("_Model" in message or "_Entry" in message for message in found.values())


def test_aliases_are_written_out() -> None:
    plain = """
merge_method: ties
base_model: b
models:
  - {model: x, parameters: {weight: 0.5, density: 0.5}}
  - {model: y, parameters: {weight: 0.25, density: 0.5}}
dtype: bfloat16
"""
    short = """
merge_method: ties
base_model: b
models:
  - model: x
    parameters: &shared {weight: 0.5, density: 0.5}
  - {model: y, parameters: {<<: *shared, weight: 0.25}}
dtype: bfloat16
"""
    assert parse_recipe(short) == parse_recipe(plain)


def test_what_an_alias_stands_for_is_not_shared(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yml"
    file.write_text("a: &x {b: 1}\nc: *x\n", encoding="utf-8")
    (found,) = load_mappings(file)
    found["a"]["b"] = 2
    assert found == {"a": {"b": 2}, "c": {"b": 1}}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "a mapping"),
        ("just text", "a mapping"),
        ("- a\n- b", "a mapping"),
        ("a: [1", "not valid YAML"),
        ("a: 1\nb: 2\na: 3", "'a' is there twice"),
        ("models:\n  - model: x\n    parameters: {weight: 1, weight: 2}", "'weight' is there twice"),
        ("a: &x [1, *x]", "inside what it stands for"),
        ("a: *x", "not valid YAML"),
        (
            "a0: &a0 [1, 1]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)),
            "written out",
        ),
        ("a: &x {b: 1}\nc: {<<: *x, d: 1, d: 2}", "'d' is there twice"),
        ("a: !!python/object/apply:os.system ['true']", "not valid YAML"),
        ("a: !!python/name:os.system", "not valid YAML"),
        ("a: !unknown 1", "not valid YAML"),
        ("? [1, 2]\n: 3", "not valid YAML"),
        ("a: 1\n---\nb: 2", "#1.name: missing"),
        ("a: \x00", "not valid YAML"),
        ("a: !!int x", "not valid YAML"),
        ("a: !!timestamp x", "not valid YAML"),
        ("a: 2020-99-99", "not valid YAML"),
        ("a: 0x_", "not valid YAML"),
        ("a: " + "9" * 5000, "not valid YAML"),
        ("a: " + "[" * 100_000, "nested too deeply"),
        ("a: " + "{b: " * 50_000, "nested too deeply"),
    ],
)
def test_what_is_no_recipe(text: str, said: str) -> None:
    with pytest.raises(RecipeError, match="recipe: ") as caught:
        parse_recipe(text)
    assert said in caught.value.message
    assert "\n" not in caught.value.message


def test_keys_that_are_no_text() -> None:
    with pytest.raises(RecipeError):
        parse_recipe("1: 2\nmerge_method: ties")
    with pytest.raises(RecipeError):
        parse_recipe(GOOD.replace("normalize:", "7:"))


def test_a_billion_laughs_are_refused_at_once() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    with pytest.raises(RecipeError, match="aliases"):
        parse_recipe("\n".join(lines))


def test_numbers_as_people_write_them() -> None:
    recipe = parse_recipe(GOOD.replace("weight: 0.3", "weight: 1e-3").replace("weight: 1}", "weight: -2E+1}"))
    assert [item.parameters.get("weight") for item in recipe.models] == [None, 0.001, -20.0]
    assert "number" in wrong(GOOD.replace("weight: 0.3", "weight: '0.3x'"))["models[1].parameters.weight"]
    assert "finite" in wrong(GOOD.replace("weight: 0.3", "weight: 1e999"))["models[1].parameters.weight"]
    assert "finite" in wrong(GOOD.replace("weight: 0.3", "weight: " + "9" * 400))["models[1].parameters.weight"]


def test_a_parameter_of_another_method_is_no_mistake() -> None:
    recipe = parse_recipe(GOOD.replace("int8_mask: true", "t: 0.5"))
    assert recipe.parameters["t"] == 0.5


def test_null_means_not_given() -> None:
    recipe = parse_recipe(GOOD.replace("normalize: false", "normalize: null") + "slices: null\n")
    assert "normalize" not in recipe.parameters


@given(st.text(max_size=60) | st.text("[]{}:,-&*!|>'\" \n\t#?abc0179.eE_~xob", max_size=40))
def test_any_text_is_a_recipe_or_a_recipe_error(text: str) -> None:
    try:
        recipe = parse_recipe(text)
    except RecipeError:
        return
    assert isinstance(recipe, Recipe)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["merge_method", "models", "base_model", "parameters", "dtype", "x"]), _JSON))
def test_any_mapping_is_a_recipe_or_a_recipe_error(value: dict[str, Any]) -> None:
    with pytest.raises(RecipeError):
        recipe_from_mapping(value)


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(GOOD, encoding="utf-8")
    assert load_recipe(path) == parse_recipe(GOOD)
    with pytest.raises(NotFoundError, match=r"missing\.yaml: No such file"):
        load_recipe(tmp_path / "missing.yaml")
    with pytest.raises(NotFoundError, match="directory"):
        load_recipe(tmp_path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="UTF-8"):
        load_recipe(path)
    path.write_bytes(b" " * (MAX_RECIPE_BYTES + 1))
    with pytest.raises(RecipeError, match="too large"):
        load_recipe(path)
