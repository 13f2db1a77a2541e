"""The page of `explain --html`: whole, self-contained, safe, and its numbers those of the plan."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mpfs.history.explain import Explanation, explain_plan
from mpfs.history.insight import Insight, Layer, Share, TensorShares, layer_of
from mpfs.history.page import STYLE, explanation_page
from mpfs.history.pictures import percent, short_names
from mpfs.objects import Budget
from mpfs.repository import Repository

VOID = {"meta", "br", "wbr"}

WIDEST = 0.65
"""An upper bound on the width of a character on average, of its height."""


class Reader(HTMLParser):
    """Checks that elements nest, and collects text and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes += attrs
        self.elements.append((tag, dict(attrs), []))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes += attrs
        self.elements.append((tag, dict(attrs), []))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if self.elements:
            self.elements[-1][2].append(data)


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


def test_experts_that_cancel_change_no_more_than_the_merge(tmp_path: Path) -> None:
    """ties elects signs: opposite deltas, whose sum is nearly 0, make half of a change each."""
    base = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    change = torch.randn(64, 64, generator=torch.Generator().manual_seed(2)) * 0.01
    with Repository.create(tmp_path / "repo", block_size=4096, map_size=1 << 28) as repo:
        for name, tensor in (("base", base), ("up", base + change), ("down", base - change)):
            save_file({"w": tensor}, tmp_path / "model.safetensors")
            repo.import_checkpoint(tmp_path / "model.safetensors", name)
        models = [{"model": name, "parameters": {"weight": 0.5, "density": 0.5}} for name in ("up", "down")]
        report = repo.plan({"merge_method": "ties", "base_model": "base", "models": models})
        insight = repo.insight(report.identity)
    (shares,) = insight.tensors
    energies = [share.energy for share in shares.experts if share is not None]
    assert sum(energies) == pytest.approx(report.plan.tensors[0].energy, rel=1e-6)
    assert energies[0] == pytest.approx(energies[1], rel=0.2)


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
    assert [attributes["class"] for tag, attributes, _ in reader.elements if tag == "svg"].count("curve") == 1
    assert reader.seen.count("polyline") == 4
    rings = [attributes for tag, attributes, _ in reader.elements if tag == "circle" and attributes["class"] == "ring"]
    assert len(rings) == 2, "what was measured: in the picture, and in its legend"
    text = "".join(reader.text)
    for shown in (
        "What a budget buys",
        "Layers and experts",
        "Agreement",
        "fidelity measured",
        "model.layers.11.weight",
    ):
        assert shown in text


def several(repository: Repository, tmp_path: Path, experts: int) -> tuple[Explanation, Insight]:
    """A plan under a budget that merges so many experts with long names."""
    base = repository.load("base")
    names = []
    for number in range(experts):
        generator = torch.Generator().manual_seed(100 + number)
        file = tmp_path / "expert.safetensors"
        save_file(
            {name: value + torch.randn(value.shape, generator=generator) * 0.01 for name, value in base.items()}, file
        )
        names.append(f"imported/some-organisation/some-long-model-name-{number}-instruct")
        repository.import_checkpoint(file, names[-1])
    models = [{"model": name, "parameters": {"weight": 0.5}} for name in names]
    asked = {"merge_method": "task_arithmetic", "base_model": "base", "models": models}
    report = repository.plan(asked, budget=Budget("percent", 30))
    return explain_plan(report.plan), repository.insight(report.identity)


@pytest.mark.parametrize("experts", [1, 5, 20])
def test_pictures_say_what_they_show(repository: Repository, tmp_path: Path, experts: int) -> None:
    explanation, insight = several(repository, tmp_path, experts)
    page = explanation_page(explanation, insight, "a plan")
    reader = read_page(page)
    # Every cell of a map tells its layer, its expert and its figure; every map has a caption and a scale.
    cells = [
        (attributes, text)
        for tag, attributes, text in reader.elements
        if tag == "td"
        and (attributes.get("class") or "").split(" ")[0] in ("change", "read", "kept", "with", "against")
    ]
    assert len(cells) >= 3 * 12 * experts
    for attributes, text in cells:
        assert attributes["title"]
        assert text, "readers of the page hear the number, whether or not it is drawn"
        assert re.fullmatch(r"--v:\d+%", attributes["style"] or "")
    maps = page.count('<table class="map')
    assert maps == (3 if experts == 1 else 4)
    assert page.count('class="scale') == page.count("<caption>") == maps
    assert ("Agreement" in page) == (experts > 1)
    # What may be wider than the window can be scrolled by keyboard, and is called something.
    for _, attributes, _ in [item for item in reader.elements if item[1].get("class") == "card"]:
        assert attributes["tabindex"] == "0"
        assert attributes["aria-label"]
    heads = [(attributes, text) for tag, attributes, text in reader.elements if tag == "span" and text]
    assert all(len("".join(text)) <= 40 for _, text in heads)


