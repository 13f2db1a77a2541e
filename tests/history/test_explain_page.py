"""The page of `explain --html`: whole, self-contained, safe, and its numbers those of the plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mpfs.history.explain import explain_plan
from mpfs.history.insight import Insight, Layer, Share, TensorShares, layer_of
from mpfs.history.page import explanation_page
from mpfs.objects import Budget
from mpfs.repository import Repository

VOID = {"meta", "br"}


class Reader(HTMLParser):
    """Checks that elements nest, and collects text and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    generator = torch.Generator().manual_seed(3)
    base = {f"model.layers.{i}.weight": torch.randn(64, 64, generator=generator) for i in range(12)}
    base["head"] = torch.randn(10, generator=generator)
    with Repository.create(tmp_path / "repo", block_size=4096, map_size=1 << 28) as repo:
        for number, name in enumerate(["base", "a<b>", "c"]):
            tensors = {key: value.clone() for key, value in base.items()}
            for i in range(12) if number else ():
                if (i + number) % 3:
                    change = torch.randn(64, 64, generator=generator) * 0.01 * (i + 1) * number
                    tensors[f"model.layers.{i}.weight"] += change
            file = tmp_path / f"{number}.safetensors"
            save_file(tensors, file)
            repo.import_checkpoint(file, name.replace("<", "-").replace(">", "-"))
        yield repo


def recipe() -> dict[str, Any]:
    return {
        "merge_method": "task_arithmetic",
        "base_model": "base",
        "models": [
            {"model": "a-b-", "parameters": {"weight": 0.7}},
            {"model": "c", "parameters": {"weight": 0.4}},
        ],
    }


def read_page(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


def test_numbers_are_those_of_the_plan(repository: Repository) -> None:
    plan = repository.plan(recipe(), budget=Budget("percent", 30)).plan
    insight = repository.insight(repository.plan(recipe(), budget=Budget("percent", 30)).identity)
    assert insight.experts == ("a-b-", "c")
    assert sum(share.nbytes_read for item in insight.tensors for share in item.experts if share) == (
        plan.cost.expert_bytes_planned
    )
    assert sum(share.nbytes for item in insight.tensors for share in item.experts if share) == (
        plan.cost.expert_bytes_full
    )
    assert [layer.name for layer in insight.layers()] == ["head", *(f"model.layers.{i}" for i in range(12))]
    first = insight.layers()[1].experts
    assert first[0] is not None
    assert first[0].energy > 0
    points = insight.curves["energy"]
    assert points[0].nbytes == 0
    assert points[-1].fidelity == pytest.approx(1.0, abs=1e-6)
    spent = [point.nbytes for point in points]
    here = float(np.interp(insight.chosen.nbytes, spent, [point.fidelity for point in points]))
    assert here == pytest.approx(plan.fidelity_predicted, abs=0.01)
    assert insight.conflict[0][0] == pytest.approx(1.0)
    assert insight.conflict[0][1] == insight.conflict[1][0]
    for policy in ("layerwise", "uniform", "random"):
        worse = insight.curves[policy]
        middle = float(np.interp(spent[-1] / 3, [p.nbytes for p in worse], [p.fidelity for p in worse]))
        assert middle <= float(np.interp(spent[-1] / 3, spent, [p.fidelity for p in points])) + 0.02


def test_a_commit_has_the_insight_of_its_plan(repository: Repository) -> None:
    report = repository.merge(recipe(), "merged", budget=Budget("percent", 30))
    assert repository.insight("merged") == repository.insight(report.plan)


@pytest.mark.parametrize("budget", [Budget(), Budget("percent", 30), Budget("bytes", 9000), Budget("fidelity", 0.5)])
@pytest.mark.parametrize("method", ["task_arithmetic", "ties"])
def test_the_page_is_whole_and_loads_nothing(repository: Repository, budget: Budget, method: str) -> None:
    asked = {**recipe(), "merge_method": method}
    repository.merge(asked, "merged", budget=budget, verify_fidelity=True)
    page = explanation_page(repository.explain("merged"), repository.insight("merged"), "merged")
    reader = read_page(page)
    assert "script" not in reader.seen
    assert not {name for name, _ in reader.attributes} & {"src", "href", "onload", "onclick"}
    assert "http" not in page.replace("http-equiv", "")
    assert "url(" not in page
    assert reader.seen.count("svg") == 1
    assert reader.seen.count("polyline") == 4
    text = " ".join(reader.text)
    for shown in (
        "What a budget buys",
        "Layers and experts",
        "Agreement",
        "fidelity measured",
        "model.layers.11.weight",
    ):
        assert shown in text


def test_names_are_escaped(repository: Repository) -> None:
    plan = repository.plan(recipe(), budget=Budget("percent", 30)).plan
    evil = '<script>alert("x")</script>'
    plan = replace(
        plan,
        models=tuple(replace(model, name=evil + model.name) for model in plan.models),
        tensors=tuple(replace(tensor, name=evil + tensor.name, note=evil) for tensor in plan.tensors),
        notes=(evil,),
    )
    insight = repository.insight(repository.plan(recipe(), budget=Budget("percent", 30)).identity)
    insight = replace(
        insight,
        experts=tuple(evil + name for name in insight.experts),
        tensors=tuple(replace(item, name=evil + item.name) for item in insight.tensors),
    )
    page = explanation_page(explain_plan(plan), insight, evil)
    assert "<script" not in page
    read_page(page)


def test_a_merge_without_a_base_has_no_curve(repository: Repository) -> None:
    asked = {
        "merge_method": "linear",
        "models": [{"model": name, "parameters": {"weight": 1.0}} for name in ("a-b-", "c")],
    }
    repository.merge(asked, "merged")
    insight = repository.insight("merged")
    read_page(explanation_page(repository.explain("merged"), insight, "merged"))


def test_many_experts_and_none() -> None:
    share = Share(1.0, 0.5, 100, 50)
    many = Insight(tuple(f"e{i}" for i in range(20)), (TensorShares("t", (share,) * 20),), (), {}, None)  # type: ignore[arg-type]
    assert many.layers() == (Layer("t", 1, (share,) * 20),)
    assert Insight((), (), (), {}, None).layers() == ()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.3.mlp.experts.17.up.weight", "model.layers.3"),
        ("model.embed_tokens.weight", "model.embed_tokens"),
        ("scalar", "scalar"),
        ("h.0", "h.0"),
    ],
)
def test_layers(name: str, layer: str) -> None:
    assert layer_of(name) == layer
