"""Models whose tensors are named differently: merged as if they were not, told in the plan, refused where it is unclear."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from merge_cases import Lab, Tensors, family, recipe
from mpfs_cli.main import app
from typer.testing import CliRunner

from mpfs.errors import BadInputError, MismatchError
from mpfs.objects import Budget, Plan

pytest_plugins = ["merge_fixtures"]

LAYERS = [f"encoder.layer.{n}.attention.output.{part}" for n in range(3) for part in ("dense.weight", "dense.bias")]
NORMS = [f"encoder.layer.{n}.attention.output.LayerNorm" for n in range(3)]
SHAPES: dict[str, tuple[int, ...]] = {
    "bert.embeddings.word_embeddings.weight": (50, 24),
    **{f"bert.{name}": (24, 24) if name.endswith("weight") else (24,) for name in LAYERS},
    **{f"bert.{name}.{part}": (24,) for name in NORMS for part in ("gamma", "beta")},
    "bert.pooler.dense.weight": (24, 24),
}
"""A BERT of TensorFlow's time."""


def modern(name: str) -> str:
    """As transformers calls it today."""
    return name.replace(".gamma", ".weight").replace(".beta", ".bias")


def prefixed(prefix: str) -> Callable[[str], str]:
    return lambda name: prefix + name


WAYS: dict[str, Callable[[str], str]] = {
    "gamma and beta": modern,
    "without bert.": lambda name: name.removeprefix("bert."),
    "both": lambda name: modern(name.removeprefix("bert.")),
    "DataParallel": prefixed("module."),
    "torch.compile": prefixed("_orig_mod."),
    "both wrappers": prefixed("module._orig_mod."),
    "model.": prefixed("model."),
}


@pytest.mark.parametrize(
    ("way", "method"), [*((way, "task_arithmetic") for way in WAYS), ("both", "linear"), ("both", "ties")]
)
def test_it_is_as_if_the_names_were_the_base_s(lab: Lab, way: str, method: str) -> None:
    models = family(2, shapes=SHAPES)
    models.add_to(lab)
    asked = recipe(method, 2, densities=[0.5, 0.5] if method == "ties" else None)
    lab.merge(asked, into="wanted")
    called = {name: WAYS[way](name) for name in SHAPES}
    lab.add("e1", {called[name]: tensor for name, tensor in models.experts[1].items()})
    report = lab.repository.plan(asked)
    lab.merge(report.plan)
    assert lab.repository.snapshot("merged") == lab.repository.snapshot("wanted")
    assert sorted(lab.load()) == sorted(SHAPES)
    expected = {new: old for old, new in called.items() if new != old}
    assert report.plan.renamed == {"e1": expected}
    assert report.as_json()["renamed"] == {"e1": expected}
    assert lab.repository.explain("merged").as_json()["renamed"] == {"e1": expected}
    (note,) = (note for note in report.plan.notes if "names tensors in another way" in note)
    assert note.startswith("e1 names tensors in another way than base (")


def test_a_plan_is_the_same_wherever_it_is_made_and_comes_back(lab: Lab) -> None:
    models = family(1, shapes=SHAPES)
    lab.add("base", models.base)
    lab.add("e0", {modern(name): tensor for name, tensor in models.experts[0].items()})
    plans = [lab.repository.plan(recipe("task_arithmetic", 1)).plan for _ in range(2)]
    assert plans[0] == plans[1] == Plan.decode(plans[0].encode())
    plain = {**json.loads(plans[0].encode())}
    plain.pop("renamed")
    assert "renamed" not in json.loads(Plan.decode(json.dumps(plain).encode()).encode())


def test_filters_go_by_the_base_s_names(lab: Lab) -> None:
    models = family(1, shapes=SHAPES)
    lab.add("base", models.base)
    lab.add("e0", {f"module.{modern(name)}": tensor for name, tensor in models.experts[0].items()})
    weights = [{"filter": "gamma", "value": 1.0}, {"value": 0.0}]
    asked = {
        "merge_method": "task_arithmetic",
        "base_model": "base",
        "models": [{"model": "e0", "parameters": {"weight": weights}}],
    }
    lab.merge(asked)
    found = lab.load()
    for name, tensor in models.base.items():
        expected = models.experts[0][name] if name.endswith("gamma") else tensor
        assert torch.allclose(found[name], expected, atol=1e-6), name


