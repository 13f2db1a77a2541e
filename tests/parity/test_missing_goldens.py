"""Models that lack a tensor: MPFS decides when it plans, says so, and agrees with mergekit 0.1.5 where that gives a result.

What mergekit does is in missing_goldens.npz (make_missing_goldens.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from parity_cases import differing, ulps
from safetensors.torch import save_file

from mpfs.errors import MismatchError
from mpfs.merge.reports import MergeReport
from mpfs.repository import Repository

GOLDENS = Path(__file__).with_name("missing_goldens.npz")
SHAPE = (5, 8)
MODELS = ("base", "e0", "e1", "e2", "e3")
EXACT = ("linear", "nearswap", "passthrough", "arithmetic", "ties", "breadcrumbs", "ram")


@cache
def goldens() -> dict[str, NDArray[Any]]:
    with np.load(GOLDENS, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def read(name: str) -> Any:
    return json.loads(str(goldens()[name]))


def model(name: str) -> dict[str, torch.Tensor]:
    kept, gone = torch.split(torch.from_numpy(goldens()[f"input/{name}"]), 40)
    return {"kept": kept, "gone": gone}


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Repository]]:
    """The models in each pattern."""
    found = {}
    for pattern, lacking in read("patterns").items():
        root = tmp_path_factory.mktemp("missing")
        found[pattern] = Repository.create(root / "repo", block_size=4096, map_size=1 << 26, author="tester")
        for name in MODELS:
            stored = {key: x.reshape(SHAPE) for key, x in model(name).items() if key == "kept" or name not in lacking}
            save_file(stored, root / f"{name}.safetensors", metadata={"format": "pt"})
            found[pattern].import_checkpoint(root / f"{name}.safetensors", name, threads=1)
    yield found
    for repository in found.values():
        repository.close()


def experts_of(case: str, pattern: str) -> tuple[list[str], list[str]]:
    """The models that a recipe lists besides its base: those that have the tensor, and those that lack it."""
    listed = [item["model"] for item in read("cases")[case]["models"] if item["model"] != "base"]
    lacking = read("patterns")[pattern]
    return [name for name in listed if name not in lacking], [name for name in listed if name in lacking]


def has_base(case: str) -> bool:
    return "base_model" in read("cases")[case]


def merge(repository: Repository, case: str, **options: Any) -> MergeReport:
    return repository.merge({**read("cases")[case], "dtype": "float32"}, "merged", threads=1, **options)


SLOW = (
    "sce",
    "slerp",
    "stock",
    "linear",
    "multislerp",
    "nuslerp-base",
    "nearswap",
    "arcee",
    "breadcrumbs",
    "ram",
    "karcher",
)
"""Cases that are like others."""

GIVEN = [(case, pattern) for case in read("cases") for pattern in read("patterns")]
BASELESS = [
    (case, p) for case, p in GIVEN if has_base(case) and "base" in read("patterns")[p] and experts_of(case, p)[0]
]


def marked(keys: list[tuple[str, str]]) -> list[Any]:
    return [pytest.param(*key, marks=pytest.mark.slow if key[0] in SLOW else []) for key in keys]


@pytest.mark.parametrize(("case", "pattern"), marked([key for key in GIVEN if f"output/{'/'.join(key)}" in goldens()]))
def test_agrees_with_mergekit_where_it_gives_a_result(
    repositories: dict[str, Repository], case: str, pattern: str
) -> None:
    report = merge(repositories[pattern], case)
    found = repositories[pattern].load("merged")["gone"].reshape(-1)
    answer = torch.from_numpy(goldens()[f"output/{case}/{pattern}"])
    if case in EXACT:
        assert not bool(differing(found, answer).any())
    else:
        assert float(ulps(found, answer, [model(name)["gone"] for name in MODELS]).max()) <= 4
    for name in experts_of(case, pattern)[1]:
        assert any(f"{name} lacks 1 tensor" in note and "gone" in note for note in report.notes)


@pytest.mark.parametrize(("case", "pattern"), marked(BASELESS))
def test_what_only_experts_have_is_refused_or_left_out(
    repositories: dict[str, Repository], case: str, pattern: str
) -> None:
    """mergekit stops in the middle of the merge, or leaves it out without a word."""
    with pytest.raises(MismatchError, match="has 1 tensor that the base has not: gone"):
        repositories[pattern].plan(read("cases")[case])
    report = merge(repositories[pattern], case, on_mismatch="base")
    assert sorted(repositories[pattern].load("merged")) == ["kept"]
    assert any("has 1 tensor that the base has not: gone" in note for note in report.notes)


@pytest.mark.parametrize(
    ("case", "pattern"),
    marked([key for key in GIVEN if f"output/{'/'.join(key)}" not in goldens() and key not in BASELESS]),
)
def test_where_too_few_are_left_for_the_method(repositories: dict[str, Repository], case: str, pattern: str) -> None:
    """mergekit stops in the middle of the merge, or leaves it out without a word: here it is the base's, and told."""
    having, lacking = experts_of(case, pattern)
    report = merge(repositories[pattern], case)
    found = repositories[pattern].load("merged")
    if has_base(case) and "base" not in read("patterns")[pattern]:
        assert torch.equal(found["gone"].reshape(-1), model("base")["gone"])
    elif having:
        assert torch.equal(found["gone"].reshape(-1), model(having[0])["gone"])
    else:
        # None of the recipe's models has it.
        assert sorted(found) == ["kept"]
        return
    for name in lacking:
        assert any(f"{name} lacks 1 tensor" in note and "gone" in note for note in report.notes)


def test_mergekit_stops_or_drops_where_the_last_test_says_so() -> None:
    silent = {*read("left_out"), *read("refused")}
    assert {f"{case}/{pattern}" for case, pattern in GIVEN} - {
        key.removeprefix("output/") for key in goldens() if key.startswith("output/")
    } == silent
    assert {error.split(":")[0] for error in read("refused").values()} == {"ValueError"}
