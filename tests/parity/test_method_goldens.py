"""MPFS's other methods against what mergekit 0.1.5 answered (make_method_goldens.py)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import parity_cases as units
import pytest
import torch
from numpy.typing import NDArray
from parity_cases import DTYPES, differing, exact, scores

from mpfs.merge.numeric import dtype_name
from mpfs.merge.operators import Column, Parameters, TensorContext, get_operator
from mpfs.merge.operators.della import keep_chances
from mpfs.merge.operators.magnitude import patterns

HERE = Path(__file__).parent
STEP = 64


@cache
def goldens(file: str) -> dict[str, NDArray[Any]]:
    with np.load(HERE / file, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


@cache
def all_cases() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(str(goldens("method_goldens.npz")["cases"]))
    return found


@cache
def shapes() -> dict[str, tuple[int, ...]]:
    return {name: tuple(shape) for name, shape in json.loads(str(goldens("goldens.npz")["tensors"])).items()}


def split(flat: NDArray[Any], names: list[str], dtype: str) -> dict[str, torch.Tensor]:
    parts = torch.split(torch.from_numpy(flat).view(DTYPES[dtype]), [math.prod(shapes()[name]) for name in names])
    return dict(zip(names, parts, strict=True))


@cache
def model(name: str, dtype: str) -> dict[str, torch.Tensor]:
    return split(goldens("goldens.npz")[f"input/{dtype}/{name}"], list(shapes()), dtype)


def answers(case: str, dtype: str) -> dict[str, torch.Tensor]:
    names = json.loads(str(goldens("method_goldens.npz")["tensors"]))
    return split(goldens("method_goldens.npz")[f"output/{case}/{dtype}"], names, dtype)


def merge(case: str, dtype: str, name: str) -> torch.Tensor:
    """What MPFS makes of a recipe for one tensor, in columns of 64 elements."""
    recipe = all_cases()[case]
    operator = get_operator(recipe["merge_method"])
    base = None
    listed = [(item["model"], item["parameters"]) for item in recipe["models"]]
    if "base_model" in recipe and (operator.needs_base or operator.optional_base):
        base = model("base", dtype)[name]
        listed = [item for item in listed if item[0] != "base"]
    shared = recipe["parameters"]
    values = Parameters(
        {p.name: shared[p.name] for p in operator.parameters if not p.per_model and p.name in shared},
        [
            {
                p.name: {**shared, **own}[p.name]
                for p in operator.parameters
                if p.per_model and p.name in {**shared, **own}
            }
            for _, own in listed
        ],
    )
    assert operator.validate(values) == []
    experts = [model(item, dtype)[name] for item, _ in listed]
    numel = experts[0].numel()
    context = TensorContext(name, numel, dtype_name(DTYPES[dtype]), 0, [item for item, _ in listed], (), shapes()[name])

    def columns() -> Iterator[Column]:
        for start in range(0, numel, STEP):
            part = slice(start, start + STEP)
            yield Column(start, None if base is None else base[part], [expert[part] for expert in experts])

    prepared = operator.prepare(context, values, columns)
    found = torch.cat([operator.apply(context, values, prepared, column) for column in columns()])
    assert found.dtype == DTYPES[dtype]
    return found


def ulps(found: torch.Tensor, expected: torch.Tensor, case: str, name: str, dtype: str) -> torch.Tensor:
    """By how many units in the last place they differ, at the size of the largest operand (models, base, result)."""
    operands = [model(item["model"], dtype)[name] for item in all_cases()[case]["models"]]
    operands += [model("base", dtype)[name], expected]
    return units.ulps(found, expected, operands)


EXACT = [
    *["passthrough", "passthrough-scale", "nearswap-near", "nearswap-far", "nearswap-coarse"],
    *["breadcrumbs-three", "breadcrumbs-gamma", "breadcrumbs-ties-six", "breadcrumbs-ties-gamma"],
    *["ram", "ram-epsilon", "ramplus", "ramplus-epsilon"],
]
CLOSE = {
    # The most ulp of float32; of 16-bit dtypes it is 1.
    **dict.fromkeys(["slerp-little", "slerp-much", "stock-two", "stock-four", "nuslerp", "nuslerp-base"], 4),
    **dict.fromkeys(["nuslerp-rows", "nuslerp-first", "sce"], 4),
    **dict.fromkeys(["multislerp-two", "multislerp-four", "multislerp-base"], 4),
    **dict.fromkeys(["nuslerp-rows-base", "nuslerp-first-base"], 4),
}
WORSE = ["stock-rows", "multislerp-sum"]
"""Here factors are larger than 1, and in float32 mergekit's rounding grows with them."""
SELECTING = ["sce-some", "sce-half", "arcee", "arcee-other"]
KARCHER = ["karcher-two", "karcher-five", "karcher-base"]


def test_every_golden_is_checked() -> None:
    assert sorted([*EXACT, *CLOSE, *WORSE, *SELECTING, *KARCHER]) == sorted(all_cases())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", EXACT)
def test_equals_mergekit(case: str, dtype: str) -> None:
    found = {
        name: int(differing(merge(case, dtype, name), answer).sum()) for name, answer in answers(case, dtype).items()
    }
    assert {name: n for name, n in found.items() if n} == {}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CLOSE)
def test_is_close_to_mergekit(case: str, dtype: str) -> None:
    for name, answer in answers(case, dtype).items():
        found = merge(case, dtype, name)
        off = ulps(found, answer, case, name, dtype)
        if case.startswith("stock"):
            # What no model changes keeps the base's bits; mergekit averages it to a neighbour.
            off = off[~unchanged(case, name, dtype)]
        assert float(off.max()) <= (CLOSE[case] if dtype == "float32" else 1), name


