"""What a budget keeps, and how well that is known beforehand: on published families and a synthetic one.

For each family and budget: the energy of the merge's change that the plan keeps, of what a perfect oracle keeps with
the same bytes, from sketches alone and after `mpfs analyze`, beside random and uniform choices. For each method:
predicted and measured fidelity. The truth is computed here, from the tensors themselves.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.families import BASE, FAMILIES, Family
from benchmarks.measure import machine
from mpfs.merge.planner import POLICIES, Candidates, choose
from mpfs.objects import Budget, Plan
from mpfs.repository import Repository

BUDGETS = (5.0, 10.0, 20.0, 50.0)
METHODS: tuple[tuple[str, float | None], ...] = (
    ("task_arithmetic", None),
    ("linear", None),
    ("ties", 0.5),
    ("dare_linear", 0.5),
    ("dare_ties", 0.5),
    ("slerp", None),
)
BLOCK_SIZE = 4096


@dataclass(frozen=True, slots=True)
class Kept:
    """Shares of the change's energy that are kept at one budget."""

    family: str
    budget: float
    oracle: float
    sketches: float
    exact: float
    layerwise: float
    uniform: float
    random: float


@dataclass(frozen=True, slots=True)
class Predicted:
    """Fidelity as predicted and as measured, and expert bytes as allowed and as read."""

    family: str
    method: str
    statistics: str
    budget: float
    predicted: float
    measured: float
    bytes_allowed: int
    bytes_read: int


def main(arguments: list[str]) -> None:
    """Run and print tables."""
    parser = argparse.ArgumentParser(prog="benchmarks fidelity", description=__doc__)
    parser.add_argument("--scratch", type=Path, help="where to work (default: a temporary directory)")
    parser.add_argument("--json", type=Path, help="also write the raw figures here")
    parser.add_argument("--family", action="append", choices=[family.__name__ for family in FAMILIES])
    options = parser.parse_args(arguments)
    kept: list[Kept] = []
    predicted: list[Predicted] = []
    for make in FAMILIES:
        if options.family and make.__name__ not in options.family:
            continue
        scratch = Path(tempfile.mkdtemp(prefix="mpfs-fidelity-", dir=options.scratch))
        try:
            with Repository.create(scratch / "repository", block_size=BLOCK_SIZE) as repository:
                family = make(repository, scratch)
                print(family.name, file=sys.stderr, flush=True)
                _run(repository, family, kept, predicted)
        finally:
            shutil.rmtree(scratch)
    _report(kept, predicted)
    if options.json is not None:
        raw = {"kept": [asdict(item) for item in kept], "predicted": [asdict(item) for item in predicted]}
        options.json.write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")


def _run(repository: Repository, family: Family, kept: list[Kept], predicted: list[Predicted]) -> None:
    recipe = family.recipe("task_arithmetic")
    full = repository.plan(recipe, save=False).plan
    truth = _truth(repository, family, full)
    plans: dict[tuple[str, float], float] = {}
    for budget in BUDGETS:
        for policy in POLICIES:
            plan = repository.plan(recipe, budget=Budget("percent", budget), policy=policy, save=False).plan
            plans[policy, budget] = _energy_kept(plan, truth)
    for method, density in METHODS:
        for budget in BUDGETS:
            predicted.append(_predict(repository, family, method, density, "sketches", budget))
    repository.analyze([name for name, _ in family.experts], BASE)
    for budget in BUDGETS:
        plan = repository.plan(recipe, budget=Budget("percent", budget), save=False).plan
        best = choose(list(truth.values()), budget=int(full.cost.expert_bytes_full * budget / 100.0))
        left = sum(choice.energy_left_out for choice in best.tensors)
        kept.append(
            Kept(
                family.name,
                budget,
                oracle=1.0 - left / _total(truth),
                sketches=plans["energy", budget],
                exact=_energy_kept(plan, truth),
                layerwise=plans["layerwise", budget],
                uniform=plans["uniform", budget],
                random=plans["random", budget],
            )
        )
    for method, density in METHODS:
        for budget in BUDGETS:
            predicted.append(_predict(repository, family, method, density, "exact", budget))


