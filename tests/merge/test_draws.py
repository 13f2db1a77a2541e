"""Methods that draw random numbers: the same seed gives the same bytes, however the work is cut and done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from merge_cases import Lab, family

from mpfs.merge.operators import get_operator, operator_names
from mpfs.objects import Budget

pytest_plugins = ["merge_fixtures"]

METHODS = [name for name in operator_names() if get_operator(name).draws]
SHAPES = {"a": (60, 50), "b": (130, 96), "norm": (96,)}


def recipe(method: str, order: tuple[int, ...] = (0, 1), **shared: Any) -> dict[str, Any]:
    own = [{"weight": 0.6, "density": 0.4}, {"weight": 0.9, "density": 0.6}]
    models = [{"model": f"e{index}", "parameters": own[index]} for index in order]
    return {"merge_method": method, "base_model": "base", "models": models, "parameters": shared}


def test_there_are_methods_that_draw() -> None:
    assert METHODS == ["dare_linear", "dare_ties", "della", "della_linear"]


@pytest.mark.parametrize("method", METHODS)
def test_blocks_threads_memory_budget_and_order_change_nothing(tmp_path: Path, method: str) -> None:
    models = family(2, dtype=torch.bfloat16, shapes=SHAPES)
    found = []
    for block_size, threads in ((4096, 3), (1 << 16, 1)):
        lab = Lab(tmp_path / f"{block_size}-{threads}", block_size)
        models.add_to(lab)
        memory = 1 << 30 if threads == 1 else 1
        lab.merge(recipe(method), threads=threads, memory=memory, seed=5, reuse=False)
        found.append(lab.load())
        # A budget that is enough for all is no other merge, and two experts are a sum of two in either order.
        lab.merge(recipe(method), threads=threads, seed=5, budget=Budget("percent", 100.0), reuse=False)
        found.append(lab.load())
        lab.merge(recipe(method, (1, 0)), threads=threads, seed=5, reuse=False)
        found.append(lab.load())
        lab.close()
    for other in found[1:]:
        assert all(torch.equal(other[name], values) for name, values in found[0].items())


@pytest.mark.parametrize("method", METHODS)
def test_a_budget_leaves_the_draws_of_what_is_read(tmp_path: Path, method: str) -> None:
    """Without rescaling, a block that is read in full comes out as in the merge without a budget."""
    lab = Lab(tmp_path / "lab", 4096)
    models = family(2, shapes={"a": (64, 256)})
    models.add_to(lab)
    lab.merge(recipe(method, rescale=False), seed=5)
    full = lab.blocks("merged")["a"].blocks
    report = lab.merge(recipe(method, rescale=False), seed=5, budget=Budget("percent", 50.0))
    part, base = lab.blocks("merged")["a"].blocks, lab.blocks("base")["a"].blocks
    assert report.figures.expert_bytes_read < report.figures.expert_bytes_full
    kinds = [(block == whole, block == untouched) for block, whole, untouched in zip(part, full, base, strict=True)]
    assert sum(whole for whole, _ in kinds) >= 3
    if get_operator(method).interaction == "column":
        assert all(whole != untouched for whole, untouched in kinds)  # all of a column is read, or none of it
    lab.close()


@pytest.mark.parametrize("method", METHODS)
def test_another_seed_draws_otherwise(tmp_path: Path, method: str) -> None:
    lab = Lab(tmp_path / "lab", 4096)
    family(2, shapes=SHAPES).add_to(lab)
    drawn = []
    for seed in (5, 6, 5):
        lab.merge(recipe(method), seed=seed)
        drawn.append(lab.load()["b"])
    assert torch.equal(drawn[0], drawn[2])
    assert 0.2 < float((drawn[0] != drawn[1]).double().mean()) <= 1
    lab.close()
