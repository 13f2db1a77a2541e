"""Several documents in one file: later ones use what earlier ones made."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from merge_cases import Lab, family

from mpfs.errors import RecipeError
from mpfs.merge.recipe import parse_recipes

pytest_plugins = ["merge_fixtures"]

TWO = """
name: both
merge_method: linear
models:
  - model: e0
    parameters: {weight: 0.5}
  - model: e1
    parameters: {weight: 0.5}
---
merge_method: task_arithmetic
base_model: base
models:
  - model: both
    parameters: {weight: 0.7}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "two.yml"
    path.write_text(TWO)
    return path


def test_documents_run_in_order(lab: Lab, file: Path) -> None:
    models = family(2)
    models.add_to(lab)
    report = lab.repository.merge(file, "merged", threads=1)
    assert any("document both: committed to the branch both" in note for note in report.notes)
    both, merged = lab.load("both"), lab.load("merged")
    for name, base in models.base.items():
        torch.testing.assert_close(both[name], (models.experts[0][name] + models.experts[1][name]) / 2)
        torch.testing.assert_close(merged[name], base + 0.7 * (both[name] - base))
    # Again: the same commits.
    assert lab.repository.merge(file, "merged", threads=1).commit == report.commit


def test_documents_cannot_be_planned_together(lab: Lab, file: Path) -> None:
    family(2).add_to(lab)
    with pytest.raises(RecipeError, match="2 documents"):
        lab.repository.plan(file)


def test_a_branch_of_something_else_is_left_alone(lab: Lab, file: Path) -> None:
    models = family(2)
    models.add_to(lab)
    lab.add("both", models.base)
    with pytest.raises(RecipeError, match=r"#1\.name: there is a branch or tag both that no merge has made"):
        lab.repository.merge(file, "merged")
    with pytest.raises(RecipeError, match="both is where the last document is merged to"):
        lab.repository.merge(file, "both")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TWO.replace("name: both", ""), "#1.name: missing"),
        (TWO + "---\n" + TWO, "#2.name: missing"),
        ("name: both" + TWO.split("name: both")[1] + "---" + TWO, "an earlier document is called both"),
        (TWO.replace("model: e0", "model: both"), "#1: it uses both, which is itself or a later document"),
        (TWO.replace("weight: 0.7", "wieght: 0.7"), "#2.models[0].parameters.wieght"),
        (TWO.replace("name: both", "name: ' '"), "name: it is empty"),
        (TWO + "---\njust text", "a mapping"),
    ],
)
def test_mistakes(text: str, said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipes(text)
    assert said in caught.value.message


def test_empty_documents_are_none() -> None:
    assert len(parse_recipes("---\n" + TWO + "\n---\n")) == 2
