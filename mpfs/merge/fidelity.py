"""Measuring what a budget cost: the merge as planned against the full one, in float64, block by block.

This reads every expert in full: it is for checking predictions, not for everyday merges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from mpfs.merge.deferred import torch
from mpfs.merge.delta import DeltaIterator, PlanInputs, ReadLedger, planned_blocks
from mpfs.merge.left_out import left_out
from mpfs.merge.operators import Operator, Parameters, TensorContext, get_operator
from mpfs.merge.operators.base import Histogram
from mpfs.merge.reusing import expert_keys
from mpfs.objects import Cut, Plan, PlanTensor, Selection
from mpfs.objects.progress import Progress
from mpfs.store import Store


def measure_fidelity(plan: Plan, full: Plan, store: Store, progress: Progress | None = None) -> float:
    """1 - |M_budget - M_full| / |M_full - base| (Frobenius, over all merged elements, in float64 without rounding).

    Args:
        plan: the merge as it was run.
        full: the plan of the same merge without a budget.
        store: where the inputs are.
        progress: told the elements done, of all.

    Returns:
        1 where the full merge changes nothing; may be negative for a merge that is worse than the base.
    """
    operator = get_operator(plan.method)
    by_name = {tensor.name: tensor for tensor in plan.tensors}
    error = change = 0.0
    total = sum(tensor.numel for tensor in full.tensors)
    done = 0
    for tensor in full.tensors:
        if tensor.action == "compute" and tensor.base is not None and tensor.experts:
            ours = _as_run(by_name[tensor.name], tensor)
            here = _compare(plan, full, ours, tensor, operator, store)
            error += here[0]
            change += here[1]
        done += tensor.numel
        if progress is not None:
            progress(done, total)
    return 1.0 if change == 0.0 else 1.0 - float((error / change) ** 0.5)


def _as_run(planned: PlanTensor, full: PlanTensor) -> PlanTensor:
    """A tensor that the plan keeps is a merge that reads no expert."""
    if planned.action == "compute":
        return planned
    nothing = tuple(Selection(()) for _ in full.experts)
    return replace(full, selections=nothing, columns=Selection(()))


def _compare(
    plan: Plan, full: Plan, ours: PlanTensor, theirs: PlanTensor, operator: Operator, store: Store
) -> tuple[float, float]:
    b = _Side(full, theirs, operator, store)
    # Thresholds of whole deltas that the plan knew, as they are in float64.
    known = [b.counted.get(i) if cuts else None for i, cuts in enumerate(ours.cuts)]
    cuts = operator.cuts("F64", ours.numel, Parameters(ours.shared, ours.parameters), known) if any(ours.cuts) else ()
    a = _Side(plan, ours, operator, store, cuts)
    error = change = 0.0
    for column in range(theirs.column_count):
        base, reference = b.merge(column)
        _, merged = a.merge(column)
        error += _squared_distance(merged, reference)
        change += _squared_distance(reference, base)
    return error, change


def _squared_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Over the elements where both are finite, as sketches count them."""
    difference = a - b
    return float(torch.sum(torch.where(torch.isfinite(difference), difference, 0.0) ** 2))


class _Side:
    """One of the two merges of a tensor, in float64."""

    def __init__(
        self, plan: Plan, tensor: PlanTensor, operator: Operator, store: Store, cuts: Sequence[Sequence[Cut]] = ()
    ) -> None:
        self.counted: dict[int, Histogram] = {}
        inputs = PlanInputs.load(store.objects, tensor)
        ledger = ReadLedger(partial(planned_blocks, tensor, inputs))
        self._operator = operator
        self._parameters = Parameters(tensor.shared, tensor.parameters)
        self._columns = DeltaIterator(plan, tensor, inputs, store.blocks, ledger, "F64")
        self._context = TensorContext(
            name=tensor.name,
            numel=tensor.numel,
            work="F64",
            seed=plan.seed,
            expert_keys=expert_keys(plan, tensor),
            left_out=left_out(store, tensor, inputs),
            shape=tensor.shape,
            cuts=cuts,
            counted=self._count,
        )
        self._prepared = operator.prepare(self._context, self._parameters, lambda: iter(self._columns))

    def _count(self, expert: int, histogram: Histogram) -> None:
        counts = histogram.copy()
        counts[0] += self._context.numel - int(counts.sum())
        self.counted[expert] = counts

    def merge(self, column: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The base and the result."""
        inputs = self._columns.read(column)
        assert inputs.base is not None  # only tensors with a base are compared
        return inputs.base, self._operator.apply(self._context, self._parameters, self._prepared, inputs)
