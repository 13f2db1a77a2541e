"""What a budget does to a merged model's accuracy: one base and five experts that are trained here, on digits.

A residual network learns scikit-learn's digits; each expert is it, tuned to read them in another way: turned, mirrored,
inverted, shifted, scrambled. Merges at several budgets are then tested on all five tasks. Needs scikit-learn.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from benchmarks.measure import machine
from mpfs.merge.planner import Policy
from mpfs.objects import Budget
from mpfs.repository import Repository

BUDGETS = (5.0, 10.0, 20.0, 50.0)
POLICIES: tuple[Policy, ...] = ("energy", "layerwise", "uniform", "random")
METHODS: Mapping[str, dict[str, float]] = {
    "task_arithmetic": {"weight": 0.4},
    "ties": {"weight": 1.0, "density": 0.4},
    "dare_ties": {"weight": 0.5, "density": 0.6},
}
WIDTH, BLOCKS = 256, 4
BLOCK_SIZE = 4096

_scramble = torch.randperm(64, generator=torch.Generator().manual_seed(5))

TASKS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "turned": lambda x: x.reshape(-1, 8, 8).rot90(1, (1, 2)).reshape(-1, 64),
    "mirrored": lambda x: x.reshape(-1, 8, 8).flip(2).reshape(-1, 64),
    "inverted": lambda x: 1.0 - x,
    "shifted": lambda x: x.reshape(-1, 8, 8).roll((3, 2), (1, 2)).reshape(-1, 64),
    "scrambled": lambda x: x[:, _scramble],
}


class Network(nn.Module):
    """A residual network of a few hundred thousand parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(BLOCKS)
        )
        self.last = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images of 64 pixels in [0, 1] to logits."""
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        result: torch.Tensor = self.last(x)
        return result


def main(arguments: list[str]) -> None:
    """Run and print tables."""
    parser = argparse.ArgumentParser(prog="benchmarks accuracy", description=__doc__)
    parser.add_argument("--epochs", type=int, default=15, help="of each training")
    options = parser.parse_args(arguments)
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        sys.exit("benchmarks accuracy: scikit-learn is not installed (pip install scikit-learn)")
    torch.manual_seed(0)
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    x = torch.tensor(digits.data[order] / 16.0, dtype=torch.float32)
    y = torch.tensor(digits.target[order], dtype=torch.int64)
    train, test = slice(0, 1300), slice(1300, None)
    scratch = Path(tempfile.mkdtemp(prefix="mpfs-accuracy-"))
    try:
        with Repository.create(scratch / "repository", block_size=BLOCK_SIZE) as repository:
            base = Network()
            _fit(base, x[train], y[train], options.epochs, 1e-3)
            _store(repository, scratch, "base", base)
            for name, change in TASKS.items():
                expert = Network()
                expert.load_state_dict(base.state_dict())
                _fit(expert, change(x[train]), y[train], options.epochs, 3e-4)
                _store(repository, scratch, name, expert)
            _report(repository, {name: (change(x[test]), y[test]) for name, change in TASKS.items()})
    finally:
        shutil.rmtree(scratch)


def _fit(network: Network, x: torch.Tensor, y: torch.Tensor, epochs: int, rate: float) -> None:
    optimizer = torch.optim.AdamW(network.parameters(), lr=rate)
    for _ in range(epochs):
        order = torch.randperm(len(x))
        for start in range(0, len(x), 64):
            batch = order[start : start + 64]
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(network(x[batch]), y[batch]))
            optimizer.step()


def _store(repository: Repository, scratch: Path, name: str, network: Network) -> None:
    save_file(network.state_dict(), scratch / "model.safetensors")
    repository.import_checkpoint(scratch / "model.safetensors", name)


def _accuracy(repository: Repository, ref: str, tests: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
    network = Network()
    network.load_state_dict(repository.load(ref))
    with torch.no_grad():
        return [float((network(x).argmax(1) == y).float().mean()) for x, y in tests.values()]


def _report(repository: Repository, tests: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
    start = float(np.mean(_accuracy(repository, "base", tests)))
    own = [_accuracy(repository, name, tests)[index] for index, name in enumerate(tests)]
    print(f"{machine()}; {len(tests)} experts\n")
    print(f"Mean accuracy over the tasks: the base {start:.3f}, each expert on its own task {np.mean(own):.3f}.")
    print("Then of merges; in brackets, the share of the full merge's gain over the base that is kept\n")
    print(f"| method | policy | {' | '.join(f'{budget:g}%' for budget in BUDGETS)} | full |")
    print(f"|---|---|{'---:|' * (len(BUDGETS) + 1)}")
    for method, parameters in METHODS.items():
        recipe = {
            "merge_method": method,
            "base_model": "base",
            "models": [{"model": name, "parameters": parameters} for name in tests],
        }
        repository.merge(recipe, "merged")
        full = float(np.mean(_accuracy(repository, "merged", tests)))
        for policy in POLICIES:
            cells = []
            for budget in BUDGETS:
                repository.merge(recipe, "merged", budget=Budget("percent", budget), policy=policy)
                accuracy = float(np.mean(_accuracy(repository, "merged", tests)))
                cells.append(f"{accuracy:.3f} ({(accuracy - start) / (full - start):.0%})")
            print(f"| {method} | {policy} | {' | '.join(cells)} | {full:.3f} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
