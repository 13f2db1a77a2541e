"""Compiling a fitted merge into a plan: costs and sketches out of the store, the planner's choice, the plan.

Reads statistics and block sizes, never a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from mpfs.errors import BudgetInfeasibleError
from mpfs.merge.inputs import Fit, Model, ModelTensor, TensorInputs, keeps_value
from mpfs.merge.operators import Operator
from mpfs.merge.planner import Candidates, Choice, Policy, choose, predicted_fidelity
from mpfs.merge.recipe import Recipe
from mpfs.objects import BlockId, Budget, Cost, Plan, PlanTensor, Selection, Tensor
from mpfs.objects.dtypes import itemsize
from mpfs.stats import delta_gram
from mpfs.stats.stored import blocks_per_column, column_records
from mpfs.store import BlockReader

COMPAT = "mergekit-0.1.5"


@dataclass(frozen=True, slots=True)
class _Weighed:
    """A merged tensor with the planner's view of it."""

    inputs: TensorInputs
    candidates: Candidates


_Merged: TypeAlias = dict[str, _Weighed]
_Chosen: TypeAlias = dict[str, Choice]


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
) -> Plan:
    """Make a plan.

    Args:
        recipe, models, fitted: what is merged, and how it fits.
        operator: the method.
        reader: for statistics and block sizes.
        block_size: the repository's, in bytes.
        budget: what the expert reads may cost, or the fidelity wanted.
        policy: how blocks are chosen.
        seed: for the random policy and for methods that draw random numbers.

    Raises:
        BudgetInfeasibleError: the method must read more than the budget allows.
    """
    weighed = {
        inputs.name: _Weighed(inputs, _candidates(inputs, operator, reader))
        for inputs in fitted.tensors
        if inputs.merged
    }
    everything_read = _choose_all(weighed)
    full = _distinct_bytes(weighed, everything_read)
    limit = _limit(budget, full)
    choices = everything_read
    if budget.kind == "fidelity" or (limit is not None and limit < full):
        fidelity = budget.value if budget.kind == "fidelity" else None
        choices = _choose(weighed, operator, limit, fidelity, policy, seed)
    tensors = tuple(_plan_tensor(inputs, choices.get(inputs.name), operator) for inputs in fitted.tensors)
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
        cost=_cost(fitted, tensors, full, _distinct_bytes(weighed, choices)),
        fidelity_predicted=_fidelity(choices),
        notes=fitted.notes,
    )


def _limit(budget: Budget, full: int) -> int | None:
    if budget.kind == "bytes":
        return int(budget.value)
    if budget.kind == "percent":
        return int(full * budget.value / 100.0)
    return None


def _choose_all(weighed: _Merged) -> _Chosen:
    chosen = choose([item.candidates for item in weighed.values()])
    return dict(zip(weighed, chosen.tensors, strict=True))


def _choose(
    weighed: _Merged, operator: Operator, limit: int | None, fidelity: float | None, policy: Policy, seed: int
) -> _Chosen:
    """What is read under a limit: all of what has no base to fall back to, and the planner's choice of the rest."""
    forced = {name: item for name, item in weighed.items() if item.inputs.base is None}
    free = {name: item for name, item in weighed.items() if item.inputs.base is not None}
    chosen = _choose_all(forced)
    required = _distinct_bytes(forced, chosen)
    if limit is not None and required > limit:
        raise BudgetInfeasibleError(
            f"a budget of {limit:,} bytes is not enough: {operator.name} must read {required:,} bytes of tensors that "
            "have no base to stand in for them (name a base_model that has them, or raise the budget)",
            required=required,
            budget=limit,
        )
    rest = None if limit is None else limit - required
    candidates = [item.candidates for item in free.values()]
    choices = choose(candidates, budget=rest, fidelity=fidelity, policy=policy, seed=seed)
    return {**chosen, **dict(zip(free, choices.tensors, strict=True))}


def _fidelity(choices: _Chosen) -> float:
    """Predicted, over all tensors; rounded so that it reads well."""
    return round(predicted_fidelity(choices.values()), 9)