@pytest.mark.parametrize("share", [0, 3, 100])
def test_nothing_of_the_curve_is_cut_off(repository: Repository, share: int) -> None:
    report = repository.plan(recipe(), budget=Budget("percent", share))
    reader = read_page(explanation_page(explain_plan(report.plan), repository.insight(report.identity), "a plan"))
    style = next("".join(text) for tag, _, text in reader.elements if tag == "style")
    sizes = [float(number) for number in re.findall(r"svg (?:text|\.axis)\{font(?:-size)?:([\d.]+)px", style)]
    assert len(sizes) == 4
    curve = next(attributes for _, attributes, _ in reader.elements if attributes.get("class") == "curve")
    assert curve["aria-label"]
    _, _, width, height = map(float, (curve["viewbox"] or "").split())
    texts = [(attributes, "".join(text)) for tag, attributes, text in reader.elements if tag == "text"]
    assert len(texts) > 8
    for attributes, text in texts:
        length = len(text) * max(sizes) * WIDEST
        if "transform" in attributes:
            turned = re.match(r"translate\(([\d.]+) ([\d.]+)\) rotate\(-90\)", attributes["transform"] or "")
            assert turned is not None
            assert float(turned[2]) - length / 2 >= 0
            assert float(turned[2]) + length / 2 <= height
            assert max(sizes) * 0.8 <= float(turned[1])
            continue
        x, y = float(attributes["x"] or 0), float(attributes["y"] or 0)
        left = x - {"end": length, "middle": length / 2}.get(attributes.get("text-anchor") or "", 0)
        assert left >= 0, text
        assert left + length <= width, text
        assert max(sizes) * 0.5 <= y <= height, text
    spans = sorted(
        (float(attributes["x"] or 0), len(text)) for attributes, text in texts if re.fullmatch(r"[\d.]+ \w*B", text)
    )
    for (first, before), (second, after) in itertools.pairwise(spans):
        assert first + before * max(sizes) * WIDEST / 2 <= second - after * max(sizes) * WIDEST / 2
    points = [(attributes["points"] or "").split() for tag, attributes, _ in reader.elements if tag == "polyline"]
    for x, y in (tuple(map(float, point.split(","))) for line in points for point in line):
        assert 0 <= x <= width
        assert 0 <= y <= height


def test_numbers_can_be_read_on_every_colour() -> None:
    """WCAG's contrast of at least 4.5 between a cell's text and its colour, however strong; 3 for lines."""
    light, dark = re.findall(r":root\{(?:color-scheme:light dark;)?([^}]*)\}", STYLE)
    for scheme in (light, dark):
        colours = dict(item.split(":") for item in scheme.replace("\n", "").split(";") if item.startswith("--"))
        for name in ("change", "read", "kept", "with", "against"):
            cold, hot = _oklab(colours["--cold"]), _oklab(colours[f"--{name}"])
            for part in range(101):
                mixed = [low + (high - low) * part / 100 for low, high in zip(cold, hot, strict=True)]
                assert _contrast(_luminance(_linear(mixed)), _luminance(_rgb(colours["--cell"]))) >= 4.5, (name, part)
        for text in ("ink", "soft", "bad"):
            for ground in ("card", "paper"):
                assert _contrast(*(_luminance(_rgb(colours[f"--{name}"])) for name in (text, ground))) >= 4.5
        assert _contrast(*(_luminance(_rgb(colours[f"--{name}"])) for name in ("soft", "cold"))) >= 4.5
        for line in ("a", "b", "c", "dot", "soft"):
            assert _contrast(*(_luminance(_rgb(colours[f"--{name}"])) for name in (line, "card"))) >= 3.0


def _rgb(colour: str) -> list[float]:
    """A colour as linear light."""
    digits = colour.removeprefix("#")
    digits = "".join(digit * 2 for digit in digits) if len(digits) == 3 else digits
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    return [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in parts]


OKLAB = np.array([[0.2104542553, 0.793617785, -0.0040720468], [1.9779984951, -2.428592205, 0.4505937099],
                  [0.0259040371, 0.7827717662, -0.808675766]])  # fmt: skip
CONES = np.array([[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566],
                  [0.0883024619, 0.2817188376, 0.6299787005]])  # fmt: skip
"""Björn Ottosson's matrices (https://bottosson.github.io/posts/oklab/), which CSS Color 4 takes over."""


def _oklab(colour: str) -> list[float]:
    return list(map(float, OKLAB @ np.cbrt(CONES @ np.array(_rgb(colour)))))


def _linear(oklab: list[float]) -> list[float]:
    return list(map(float, np.clip(np.linalg.solve(CONES, np.linalg.solve(OKLAB, np.array(oklab)) ** 3), 0.0, 1.0)))


def _luminance(linear: list[float]) -> float:
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(first: float, second: float) -> float:
    high, low = max(first, second), min(first, second)
    return (high + 0.05) / (low + 0.05)


def test_budgets_of_a_recipe_are_told(repository: Repository) -> None:
    asked = {**recipe(), "budget": "60%"}
    asked["models"][0]["budget"] = [{"filter": "layers.1", "value": 8192}, {"value": "50%"}]
    report = repository.plan(asked)
    page = explanation_page(explain_plan(report.plan), repository.insight(report.identity), "p", "what it is <for>")
    text = " ".join(read_page(page).text)
    for shown in (
        "Budgets of the recipe",
        "models[0].budget[0]",
        "8.0 KiB",
        "but those of the recipe",
        "what it is <for>",
    ):
        assert shown in text


@pytest.mark.parametrize(
    ("part", "text"),
    [(0.0, "0"), (1e-5, "<.1"), (0.004, "0.4"), (0.0994, "9.9"), (0.0996, "10"), (0.9951, ">99"), (1.0, "100")],
)
def test_shares_are_short(part: float, text: str) -> None:
    assert percent(part) == text


def test_long_names_are_told_apart() -> None:
    assert short_names(["a", "b"]) == ["a", "b"]
    names = [f"imported/some-organisation/some-model-{number}" for number in range(20)]
    assert short_names(names) == [str(number) for number in range(20)]
    apart = short_names(["x" * 30 + "-of-the-first", "y" * 30])
    assert len(set(apart)) == 2
    assert all(len(name) <= 20 for name in apart)


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