def unchanged(case: str, name: str, dtype: str) -> torch.Tensor:
    base = model("base", dtype)[name]
    return torch.stack([model(item["model"], dtype)[name] == base for item in all_cases()[case]["models"]]).all(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ["stock-two", "stock-four", "stock-rows"])
def test_model_stock_keeps_what_no_model_changes(case: str, dtype: str) -> None:
    for name in answers(case, dtype):
        same = unchanged(case, name, dtype)
        assert torch.equal(merge(case, dtype, name)[same], model("base", dtype)[name][same])


def operands(case: str, name: str, dtype: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The base's tensor and the models' that the recipe lists, the base left out but where it is one of karcher's."""
    recipe = all_cases()[case]
    listed = [item["model"] for item in recipe["models"]]
    if recipe["merge_method"] != "karcher":
        listed = [item for item in listed if item != "base"]
    return model("base", dtype)[name], [model(item, dtype)[name] for item in listed]


def errors(case: str, name: str, dtype: str, answer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How far MPFS and mergekit are from the exact result, in ulp at the size of the largest operand."""
    base, experts = operands(case, name, dtype)
    true = exact(all_cases()[case], base, experts, shapes()[name])
    found = merge(case, dtype, name)
    return tuple(units.ulps(x, true, [base, *experts, answer]) for x in (found, answer))  # type: ignore[return-value]


@pytest.mark.parametrize("case", WORSE)
def test_where_mergekits_float32_is_off_the_exact_result(case: str) -> None:
    """The exception: MPFS is within 1 ulp of exact arithmetic; where the two differ by more than 4, it is mergekit."""
    farthest = 0.0
    for name, answer in answers(case, "float32").items():
        ours, theirs = errors(case, name, "float32", answer)
        assert float(ours.max()) <= 1.2, name  # half of the result's, which may be the larger one
        apart = ulps(merge(case, "float32", name), answer, case, name, "float32") > 4
        assert bool((theirs[apart] > 3).all()), name
        farthest = max(farthest, float(theirs.max()))
    assert 4 < farthest < 16


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("case", WORSE)
def test_in_16_bits_mergekits_rounding_is_followed(case: str, dtype: str) -> None:
    for name, answer in answers(case, dtype).items():
        off = ulps(merge(case, dtype, name), answer, case, name, dtype)
        assert float(off[~unchanged(case, name, dtype)].max()) <= 1, name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", SELECTING)
def test_selects_as_mergekit_but_at_the_threshold(case: str, dtype: str) -> None:
    """Elements may be decided otherwise only if their score lies within 1e-6 of the threshold; here few are."""
    total = disputed = 0
    for name, answer in answers(case, dtype).items():
        found, base = merge(case, dtype, name), model("base", dtype)[name]
        other = (found == base) != (answer == base)
        score, threshold = scores(all_cases()[case], *operands(case, name, dtype), shapes()[name])
        assert float((score[other].double() - threshold).abs().max() if bool(other.any()) else 0.0) <= 1e-6
        off = ulps(found, answer, case, name, dtype)[~other] > (4 if dtype == "float32" else 1)
        # What is selected also decides on sce's weights: they may differ only where something else was.
        assert not bool(off.any()) or bool(other.any())
        disputed += int(other.sum())
        total += len(answer)
    # In float16 variances of 1e-6 have few values, so many are equal to the threshold.
    assert disputed <= (0.01 if dtype != "float16" else 0.06) * total


@pytest.mark.parametrize("case", KARCHER)
def test_karcher_is_close_to_mergekit_in_float32(case: str) -> None:
    for name, answer in answers(case, "float32").items():
        assert float(ulps(merge(case, "float32", name), answer, case, name, "float32").max()) <= 4


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("case", KARCHER)
def test_karcher_in_16_bits_is_what_mergekit_gives_by_way_of_float32(case: str, dtype: str) -> None:
    for name, answer in answers(f"{case}-wide", dtype).items():
        assert float(ulps(merge(case, dtype, name), answer, case, name, dtype).max()) <= 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("case", KARCHER)
def test_karcher_in_16_bits_is_where_mergekit_has_rounding_errors(case: str, dtype: str) -> None:
    """The exception itself: MPFS is the exact result rounded, mergekit is off by many ulp."""
    farthest = 0.0
    for name, answer in answers(case, dtype).items():
        ours, theirs = errors(case, name, dtype, answer)
        assert float(ours.max()) <= 0.501, name
        assert float(ours.square().mean()) < float(theirs.square().mean()), name
        farthest = max(farthest, float(theirs.max()))
    assert farthest > 1


def test_della_keeps_as_often_as_mergekit() -> None:
    """Over many of mergekit's draws each element is kept as often as MPFS's chance says; so in the mean and variance."""
    archive = goldens("method_goldens.npz")
    draws = int(archive["draws"])
    kept = archive["draws/della"].astype(np.float64)
    name = "model.layers.0.self_attn.k_proj.weight"
    delta = model("expert5", "float32")[name] - model("base", "float32")[name]
    chances = keep_chances(patterns(delta).numpy().reshape(kept.shape), 0.4, 0.2)
    live = (delta != 0).numpy().reshape(kept.shape)
    score = ((kept - draws * chances) / np.sqrt(draws * chances * (1 - chances)))[live]
    assert abs(score.mean()) < 5 / math.sqrt(len(score))
    assert score.var() == pytest.approx(1.0, abs=5 * math.sqrt(2 / len(score)))
    assert float(np.abs(score).max()) < 5