def _candidates(inputs: TensorInputs, operator: Operator, reader: BlockReader) -> Candidates:
    elements = inputs.column_elements
    experts = [item.tensor for _, item in inputs.experts]
    columns = -(-experts[0].numel // elements)
    base = None if inputs.base is None else inputs.base.tensor
    cost = np.zeros((columns, len(experts)), np.int64)
    for index, expert in enumerate(experts):
        cost[:, index] = _column_cost(expert, base, elements)
    if base is None or not cost.any():
        return Candidates(inputs.name, np.zeros((columns, len(experts), len(experts))), cost, base is None)
    records = np.stack([column_records(reader, expert, elements) for expert in experts])
    gram = delta_gram(column_records(reader, base, elements), records)
    weights = [float(values.get("weight", 1.0)) for values in inputs.parameters.experts]
    for i, first in enumerate(weights):
        for j, second in enumerate(weights):
            gram[:, i, j] *= first * second
    # An equal block has no delta, whatever rounding left in the sketches.
    same = cost == 0
    gram[same[:, :, None] | same[:, None, :]] = 0.0
    return Candidates(inputs.name, gram, cost, operator.interaction == "column")


def _column_cost(expert: Tensor, base: Tensor | None, elements: int) -> NDArray[np.int64]:
    width = blocks_per_column(expert, elements)
    sizes = np.array([size for _, size in expert.sized_blocks()], np.int64)
    if base is not None and base.dtype == expert.dtype:
        same = np.array([ours == theirs for ours, theirs in zip(expert.blocks, base.blocks, strict=True)], bool)
        sizes[same] = 0
    padded = np.zeros(-(-len(sizes) // width) * width, np.int64)
    padded[: len(sizes)] = sizes
    total: NDArray[np.int64] = padded.reshape(-1, width).sum(axis=1)
    return total


def _distinct_bytes(weighed: _Merged, choices: _Chosen) -> int:
    """Bytes of the distinct expert blocks that a choice reads."""
    sizes: dict[BlockId, int] = {}
    for name, item in weighed.items():
        choice = choices[name]
        for index, (_, expert) in enumerate(item.inputs.experts):
            columns = np.flatnonzero(choice.read[:, index]).tolist()
            for column in columns:
                sizes.update(column_blocks(expert.tensor, column, item.inputs.column_elements, item.inputs.base))
    return sum(sizes.values())


def column_blocks(
    expert: Tensor, column: int, column_elements: int, base: ModelTensor | None
) -> list[tuple[BlockId, int]]:
    """The blocks (with sizes) that an expert's column consists of, less those that are the base's at that place."""
    width = blocks_per_column(expert, column_elements)
    start, stop = column * width, min((column + 1) * width, len(expert.blocks))
    aligned = base is not None and base.tensor.dtype == expert.dtype
    return [
        (expert.blocks[index], expert.block_nbytes(index))
        for index in range(start, stop)
        if not (aligned and base is not None and base.tensor.blocks[index] == expert.blocks[index])
    ]


def _plan_tensor(inputs: TensorInputs, choice: Choice | None, operator: Operator) -> PlanTensor:
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
    count = -(-inputs.experts[0][1].tensor.numel // elements)
    computed: NDArray[np.bool_] = np.ones(count, bool)
    if _kept_exactly(inputs, operator):
        computed = np.asarray(choice.read.any(axis=1), bool)
    base = None if inputs.base is None else inputs.base.identity
    if not computed.any() and inputs.base is not None:
        equal = all(item.identity == base for _, item in inputs.experts)
        note = "all experts equal the base" if equal else None
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
        selections=tuple(
            Selection.of(np.flatnonzero(choice.read[:, index]).tolist()) for index in range(len(inputs.experts))
        ),
        columns=Selection.of(np.flatnonzero(computed).tolist()),
        shared=dict(inputs.parameters.shared),
        parameters=tuple(dict(values) for values in inputs.parameters.experts),
        energy=choice.energy,
        energy_left_out=choice.energy_left_out,
        cosine=choice.cosine,
    )


def _kept_exactly(inputs: TensorInputs, operator: Operator) -> bool:
    """Whether a column without any delta comes out as the base's bytes."""
    if inputs.base is None or not operator.keeps_base(inputs.parameters):
        return False
    dtype = inputs.base.tensor.dtype
    return dtype == inputs.out_dtype and keeps_value(dtype, inputs.work_dtype)


def _cost(fitted: Fit, tensors: Sequence[PlanTensor], full: int, planned: int) -> Cost:
    base_blocks: dict[BlockId, int] = {}
    written = kept = computed = 0
    for inputs, tensor in zip(fitted.tensors, tensors, strict=True):
        nbytes = tensor.numel * itemsize(tensor.dtype) if inputs.merged else 0
        if not inputs.merged or tensor.action == "keep":
            kept += len(inputs.base.tensor.blocks) if inputs.base else 0
            continue
        size = tensor.column_elements * itemsize(tensor.dtype)
        per_column = size // inputs.experts[0][1].tensor.block_size
        total_blocks = -(-nbytes // inputs.experts[0][1].tensor.block_size)
        for column in tensor.columns.columns():
            bytes_here = min(size, nbytes - column * size)
            written += bytes_here
            computed += min(per_column, total_blocks - column * per_column)
            if inputs.base is not None:
                base_blocks.update(column_blocks(inputs.base.tensor, column, tensor.column_elements, None))
        kept += total_blocks - sum(
            min(per_column, total_blocks - column * per_column) for column in tensor.columns.columns()
        )
    return Cost(full, planned, sum(base_blocks.values()), written, kept, computed)
