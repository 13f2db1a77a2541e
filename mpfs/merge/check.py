"""Checking a plan that comes from elsewhere: a file that somebody may have edited, made for another repository.

A plan that this repository made passes. One that passes names only tensors of its own models, reads only columns that
exist, and keeps its budget, so the engine can run it as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mpfs.errors import BadInputError, IntegrityError, NotFoundError, RecipeError, UsageError
from mpfs.merge.columns import column_blocks
from mpfs.merge.models import Model, ModelTensor
from mpfs.merge.operators import Operator, Parameters, get_operator
from mpfs.objects import BlockId, Commit, Cut, ObjectId, Plan, PlanTensor, Selection
from mpfs.objects.dtypes import MERGEABLE, itemsize
from mpfs.store import Store
from mpfs.store.histogram import BINS


def check_models(store: Store, plan: Plan) -> None:
    """The plan's commits must be in this repository, and hold what they did.

    Raises:
        UsageError: the plan was made for another block size.
        NotFoundError: one of its models is not here.
        IntegrityError: one of its models is not what it was.
    """
    size = store.info.block_size
    if plan.block_size != size:
        raise UsageError(f"the plan was made for blocks of {plan.block_size:,} bytes, this repository has {size:,}")
    for model in plan.models:
        try:
            commit = store.objects.get(Commit, model.commit)
        except NotFoundError as error:
            raise NotFoundError(
                f"the plan's model {model.name} is not here: {error.message}", id=model.commit
            ) from error
        if commit.snapshot != model.snapshot:
            raise IntegrityError(f"the plan's model {model.name} is not what commit {model.commit[:12]} holds")


def check_plan(plan: Plan, models: Sequence[Model]) -> None:
    """A plan must fit its models: pure.

    Args:
        plan: what to check.
        models: the plan's, in its order.

    Raises:
        BadInputError: it does not; the message says where.
        RecipeError: its parameters are not the method's.
    """
    try:
        operator = get_operator(plan.method)
    except NotFoundError as error:
        raise BadInputError(f"plan: {error.message}") from error
    indices = [plan.template, *([] if plan.base is None else [plan.base])]
    if not models or any(not 0 <= index < len(models) for index in indices):
        raise BadInputError("plan: its base or template is not one of its models")
    for dtype in (plan.work_dtype, plan.out_dtype):
        if dtype is not None and dtype not in MERGEABLE:
            raise BadInputError(f"plan: nothing can be computed in {dtype}")
    names = [tensor.name for tensor in plan.tensors]
    if len(set(names)) != len(names):
        raise BadInputError("plan: two of its tensors have the same name")
    sizes: dict[BlockId, int] = {}
    known = [{item.identity: item for item in model.tensors.values()} for model in models]
    reads: dict[str, list[tuple[int, dict[BlockId, int]]]] = {}
    for tensor in plan.tensors:
        reads[tensor.name] = _check_tensor(plan, tensor, known, operator)
        for _, blocks in reads[tensor.name]:
            sizes.update(blocks)
    _check_bounds(plan, reads)
    total = sum(sizes.values())
    if plan.budget.kind == "bytes" and total > plan.budget.value:
        raise BadInputError(
            f"plan: it reads {total:,} bytes of the experts, more than its own budget of {int(plan.budget.value):,}"
        )


def _check_bounds(plan: Plan, reads: Mapping[str, Sequence[tuple[int, Mapping[BlockId, int]]]]) -> None:
    """What is read under each budget of the recipe; `reads` are the blocks of each tensor, by model."""
    left: dict[str, list[str]] = {}
    for bound in plan.bounds:
        # The rules of one place go together: the first one that fits a tensor's name counts.
        names = left.setdefault(bound.path.rstrip("0123456789]").rstrip("["), list(reads))
        mine = [name for name in names if bound.filter is None or bound.filter in name]
        names[:] = [name for name in names if name not in set(mine)]
        sizes: dict[BlockId, int] = {}
        for name in mine:
            for model, blocks in reads[name]:
                if bound.model is None or model == bound.model:
                    sizes.update(blocks)
        total = sum(sizes.values())
        if bound.limit is not None and total > bound.limit:
            raise BadInputError(
                f"plan: it reads {total:,} bytes where {bound.path} of its recipe allows {bound.limit:,}"
            )


def _check_tensor(
    plan: Plan, tensor: PlanTensor, known: Sequence[Mapping[ObjectId, ModelTensor]], operator: Operator
) -> list[tuple[int, dict[BlockId, int]]]:
    """The expert blocks that a planned tensor reads of each model, with their sizes; `known` are the tensors of each
    model by id."""
    everywhere = range(len(known))

    def fail(problem: str) -> BadInputError:
        return BadInputError(f"plan: tensor {tensor.name}: {problem}", tensor=tensor.name)

    def found(identity: str, among: Sequence[int]) -> ModelTensor:
        # Slices give a tensor another name than its inputs have, and tied ones stand in for each other.
        for index in among:
            item = known[index].get(identity)
            if item is not None:
                if item.tensor.shape != tensor.shape:
                    raise fail(f"its shape is {list(item.tensor.shape)}, not {list(tensor.shape)}")
                return item
        raise fail(f"{identity[:12]} is no tensor of the plan's models")

    if tensor.action == "keep":
        if tensor.base is None:
            raise fail("it is kept, but nothing is named to keep")
        if found(tensor.base, everywhere).tensor.dtype != tensor.dtype:
            raise fail("it is kept, but with another dtype")
        return []
    nothing = not tensor.experts and tensor.base is None
    if tensor.action != "compute" or tensor.dtype not in MERGEABLE or nothing:
        raise fail("it cannot be computed like this")
    base = None
    if tensor.base is not None:
        base = found(tensor.base, everywhere)
    if any(not 0 <= model < len(known) for model, _ in tensor.experts):
        raise fail("an expert is not one of the plan's models")
    experts = [found(identity, [model]) for model, identity in tensor.experts]
    dtypes = {item.tensor.dtype for item in (*experts, *([] if base is None else [base]))}
    if not dtypes <= MERGEABLE:
        raise fail(f"{', '.join(sorted(dtypes))} cannot be merged")
    narrowest = min(itemsize(dtype) for dtype in (*dtypes, tensor.dtype))
    if tensor.column_elements != plan.block_size // narrowest:
        raise fail(f"its columns have {tensor.column_elements} elements, not {plan.block_size // narrowest}")
    if not len(experts) == len(tensor.selections) == len(tensor.parameters):
        raise fail("its experts, columns and parameters do not go together")
    for selection in (tensor.columns, *tensor.selections):
        if not _is_sound(selection, tensor.column_count):
            raise fail(f"its columns are not within its {tensor.column_count}")
    everything = Selection(((0, tensor.column_count),)) if tensor.column_count else Selection(())
    if (base is None or base.tensor.dtype != tensor.dtype) and tensor.columns != everything:
        raise fail("columns are to be kept that there is nothing to keep of")
    problems = operator.validate(Parameters(tensor.shared, tensor.parameters)) if experts else []
    if problems:
        raise RecipeError(
            f"plan: tensor {tensor.name}: {'; '.join(problems)}",
            problems=[{"path": tensor.name, "message": problem} for problem in problems],
        )
    if tensor.cuts and not _are_cuts(tensor, operator):
        raise fail("its cuts are not those of the method, or not within the tensor")
    return [
        (
            model,
            {
                block: size
                for column in selection.columns()
                for block, size in column_blocks(expert.tensor, column, tensor.column_elements, base)
            },
        )
        for (model, _), expert, selection in zip(tensor.experts, experts, tensor.selections, strict=True)
    ]


def _are_cuts(tensor: PlanTensor, operator: Operator) -> bool:
    nothing = [np.zeros(BINS, np.int64)] * len(tensor.experts)
    own = operator.cuts(tensor.dtype, tensor.numel, Parameters(tensor.shared, tensor.parameters), nothing)
    if len(own) != len(tensor.cuts):
        return False
    return all(
        len(cuts) in (0, len(wanted)) and all(_is_cut(cut, tensor.numel) for cut in cuts)
        for cuts, wanted in zip(tensor.cuts, own, strict=True)
    )


def _is_cut(cut: Cut, numel: int) -> bool:
    numbers = (cut.digit, cut.wanted, cut.total)
    within = all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in numbers)
    return within and cut.digit < BINS and cut.wanted <= cut.total <= numel


def _is_sound(selection: Selection, count: int) -> bool:
    """Whether ranges are sorted, apart, not empty, and within the columns."""
    end = -1
    for start, stop in selection.ranges:
        if not (isinstance(start, int) and isinstance(stop, int) and end < start < stop <= count):
            return False
        end = stop
    return True
