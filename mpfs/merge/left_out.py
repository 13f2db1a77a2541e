"""What a plan leaves unread of each expert of a tensor, with the size of its delta estimated from sketches."""

from __future__ import annotations

import numpy as np

from mpfs.merge.delta import PlanInputs
from mpfs.merge.differing import BlockRuns, BoolArray
from mpfs.merge.models import ModelTensor
from mpfs.merge.operators import LeftOut
from mpfs.objects import PlanTensor, Selection, Tensor
from mpfs.stats.estimate import delta_summary
from mpfs.stats.stored import column_records
from mpfs.store import Store


def left_out(store: Store, tensor: PlanTensor, inputs: PlanInputs) -> tuple[tuple[LeftOut, ...], ...]:
    """For each expert the runs that a plan does not read though they are not the base's; none where there is no base."""
    base = inputs.base
    nothing: tuple[tuple[LeftOut, ...], ...] = tuple(() for _ in inputs.experts)
    whole = len(tensor.columns) == tensor.column_count and all(
        len(selection) == tensor.column_count for selection in tensor.selections
    )
    if base is None or whole:
        return nothing
    unread = [
        _unread(tensor, expert.tensor, base.tensor, selection)
        for expert, selection in zip(inputs.experts, tensor.selections, strict=True)
    ]
    if not any(columns.any() for columns in unread):
        return nothing
    elements = tensor.column_elements
    origin = column_records(store.blocks, base.tensor, elements, base.identity)
    sizes = np.full(tensor.column_count, elements, np.int64)
    sizes[-1] = tensor.numel - (tensor.column_count - 1) * elements

    def runs(expert: ModelTensor, columns: BoolArray) -> tuple[LeftOut, ...]:
        if not columns.any():
            return ()
        records = column_records(store.blocks, expert.tensor, elements, expert.identity)
        energy = delta_summary(origin[columns], records[columns]).delta_squared
        rms = np.sqrt(np.maximum(energy, 0.0) / sizes[columns])
        return tuple(map(LeftOut, sizes[columns].tolist(), rms.tolist()))

    return tuple(runs(expert, columns) for expert, columns in zip(inputs.experts, unread, strict=True))


def _unread(tensor: PlanTensor, expert: Tensor, base: Tensor, selection: Selection) -> BoolArray:
    """The columns of which something is not read that is not the base's."""
    unread: BoolArray = np.zeros(tensor.column_count, bool)
    blocks = BlockRuns([expert])
    unread[blocks.columns([tensor.column_elements])[blocks.differing([base])]] = True
    for start, stop in selection.ranges:
        unread[start:stop] = False
    return unread
