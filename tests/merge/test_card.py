"""The model card and the recipe that come with a merged model."""

from __future__ import annotations

import re

import pytest
import torch
import yaml
from merge_cases import Lab, config, family, recipe

from mpfs.merge.card import CARD, RECIPE, card_files
from mpfs.merge.operators import get_operator, operator_names
from mpfs.merge.recipe import parse_recipe
from mpfs.objects import Budget, Plan

pytest_plugins = ["merge_fixtures"]


def read(lab: Lab, path: str, ref: str = "merged") -> str:
    return b"".join(lab.repository.reader(ref).open(path).iter_chunks()).decode()


def with_config(lab: Lab, experts: int = 2) -> None:
    models = family(experts)
    side = {"config.json": config(), "README.md": b"---\nlicense: mit\n---\nThe base's own card.\n"}
    lab.add("base", models.base, side)
    for index, tensors in enumerate(models.experts):
        lab.add(f"e{index}", tensors, side)


def test_the_card_says_what_was_merged(lab: Lab) -> None:
    with_config(lab)
    report = lab.merge(recipe("dare_ties", 2, dtype="float32"), budget=Budget("percent", 40.0), seed=7)
    card = read(lab, CARD)
    assert "The base's own card" not in card
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["tags"] == ["mpfs", "merge"]
    for text in ("# Merge of e0 and e1\n", "`dare_ties`, starting from base.", str(report.plan), "- seed: 7\n"):
        assert text in card
    assert "[arXiv 2311.03099](https://arxiv.org/abs/2311.03099)" in card
    for name in ("base", "e0", "e1"):
        role = "base" if name == "base" else "merged"
        assert f"| {name} | {role} | `{lab.repository.resolve(name)}` |" in card
    assert "- budget: 40% of the experts' bytes" in card
    assert f"at most {report.figures.expert_bytes_planned:,} of the {report.figures.expert_bytes_full:,}" in card
    assert f"- fidelity, predicted: {report.fidelity_predicted:.6g} " in card
    shown = re.search(r"```yaml\n(.*?)```", card, re.S)
    assert shown is not None
    assert shown[1] == read(lab, RECIPE)


def test_the_recipe_file_gives_the_same_merge(lab: Lab) -> None:
    with_config(lab)
    asked = recipe("ties", 2, parameters={"density": [{"filter": "mlp", "value": [0.3, 0.9]}, {"value": 0.5}]})
    first = lab.merge(asked)
    text = read(lab, RECIPE)
    parse_recipe(text)
    assert lab.repository.merge(yaml.safe_load(text), "again", threads=1).plan == first.plan
    assert lab.repository.snapshot("again") == lab.repository.snapshot("merged")


def test_notes_and_names_are_shown_as_they_are(lab: Lab) -> None:
    models = family(2)
    del models.experts[1][next(iter(models.base))]
    odd = "org/my_model"
    for name, tensors in (("base", models.base), (odd, models.experts[0]), ("e1", models.experts[1])):
        lab.add(name, tensors, {"config.json": config()})
    asked = recipe("task_arithmetic", 2)
    asked["models"][0]["model"] = odd
    lab.merge(asked)
    card = read(lab, CARD)
    assert "# Merge of org/my\\_model and e1\n" in card
    assert yaml.safe_load(card.split("---\n")[1])["base_model"] == [odd]
    assert "- e1 lacks 1 tensor, merged without it there" in card


def test_no_card_without_a_config(lab: Lab) -> None:
    family(1).add_to(lab)
    lab.add("base", {"a": torch.ones(4)}, {})
    lab.add("e0", {"a": torch.zeros(4)}, {})
    lab.merge(recipe("task_arithmetic", 1))
    assert {file.path for file in lab.repository.snapshot("merged").files} == {"model.safetensors"}


@pytest.mark.parametrize("name", operator_names())
def test_every_method_has_a_source(name: str) -> None:
    source = get_operator(name).source
    assert "\n" not in source
    assert re.search(r"\d{4}\.\d{5}", source)


def test_a_plan_read_back_has_the_same_card(lab: Lab) -> None:
    with_config(lab)
    plan = lab.repository.plan(recipe("ties", 2, dtype="float32")).plan
    assert card_files(Plan.decode(plan.encode())) == card_files(plan)
