"""Parameter values: gradients, filters, and which level they are taken from."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from merge_cases import problems_of

from mpfs.merge.architecture import recognise
from mpfs.merge.recipe import Choice, Value, depends_on_layer, evaluate, recipe_from_mapping
from mpfs.merge.recipe.problems import Problem
from mpfs.merge.recipe.values import read_value, value_as_json


def value(given: Any) -> Value | None:
    problems: list[Problem] = []
    found = read_value(given, "parameters.weight", problems)
    assert problems == []
    return found


@pytest.mark.parametrize(
    ("given", "t", "wanted"),
    [
        (0.5, 0.3, 0.5),
        (True, 0.3, True),
        ([0.5], 0.3, 0.5),
        ([0, 1], 0.25, 0.25),
        ([0, 10, 0], 0.25, 5),
        ([0, 10, 0], 1.0, 0),
        ([1, 2, 4, 8], 0.5, 3),
        ([True, False], 0.99, True),
        ([True, False], 1.0, False),
        (["1e-1", 0.3], 0.5, 0.2),
    ],
)
def test_gradients(given: Any, t: float, wanted: float) -> None:
    found = evaluate(value(given), "any", t)
    assert found == pytest.approx(wanted)
    assert isinstance(found, bool) is isinstance(wanted, bool)


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=6), st.floats(0, 1))
def test_a_gradient_stays_between_its_numbers(numbers: list[float], t: float) -> None:
    found = evaluate(value(numbers), "any", t)
    assert found is not None
    assert min(numbers) - 1e-9 <= found <= max(numbers) + 1e-9
    ends = [evaluate(value(numbers), "any", end) for end in (0.0, 1.0)]
    assert ends == [numbers[0], numbers[-1]]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("model.layers.0.self_attn.q_proj.weight", 1),
        ("model.layers.0.mlp.up.weight", 2.5),
        ("model.layers.0.SELF_ATTN.weight", 4),
        ("lm_head.weight", 3),
    ],
)
def test_filters_are_parts_of_names_and_the_first_hit_counts(name: str, wanted: float) -> None:
    found = value(
        [
            {"filter": "self_attn", "value": 1},
            {"filter": "mlp", "value": [2, 3]},
            {"filter": "lm_", "value": [{"filter": "head", "value": 3}]},
            {"value": 4},
            {"filter": "never", "value": 5},
        ]
    )
    assert evaluate(found, name, 0.5) == wanted


def test_no_hit_is_no_value() -> None:
    assert evaluate(value([{"filter": "mlp", "value": 1}]), "lm_head", 0) is None
    assert evaluate(value([{"filter": "*", "value": 1}]), "lm_head", 0) == 1
    assert evaluate(value({"filter": "lm", "value": 1}), "lm_head", 0) == 1
    assert value([]) is None
    assert value(None) is None


def test_which_values_depend_on_the_layer() -> None:
    assert depends_on_layer(value([0, 1]))
    assert depends_on_layer(value([{"filter": "x", "value": [0, 1]}]))
    assert not depends_on_layer(value([1, 1]))
    assert not depends_on_layer(value([{"filter": "x", "value": 1}]))
    assert not depends_on_layer(2)


_VALUES = st.recursive(
    st.integers(-3, 3) | st.floats(-3, 3) | st.booleans() | st.lists(st.floats(-3, 3), min_size=1, max_size=3),
    lambda inner: st.lists(
        st.fixed_dictionaries({"value": inner}, optional={"filter": st.text(max_size=3)}), min_size=1, max_size=3
    ),
    max_leaves=6,
)


@given(_VALUES)
def test_values_survive_normalisation(given: Any) -> None:
    found = value(given)
    assert found is not None
    assert value(value_as_json(found)) == found


@pytest.mark.parametrize(
    ("given", "path", "said"),
    [
        ("text", "", "must be a number, true/false, a list of numbers, or a list of filters, not text"),
        ([1, "text"], "[1]", "must be a number"),
        ([1, None], "[1]", "must be a number, or `filter:` and `value:`, not nothing"),
        ([[1, 2]], "[0]", "not a list"),
        ([1, {"value": 2}], "", "numbers and filters cannot be mixed"),
        ([1, True], "", "numbers and true/false cannot be mixed"),
        ([{"filter": "mlp"}], "[0]", "`value:` is missing"),
        ([{"filter": "mlp", "values": 1}], "[0]", "unknown key values"),
        ([{"filter": 5, "value": 1}], "[0].filter", "must be text"),
        ([{"value": "text"}], "[0].value", "must be a number"),
        ([0.5, float("nan")], "[1]", "must be finite"),
    ],
)
def test_wrong_values(given: Any, path: str, said: str) -> None:
    recipe = {"merge_method": "linear", "models": [{"model": "a", "parameters": {"weight": given}}]}
    found = problems_of(lambda: recipe_from_mapping(recipe))
    assert said in found[f"models[0].parameters.weight{path}"]


def test_filters_nested_too_deeply() -> None:
    given: Any = 1
    for _ in range(30):
        given = [{"value": given}]
    problems: list[Problem] = []
    assert read_value(given, "weight", problems) is None
    assert problems[0]["message"] == "filters are nested too deeply"


def test_choices_are_compared_by_value() -> None:
    assert value([{"filter": "a", "value": 1}]) == (Choice("a", 1),)


@pytest.mark.parametrize(
    ("names", "config", "stacks", "main", "embedding", "head"),
    [
        (
            [
                "model.embed_tokens.weight",
                "model.layers.0.mlp.experts.7.w1.weight",
                "model.layers.1.a",
                "lm_head.weight",
            ],
            {"num_hidden_layers": 2},
            {"model.layers": 2},
            "model.layers",
            "model.embed_tokens.weight",
            "lm_head.weight",
        ),
        (["wte.weight", "wpe.weight", "h.0.a", "h.1.a", "ln_f.bias"], {}, {"h": 2}, "h", "wte.weight", None),
        (
            [
                "bert.embeddings.word_embeddings.weight",
                "bert.encoder.layer.0.a",
                "classifier.0.weight",
                "classifier.3.bias",
            ],
            {},
            {"bert.encoder.layer": 1},
            "bert.encoder.layer",
            "bert.embeddings.word_embeddings.weight",
            None,
        ),
        (
            ["visual.blocks.0.a", "visual.blocks.1.a", "visual.blocks.2.a", "model.layers.0.a", "model.layers.1.a"],
            {"text_config": {"num_hidden_layers": 2}, "vision_config": {"depth": 3}},
            {"visual.blocks": 3, "model.layers": 2},
            "model.layers",
            None,
            None,
        ),
        (["units.0.a", "units.1.a", "0.weight"], {"n_layer": 2}, {"units": 2}, "units", None, None),
        (
            ["gpt_neox.embed_in.weight", "embed_out.weight"],
            {},
            {},
            None,
            "gpt_neox.embed_in.weight",
            "embed_out.weight",
        ),
    ],
)
def test_what_is_recognised(
    names: list[str],
    config: dict[str, Any],
    stacks: dict[str, int],
    main: str | None,
    embedding: str | None,
    head: str | None,
) -> None:
    found = recognise(names, config)
    assert (dict(found.stacks), found.main, found.embedding, found.head) == (stacks, main, embedding, head)
