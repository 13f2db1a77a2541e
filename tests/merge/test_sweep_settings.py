"""Settings of sweeps: key paths, combinations and branch names, without a repository."""

from __future__ import annotations

import copy
import json
import string
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpfs.errors import UsageError
from mpfs.merge.sweep.names import branch_names, short_keys
from mpfs.merge.sweep.settings import Setting, check_settings, make_variants, parse_setting
from mpfs.objects import Budget
from mpfs.store import check_ref_name

RECIPE: dict[str, Any] = {
    "merge_method": "ties",
    "base_model": "base",
    "models": [
        {"model": "base"},
        {"model": "release/1.2", "parameters": {"weight": 1.0}},
        {"model": {"model": {"path": "code"}, "lora": {"path": "style"}}, "parameters": {"weight": 0.5}},
    ],
    "parameters": {"t": [{"filter": "self_attn", "value": 0.3}, {"value": 0.7}]},
}

words = st.text(string.ascii_lowercase + "_", min_size=1, max_size=8)
scalars = st.one_of(
    st.booleans(), st.integers(-9, 9), st.floats(-4, 4, allow_subnormal=False).map(lambda x: round(x, 3)), words
)
values = st.one_of(scalars, st.lists(scalars, max_size=3), st.dictionaries(words, scalars, max_size=2))


def set_to(path: str, value: Any) -> Any:
    """The recipe with one key set."""
    variants, problems = make_variants(RECIPE, [Setting(path, (value,))])
    assert problems == []
    return variants[0].recipe


def wrong(path: str) -> str:
    """What is said of a path that leads nowhere."""
    variants, problems = make_variants(RECIPE, [Setting(path, (1,)), Setting("dtype", ("float32",))])
    assert variants == []
    assert [item["path"] for item in problems] == [path]
    return problems[0]["message"]


@pytest.mark.parametrize("path", ["models.1.parameters.weight", "models[1].parameters.weight"])
def test_an_entry_is_found_by_index_as_errors_write_it(path: str) -> None:
    assert set_to(path, 9)["models"][1]["parameters"] == {"weight": 9}


def test_an_entry_is_found_by_name() -> None:
    assert set_to("models.release/1.2.parameters.weight", 9)["models"][1]["parameters"] == {"weight": 9}
    assert set_to("models.code.parameters.weight", 9)["models"][2]["parameters"] == {"weight": 9}
    assert set_to("parameters.t.self_attn.value", 9)["parameters"]["t"][0]["value"] == 9


def test_a_star_is_every_entry() -> None:
    found = set_to("models.*.parameters.density", 9)["models"]
    assert [item["parameters"]["density"] for item in found] == [9, 9, 9]


def test_what_is_not_there_is_made() -> None:
    assert set_to("out_dtype", "float16")["out_dtype"] == "float16"
    assert set_to("models.0.parameters.density", 9)["models"][0] == {"model": "base", "parameters": {"density": 9}}


def test_the_longest_name_is_meant() -> None:
    recipe = {"models": [{"model": "a"}, {"model": "a.b"}], "modules": {"x": {}, "x.y": {}}}
    (found,), _ = make_variants(
        recipe, [Setting("models.a.b.parameters.weight", (1,)), Setting("modules.x.y.models", (2,))]
    )
    assert found.recipe["models"] == [{"model": "a"}, {"model": "a.b", "parameters": {"weight": 1}}]
    assert found.recipe["modules"] == {"x": {}, "x.y": {"models": 2}}


def test_paths_that_lead_nowhere_are_told_with_what_there_is() -> None:
    entries = "its entries are 0 (base), 1 (release/1.2), 2 (code)"
    assert wrong("models.7.parameters.weight") == f"models has no entry 7; {entries}"
    assert wrong("models.cod.parameters.weight") == f"models has no entry cod; did you mean code?; {entries}"
    assert wrong("merge_method.x") == "merge_method is text, which has no x"
    assert wrong("models..x") == wrong("models.*.") == "the path has an empty part"


@given(st.dictionaries(st.sampled_from(["a", "b.c", "parameters.d", "seed"]), st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True), min_size=1))  # fmt: skip
def test_variants_are_the_product(settings: dict[str, list[int]]) -> None:
    before = copy.deepcopy(RECIPE)
    variants, problems = make_variants(RECIPE, [Setting(path, tuple(found)) for path, found in settings.items()])
    assert problems == []
    assert [tuple(item.values.values()) for item in variants] == list(product(*settings.values()))
    for variant in variants:
        for path, value in variant.values.items():
            holder: Any = variant.options if path == "seed" else variant.recipe
            for key in path.split("."):
                holder = holder[key]
            assert holder == value
    assert before == RECIPE


