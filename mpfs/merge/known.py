"""What running a plan now would come to, given what earlier merges have computed: looked up, and nothing is computed.

No part of a plan, which must not depend on what a repository holds besides its inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpfs.merge.columns import column_blocks
from mpfs.merge.engine import Execution
from mpfs.merge.options import MergeOptions
from mpfs.merge.reports import Outlook
from mpfs.merge.reusing import Result
from mpfs.objects import BlockId, Plan, PlanTensor
from mpfs.objects.dtypes import itemsize
from mpfs.store import Store, Writer
from mpfs.store.blocks import footprint


def find_outlook(store: Store, plan: Plan) -> Outlook:
    """What running a plan now would read, write and reuse; no block is read.

    Raises:
        NotFoundError: an input of the plan is not in this repository.
    """
    with store.writer() as writer:
        return Known(plan, store, writer, reuse=True).outlook()


class Known(Execution):
    """An execution that looks results up, and computes none."""

    def __init__(self, plan: Plan, store: Store, writer: Writer, reuse: bool) -> None:
        super().__init__(plan, store, writer, MergeOptions(reuse=reuse, memory=0, threads=1))
        self.fast = False
        self._expert: dict[BlockId, int] = {}
        self._base: dict[BlockId, int] = {}
        self._written = self._on_disk = self._reused = self._computed = 0

    def outlook(self) -> Outlook:
        """What is left to do."""
        computed = [tensor for tensor in self.plan.tensors if tensor.action == "compute"]
        whole = self.known_whole(computed)
        for blocks in whole.values():
            self._reused += len(blocks)
        computed = [tensor for tensor in computed if tensor.name not in whole]
        known = {job.tensor.name: results for job, results in self.known(computed)}
        for tensor in computed:
            self._add(tensor, known.get(tensor.name))
        return Outlook(
            expert_bytes=sum(self._expert.values()),
            base_bytes=sum(self._base.values()),
            bytes_written=self._written,
            disk_bytes=self._on_disk,
            blocks_computed=self._computed,
            blocks_reused=self._reused,
        )

    def _add(self, tensor: PlanTensor, known: Sequence[Result] | None) -> None:
        columns = list(tensor.columns.columns())
        sizes = {column: self._block_sizes(tensor, column) for column in columns}
        if known is not None:
            columns = [column for column, result in zip(columns, known, strict=True) if result.reused is None]
        left = set(columns)
        for column, blocks in sizes.items():
            if column not in left:
                self._reused += len(blocks)
                continue
            self._computed += len(blocks)
            self._written += sum(blocks)
            self._on_disk += sum(map(footprint, blocks))
        inputs, elements = self.inputs[tensor.name], tensor.column_elements
        if inputs.base is not None:
            for column in columns:
                self._base.update(column_blocks(inputs.base.tensor, column, elements, None))
        for expert, selection in zip(inputs.experts, tensor.selections, strict=True):
            for column in left.intersection(selection.columns()):
                self._expert.update(column_blocks(expert.tensor, column, elements, inputs.base))

    def _block_sizes(self, tensor: PlanTensor, column: int) -> Sequence[int]:
        """Of the output's blocks in a column."""
        size = self.plan.block_size
        width = tensor.column_elements * itemsize(tensor.dtype)
        total = tensor.numel * itemsize(tensor.dtype)
        start, stop = column * width, min((column + 1) * width, total)
        return [min(size, stop - at) for at in range(start, stop, size)]
