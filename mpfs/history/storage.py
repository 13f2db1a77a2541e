"""How much space snapshots take: as files, as distinct blocks, as stored."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from mpfs.errors import IntegrityError
from mpfs.objects import BlockId, ObjectId, Snapshot, Tensor
from mpfs.objects.encoding import Json
from mpfs.store import Store


@dataclass(frozen=True, slots=True)
class StorageReport:
    """How much some snapshots take. Bytes: `logical_bytes` as files, `unique_bytes` of distinct blocks,
    `stored_bytes` of these as encoded in the store; `file_bytes` is data.mdb's size, for a whole repository."""

    snapshots: int
    tensors: int
    logical_bytes: int
    unique_bytes: int
    stored_bytes: int
    blocks: int
    file_bytes: int | None

    @property
    def dedup_ratio(self) -> float:
        """Logical bytes over unique bytes."""
        return self.logical_bytes / self.unique_bytes if self.unique_bytes else 1.0

    @property
    def codec_ratio(self) -> float:
        """Unique bytes over stored bytes."""
        return self.unique_bytes / self.stored_bytes if self.stored_bytes else 1.0

    def as_json(self) -> Json:
        """The JSON form."""
        return {**asdict(self), "dedup_ratio": self.dedup_ratio, "codec_ratio": self.codec_ratio}


def measure_storage(store: Store, snapshots: Iterable[ObjectId], *, whole: bool) -> StorageReport:
    """Measure some snapshots; `whole` says that they are all there are, so that the file's size belongs to them.

    Raises:
        IntegrityError: a block is missing.
    """
    distinct = set(snapshots)
    tensors: set[ObjectId] = set()
    logical = 0
    for identity in distinct:
        snapshot = store.objects.get(Snapshot, identity)
        logical += snapshot.size
        tensors.update(snapshot.references())
    sizes: dict[BlockId, int] = {}
    for identity in tensors:
        sizes.update(store.objects.get(Tensor, identity).sized_blocks())
    stored = 0
    for block in sizes:
        info = store.blocks.info(block)
        if info is None:
            raise IntegrityError(f"block {block.hex()} is missing from the store", block=block.hex())
        stored += info.stored_size
    file_bytes = store.environment.data_size() if whole else None
    return StorageReport(len(distinct), len(tensors), logical, sum(sizes.values()), stored, len(sizes), file_bytes)
