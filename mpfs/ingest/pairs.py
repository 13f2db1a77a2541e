"""Comparing a checkpoint with its base while it comes in: exact statistics of each pair of tensors, in the same pass.

Of the base those blocks are read out of the store that the checkpoint does not share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mpfs.ingest.pipeline import TensorJob
from mpfs.objects import BlockId, Commit, ObjectId, Snapshot, Tensor
from mpfs.objects.dtypes import MERGEABLE
from mpfs.stats.differences import Comparison
from mpfs.store import BlockReader, Store
from mpfs.store.pairs import Pair, PairRecord


class BaseModel:
    """The model that a checkpoint is compared with."""

    def __init__(self, store: Store, commit: ObjectId) -> None:
        self._store = store
        self._tensors = store.objects.get(Snapshot, store.objects.get(Commit, commit).snapshot).tensors
        self._compared: dict[str, _Compared] = {}

    def compared(self, name: str, job: TensorJob) -> TensorJob:
        """The job of storing a tensor, with the base's tensor of its name as companion, if the two can be compared."""
        identity = self._tensors.get(name)
        if identity is None or job.dtype not in MERGEABLE or not job.nbytes:
            return job
        base = self._store.objects.get(Tensor, identity)
        if (base.dtype, base.shape) != (job.dtype, job.shape):
            return job
        self._compared[name] = _Compared(self._store.blocks, base, name)
        return replace(job, companion=self._compared[name])

    def records(self, tensors: Mapping[str, ObjectId]) -> dict[Pair, PairRecord]:
        """What was found, given the ids of the tensors that came in."""
        return {
            (self._tensors[name], tensors[name]): compared.record
            for name, compared in self._compared.items()
            if tensors.get(name, self._tensors[name]) != self._tensors[name]
        }


class _Compared:
    """A tensor of the base, beside which another one comes in; see `Companion`."""

    def __init__(self, reader: BlockReader, base: Tensor, name: str) -> None:
        self._reader = reader
        self._base = base
        self._where = f"{name} of the base"
        self._found = Comparison(base.dtype, base.numel, base.block_size)

    @property
    def record(self) -> PairRecord:
        return self._found.record

    def announce(self, offsets: Sequence[int]) -> None:
        self._reader.prefetch([self._at(offset) for offset in offsets])

    def take(self, offset: int, block: BlockId, data: bytes | memoryview) -> None:
        ours = self._at(offset)
        if ours == block:
            self._found.equal()
            return
        with self._reader.view([ours], self._where) as (payload,):
            self._found.differ(offset // self._base.block_size, payload, data)

    def _at(self, offset: int) -> BlockId:
        return self._base.blocks[offset // self._base.block_size]
