"""Whole recipes against what mergekit 0.1.5 made of them (make_grammar_goldens.py): gradients, filters, slices, tied heads."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from mpfs.errors import MPFSError
from mpfs.repository import Repository

GOLDENS = Path(__file__).with_name("grammar_goldens.npz")
LAYERS = 4

REFUSED = {"slices-without-base": "needs the base"}
"""What mergekit refuses, too."""

CLOSE = ("slerp-gradient",)
"""Methods that sum in another order than mergekit."""


@cache
def goldens() -> dict[str, NDArray[Any]]:
    with np.load(GOLDENS, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


@cache
def all_cases() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(str(goldens()["cases"]))
    return found


def stored(kind: str, name: str) -> dict[str, torch.Tensor]:
    shapes = json.loads(str(goldens()[f"names/{kind}/{name}"]))
    flat = torch.from_numpy(goldens()[f"{kind}/{name}"])
    parts = torch.split(flat, [math.prod(shape) for shape in shapes.values()])
    return {key: part.reshape(shape) for (key, shape), part in zip(shapes.items(), parts, strict=True)}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repository]:
    """The models that mergekit was given."""
    root = tmp_path_factory.mktemp("grammar")
    config = json.loads(str(goldens()["config/tied-all"]))
    with Repository.create(root / "repo", block_size=4096, map_size=1 << 28, author="tester") as repository:
        for name in ("base", "a", "b", "c", "tied"):
            (root / name).mkdir()
            save_file(stored("input", name), root / name / "model.safetensors", metadata={"format": "pt"})
            value = {**config, "num_hidden_layers": LAYERS, "tie_word_embeddings": name == "tied"}
            (root / name / "config.json").write_text(json.dumps(value))
            repository.import_checkpoint(root / name, name, threads=1)
        yield repository


@pytest.mark.parametrize("case", [name for name in all_cases() if f"output/{name}" in goldens()])
def test_equals_mergekit(repository: Repository, case: str) -> None:
    repository.merge(all_cases()[case], "merged", threads=1)
    found, wanted = repository.load("merged"), stored("output", case)
    assert sorted(found) == sorted(wanted)
    for name, values in wanted.items():
        if case in CLOSE:
            torch.testing.assert_close(found[name], values, rtol=4e-7, atol=1e-9)
        else:
            assert torch.equal(found[name], values), name
    config = config_of(repository, "merged")
    layers = {int(name.split(".")[2]) for name in found if name.startswith("model.layers.")}
    assert config["num_hidden_layers"] == len(layers)
    assert config["num_hidden_layers"] == json.loads(str(goldens()[f"config/{case}"]))["num_hidden_layers"]
    assert config["tie_word_embeddings"] is ("lm_head.weight" not in found)


def config_of(repository: Repository, ref: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(b"".join(repository.reader(ref).open("config.json").iter_chunks()))
    return value


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_what_mergekit_refuses(repository: Repository, case: str) -> None:
    with pytest.raises(MPFSError, match=REFUSED[case]):
        repository.plan(all_cases()[case])
