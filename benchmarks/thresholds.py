"""How well a budgeted merge knows the thresholds that TIES trims by, without and with histograms of whole deltas.

For each family of `benchmarks.families` and each budget: by how many elements a tensor's threshold misses the count that
`density` keeps of the whole delta, as a share of that count; mean over the tensors that are read in part, and the worst.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np

from benchmarks.families import BASE, FAMILIES, Family
from benchmarks.measure import machine
from mpfs.merge.delta import DeltaIterator, PlanInputs, ReadLedger, planned_blocks, work_dtype
from mpfs.merge.left_out import left_out
from mpfs.merge.operators import Parameters, TensorContext, get_operator
from mpfs.merge.operators.arithmetic import difference
from mpfs.merge.operators.magnitude import keep_count, patterns
from mpfs.merge.reusing import expert_keys
from mpfs.objects import Budget, Plan
from mpfs.repository import Repository

BUDGETS = (5.0, 10.0, 20.0, 50.0)
DENSITY = 0.3
BLOCK_SIZE = 4096


def main(arguments: list[str]) -> None:
    """Run and print a table."""
    parser = argparse.ArgumentParser(prog="benchmarks thresholds", description=__doc__)
    parser.parse_args(arguments)
    print(f"{machine()}; density {DENSITY:g}; mean (worst)\n")
    print(f"| family | | {' | '.join(f'{budget:g}%' for budget in BUDGETS)} |")
    print(f"|---|---|{'---:|' * len(BUDGETS)}")
    for make in FAMILIES:
        scratch = Path(tempfile.mkdtemp(prefix="mpfs-thresholds-"))
        try:
            with Repository.create(scratch / "repository", block_size=BLOCK_SIZE) as repository:
                family = make(repository, scratch)
                print(f"| {family.name} | estimated | {' | '.join(_cells(repository, family))} |", flush=True)
                repository.analyze([name for name, _ in family.experts], BASE)
                print(f"| | from histograms | {' | '.join(_cells(repository, family))} |", flush=True)
        finally:
            shutil.rmtree(scratch)


def _cells(repository: Repository, family: Family) -> list[str]:
    cells = []
    for budget in BUDGETS:
        plan = repository.plan(family.recipe("ties", DENSITY), budget=Budget("percent", budget), save=False).plan
        missed = _missed(repository, plan)
        cells.append(f"{np.mean(missed):.4f} ({np.max(missed):.3f})" if missed else "")
    return cells


def _missed(repository: Repository, plan: Plan) -> list[float]:
    """For each tensor and expert that is read in part: by how much its threshold misses."""
    store, operator = repository._store, get_operator(plan.method)
    names = [model.name for model in plan.models]
    weights = {name: repository.load(name) for name in names}
    found: list[float] = []
    for tensor in plan.tensors:
        if tensor.action != "compute" or not tensor.experts:
            continue
        inputs = PlanInputs.load(store.objects, tensor)
        work = work_dtype(plan, inputs)
        ledger = ReadLedger(partial(planned_blocks, tensor, inputs))
        columns = DeltaIterator(plan, tensor, inputs, store.blocks, ledger, work)
        context = TensorContext(
            name=tensor.name,
            numel=tensor.numel,
            work=work,
            seed=plan.seed,
            expert_keys=expert_keys(plan, tensor),
            left_out=left_out(store, tensor, inputs),
            shape=tensor.shape,
            cuts=tensor.cuts,
        )
        prepared = operator.prepare(context, Parameters(tensor.shared, tensor.parameters), lambda c=columns: iter(c))  # type: ignore[misc]
        keep = keep_count(DENSITY, tensor.numel)
        for i, pattern in enumerate(cast("list[int]", prepared["threshold_bits"])):
            if not context.left_out[i] or not len(tensor.selections[i]):
                continue
            expert = weights[names[tensor.experts[i][0]]][tensor.name]
            magnitudes = patterns(difference(expert, weights[BASE][tensor.name]).flatten())
            above, least = int((magnitudes > pattern).sum()), int((magnitudes >= pattern).sum())
            found.append(max(0, keep - least, above - keep) / keep)
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
