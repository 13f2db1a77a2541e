"""`mpfs sweep`: what it prints, its JSON, and what it says of mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_helpers import Command

pytest_plugins = ["cli_fixtures"]

SWEEP = ("sweep", "recipe.yml", "--set", "models.a.parameters.weight=0.5,1.0", "--into", "s", "--threads", "2")


def test_a_sweep(mpfs: Command, workplace: Path) -> None:
    planned = mpfs(*SWEEP, "--budget", "50%", "--dry-run").out
    done = mpfs(*SWEEP, "--budget", "50%").out
    for text in (planned, done):
        assert [line.split()[0] for line in text.splitlines()[:3]] == ["branch", "s/weight=0.5", "s/weight=1.0"]
    assert "expert bytes read" not in planned
    assert mpfs("show", "s/weight=1.0", "--json").json["message"].startswith("weight=1.0: Merge a, b into base")
    assert mpfs("log", "s/weight=0.5").out.count("weight=0.5: Merge") == 1
    assert "weight=0.5: Merge a, b into base" in mpfs("explain", "s/weight=0.5").out
    assert mpfs("explain", "s/weight=0.5", "--json").json["message"].startswith("weight=0.5: ")
    commits = [mpfs("show", name, "--json").json["commit"] for name in ("s/weight=0.5", "s/weight=1.0")]
    assert mpfs("-q", *SWEEP, "--budget", "50%").out.split() == commits


def test_json(mpfs: Command, workplace: Path) -> None:
    planned = mpfs(*SWEEP, "--budget", "50%", "--dry-run", "--json").json
    done = mpfs(*SWEEP, "--budget", "50%", "--json").json
    for document in (planned, done):
        assert document["failed"] == 0
        run = document["run"]
        assert 0 < run["expert_bytes_planned"] <= run["expert_bytes_full"] / 2
        assert run["expert_bytes_planned"] < run["expert_bytes_apart"]
        assert [item["settings"] for item in document["variants"]] == [
            {"models.a.parameters.weight": 0.5},
            {"models.a.parameters.weight": 1.0},
        ]
        assert [item["ref"] for item in document["variants"]] == ["s/weight=0.5", "s/weight=1.0"]
    assert done["run"]["expert_bytes_read"] == done["run"]["expert_bytes_planned"]
    for before, after in zip(planned["variants"], done["variants"], strict=True):
        assert before["plan"] == after["plan"]
        assert after["run"]["variants"] == 2
        assert mpfs("show", after["ref"], "--json").json["commit"] == after["commit"]


def test_options_of_merges_may_be_set(mpfs: Command, workplace: Path) -> None:
    done = mpfs("sweep", "recipe.yml", "--set", "budget=10%,32KiB", "--into", "b{budget}", "--json").json
    assert [item["ref"] for item in done["variants"]] == ["b10pct", "b32768"]
    assert done["variants"][1]["settings"] == {"budget": {"kind": "bytes", "value": 32768}}
    done = mpfs("sweep", "recipe.yml", "--set", "fidelity=0.5,90%", "--into", "f", "--json").json
    assert [item["fidelity_predicted"] >= wanted for item, wanted in zip(done["variants"], (0.5, 0.9), strict=True)]
    assert [item["ref"] for item in done["variants"]] == ["f/fidelity=0.5", "f/fidelity=0.9"]


def test_a_variant_that_fails(mpfs: Command, workplace: Path) -> None:
    arguments = ("sweep", "recipe.yml", "--set", "models.a.parameters.weight=0.5,1e39", "--into", "s")
    result = mpfs(*arguments, code=65)
    assert "s/weight=0.5" in result.out
    assert "1 variant failed" in result.out
    assert result.err.startswith("mpfs: s/weight=1e39 was not committed: the result holds")
    document = mpfs(*arguments, "--json", code=65).json
    assert document["failed"] == 1
    assert document["variants"][1]["error"]["kind"] == "nonfinite"
    assert len(mpfs("-q", *arguments, code=65).out.split()) == 1


@pytest.mark.parametrize(
    ("setting", "code", "message"),
    [
        ("density", 2, "'density' is no setting: write PATH=VALUE,VALUE, such as parameters.density=0.3,0.5"),
        ("budget=10,x", 2, "budget: 'x' is no size"),
        ("models.c.parameters.weight=1", 65, "recipe.yml: models.c.parameters.weight: models has no entry c"),
        ("parameters.weigth=1,2", 65, "recipe.yml: parameters.weigth: task_arithmetic has no such parameter; did you"),
        ("models.a.parameters.weight=" + ",".join(map(str, range(65))), 2, "65 variants are more than 64"),
    ],
)
def test_mistakes(mpfs: Command, workplace: Path, setting: str, code: int, message: str) -> None:
    result = mpfs("sweep", "recipe.yml", "--set", setting, "--into", "s", code=code)
    assert result.err.startswith(f"mpfs: {message}")
    assert len(result.err.splitlines()) == 1
    assert len(mpfs("branch", "--json").json) == 3


def test_a_path_twice(mpfs: Command, workplace: Path) -> None:
    result = mpfs(*SWEEP, "--set", "models.a.parameters.weight=2", code=2)
    assert "is set twice" in result.err
