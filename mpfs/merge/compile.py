"""Compiling a fitted merge into a plan: costs and sketches out of the store, the planner's choice, the plan.

Reads statistics and block sizes, never a block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from mpfs.errors import UsageError
from mpfs.merge.bounds import Chosen, choose_all, choose_under, choose_within, limit_of
from mpfs.merge.differing import BlockRuns, blocks_in
from mpfs.merge.distinct import Distinct, Merged
from mpfs.merge.inputs import Fit, TensorInputs, keeps_value
from mpfs.merge.magnitudes import Histograms
from mpfs.merge.models import Model
from mpfs.merge.operators import Operator
from mpfs.merge.planner import Choice, Policy, predicted_fidelity
from mpfs.merge.recipe import Recipe
from mpfs.merge.remembered import Memory, Worth, is_whole
from mpfs.merge.weighing import Priced, Weigher, price
from mpfs.objects import BlockId, Bound, Budget, Cost, Cut, Plan, PlanTensor, Selection, Tensor
from mpfs.objects.dtypes import itemsize
from mpfs.objects.plan import NO_DELTA
from mpfs.store import BlockReader
from mpfs.store.pairs import PairTable

COMPAT = "mergekit-0.1.5"


def compile_plan(
    recipe: Recipe,
    models: Sequence[Model],
    fitted: Fit,
    operator: Operator,
    reader: BlockReader,
    *,
    block_size: int,
    budget: Budget,
    policy: Policy = "energy",
    seed: int = 0,
    pairs: PairTable | None = None,
    memory: Memory | None = None,
) -> Plan:
    """Make a plan.

    Args:
        recipe, models, fitted: what is merged, and how it fits.
        operator: the method.
        reader: for statistics and block sizes.
        block_size: the repository's, in bytes.
        budget: what the expert reads may cost, or the fidelity wanted; the recipe's own budgets hold as well.
        policy: how blocks are chosen.
        seed: for the random policy and for methods that draw random numbers.
        pairs: exact distances, which are preferred to estimates where they are known.
        memory: what is known of earlier plans, where `pairs` was the same.

    Raises:
        BudgetInfeasibleError: the method must read more than a budget allows.
        FidelityInfeasibleError: a fidelity cannot be reached within the budgets.
        UsageError: a budget or fidelity that cannot be meant.
    """
    check_budget(budget)
    weigher = Weigher(reader, pairs)
    if is_whole(recipe, budget):
        priced = {item.inputs.name: item for item in price(fitted.tensors)}
        full = Distinct(priced).nbytes()
        choices = _everything(priced, operator, weigher, memory or Memory(None))
        return write_plan(recipe, models, fitted, operator, choices, full, full, block_size, budget, policy, seed, None)
    weighed = Merged({item.inputs.name: item for item in weigher.weigh(fitted.tensors, operator)})
    full = weighed.distinct.nbytes()
    limit = limit_of(budget, full)
    bounds: tuple[Bound, ...] = ()
    if recipe.has_budgets:
        refs = [model.ref for model in models]
        choices, bounds = choose_under(weighed, recipe, refs, operator.name, budget, policy, seed)
    elif budget.kind == "fidelity" or (limit is not None and limit < full):
        choices = choose_within(weighed, operator.name, budget, limit, policy, seed)
    else:
        choices = choose_all(weighed)
    planned = weighed.distinct.nbytes({name: choice.read for name, choice in choices.items()})
    histograms = weigher.histograms
    plan = write_plan(
        recipe, models, fitted, operator, choices, full, planned, block_size, budget, policy, seed, histograms
    )
    return replace(plan, bounds=bounds) if bounds else plan


def _everything(priced: Mapping[str, Priced], operator: Operator, weigher: Weigher, memory: Memory) -> Chosen:
    """The choice of everything, of which only those tensors are weighed of which it is not known what that is worth."""
    known = memory.worths([item.inputs for item in priced.values()], operator)
    rest = [item.inputs for name, item in priced.items() if name not in known]
    weighed = choose_all(Merged({item.inputs.name: item for item in weigher.weigh(rest, operator)}))
    for inputs in rest:
        memory.learn_worth(inputs, operator, Worth(weighed[inputs.name].energy, weighed[inputs.name].cosine))
    return {
        name: weighed[name] if name in weighed else Choice(item.cost > 0, known[name].energy, 0.0, known[name].cosine)
        for name, item in priced.items()
    }


def write_plan(
    recipe: Recipe,
    models: Sequence[Model],
    fitted: Fit,
    operator: Operator,
    choices: Chosen,
    full: int,
    planned: int,
    block_size: int,
    budget: Budget,
    policy: Policy,
    seed: int,
    histograms: Histograms | None,
) -> Plan:
    """The plan of a choice. `full` and `planned` are the distinct expert bytes of everything and of what is chosen.
    `histograms` tell thresholds where something is left out."""
    histograms = histograms if planned < full else None
    tensors = tuple(_plan_tensor(inputs, choices.get(inputs.name), operator, histograms) for inputs in fitted.tensors)
    return Plan(
        method=operator.name,
        compat=COMPAT,
        recipe=recipe.as_json(),
        models=tuple(model.ref for model in models),
        base=fitted.base,
        template=fitted.template,
        work_dtype=recipe.dtype,
        out_dtype=recipe.out_dtype,
        seed=seed,
        block_size=block_size,
        budget=budget,
        policy=policy,
        tensors=tensors,
        cost=_cost(fitted, tensors, full, planned, block_size),
        fidelity_predicted=_fidelity(choices),
        notes=fitted.notes,
        renamed=fitted.renamed,
    )


def check_budget(budget: Budget) -> None:
    """Whether the number makes sense for its kind."""
    value = budget.value
    largest = {"none": value, "bytes": value, "percent": 100.0, "fidelity": 1.0}[budget.kind]
    if not (isfinite(value) and 0.0 <= value <= largest):
        asked = {"percent": f"{value:g}%", "bytes": f"{value:,.0f} bytes"}.get(budget.kind, f"{value:g}")
        allowed = {"percent": "between 0% and 100%", "fidelity": "between 0 and 1"}.get(budget.kind, "0 or more bytes")
        what = "fidelity" if budget.kind == "fidelity" else "budget"
        raise UsageError(f"a {what} of {asked}: it must be {allowed}")


def _fidelity(choices: Chosen) -> float:
    """Predicted, over all tensors; rounded so that it reads well."""
    return round(predicted_fidelity(choices.values()), 9)


def _plan_tensor(
    inputs: TensorInputs, choice: Choice | None, operator: Operator, histograms: Histograms | None
) -> PlanTensor:
    elements = inputs.column_elements if inputs.merged else max(1, inputs.base.tensor.numel if inputs.base else 1)
    if choice is None:
        return PlanTensor(
            inputs.name,
            "keep",
            inputs.out_dtype,
            inputs.shape,
            elements,
            None if inputs.base is None else inputs.base.identity,
            note=inputs.note,
        )
    computed: NDArray[np.bool_] = np.ones(len(choice.read), bool)
    if _kept_exactly(inputs, operator):
        computed = np.asarray(choice.read.any(axis=1), bool)
    base = None if inputs.base is None else inputs.base.identity
    if inputs.base is not None and inputs.base.tensor.dtype == inputs.out_dtype and not computed.any():
        equal = all(item.identity == base for _, item in inputs.experts)
        note = NO_DELTA if equal else None
        return PlanTensor(
            inputs.name,
            "keep",
            inputs.out_dtype,
            inputs.shape,
            elements,
            base,
            energy=choice.energy,
            energy_left_out=choice.energy_left_out,
            cosine=choice.cosine,
            note=note,
        )
    return PlanTensor(
        name=inputs.name,
        action="compute",
        dtype=inputs.out_dtype,
        shape=inputs.shape,
        column_elements=elements,
        base=base,
        experts=tuple((model, item.identity) for model, item in inputs.experts),
        selections=tuple(map(_selection, choice.read.T)),
        columns=_selection(computed),
        shared=dict(inputs.parameters.shared),
        parameters=tuple(dict(values) for values in inputs.parameters.experts),
        energy=choice.energy,
        energy_left_out=choice.energy_left_out,
        cosine=choice.cosine,
        note=inputs.note,
        cuts=() if histograms is None else _cuts(inputs, choice, operator, histograms),
    )


def _selection(marked: NDArray[np.bool_]) -> Selection:
    # Mostly all are.
    return (
        Selection(((0, len(marked)),))
        if marked.all() and len(marked)
        else Selection.of(np.flatnonzero(marked).tolist())
    )


def _cuts(
    inputs: TensorInputs, choice: Choice, operator: Operator, histograms: Histograms
) -> tuple[tuple[Cut, ...], ...]:
    """The thresholds of the experts of which something is not read."""
    if type(operator).cuts is Operator.cuts or inputs.base is None:
        return ()
    base, elements = inputs.base.tensor, inputs.column_elements

    def is_partly_read(index: int, expert: Tensor) -> bool:
        blocks = BlockRuns([expert])
        return bool((blocks.differing([base]) & ~choice.read[blocks.columns([elements]), index]).any())

    experts = [item for _, item in inputs.experts]
    wanted = [is_partly_read(index, item.tensor) for index, item in enumerate(experts)]
    return histograms.cuts(operator, inputs.parameters, inputs.work_dtype, inputs.base, experts, wanted)


def _kept_exactly(inputs: TensorInputs, operator: Operator) -> bool:
    """Whether a column without any delta comes out as the base's bytes."""
    if inputs.base is None or not inputs.experts or not operator.keeps_base(inputs.parameters):
        return False
    dtype = inputs.base.tensor.dtype
    return dtype == inputs.out_dtype and keeps_value(dtype, inputs.work_dtype)