@given(words, st.lists(values, min_size=1, max_size=4))
def test_what_is_written_is_what_is_set(path: str, found: list[Any]) -> None:
    """JSON is YAML."""
    setting = parse_setting(f"{path}={','.join(json.dumps(value) for value in found)}")
    assert (setting.path, list(setting.values)) == (path, found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("d=0.3, 0.5", (0.3, 0.5)),
        ("m=ties,dare_ties", ("ties", "dare_ties")),
        ("g=[0, 0.5, 1],[1,0]", ([0, 0.5, 1], [1, 0])),
        ("x=true,null", (True, None)),
        ("m=s3://bucket/a,org/b@main+lora", ("s3://bucket/a", "org/b@main+lora")),
    ],
)
def test_values_as_people_write_them(text: str, expected: tuple[Any, ...]) -> None:
    assert parse_setting(text).values == expected


@pytest.mark.parametrize("text", ["", "density", "=0.3", "d=0.3,,0.5", "d=[0.3", "d=0.3],[0.5", "d={a", "d=*x"])  # fmt: skip
def test_what_is_no_setting(text: str) -> None:
    with pytest.raises(UsageError):
        parse_setting(text)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([], "nothing is set"),
        ([Setting("a", ())], "a: there are no values"),
        ([Setting("a", (1, 2, 1))], "a: the value 1 is there twice"),
        ([Setting("models[0].x", (1,)), Setting("models.0.x", (2,))], "models.0.x is set twice"),
        ([Setting("a", tuple(range(9))), Setting("b", tuple(range(8)))], "9 x 8 = 72 variants are more than 64"),
        ([Setting("budget", ("10%",))], "budget: 10% is not an amount"),
        ([Setting("seed", (0.5,))], "seed: 0.5 is not a whole number"),
        ([Setting("policy", ("best",))], "policy: best is not one of energy"),
        ([Setting("budget", (Budget(),)), Setting("fidelity", (0.9,))], "exclude each other"),
    ],
)
def test_settings_that_cannot_be(settings: list[Setting], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_settings(settings, 64)


def test_one_true_and_one_point_zero_are_three_values() -> None:
    check_settings([Setting("a", (1, True, 1.0))], 64)


def test_short_keys() -> None:
    assert short_keys(["parameters.density", "merge_method"]) == {
        "parameters.density": "density",
        "merge_method": "merge_method",
    }
    paths = ["models.a.parameters.weight", "models.b.parameters.weight", "slices.0.sources.1.layer_range"]
    assert list(short_keys(paths).values()) == ["a.weight", "b.weight", "layer_range"]


def test_names_are_the_settings() -> None:
    found = [{"parameters.density": 0.3, "merge_method": "ties"}, {"parameters.density": 1e-05, "merge_method": "ties"}]
    assert branch_names(found, "try/") == ["try/density=0.3,merge_method=ties", "try/density=1e-05,merge_method=ties"]
    assert branch_names([{"budget": Budget("percent", 12.5), "x": [0, -0.5]}], "a/b") == ["a/b/budget=12.5pct,x=0--0.5"]


def test_templates() -> None:
    found = [{"parameters.density": value, "merge_method": "ties"} for value in (0.3, 0.5)]
    assert branch_names(found, "t-{merge_method}/d{density}") == ["t-ties/d0.3", "t-ties/d0.5"]
    assert branch_names(found, "x{parameters.density}") == ["x0.3", "x0.5"]
    for template, message in (
        ("x{densty}", "did you mean density"),
        ("x{merge_method}", "two variants would be called xties: use all of {density}, {merge_method}"),
        ("x{", "two variants would be called"),
    ):
        with pytest.raises(UsageError, match=message):
            branch_names(found, template)


def test_a_prefix_that_is_no_ref() -> None:
    with pytest.raises(UsageError, match="cannot be a ref's name"):
        branch_names([{"a": 1}], "../x")


odd = st.one_of(values, st.text(max_size=60), st.lists(st.text(max_size=60), max_size=3), st.floats())


@given(st.lists(st.text(min_size=1, max_size=90), min_size=1, max_size=4, unique=True), st.data())
def test_every_name_is_legal_and_no_two_are_the_same(paths: list[str], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 5))
    rows = [{path: data.draw(odd) for path in paths} for _ in range(count)]
    distinct = {json.dumps([repr(row[path]) for path in paths]): row for row in rows}
    names = branch_names(list(distinct.values()), "p")
    assert len(set(names)) == len(distinct)
    for name in names:
        assert check_ref_name(name) == name