def test_a_budget_holds_as_ever(lab: Lab) -> None:
    models = family(1, shapes={"model.w": (200, 1024)})
    lab.add("base", models.base)
    lab.add("e0", {"w": models.experts[0]["model.w"]})
    report = lab.merge(recipe("task_arithmetic", 1), budget=Budget("percent", 10.0), verify_fidelity=True)
    assert 0 < report.figures.expert_bytes_read <= report.figures.expert_bytes_full // 10
    assert report.figures.fidelity is not None
    assert report.figures.fidelity == pytest.approx(report.fidelity_predicted, abs=0.1)


class TestUnclear:
    def add(self, lab: Lab) -> None:
        shape = (8, 8)
        lab.add("base", {name: torch.ones(shape) for name in ("model.w", "net.w", "same")})
        lab.add("e0", {"w": torch.zeros(shape), "same": torch.zeros(shape)})

    def test_it_is_refused_with_what_it_could_be(self, lab: Lab) -> None:
        self.add(lab)
        with pytest.raises(MismatchError, match=r"w of e0 could be model\.w or net\.w of base: rename it"):
            lab.repository.plan(recipe("task_arithmetic", 1))

    def test_the_base_s_may_be_taken_there(self, lab: Lab) -> None:
        self.add(lab)
        report = lab.repository.plan(recipe("task_arithmetic", 1), on_mismatch="base")
        assert report.plan.renamed == {}
        assert any("could be model.w or net.w" in note for note in report.plan.notes)

    def test_shapes_that_settle_it(self, lab: Lab) -> None:
        self.add(lab)
        lab.add("base", {"model.w": torch.ones(8, 8), "net.w": torch.ones(9), "same": torch.ones(8, 8)})
        assert lab.repository.plan(recipe("task_arithmetic", 1)).plan.renamed == {"e0": {"w": "model.w"}}


def test_a_name_that_nothing_explains_has_near_ones_told(lab: Lab) -> None:
    models: Tensors = {"model.layers.0.mlp.up_proj.weight": torch.ones(3), "x": torch.ones(2)}
    lab.add("base", models)
    lab.add("e0", {"model.layers.0.mlp.upproj.weight": torch.ones(3), "x": torch.ones(2)})
    with pytest.raises(
        MismatchError,
        match=r"the base has not: model\.layers\.0\.mlp\.upproj\.weight \(like model\.layers\.0\.mlp\.up_proj\.weight there\?\)",
    ):
        lab.repository.plan(recipe("task_arithmetic", 1))


def test_an_unknown_base_is_found_under_other_names(lab: Lab) -> None:
    models = family(1, shapes=SHAPES)
    lab.add("base", models.base)
    lab.add("e0", {modern(name): tensor for name, tensor in models.experts[0].items()})
    report = lab.repository.import_checkpoint(lab.root / "sources/e0", "again", base="auto")
    assert report.base in ("base", "e0")


def test_forged_renamings_are_refused(lab: Lab) -> None:
    models = family(1, shapes=SHAPES)
    lab.add("base", models.base)
    lab.add("e0", {modern(name): tensor for name, tensor in models.experts[0].items()})
    plan = lab.repository.plan(recipe("task_arithmetic", 1)).plan
    value = json.loads(plan.encode())
    forged: object
    for forged in ([], {"e0": 3}, {"e0": {"a": 3}}, {"e0": {"a": "x" * (1 << 21)}}):
        value["renamed"] = forged
        path = lab.root / "plan.json"
        path.write_text(json.dumps(value))
        with pytest.raises(BadInputError, match="not a plan"):
            lab.repository.find_plan(path)


def test_the_command_line_shows_it(lab: Lab) -> None:
    models = family(1, shapes=SHAPES)
    lab.add("base", models.base)
    lab.add("e0", {modern(name): tensor for name, tensor in models.experts[0].items()})
    path = lab.root / "recipe.yml"
    path.write_text(json.dumps(recipe("task_arithmetic", 1)))
    lab.repository.close()
    run = CliRunner().invoke
    for arguments in (["plan", str(path)], ["plan", str(path), "--explain"]):
        shown = run(app, ["-r", str(lab.root / "repo"), *arguments])
        assert "names tensors in another way than base" in " ".join(shown.output.split())
    shown = run(app, ["-r", str(lab.root / "repo"), "plan", str(path), "--json"])
    assert json.loads(shown.stdout)["renamed"]["e0"][modern(f"bert.{NORMS[0]}.gamma")] == f"bert.{NORMS[0]}.gamma"
