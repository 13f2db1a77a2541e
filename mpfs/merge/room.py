"""How much a merge will write at the most, before it starts: what it computes, but for what earlier merges have computed."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from mpfs.merge.engine import Execution, Job, computed_bytes
from mpfs.merge.operators import Prepared
from mpfs.objects import Plan, PlanTensor
from mpfs.objects.dtypes import itemsize
from mpfs.store import Store, Writer
from mpfs.store.blocks import footprint

_RESERVE = 16 << 20
"""Bytes, for LMDB's trees and for objects; they are few beside the blocks."""


def require_room(store: Store, writer: Writer, plans: Sequence[Plan], *, reuse: bool) -> None:
    """Refuse merges whose results would not fit, if no block that they compute is there already but those known.

    Only where all of the results together would not fit is it looked up which are known.

    Args:
        store, writer: where they would go.
        plans: of the merges.
        reuse: whether results of earlier merges are used.

    Raises:
        NoSpaceError: there is no room.
    """
    most = sum(computed_bytes(tensor) for plan in plans for tensor in plan.tensors if tensor.action == "compute")
    if most + most // 64 + _RESERVE > store.room():
        needed = sum(_Known(plan, store, writer, reuse).bytes_to_write() for plan in plans)
        store.require_room(needed, "the merge (if none of the blocks that it computes is stored already)")


class _UnknownError(Exception):
    """A tensor was not prepared before, so none of its results is known."""


class _Known(Execution):
    """An execution that looks results up, and computes none."""

    def __init__(self, plan: Plan, store: Store, writer: Writer, reuse: bool) -> None:
        super().__init__(plan, store, writer, reuse, 1, 0, False)

    def bytes_to_write(self) -> int:
        """The room that the results take which are not known, in bytes."""
        with ThreadPoolExecutor(1) as executor:
            return sum(self._of(tensor, executor) for tensor in self.plan.tensors if tensor.action == "compute")

    def _of(self, tensor: PlanTensor, executor: ThreadPoolExecutor) -> int:
        columns = list(tensor.columns.columns())
        if self.reuse:
            try:
                job = self.job(tensor, executor)
                found = self.look_up(job, columns)
                columns = [column for column, known in zip(columns, found, strict=True) if known.reused is None]
            except _UnknownError:
                pass
        size = self.plan.block_size
        width = tensor.column_elements * itemsize(tensor.dtype)
        total = tensor.numel * itemsize(tensor.dtype)
        return sum(
            footprint(min(size, total - start))
            for column in columns
            for start in range(column * width, min((column + 1) * width, total), size)
        )

    def _prepare(self, job: Job, executor: ThreadPoolExecutor) -> Prepared:
        _, known = self.preparation(job)
        if known is None:
            raise _UnknownError
        return known
