"""The check before a merge is published: no output block holds NaN or infinity. From statistics; no block is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mpfs.errors import NonFiniteError
from mpfs.merge.delta import PlanInputs, work_dtype
from mpfs.objects import Plan, PlanTensor, Tensor
from mpfs.objects.dtypes import MERGEABLE
from mpfs.stats.stored import block_records
from mpfs.store import BlockReader, ObjectReader

_SHOWN = 3


def check_finite(
    plan: Plan, output: Mapping[str, Tensor], objects: ObjectReader, blocks: BlockReader, *, allow: bool
) -> tuple[str, ...]:
    """Look for NaN and infinity in a merge's output.

    Args:
        plan: what was run.
        output: its tensors by name, whose blocks are in the store.
        objects, blocks: where the inputs and statistics are.
        allow: whether such values are all right.

    Returns:
        Notes that name the tensors, if they are allowed and there are any.

    Raises:
        NonFiniteError: there are some, and they are not allowed. The message names the tensors, and where it comes from.
    """
    found: list[str] = []
    count = 0
    for tensor in plan.tensors:
        made = output[tensor.name]
        bad = _non_finite(made, blocks)
        if bad:
            count += 1
            if count <= _SHOWN:
                found.append(f"{tensor.name} has {bad:,} of {made.numel:,} ({_cause(plan, tensor, objects, blocks)})")
    if not found:
        return ()
    more = f" and {count - _SHOWN} more tensors" if count > _SHOWN else ""
    told = f"values that are NaN or infinite: {'; '.join(found)}{more}"
    if allow:
        return (told,)
    raise NonFiniteError(
        f"the result holds {told}. Nothing was published; --allow-nonfinite lets such a result pass", tensors=count
    )


def _non_finite(tensor: Tensor, blocks: BlockReader) -> int:
    if tensor.dtype not in MERGEABLE or not tensor.blocks:
        return 0
    return int(block_records(blocks, tensor)["nonfinite"].sum())


def _cause(plan: Plan, tensor: PlanTensor, objects: ObjectReader, blocks: BlockReader) -> str:
    """Where it comes from: an input, or the arithmetic."""
    inputs = PlanInputs.load(objects, tensor)

    def named() -> Iterator[tuple[str, Tensor]]:
        if inputs.base is not None:
            yield "the base" if tensor.experts else "it is kept as it is", inputs.base.tensor
        for (model, _), item in zip(tensor.experts, inputs.experts, strict=True):
            yield plan.models[model].name, item.tensor

    guilty = [f"{bad:,} in {name}" for name, item in named() if (bad := _non_finite(item, blocks))]
    if guilty:
        return f"its inputs have {', '.join(guilty)}" if tensor.experts else "it is kept as it is"
    limit = "" if tensor.dtype == work_dtype(plan, inputs) else f", or rounding to {tensor.dtype}"
    return f"all inputs are finite: the arithmetic in {work_dtype(plan, inputs)}{limit} overflowed"
