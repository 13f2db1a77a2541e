"""Whole recipes by `mpfs merge` on four architectures against mergekit 0.1.5 (make_architecture_goldens.py)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from mpfs_cli.main import run
from numpy.typing import NDArray
from parity_cases import DTYPES, differing, exact, scores, ulps
from safetensors.torch import save_file

from mpfs.merge.operators import get_operator, operator_names
from mpfs.repository import Repository

GOLDENS = Path(__file__).with_name("architecture_goldens.npz")
POSITION_IDS = "embeddings.position_ids"

EXACT = [
    *["linear", "linear-sum", "passthrough", "passthrough-scale", "nearswap", "arithmetic", "ties", "ties-sum"],
    *["breadcrumbs", "breadcrumbs-ties", "ram", "ramplus"],
]
CLOSE = [
    *["slerp", "nuslerp", "nuslerp-base", "nuslerp-rows", "nuslerp-rows-base"],
    *["multislerp", "multislerp-base", "karcher", "stock", "sce"],
]
WORSE = ["multislerp-sum", "stock-rows", "nuslerp-first-base"]
"""In float32 mergekit is farther from the exact result than 4 ulp here."""
SELECTING = ["sce-some", "arcee"]

QUICK = {"llama": "float32", "qwen3": "", "gpt2": "float16", "bert": "bfloat16"}
"""What is merged in every run of the tests; the rest is in the slow ones. A Qwen3 is a Llama with two norms more."""

Model = dict[str, torch.Tensor]

each_model = pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        pytest.param(architecture, dtype, marks=[] if QUICK[architecture] == dtype else pytest.mark.slow)
        for architecture in QUICK
        for dtype in DTYPES
    ],
)


@cache
def goldens() -> dict[str, NDArray[Any]]:
    with np.load(GOLDENS, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


@cache
def all_cases() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(str(goldens()["cases"]))
    return found


@cache
def shapes(architecture: str) -> dict[str, tuple[int, ...]]:
    return {name: tuple(shape) for name, shape in json.loads(str(goldens()[f"names/{architecture}"])).items()}


def split(flat: torch.Tensor, architecture: str) -> Model:
    parts = torch.split(flat, [math.prod(shape) for shape in shapes(architecture).values()])
    return dict(zip(shapes(architecture), parts, strict=True))


@cache
def model(architecture: str, name: str, dtype: str) -> Model:
    return split(torch.from_numpy(goldens()[f"input/{architecture}/{name}"]).to(DTYPES[dtype]), architecture)


def answers(architecture: str, case: str, dtype: str) -> Model:
    return split(torch.from_numpy(goldens()[f"output/{architecture}/{case}/{dtype}"]).view(DTYPES[dtype]), architecture)


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, str], dict[str, Model]]]:
    """What MPFS makes of all cases for an architecture and a dtype: documents of one recipe file."""

    @cache
    def merge(architecture: str, dtype: str) -> dict[str, Model]:
        folder = tmp_path_factory.mktemp(f"{architecture}-{dtype}")
        config = {**json.loads(str(goldens()[f"config/{architecture}"])), "torch_dtype": dtype}
        with Repository.create(folder / "repo", block_size=4096, map_size=1 << 28, author="tester") as repository:
            for name in ("base", "e0", "e1", "e2", "e3"):
                tensors = {
                    key: values.reshape(shapes(architecture)[key])
                    for key, values in model(architecture, name, dtype).items()
                }
                if architecture == "bert":
                    tensors[POSITION_IDS] = torch.arange(6)[None]
                (folder / name).mkdir()
                save_file(tensors, folder / name / "model.safetensors", metadata={"format": "pt"})
                (folder / name / "config.json").write_text(json.dumps(config))
                repository.import_checkpoint(folder / name, name, threads=1)
        documents = [{**recipe, "dtype": dtype, "name": name} for name, recipe in all_cases().items()]
        (folder / "recipe.yml").write_text(yaml.safe_dump_all(documents))
        command = ["merge", str(folder / "recipe.yml"), "--into", str(documents[-1]["name"]), "--threads", "1"]
        assert run(["-q", "-r", str(folder / "repo"), *command]) == 0
        with Repository.open(folder / "repo") as repository:
            return {case: repository.load(case) for case in all_cases()}

    yield merge
    merge.cache_clear()


def operands(architecture: str, case: str, dtype: str, name: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The base's tensor and the models' that the recipe lists, the base left out."""
    listed = [item["model"] for item in all_cases()[case]["models"] if item["model"] != "base"]
    return model(architecture, "base", dtype)[name], [model(architecture, item, dtype)[name] for item in listed]


