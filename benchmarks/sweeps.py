"""What planning a sweep together saves: bytes read together and mean predicted fidelity, against a plan for each.

`make bench BENCH_ARGS="sweeps"`; a few seconds, no reads. The family is synthetic: four experts whose deltas differ in
size by tensor and by row, independent of each other. Figures in docs/sweeps.md.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpfs.merge.sweep.report import SweepReport
from mpfs.objects import Budget
from mpfs.repository import Repository
from mpfs.testing.checkpoints import TensorContent, safetensors_bytes, write

LAYERS, SHAPE, EXPERTS = 24, (128, 256), 4
NAMES = [f"e{index}" for index in range(EXPERTS)]
WEIGHTS = (0.3, 0.8, -0.4, 1.1)
SHARE = 20.0

CASES: Sequence[tuple[str, str, Mapping[str, Sequence[Any]]]] = (
    ("3 scales (`lambda`)", "task_arithmetic", {"parameters.lambda": [0.5, 1.0, 1.5]}),
    ("3 densities (ties)", "ties", {"parameters.density": [0.3, 0.5, 0.7]}),
    ("4 weights of one model", "task_arithmetic", {"models.e0.parameters.weight": [0.2, 0.5, 1.0, 2.0]}),
    (
        "2 weights of two models",
        "task_arithmetic",
        {"models.e0.parameters.weight": [0.2, 1.0], "models.e1.parameters.weight": [0.2, 1.0]},
    ),
    ("ties, dare_ties, task_arithmetic", "ties", {"merge_method": ["ties", "dare_ties", "task_arithmetic"]}),
)


def main(arguments: list[str]) -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        with Repository.create(root / "repository", block_size=4096, map_size=1 << 30) as repository:
            for number, name in enumerate(["base", *NAMES]):
                repository.import_checkpoint(_model(root / name, number), name)
            print(
                "| variants | each its own plan: read together | fidelity | one budget of as much | one budget of 20% |"
            )
            print("|---|---|---|---|---|")
            for title, method, values in CASES:
                print(_row(repository, title, method, values), flush=True)


def _row(repository: Repository, title: str, method: str, values: Mapping[str, Sequence[Any]]) -> str:
    models = [{"model": name, "parameters": {"weight": weight}} for name, weight in zip(NAMES, WEIGHTS, strict=True)]
    recipe = {"merge_method": method, "base_model": "base", "models": models}

    def plan(together: Budget | None, **more: Sequence[Any]) -> SweepReport:
        return repository.sweep(recipe, {**values, **more}, "sweep", budget=together, dry_run=True)

    apart = plan(None, budget=[Budget("percent", SHARE)])
    same = plan(Budget("bytes", apart.expert_bytes.planned))
    joint = plan(Budget("percent", SHARE))
    share = apart.expert_bytes.planned / apart.expert_bytes.full
    return f"| {title} | {share:.1%} | {_mean(apart):.3f} | {_mean(same):.3f} | {_mean(joint):.3f} |"


def _mean(report: SweepReport) -> float:
    return sum(item.plan.plan.fidelity_predicted for item in report.variants) / len(report.variants)


def _model(folder: Path, number: int) -> Path:
    """The base (number 0) or an expert."""
    tensors = []
    for layer in range(LAYERS):
        data = np.random.default_rng(layer).standard_normal(SHAPE, np.float32)
        if number:
            generator = np.random.default_rng([layer, number])
            scale = np.float32(0.1) * np.exp(generator.standard_normal((SHAPE[0] // 4, 1), np.float32))
            data = data + np.repeat(scale, 4, axis=0) * generator.standard_normal(SHAPE, np.float32)
        tensors.append(TensorContent(f"layers.{layer}.weight", "F32", SHAPE, data.tobytes()))
    write(folder, {"model.safetensors": safetensors_bytes(tensors, {"format": "pt"})})
    return folder