def _predict(
    repository: Repository, family: Family, method: str, density: float | None, statistics: str, budget: float
) -> Predicted:
    recipe = family.recipe(method, density)
    if method == "linear":
        recipe["models"] = [{"model": BASE, "parameters": {"weight": 1.0}}, *recipe["models"]]  # type: ignore[misc]
    report = repository.merge(recipe, "merged", budget=Budget("percent", budget), reuse=False, verify_fidelity=True)
    measured = report.figures.fidelity
    assert measured is not None
    return Predicted(
        family.name,
        method,
        statistics,
        budget,
        report.fidelity_predicted,
        measured,
        int(report.figures.expert_bytes_full * budget / 100.0),
        report.figures.expert_bytes_read,
    )


def _truth(repository: Repository, family: Family, plan: Plan) -> dict[str, Candidates]:
    """The planner's view of the task_arithmetic merge, from the tensors themselves, in float64."""
    base = repository.load(BASE)
    experts = [(repository.load(name), weight) for name, weight in family.experts]
    result: dict[str, Candidates] = {}
    for tensor in plan.tensors:
        if not torch.is_floating_point(base[tensor.name]):
            continue
        origin = _flat(base[tensor.name])
        width = tensor.column_elements if tensor.action == "compute" else BLOCK_SIZE // base[tensor.name].element_size()
        columns = -(-len(origin) // width)
        deltas = np.zeros((columns * width, len(experts)))
        for i, (expert, weight) in enumerate(experts):
            deltas[: len(origin), i] = (_flat(expert[tensor.name]) - origin) * weight
        shaped = deltas.reshape(columns, width, len(experts))
        gram = np.einsum("cni,cnj->cij", shaped, shaped)
        sizes = np.full(columns, width * base[tensor.name].element_size(), np.int64)
        sizes[-1:] = (len(origin) - (columns - 1) * width) * base[tensor.name].element_size()
        cost = np.where(np.abs(shaped).max(axis=1) > 0.0, sizes[:, None], 0)
        result[tensor.name] = Candidates(tensor.name, gram, cost, whole_columns=False)
    return result


def _flat(tensor: torch.Tensor) -> NDArray[np.float64]:
    values: NDArray[np.float64] = tensor.double().reshape(-1).numpy()
    return values


def _total(truth: dict[str, Candidates]) -> float:
    return sum(float(item.energy.sum()) for item in truth.values())


def _energy_kept(plan: Plan, truth: dict[str, Candidates]) -> float:
    """1 - the true energy of what a plan leaves out, of all."""
    left = 0.0
    for tensor in plan.tensors:
        item = truth.get(tensor.name)
        if item is None:
            continue
        missing = item.cost > 0
        for index, selection in enumerate(tensor.selections):
            for start, stop in selection.ranges:
                missing[start:stop, index] = False
        left += float(np.einsum("ci,cij,cj->", missing.astype(float), item.gram, missing.astype(float)))
    return 1.0 - left / _total(truth)


def _report(kept: list[Kept], predicted: list[Predicted]) -> None:
    print(f"{machine()}; blocks of {BLOCK_SIZE // 1024} KiB\n")
    print("Share of the change's energy that is kept (task_arithmetic); in brackets, of what the oracle keeps\n")
    print("| family | budget | oracle | sketches | after analyze | layerwise | uniform | random |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for row in kept:
        print(
            f"| {row.family} | {row.budget:g}% | {row.oracle:.3f} | {row.sketches:.3f} ({row.sketches / row.oracle:.3f}) "
            f"| {row.exact:.3f} ({row.exact / row.oracle:.4f}) | {row.layerwise:.3f} | {row.uniform:.3f} | {row.random:.3f} |"
        )
    print("\nFidelity predicted → measured, from sketches\n")
    print(f"| family | method | {' | '.join(f'{budget:g}%' for budget in BUDGETS)} | largest error | after analyze |")
    print(f"|---|---|{'---:|' * (len(BUDGETS) + 2)}")
    for family, method in dict.fromkeys((row.family, row.method) for row in predicted):
        rows = [row for row in predicted if (row.family, row.method) == (family, method)]
        rough = [row for row in rows if row.statistics == "sketches"]
        cells = [f"{row.predicted:.3f} → {row.measured:.3f}" for row in rough]
        worst = {
            name: max((row.predicted - row.measured for row in rows if row.statistics == name), key=abs)
            for name in ("sketches", "exact")
        }
        print(f"| {family} | {method} | {' | '.join(cells)} | {worst['sketches']:+.3f} | {worst['exact']:+.3f} |")
    used = [row.bytes_read / row.bytes_allowed for row in predicted if row.bytes_allowed]
    print(
        f"\nExpert bytes read, of those allowed, over {len(used)} merges: "
        f"{min(used):.4f} to {max(used):.4f}, mean {sum(used) / len(used):.4f}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
