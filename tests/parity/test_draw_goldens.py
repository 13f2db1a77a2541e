"""Methods that draw against mergekit 0.1.5 over many seeds (make_draw_goldens.py): equal means and variances."""

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

from mpfs.merge.operators import Column, Parameters, TensorContext, get_operator, operator_names

GOLDENS = Path(__file__).with_name("draw_goldens.npz")
SHAPE = (10, 16)


@cache
def goldens() -> dict[str, NDArray[Any]]:
    with np.load(GOLDENS, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


@cache
def all_cases() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(str(goldens()["cases"]))
    return found


def merge(recipe: dict[str, Any], seed: int) -> torch.Tensor:
    operator = get_operator(recipe["merge_method"])
    base, *experts = (torch.from_numpy(goldens()[name]) for name in ("base", "e0", "e1"))
    shared = recipe["parameters"]
    own = [
        {**{p.name: shared[p.name] for p in operator.parameters if p.per_model and p.name in shared}, **x["parameters"]}
        for x in recipe["models"]
    ]
    values = Parameters(
        {p.name: shared[p.name] for p in operator.parameters if p.name in shared and not p.per_model}, own
    )
    context = TensorContext("x", base.numel(), "F32", seed, ["e0", "e1"], (), SHAPE)

    def columns() -> Iterator[Column]:
        yield Column(0, base, experts)

    return operator.apply(context, values, operator.prepare(context, values, columns), next(columns()))


def test_every_method_that_draws_is_there() -> None:
    tried = {recipe["merge_method"] for recipe in all_cases().values()}
    assert tried == {name for name in operator_names() if get_operator(name).draws}


@pytest.mark.parametrize("case", all_cases())
def test_means_and_variances_agree(case: str) -> None:
    draws = int(goldens()["draws"])
    found = torch.stack([merge(all_cases()[case], seed) for seed in range(draws)]).double()
    mean, variance = (torch.from_numpy(goldens()[f"{kind}/{case}"]) for kind in ("mean", "variance"))
    count = found.shape[1]
    score = (found.mean(0) - mean) / ((found.var(0) + variance) / draws).sqrt()
    assert abs(float(score.mean())) < 5 / math.sqrt(count)
    assert float(score.var()) == pytest.approx(1.0, abs=5 * math.sqrt(2 / count))
    assert float(score.abs().max()) < 5
    # The standard deviation of a log of a variance is sqrt((kurtosis - 1) / draws); entries are kept or not, so the
    # kurtosis may be below 2 and, where few are kept, above.
    kurtosis = (found - found.mean(0)).pow(4).mean(0) / found.var(0).square()
    spread = (2 * (kurtosis - 1).clamp(min=0.05) / draws).sqrt()
    apart = (found.var(0) / variance).log()
    assert abs(float(apart.mean())) < 5 * float(spread.mean()) / math.sqrt(count) + 0.01
    assert float((apart / spread).abs().max()) < 6