def test_every_golden_is_checked() -> None:
    assert sorted([*EXACT, *CLOSE, *WORSE, *SELECTING]) == sorted(all_cases())
    tried = {recipe["merge_method"] for recipe in all_cases().values()}
    assert tried == {name for name in operator_names() if not get_operator(name).draws}


@each_model
def test_equals_mergekit(merged: Callable[[str, str], dict[str, Model]], architecture: str, dtype: str) -> None:
    """Methods that work element by element, or select: bit for bit."""
    wrong = {}
    for case in EXACT:
        found = merged(architecture, dtype)[case]
        for name, answer in answers(architecture, case, dtype).items():
            count = int(differing(found[name].reshape(-1), answer).sum())
            if count:
                wrong[case, name] = count
    assert wrong == {}


@each_model
def test_tensors_are_those_of_mergekit(
    merged: Callable[[str, str], dict[str, Model]], architecture: str, dtype: str
) -> None:
    extra = [POSITION_IDS] if architecture == "bert" else []
    for found in merged(architecture, dtype).values():
        assert sorted(found) == sorted([*shapes(architecture), *extra])
        assert {x.dtype for name, x in found.items() if name not in extra} == {DTYPES[dtype]}
        assert all(torch.equal(found[name], torch.arange(6)[None]) for name in extra)


@each_model
@pytest.mark.parametrize("case", [*CLOSE, *WORSE])
def test_is_close_to_mergekit(
    merged: Callable[[str, str], dict[str, Model]], architecture: str, dtype: str, case: str
) -> None:
    """Methods with sums over the tensor: 1 ulp of a 16-bit dtype, 4 ulp of float32, at the largest operand's size."""
    # In 16 bits karcher's steps are rounding there: compared is what it gives by way of float32.
    asked = "karcher-wide" if case == "karcher" and dtype != "float32" else case
    wrong = {}
    for name, answer in answers(architecture, asked, dtype).items():
        base, experts = operands(architecture, case, dtype, name)
        found = merged(architecture, dtype)[case][name].reshape(-1)
        limit = 4 if dtype == "float32" else 1
        if bool(answer.isnan().any()):
            # mergekit divides zero by zero: an unchanged expert has no length, and eps is zero in float16.
            assert (case, dtype) == ("multislerp-base", "float16")
            assert any(torch.equal(expert, base) for expert in experts)
            answer = exact(all_cases()[case], base, experts, shapes(architecture)[name]).to(DTYPES[dtype])
            limit = 2  # All its steps are rounded to float16.
        # What no model changes keeps the base's bits; mergekit may round it to a neighbour.
        changed = ~torch.stack([expert == base for expert in experts]).all(0)
        off = float((ulps(found, answer, [base, *experts, answer]) * changed).max())
        if off <= limit:
            continue
        # Then it is mergekit that is off.
        assert dtype == "float32"
        assert case in WORSE
        true = exact(all_cases()[case], base, experts, shapes(architecture)[name])
        ours, theirs = (float(ulps(x, true, [base, *experts, answer]).max()) for x in (found, answer))
        if not (ours <= 1 and theirs > 3):
            wrong[name] = (off, ours, theirs)
    assert wrong == {}


@each_model
@pytest.mark.parametrize("case", SELECTING)
def test_selects_as_mergekit_but_at_the_threshold(
    merged: Callable[[str, str], dict[str, Model]], architecture: str, dtype: str, case: str
) -> None:
    """Elements may be decided otherwise only if their score lies within 1e-6 of the threshold."""
    for name, answer in answers(architecture, case, dtype).items():
        base, experts = operands(architecture, case, dtype, name)
        found = merged(architecture, dtype)[case][name].reshape(-1)
        other = (found == base) != (answer == base)
        score, threshold = scores(all_cases()[case], base, experts, shapes(architecture)[name])
        if bool(other.any()):
            assert float((score[other].double() - threshold).abs().max()) <= 1e-6, name
        else:  # What is selected also decides on sce's weights.
            off = ulps(found, answer, [base, *experts, answer])
            assert float(off.max()) <= (4 if dtype == "float32" else 1), name
