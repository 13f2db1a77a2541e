"""Whole merges give the same snapshot by kernels as by torch."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mpfs.merge.kernels import dispatch
from mpfs.merge.kernels.backend import Kernels
from mpfs.objects import Budget
from mpfs.repository import Repository

EXPERTS = 3


def family(dtypes: Mapping[str, torch.dtype]) -> list[dict[str, torch.Tensor]]:
    """A base and three experts, whose tensors are of several blocks and odd sizes, some equal here and there."""
    generator = torch.Generator().manual_seed(11)
    shapes = {"a": (70, 131), "b": (1,), "c": (9000,), "same": (50, 50), "d": (33, 3)}
    models: list[dict[str, torch.Tensor]] = [{} for _ in range(EXPERTS + 1)]
    for name, shape in shapes.items():
        base = torch.randn(shape, generator=generator) * 0.1
        for index, model in enumerate(models):
            delta = (torch.randn(shape, generator=generator) * 8).round() / 512
            if name == "same" or index == 0:
                delta.zero_()
            elif index == 2:
                delta.view(-1)[: delta.numel() // 2] = 0
            model[name] = (base + delta).to(dtypes.get(name, dtypes["*"]))
    return models


def repository(root: Path, models: list[dict[str, torch.Tensor]]) -> Repository:
    """With the models as m0, m1, …"""
    made = Repository.create(root / "repo", block_size=4096, map_size=1 << 28)
    for index, model in enumerate(models):
        directory = root / f"m{index}"
        directory.mkdir()
        save_file(model, directory / "model.safetensors")
        made.import_checkpoint(directory, f"m{index}", threads=1)
    return made


def recipe(method: str, **top: Any) -> dict[str, Any]:
    """All models, or all but the base."""
    parameters = {} if method in ("linear", "task_arithmetic") else {"density": 0.3}
    models = [{"model": f"m{i}", "parameters": {"weight": 0.3 + 0.1 * i, **parameters}} for i in range(1, EXPERTS + 1)]
    if method == "linear":
        models.append({"model": "m0", "parameters": {"weight": 0.2}})
        return {"merge_method": method, "models": models, **top}
    return {"merge_method": method, "base_model": "m0", "models": models, **top}


FAMILIES: dict[str, Mapping[str, torch.dtype]] = {
    "bf16": {"*": torch.bfloat16},
    "f16": {"*": torch.float16},
    "f32": {"*": torch.float32},
    "mixed": {"*": torch.bfloat16, "a": torch.float32, "c": torch.float16},
    "f64": {"*": torch.bfloat16, "a": torch.float64},
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_same_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    used: list[str] = []
    load = dispatch.load

    def noting(name: str, dtype: str) -> Any:
        used.append(name)
        return load(name, dtype)

    monkeypatch.setattr(dispatch, "load", noting)
    with repository(tmp_path, family(FAMILIES[kind])) as repo:
        for method in (
            "linear",
            "task_arithmetic",
            "ties",
            "dare_linear",
            "dare_ties",
            "breadcrumbs",
            "breadcrumbs_ties",
        ):
            for top in ({}, {"dtype": "float32", "out_dtype": "bfloat16"}, {"dtype": "bfloat16"}):
                if top and kind in ("f16", "f64"):
                    continue
                asked = recipe(method, **top)
                budget = None if method == "linear" else Budget("percent", 60)
                used.clear()
                results = [
                    repo.merge(asked, "fast", reuse=False, threads=3).snapshot,
                    repo.merge(asked, "fast-budget", reuse=False, threads=1, budget=budget).snapshot,
                ]
                assert used
                with monkeypatch.context() as patch:
                    patch.setattr("mpfs.merge.engine.kernels", lambda: None)
                    used.clear()
                    expected = [
                        repo.merge(asked, "slow", reuse=False, threads=1).snapshot,
                        repo.merge(asked, "slow-budget", reuse=False, threads=3, budget=budget).snapshot,
                    ]
                    assert not used
                assert results == expected, (method, top)
        assert repo.fsck(read_data=True).ok


def test_a_kernel_that_fails_fails_the_merge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: Any, **more: Any) -> Any:
        raise ValueError("out of luck")

    with repository(tmp_path, family(FAMILIES["bf16"])) as repo:
        for name in ("histogram", "task_vector"):
            with monkeypatch.context() as patch:
                patch.setattr(Kernels, name, failing)
                with pytest.raises(ValueError, match="out of luck"):
                    repo.merge(recipe("ties"), "merged")
            assert not [
                thread for thread in threading.enumerate() if thread.name.startswith(("mpfs-merge", "mpfs-pre"))
            ]
        repo.merge(recipe("ties"), "merged")
        assert repo.fsck(read_data=True).ok


def test_the_same_merge_again_needs_no_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise AssertionError("asked for")

    with repository(tmp_path, family(FAMILIES["bf16"])) as repo:
        first = repo.merge(recipe("ties"), "merged")
        monkeypatch.setattr("mpfs.merge.engine.kernels", refuse)
        again = repo.merge(recipe("ties"), "again")
        assert (again.snapshot, again.figures.blocks_computed) == (first.snapshot, 0)
