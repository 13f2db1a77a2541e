"""Streaming columns: the base's block and the selected experts' blocks of one run of elements, in plan order.

This is where the budget holds: an expert block that the plan does not list is never read, and what was read is
counted by distinct blocks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import numpy as np

from mpfs.errors import IntegrityError, MPFSError
from mpfs.merge.columns import column_blocks
from mpfs.merge.conversion import TYPES, converted
from mpfs.merge.deferred import torch
from mpfs.merge.kernels.columns import BIT_TYPES, Bits, BitsColumn, Only
from mpfs.merge.models import ModelTensor
from mpfs.merge.numeric import to_torch
from mpfs.merge.operators import Column
from mpfs.objects import BlockId, ObjectId, Plan, PlanTensor, Tensor
from mpfs.objects.dtypes import promote
from mpfs.stats.stored import blocks_per_column
from mpfs.store import BlockReader, ObjectReader
from mpfs.store.blocks import Read

_PREFETCH_COLUMNS = 16


class ReadLedger:
    """Which distinct blocks a merge has read, as expert and as base. Thread-safe.

    `allowed` finds the expert blocks that the plan lists; reading another one is a bug, and refused.
    """

    def __init__(self, allowed: Callable[[], set[BlockId]]) -> None:
        self._find_allowed = allowed
        self._lock = threading.Lock()
        self._expert: dict[BlockId, int] = {}
        self._base: dict[BlockId, int] = {}

    @cached_property
    def _allowed(self) -> set[BlockId]:
        """Found when the first block is read: where all is known already, none is."""
        return self._find_allowed()

    def expert(self, blocks: Iterable[tuple[BlockId, int]]) -> None:
        """Note (before reading) expert blocks with their sizes."""
        with self._lock:
            for block, size in blocks:
                if block not in self._allowed:
                    raise MPFSError(f"block {block.hex()} is not in the plan; refusing to read it")
                self._expert[block] = size

    def base(self, blocks: Iterable[tuple[BlockId, int]]) -> None:
        """Note (before reading) base blocks with their sizes."""
        with self._lock:
            self._base.update(blocks)

    @property
    def expert_blocks(self) -> dict[BlockId, int]:
        """The distinct expert blocks read, with their sizes."""
        return dict(self._expert)

    @property
    def base_blocks(self) -> dict[BlockId, int]:
        """The distinct base blocks read, with their sizes."""
        return dict(self._base)

    @property
    def expert_bytes(self) -> int:
        """Bytes of the distinct expert blocks read."""
        return sum(self._expert.values())

    @property
    def base_bytes(self) -> int:
        """Bytes of the distinct base blocks read."""
        return sum(self._base.values())


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """The tensor objects of one planned tensor."""

    base: ModelTensor | None
    experts: tuple[ModelTensor, ...]

    @classmethod
    def load(cls, objects: ObjectReader, tensor: PlanTensor) -> PlanInputs:
        """Read them from the store."""
        found = objects.get_many(Tensor, tensor.inputs)

        def get(identity: ObjectId) -> ModelTensor:
            return ModelTensor(identity, found[identity])

        return cls(
            None if tensor.base is None else get(tensor.base), tuple(get(identity) for _, identity in tensor.experts)
        )


def planned_blocks(tensor: PlanTensor, inputs: PlanInputs) -> set[BlockId]:
    """The expert blocks that the plan lists for a tensor."""
    return {
        block
        for expert, selection in zip(inputs.experts, tensor.selections, strict=True)
        for column in selection.columns()
        for block, _ in column_blocks(expert.tensor, column, tensor.column_elements, inputs.base)
    }


@dataclass(frozen=True, slots=True)
class _Reads:
    """What a column is read from. Blocks come with their sizes.

    `runs` has the blocks of each expert, None where it is left out; `experts` those of them that the base does not have
    at that place, none where it is left out.
    """

    base_run: tuple[BlockId, ...]
    runs: tuple[tuple[BlockId, ...] | None, ...]
    base: tuple[tuple[BlockId, int], ...]
    experts: tuple[tuple[tuple[BlockId, int], ...], ...]

    def wanted(self, only: Collection[int] | None = None) -> dict[BlockId, None]:
        """The distinct blocks, in order; of all experts, or some."""
        found = dict.fromkeys(self.base_run)
        for expert, blocks in enumerate(self.experts):
            if only is None or expert in only:
                found.update(dict.fromkeys([block for block, _ in blocks]))
        return found


class DeltaIterator:
    """The columns of one planned tensor. Safe to read from several threads."""

    def __init__(
        self,
        plan: Plan,
        tensor: PlanTensor,
        inputs: PlanInputs,
        reader: BlockReader,
        ledger: ReadLedger,
        work: str,
        device: str = "cpu",
    ) -> None:
        self._plan = plan
        self._tensor = tensor
        self._inputs = inputs
        self._reader = reader
        self._ledger = ledger
        self._work = work
        self._device = device
        self._selected = [frozenset(selection.columns()) for selection in tensor.selections]
        self._known: dict[int, _Reads] = {}

    @property
    def column_elements(self) -> int:
        """Elements of a column."""
        return self._tensor.column_elements

    def __iter__(self) -> Iterator[Column]:
        """The columns that are computed, in order: what `prepare` streams over. In the others no delta is read."""
        for columns in self.batches():
            self.prefetch(columns)
            for column in columns:
                yield self.read(column)

    def batches(self) -> Iterator[list[int]]:
        """The columns that are computed, in order, so many at a time as should be asked of the disk together."""
        columns = self._tensor.columns.columns()
        while batch := list(islice(columns, _PREFETCH_COLUMNS)):
            yield batch

    def expert_blocks(self, column: int) -> tuple[tuple[BlockId, ...] | None, ...]:
        """For each expert the ids of its blocks in a column, or None where it is left out: what the result depends on."""
        return self._reads(column).runs

    def base_blocks(self, column: int) -> tuple[BlockId, ...] | None:
        """The ids of the base's blocks in a column."""
        return None if self._inputs.base is None else self._reads(column).base_run

    def prefetch(self, columns: Iterable[int], only: Only | None = None) -> None:
        """Ask the disk for what these columns will read."""
        self._reader.prefetch(self.wanted(columns, only))

    def wanted(self, columns: Iterable[int], only: Only | None = None) -> list[BlockId]:
        """The blocks that these columns will read."""
        return [block for column in columns for block in self._reads(column).wanted(only and only[column])]

    def read(self, column: int) -> Column:
        """One column, in the work dtype, on the device.

        Raises:
            IntegrityError: a block is missing or damaged.
        """
        start, reads = column * self._tensor.column_elements, self._reads(column)
        base_data: dict[BlockId, bytes] = {}
        base = None
        if self._inputs.base is not None:
            dtype = self._inputs.base.tensor.dtype
            self._ledger.base(reads.base)
            base_data = self._read(reads.base_run, "the base")
            base = to_torch(_joined(reads.base_run, base_data), dtype, self._work).to(self._device)
        experts = [self._expert(index, reads, base, base_data) for index in range(len(self._inputs.experts))]
        return Column(start, base, experts)

    @contextmanager
    def view(self, columns: Sequence[int], only: Only | None = None) -> Iterator[Iterator[BitsColumn]]:
        """Columns as bit patterns in the work dtype (one of `BIT_TYPES`); without a copy if that is how they are stored.

        Each is read when it is asked for, so that it still is in the processor's caches when it is worked on. The arrays
        rest on the store's map, and are valid inside the `with` block.

        Raises:
            IntegrityError: a block is missing or damaged.
        """
        try:
            with self._reader.reading(self._tensor.name) as read:
                yield (self._bits_column(column, read, only and only[column]) for column in columns)
        except IntegrityError:
            for column in columns:
                self.read(column)  # says whose block it is
            raise

    def _bits_column(self, column: int, read: Read, only: Collection[int] | None) -> BitsColumn:
        start, reads, base = column * self._tensor.column_elements, self._reads(column), self._inputs.base
        self._ledger.base(reads.base)
        for expert, blocks in enumerate(reads.experts):
            if only is None or expert in only:
                self._ledger.expert(blocks)
        wanted = reads.wanted(only)
        data = dict(zip(wanted, read(wanted), strict=True))
        values = None if base is None else self._bits(reads.base_run, data, base.tensor.dtype)
        experts = [
            None
            if run is None or (only is not None and index not in only)
            # No blocks of its own: it is the base here.
            else (self._bits(run, data, self._inputs.experts[index].tensor.dtype) if own else values)
            for index, (run, own) in enumerate(zip(reads.runs, reads.experts, strict=True))
        ]
        return BitsColumn(column, start, min(self._tensor.column_elements, self._tensor.numel - start), values, experts)

    def _bits(self, run: tuple[BlockId, ...], data: Mapping[BlockId, memoryview], dtype: str) -> Bits:
        work = self._work
        buffer = data[run[0]] if len(run) == 1 else bytearray().join(data[block] for block in run)
        if dtype == work:
            return np.frombuffer(buffer, BIT_TYPES[work])
        return converted(np.frombuffer(buffer, TYPES[dtype]), dtype, work).view(BIT_TYPES[work])

    def _expert(
        self, index: int, reads: _Reads, base: torch.Tensor | None, base_data: dict[BlockId, bytes]
    ) -> torch.Tensor | None:
        run, own = reads.runs[index], reads.experts[index]
        if run is None:
            return None
        if not own:
            return base
        self._ledger.expert(own)
        model = self._tensor.experts[index][0]
        data = self._read([block for block, _ in own], self._plan.models[model].name)
        dtype = self._inputs.experts[index].tensor.dtype
        return to_torch(_joined(run, base_data | data), dtype, self._work).to(self._device)

    def _reads(self, column: int) -> _Reads:
        found = self._known.get(column)
        if found is None:
            found = self._known[column] = self._find(column)
        return found

    def _find(self, column: int) -> _Reads:
        base, elements = self._inputs.base, self._tensor.column_elements
        runs: list[tuple[BlockId, ...] | None] = []
        experts: list[tuple[tuple[BlockId, int], ...]] = []
        for expert, selected in zip(self._inputs.experts, self._selected, strict=True):
            own = tuple(column_blocks(expert.tensor, column, elements, base))
            # An expert takes part in a column if the plan lists it, or if it equals the base there, at no cost.
            listed = column in selected
            runs.append(self._run(expert.tensor, column) if listed or not own else None)
            experts.append(own if listed else ())
        return _Reads(
            () if base is None else self._run(base.tensor, column),
            tuple(runs),
            () if base is None else tuple(column_blocks(base.tensor, column, elements, None)),
            tuple(experts),
        )

    def _run(self, tensor: Tensor, column: int) -> tuple[BlockId, ...]:
        width = blocks_per_column(tensor, self._tensor.column_elements)
        return tensor.blocks[column * width : (column + 1) * width]

    def _read(self, blocks: Iterable[BlockId], model: str) -> dict[BlockId, bytes]:
        wanted = list(blocks)
        with self._reader.view(wanted, f"{self._tensor.name} of {model}") as payloads:
            return {block: bytes(payload) for block, payload in zip(wanted, payloads, strict=True)}


def work_dtype(plan: Plan, inputs: PlanInputs) -> str:
    """The stored name of the dtype that a tensor's arithmetic runs in."""
    dtypes = {item.tensor.dtype for item in inputs.experts} | ({inputs.base.tensor.dtype} if inputs.base else set())
    return plan.work_dtype or promote(dtypes)


def _joined(run: Iterable[BlockId], data: dict[BlockId, bytes]) -> bytearray:
    return bytearray().join(data[block] for block in run)
