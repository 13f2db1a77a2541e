"""MPFS's operators against what mergekit 0.1.5 answered (make_goldens.py), bit for bit."""

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

import mpfs.merge.operators.task_vector as task_vector
from mpfs.merge.numeric import dtype_name
from mpfs.merge.operators import Column, Parameters, TensorContext, get_operator

GOLDENS = Path(__file__).with_name("goldens.npz")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
STEP = 64


@cache
def goldens() -> dict[str, NDArray[Any]]:
    with np.load(GOLDENS, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


@cache
def all_cases() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(str(goldens()["cases"]))
    return found


def tensors(name: str, dtype: str) -> dict[str, torch.Tensor]:
    """A stored model's tensors, flat."""
    shapes = json.loads(str(goldens()["tensors"]))
    flat = torch.from_numpy(goldens()[name]).view(DTYPES[dtype])
    parts = torch.split(flat, [math.prod(shape) for shape in shapes.values()])
    return dict(zip(shapes, parts, strict=True))


def merge(case: dict[str, Any], dtype: str, name: str) -> torch.Tensor:
    """What MPFS makes of the case for one tensor."""
    listed = case["experts"]
    values = Parameters(case["shared"], [{"weight": x["weight"], "density": x["density"]} for x in listed])
    operator = get_operator(case["method"])
    assert operator.validate(values) == []
    base = tensors(f"input/{dtype}/base", dtype)[name] if operator.needs_base else None
    experts = [tensors(f"input/{dtype}/{x['model']}", dtype)[name] for x in listed]
    numel = experts[0].numel()
    context = TensorContext(name, numel, dtype_name(DTYPES[dtype]), 0, [x["model"] for x in listed])

    def columns() -> Iterator[Column]:
        for start in range(0, numel, STEP):
            part = slice(start, start + STEP)
            yield Column(start, None if base is None else base[part], [expert[part] for expert in experts])

    prepared = operator.prepare(context, values, columns)
    return torch.cat([operator.apply(context, values, prepared, column) for column in columns()])


def differing(found: torch.Tensor, expected: torch.Tensor) -> int:
    """How many elements differ in their bits, but for a zero's sign: MPFS keeps that of an untouched base."""
    integer = {2: torch.int16, 4: torch.int32}[found.element_size()]
    return int(((found.view(integer) != expected.view(integer)) & ((found != 0) | (expected != 0))).sum())


CASES = [
    "linear-one",
    "linear-three",
    "linear-six",
    "linear-sum",
    "arithmetic-six",
    "arithmetic-mean",
    "ties-three",
    "ties-six",
    "ties-sum",
    "ties-edges",
    "dare-dense",
    "dare-ties-dense",
]


def test_every_golden_is_checked() -> None:
    assert sorted([*CASES, "dare-masked"]) == sorted(all_cases())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_equals_mergekit(case: str, dtype: str) -> None:
    answers = tensors(f"output/{case}/{dtype}", dtype)
    assert len(answers) == 12
    wrong = {name: differing(merge(all_cases()[case], dtype, name), answer) for name, answer in answers.items()}
    assert {name: n for name, n in wrong.items() if n} == {}


@pytest.mark.parametrize("dtype", DTYPES)
def test_dare_equals_mergekit_for_the_same_mask(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """mergekit's draws are read off its answer; the scale and the rest must then agree."""
    case = all_cases()["dare-masked"]
    base = tensors(f"input/{dtype}/base", dtype)
    for name, answer in tensors(f"output/dare-masked/{dtype}", dtype).items():
        mask = (answer != base[name]).numpy()

        def draw(key: int, start: int, n: int, density: float, mask: NDArray[np.bool_] = mask) -> NDArray[np.bool_]:
            return mask[start : start + n]

        monkeypatch.setattr(task_vector, "bernoulli", draw)
        found = merge(case, dtype, name)
        if dtype == "float32":
            # Its norms are float32 sums, ours are exact to float32's last place: the scale may differ there.
            torch.testing.assert_close(found, answer, rtol=1e-6, atol=1e-8)
        else:
            assert differing(found, answer) == 0, name
