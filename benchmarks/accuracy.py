"""What a budget does to a merged model's accuracy: a base and five experts that are trained here, merged at several budgets.

Set-ups differ in how the experts were tuned:

- `sgd`, `adamw`, `lora`, `sparse`: the tasks are five of scikit-learn's data sets (handwritten digits, wine, breast cancer,
  iris, diabetes). The base is a residual network that has seen three labelled examples a class of each; an expert
  is it, tuned to one of them: by SGD with momentum, by AdamW, by AdamW through low-rank adapters that are then added to the
  weights, or by AdamW with each step's change pulled towards zero. A task has its own outputs, as is usual.
- `views`: the tasks are the digits, read in five ways: turned, mirrored, inverted, shifted, scrambled. The base knows the
  digits as they are; all tasks share the outputs.

Needs scikit-learn.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from benchmarks.measure import machine
from benchmarks.plot import Line, Panel, chart
from mpfs.merge.planner import Policy
from mpfs.objects import Budget
from mpfs.repository import Repository

BUDGETS = (5.0, 10.0, 20.0, 50.0)
POLICIES: tuple[Policy, ...] = ("energy", "uniform", "random")
BLOCK_SIZE = 4096
FEATURES = 64
BATCH = 64
EXAMPLES = 3
"""Labelled examples a class that the base has seen of each data set."""

SETUPS = ("sgd", "adamw", "lora", "sparse", "views")


@dataclass(frozen=True)
class Task:
    """A task: its place among all, its outputs as a half-open range, and its data."""

    name: str
    place: int
    outputs: tuple[int, int]
    train: tuple[torch.Tensor, torch.Tensor]
    test: tuple[torch.Tensor, torch.Tensor]


class Network(nn.Module):
    """A residual network; its input is FEATURES numbers and, if there are `tags`, which task it is."""

    def __init__(self, tags: int, outputs: int, width: int, blocks: int, hidden: int) -> None:
        super().__init__()
        self.tags = tags
        self.first = nn.Linear(FEATURES + tags, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, hidden * width), nn.GELU(), nn.Linear(hidden * width, width)
            )
            for _ in range(blocks)
        )
        self.last = nn.Linear(width, outputs)

    def forward(self, x: torch.Tensor, place: int, outputs: tuple[int, int]) -> torch.Tensor:
        """Examples of a task to its logits."""
        if self.tags:
            tag = torch.zeros(len(x), self.tags)
            tag[:, place] = 1.0
            x = torch.cat([x, tag], 1)
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        result: torch.Tensor = self.last(x)[:, outputs[0] : outputs[1]]
        return result


def main(arguments: list[str]) -> None:
    """Run and print tables."""
    parser = argparse.ArgumentParser(prog="benchmarks accuracy", description=__doc__)
    parser.add_argument("--setup", action="append", choices=SETUPS, help="only this one; may be given several times")
    parser.add_argument("--plot", type=Path, help="write a chart of accuracy against expert bytes, as SVG")
    parser.add_argument("--json", type=Path, help="the figures: those of other set-ups that are there are kept")
    options = parser.parse_args(arguments)
    try:
        import sklearn.datasets  # type: ignore[import-not-found,import-untyped,unused-ignore]  # noqa: F401
    except ImportError:
        sys.exit("benchmarks accuracy: scikit-learn is not installed (pip install scikit-learn)")
    found: dict[str, Any] = {}
    if options.json is not None and options.json.exists():
        found = json.loads(options.json.read_text(encoding="utf-8"))
    torch.set_num_threads(1)  # networks as small as these gain nothing from more
    print(f"{machine()}; in brackets, the share of the full merge's gain over the base that is kept\n")
    for setup in options.setup or SETUPS:
        scratch = Path(tempfile.mkdtemp(prefix="mpfs-accuracy-"))
        try:
            with Repository.create(scratch / "repository", block_size=BLOCK_SIZE) as repository:
                found[setup] = _run(repository, scratch, setup)
        finally:
            shutil.rmtree(scratch)
        if options.json is not None:
            options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        if options.plot is not None:
            title = "Accuracy against expert bytes read"
            x_label = "expert bytes read, % of the full merge's (0: the base), square-root scale"
            picture = chart(title, x_label, "accuracy, mean of the tasks", list(_panels(found)))
            options.plot.write_text(picture, encoding="utf-8")


def _run(repository: Repository, scratch: Path, setup: str) -> dict[str, Any]:
    torch.manual_seed(0)
    tasks = _views() if setup == "views" else _data_sets()
    if setup == "views":
        network = Network(0, 10, 256, 4, 2)
        _tune(network, [_digits()], "adamw", 300, 1e-3)
    else:
        network = Network(len(tasks), tasks[-1].outputs[1], 128, 4, 4)
        _tune(network, [_few(task) for task in tasks], "adamw", 300, 1e-3, noise=0.3)
    base = {name: weight.detach().clone() for name, weight in network.state_dict().items()}

    def store(name: str) -> None:
        weights = {key: weight.detach().contiguous() for key, weight in network.state_dict().items()}
        save_file(weights, scratch / "model.safetensors")
        repository.import_checkpoint(scratch / "model.safetensors", name)

    store("base")
    start, own = float(np.mean(_accuracy(network, tasks))), []
    for task in tasks:
        network.load_state_dict(base)
        _tune(network, [task], "adamw" if setup == "views" else setup, 300 if setup == "views" else 200)
        own.append(_accuracy(network, [task])[0])
        store(task.name)

    def accuracy(recipe: Mapping[str, Any], **options: Any) -> float:
        repository.merge(recipe, "merged", **options)
        network.load_state_dict(repository.load("merged"))
        return float(np.mean(_accuracy(network, tasks)))

    print(f"{setup}: the base {start:.3f}, each expert on its own task {np.mean(own):.3f}\n")
    print(f"| method | policy | {' | '.join(f'{budget:g}%' for budget in BUDGETS)} | full |")
    print(f"|---|---|{'---:|' * (len(BUDGETS) + 1)}")
    result: dict[str, Any] = {"base": start, "own": float(np.mean(own)), "methods": {}}
    for method, parameters in _methods(setup).items():
        models = [{"model": task.name, "parameters": parameters} for task in tasks]
        recipe = {"merge_method": method, "base_model": "base", "models": models}
        full = accuracy(recipe)
        policies = {
            policy: [accuracy(recipe, budget=Budget("percent", budget), policy=policy) for budget in BUDGETS]
            for policy in POLICIES
        }
        result["methods"][method] = {"full": full, "policies": policies}
        for policy, values in policies.items():
            cells = [f"{value:.3f} ({(value - start) / (full - start):.0%})" for value in values]
            print(f"| {method} | {policy} | {' | '.join(cells)} | {full:.3f} |", flush=True)
    print(flush=True)
    return result


def _methods(setup: str) -> dict[str, dict[str, float]]:
    if setup == "views":
        return {
            "task_arithmetic": {"weight": 0.4},
            "ties": {"weight": 1.0, "density": 0.4},
            "dare_ties": {"weight": 0.5, "density": 0.6},
        }
    return {
        "task_arithmetic": {"weight": 0.5},
        "ties": {"weight": 1.0, "density": 0.3},
        "dare_ties": {"weight": 0.6, "density": 0.6},
    }


def _data_sets() -> list[Task]:
    from sklearn import datasets

    tasks: list[Task] = []
    first = 0
    for name in ("digits", "wine", "breast_cancer", "iris", "diabetes"):
        data = getattr(datasets, f"load_{name}")()
        target = data.target > np.median(data.target) if name == "diabetes" else data.target
        order = np.random.default_rng(0).permutation(len(target))
        values = (data.data - data.data.mean(0)) / (data.data.std(0) + 1e-6)
        padded = np.pad(values, ((0, 0), (0, FEATURES - values.shape[1])))
        x = torch.tensor(padded[order], dtype=torch.float32)
        y = torch.tensor(target[order], dtype=torch.int64)
        count, classes = int(0.7 * len(y)), int(y.max()) + 1
        outputs = (first, first + classes)
        tasks.append(Task(name, len(tasks), outputs, (x[:count], y[:count]), (x[count:], y[count:])))
        first += classes
    return tasks


def _few(task: Task) -> Task:
    count = min(len(task.train[1]), EXAMPLES * (task.outputs[1] - task.outputs[0]))
    return Task(task.name, task.place, task.outputs, (task.train[0][:count], task.train[1][:count]), task.test)


def _digits() -> Task:
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    x = torch.tensor(digits.data[order] / 16.0, dtype=torch.float32)
    y = torch.tensor(digits.target[order], dtype=torch.int64)
    return Task("digits", 0, (0, 10), (x[:1300], y[:1300]), (x[1300:], y[1300:]))


def _views() -> list[Task]:
    scramble = torch.randperm(FEATURES, generator=torch.Generator().manual_seed(5))
    views: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "turned": lambda x: x.reshape(-1, 8, 8).rot90(1, (1, 2)).reshape(-1, 64),
        "mirrored": lambda x: x.reshape(-1, 8, 8).flip(2).reshape(-1, 64),
        "inverted": lambda x: 1.0 - x,
        "shifted": lambda x: x.reshape(-1, 8, 8).roll((3, 2), (1, 2)).reshape(-1, 64),
        "scrambled": lambda x: x[:, scramble],
    }
    plain = _digits()
    return [
        Task(name, 0, (0, 10), (view(plain.train[0]), plain.train[1]), (view(plain.test[0]), plain.test[1]))
        for name, view in views.items()
    ]


def _tune(
    network: Network, tasks: Sequence[Task], way: str, steps: int, rate: float | None = None, noise: float = 0.0
) -> None:
    """Train on one task after the other, a batch each."""
    before = {name: weight.detach().clone() for name, weight in network.named_parameters()}
    adapters = {
        name: (nn.Parameter(torch.randn(4, weight.shape[1]) * 0.05), nn.Parameter(torch.zeros(weight.shape[0], 4)))
        for name, weight in before.items()
        if way == "lora" and weight.dim() == 2
    }

    def weights() -> dict[str, torch.Tensor]:
        return {name: before[name] + up @ down for name, (down, up) in adapters.items()}

    optimizer: torch.optim.Optimizer
    if way == "sgd":
        optimizer = torch.optim.SGD(network.parameters(), rate or 0.01, momentum=0.9)
    elif way == "lora":
        optimizer = torch.optim.AdamW([part for pair in adapters.values() for part in pair], rate or 3e-3)
    else:
        optimizer = torch.optim.AdamW(network.parameters(), rate or 3e-4, weight_decay=0.0)
    for step in range(steps):
        task = tasks[step % len(tasks)]
        batch = torch.randint(0, len(task.train[1]), (BATCH,))
        x, y = task.train[0][batch], task.train[1][batch]
        if noise:
            x = x + noise * torch.randn_like(x)
        optimizer.zero_grad()
        logits = torch.func.functional_call(network, weights(), (x, task.place, task.outputs))
        torch.autograd.backward(nn.functional.cross_entropy(logits, y))
        optimizer.step()
        with torch.no_grad():
            for name, weight in network.named_parameters() if way == "sparse" else ():
                change = weight - before[name]
                weight.copy_(before[name] + change.sign() * (change.abs() - 2e-4).clamp(min=0.0))
    with torch.no_grad():
        for name, sum_ in weights().items():
            network.get_parameter(name).copy_(sum_)


def _accuracy(network: Network, tasks: Sequence[Task]) -> list[float]:
    with torch.no_grad():
        return [
            float((network(task.test[0], task.place, task.outputs).argmax(1) == task.test[1]).float().mean())
            for task in tasks
        ]


def _panels(found: Mapping[str, Any]) -> Iterator[Panel]:
    for setup, figures in found.items():
        for method, item in figures["methods"].items():
            lines = [
                Line(policy, [(0.0, figures["base"]), *zip(BUDGETS, values, strict=True), (100.0, item["full"])])
                for policy, values in item["policies"].items()
            ]
            yield Panel(f"{setup}: {method}", lines)


if __name__ == "__main__":
    main(sys.argv[1:])