def _cost(fitted: Fit, tensors: Sequence[PlanTensor], full: int, planned: int, block_size: int) -> Cost:
    base_blocks: dict[BlockId, int] = {}
    written = kept = computed = 0
    for inputs, tensor in zip(fitted.tensors, tensors, strict=True):
        nbytes = tensor.numel * itemsize(tensor.dtype) if inputs.merged else 0
        if not inputs.merged or tensor.action == "keep":
            kept += len(inputs.base.tensor.blocks) if inputs.base else 0
            continue
        if tensor.columns.ranges == ((0, tensor.column_count),):
            written += nbytes
            computed += -(-nbytes // block_size)
            if inputs.base is not None:
                base_blocks.update(inputs.base.tensor.sized_blocks())
            continue
        size = tensor.column_elements * itemsize(tensor.dtype)
        columns = np.zeros(tensor.column_count, bool)
        for start, stop in tensor.columns.ranges:
            columns[start:stop] = True
        here = int(columns.sum()) * size - (tensor.column_count * size - nbytes if columns[-1:].any() else 0)
        blocks = int(np.repeat(columns, size // block_size)[: -(-nbytes // block_size)].sum())
        written += here
        computed += blocks
        kept += -(-nbytes // block_size) - blocks
        if inputs.base is not None:
            base_blocks.update(blocks_in(inputs.base.tensor, columns, tensor.column_elements))
    return Cost(full, planned, sum(base_blocks.values()), written, kept, computed)
