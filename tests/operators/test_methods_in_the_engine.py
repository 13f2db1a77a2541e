"""The methods run by the engine, on blocks that rows reach across, against the same methods over whole tensors."""

from __future__ import annotations

from collections.abc import Iterator

import method_cases as methods
import operator_cases as cases
import pytest
import torch
from method_cases import ASKS, WITH_BASE, Ask
from safetensors.torch import save_file

from mpfs.objects import Budget
from mpfs.repository import Repository

SHAPES = {"a": (40, 100), "b": (129, 96), "norm": (96,), "conv": (6, 5, 7), "long": (3, 5000), "frozen": (64, 64)}
EXPERTS = 3
Model = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def family() -> dict[str, Model]:
    """A base and experts in bfloat16, some blocks of 2,048 elements and one tensor equal in all."""
    generator = torch.Generator().manual_seed(4)
    base = {name: (torch.randn(shape, generator=generator) * 0.02).bfloat16() for name, shape in SHAPES.items()}
    models = {"base": base}
    for i in range(EXPERTS):
        model = {}
        for name, values in base.items():
            model[name] = (values.float() + 0.003 * torch.randn(values.shape, generator=generator)).bfloat16()
        model["frozen"] = base["frozen"].clone()
        for name, low, high in (("long", 4096, 10_240), ("b", 4096, 8192)):
            model[name].view(-1)[low:high] = base[name].view(-1)[low:high]
        models[f"e{i}"] = model
    return models


@pytest.fixture(scope="module")
def repository(family: dict[str, Model], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repository]:
    root = tmp_path_factory.mktemp("methods")
    found = Repository.create(root / "repo", block_size=4096, map_size=1 << 30, author="tester")
    for name, tensors in family.items():
        (root / name).mkdir()
        save_file(tensors, root / name / "model.safetensors", metadata={"format": "pt"})
        found.import_checkpoint(root / name, name, threads=1)
    yield found
    found.close()


def recipe(ask: Ask) -> dict[str, object]:
    listed = [{"model": f"e{i}", "parameters": dict(ask.own)} for i in range(ask.experts)]
    found: dict[str, object] = {"merge_method": ask.method, "models": listed, "parameters": dict(ask.shared)}
    return {**found, "base_model": "base"} if ask.base else found


@pytest.mark.parametrize("ask", ASKS, ids=str)
def test_equals_the_method_over_whole_tensors(ask: Ask, repository: Repository, family: dict[str, Model]) -> None:
    repository.merge(recipe(ask), "merged", threads=2)
    merged = repository.load("merged")
    keys = [f"e{i}" for i in range(ask.experts)]
    for name, shape in SHAPES.items():
        inputs = [family[key][name].reshape(-1) for key in keys]
        where = methods.context(shape, ask.experts, torch.bfloat16, keys=keys)
        where = type(where)(name, where.numel, where.work, where.seed, where.expert_keys, (), where.shape)
        base = family["base"][name].reshape(-1)
        expected = cases.merge(ask.method, base if ask.base else None, inputs, ask.parameters(), where=where)
        assert torch.equal(cases.bits(merged[name].reshape(-1)), cases.bits(expected)), name


@pytest.mark.parametrize("ask", WITH_BASE, ids=str)
def test_a_budget_is_kept(ask: Ask, repository: Repository) -> None:
    report = repository.merge(
        recipe(ask), "less", budget=Budget("percent", 40.0), verify_fidelity=True, reuse=False, threads=2
    )
    assert 0 < report.figures.expert_bytes_read <= 0.4 * report.figures.expert_bytes_full
    for values in repository.load("less").values():
        assert bool(torch.isfinite(values).all())
