"""Writing: blocks in bounded batches, then everything that makes a commit in one last transaction.

A block, its info and its statistics go in together. Batches are committed (and synced) by a thread of their own, so
that hashing and computing go on meanwhile. At most two batches are in memory at once, one that is being filled and one
that is being committed: that is what a crash can cost.
"""

from __future__ import annotations

import threading
import time as clock
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import TracebackType

from mpfs.errors import IntegrityError, MPFSError
from mpfs.objects import BlockId, Commit, ObjectId, Plan, Run, Snapshot, Tensor
from mpfs.objects.ids import BLOCK_ID_SIZE, is_object_id
from mpfs.store.blocks import RAW, BlockInfo, read_ahead
from mpfs.store.environment import Environment, Transaction
from mpfs.store.memory import MEMORY
from mpfs.store.objects import put_object
from mpfs.store.pairs import Pair, PairRecord, pairs_size, put_pair_records
from mpfs.store.refs import RefKind, set_ref
from mpfs.store.seal import seal
from mpfs.store.statistics import missing, put_packed, stats_key

UNSYNCED_BYTES = 64 << 20
"""Payload bytes that are staged and not durable yet, at the most: what has to be stored again after a crash."""

BATCH_BYTES = UNSYNCED_BYTES // 2
"""Payload bytes of one write transaction: its pages are held in memory until they are synced."""


@dataclass(frozen=True, slots=True)
class StagedBlock:
    """A block to be stored: its id, raw bytes (which must not change any more), and the statistics of one place where it
    occurs."""

    block: BlockId
    data: bytes | memoryview
    dtype: str
    first_element: int
    stats: bytes


@dataclass(frozen=True, slots=True)
class RefMove:
    """A ref to be moved with a publication, from `expected` (None: it must not exist)."""

    name: str
    expected: ObjectId | None
    kind: RefKind
    reason: str


@dataclass(slots=True)
class WriteFigures:
    """What a writer has done so far. Bytes are payload bytes."""

    new_blocks: int = 0
    deduplicated_blocks: int = 0
    bytes_written: int = 0

    def count(self, staged: StagedBlock, new: bool) -> None:
        """One block more."""
        if new:
            self.new_blocks += 1
            self.bytes_written += len(staged.data)
        else:
            self.deduplicated_blocks += 1

    def plus(self, other: WriteFigures) -> WriteFigures:
        """Both together."""
        return WriteFigures(
            self.new_blocks + other.new_blocks,
            self.deduplicated_blocks + other.deduplicated_blocks,
            self.bytes_written + other.bytes_written,
        )

    def less(self, other: WriteFigures) -> WriteFigures:
        """What was done since it was `other`."""
        return self.plus(WriteFigures(-other.new_blocks, -other.deduplicated_blocks, -other.bytes_written))


@dataclass
class _Batch:
    blocks: list[StagedBlock] = field(default_factory=list)
    counted: list[WriteFigures | None] = field(default_factory=list)
    reuse: list[tuple[bytes, bytes]] = field(default_factory=list)
    nbytes: int = 0


class Writer:
    """Stages blocks and publishes commits. The caller holds the repository lock, shared, for as long as it lives.

    Leaving the `with` block without `publish` drops nothing that others see: blocks already staged stay in the store,
    unreferenced, for the next import to find or for gc to collect.
    """

    def __init__(self, environment: Environment, batch_bytes: int = BATCH_BYTES) -> None:
        self._environment = environment
        self._batch_bytes = batch_bytes
        self._pending = _Batch()
        self._lock = threading.Lock()
        self._submit_lock = threading.Lock()
        self._failure: BaseException | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="mpfs-writer")
        # Started here and not with the first batch: a KeyboardInterrupt in the middle of starting a thread leaves one
        # that `shutdown` does not know of, and that would hold its write transaction when the environment is closed.
        self._executor.submit(int).result()
        self._in_flight: Future[None] | None = None
        self._unplaced: list[BlockId] = []
        self.figures = WriteFigures()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)
        MEMORY.forget()
        # What is left there is in nobody's way: the next writer uses it, a compaction gives it back.
        with suppress(MPFSError):
            self._environment.give_room_back()

    def put_block(self, staged: StagedBlock, figures: WriteFigures | None = None) -> None:
        """Stage a block. Durable after the next `flush` or `publish`, and then also counted in `figures`.

        Raises:
            IntegrityError: an other block with the same id is in the store.
            NoSpaceError: there was no room for an earlier batch.
        """
        with self._lock:
            self._pending.blocks.append(staged)
            self._pending.counted.append(figures)
            self._pending.nbytes += len(staged.data)
            full = self._pending.nbytes >= self._batch_bytes
        if full:
            self._submit(self._batch_bytes)

    def put_reuse(self, key: bytes, value: bytes) -> None:
        """Remember a result under the digest of its inputs, in the same transaction as the blocks staged with it."""
        with self._lock:
            self._pending.reuse.append((key, value))
            self._pending.nbytes += len(key) + len(value)

    def flush(self) -> None:
        """Make everything staged so far durable.

        Raises:
            IntegrityError, NoSpaceError: this or an earlier batch could not be written; the writer is of no more use.
        """
        with self._submit_lock:
            self._submit_pending()
            self._wait()

    def publish(
        self,
        *,
        tensors: Iterable[Tensor],
        snapshot: Snapshot,
        commit: Commit,
        move: RefMove,
        plan: Plan | None = None,
        run: Callable[[ObjectId], Run] | None = None,
        pairs: Mapping[Pair, PairRecord] | None = None,
    ) -> ObjectId:
        """Store the objects of a commit and move a ref to it, all at once; the commit's id.

        `run` makes the run's record from the commit's id. `pairs` are statistics of pairs of tensors.

        Raises:
            RefConflictError: the ref is not where it was expected; nothing is published.
            NoSpaceError: there was no room; nothing is published.
            IntegrityError: something that the commit refers to is not in the store; nothing is published.
        """
        self.flush()
        tensors = list(tensors)
        # Half of a tensor's object is its block ids in hex.
        needed = sum(2 * BLOCK_ID_SIZE * len(tensor.blocks) for tensor in tensors) + (1 << 20)
        needed += pairs_size(pairs or {})
        entries: list[tuple[bytes, bytes]] = []
        for batch in missing(self._environment, tensors):
            # All but the last go ahead: a transaction holds in memory what it writes.
            if entries:
                with self._environment.write(needed=_nbytes(entries)) as txn:
                    put_packed(txn, entries)
            entries = batch
        needed += _nbytes(entries)
        with self._environment.write(needed) as txn:
            self._place(txn)
            for tensor in tensors:
                _require_blocks(txn, tensor)
                put_object(txn, tensor)
            put_packed(txn, entries)
            put_pair_records(txn, pairs or {})
            put_object(txn, snapshot)
            if plan is not None:
                put_object(txn, plan)
            _require_references(txn, snapshot, commit)
            identity = put_object(txn, commit)
            if run is not None:
                record = put_object(txn, run(identity))
                txn.put("run_index", bytes.fromhex(identity), bytes.fromhex(record))
            set_ref(
                txn,
                move.name,
                identity,
                expected=move.expected,
                kind=move.kind,
                time=commit.time,
                author=commit.author,
                reason=move.reason,
            )
        return identity

    def _submit(self, at_least: int) -> None:
        with self._submit_lock:
            # Another thread may have sent the batch on meanwhile.
            if self._pending.nbytes >= at_least:
                self._submit_pending()

    def _submit_pending(self) -> None:
        self._wait()
        with self._lock:
            batch, self._pending = self._pending, _Batch()
        if batch.blocks or batch.reuse:
            self._in_flight = self._executor.submit(self._write, batch)

    def _wait(self) -> None:
        # After one failed batch nothing of this writer may be published, whoever caught the first error.
        if self._failure is not None:
            raise self._failure
        if self._in_flight is not None:
            future, self._in_flight = self._in_flight, None
            try:
                future.result()
            except BaseException as error:
                self._failure = error
                raise

    def _write(self, batch: _Batch) -> None:
        new: list[bool] = []
        placed: list[BlockId] = []
        # A block that is there already will be compared, page by page; if it is not in memory, all are read at once.
        read_ahead(self._environment, [staged.block for staged in batch.blocks])
        size = batch.nbytes
        with self._environment.writing_back(size), self._environment.write(needed=size) as txn:
            txn.take_room(size)
            self._place(txn)
            for staged in batch.blocks:
                new.append(_put_block(txn, staged))
                if new[-1]:
                    placed.append(staged.block)
            for key, value in batch.reuse:
                txn.put("reuse", key, seal(key, value))
        self._unplaced = placed
        for staged, is_new, figures in zip(batch.blocks, new, batch.counted, strict=True):
            for counted in (self.figures, figures):
                if counted is not None:
                    counted.count(staged, is_new)

    def _place(self, txn: Transaction) -> None:
        """Note where the previous batch's payloads lie in the file, which is known only once they are committed."""
        unplaced, self._unplaced = self._unplaced, []
        record_offsets(txn, unplaced)


def _nbytes(entries: Iterable[tuple[bytes, bytes]]) -> int:
    return sum(len(key) + len(value) for key, value in entries)


def record_offsets(txn: Transaction, blocks: Sequence[BlockId]) -> None:
    """Write the offset hints of blocks that an earlier transaction has committed."""
    for block in blocks:
        record = txn.get("block_info", block)
        if record is None:
            continue
        info = BlockInfo.unpack(record)
        offset = txn.file_offset("blocks", block)
        if offset != info.offset:
            txn.put("block_info", block, replace(info, offset=offset).pack())


def _require_blocks(txn: Transaction, tensor: Tensor) -> None:
    """A tensor may rest on blocks that were staged long ago, and that somebody has removed since."""
    for index, (block, size) in enumerate(tensor.sized_blocks()):
        record = txn.get("block_info", block)
        key = stats_key(block, tensor.dtype, tensor.block_start(index))
        if record is None or BlockInfo.unpack(record).raw_size != size or not txn.contains("stats", key):
            raise IntegrityError(
                f"nothing was published: block {block.hex()} ({size:,} bytes, block {index} of a {tensor.dtype} "
                f"{list(tensor.shape)} tensor) was not staged, or not with its statistics for that place",
                block=block.hex(),
            )


def _require_references(txn: Transaction, snapshot: Snapshot, commit: Commit) -> None:
    """Nothing is published that refers to what is not there (any more)."""
    needed = [("snapshots", commit.snapshot), *(("tensors", tensor) for tensor in snapshot.references())]
    needed += [("commits", parent) for parent in commit.parents]
    needed += [("commits", item.commit) for item in commit.inputs]
    if commit.plan is not None:
        needed.append(("plans", commit.plan))
    for database, identity in needed:
        if not (is_object_id(identity) and txn.contains(database, bytes.fromhex(identity))):
            raise IntegrityError(
                f"nothing was published: the commit needs {database[:-1]} {identity}, which is not in the store",
                id=identity,
            )


def _put_block(txn: Transaction, staged: StagedBlock) -> bool:
    """Insert a block unless it is there; whether it was new."""
    existing = txn.get("blocks", staged.block)
    new = existing is None
    if existing is None:
        size = len(staged.data)
        txn.put("blocks", staged.block, staged.data)
        txn.put("block_info", staged.block, BlockInfo(RAW, size, size, None, int(clock.time())).pack())
    elif bytes(existing) != bytes(staged.data):
        # XXH3 is fast, not collision resistant: an id alone never makes two blocks the same.
        raise IntegrityError(
            f"block {staged.block.hex()}: other bytes are stored under this id (a damaged block, or a hash collision); "
            "run 'mpfs fsck --read-data'",
            block=staged.block.hex(),
        )
    elif not txn.contains("block_info", staged.block):
        size = len(staged.data)
        txn.put("block_info", staged.block, BlockInfo(RAW, size, size, None, int(clock.time())).pack())
    key = stats_key(staged.block, staged.dtype, staged.first_element)
    txn.put("stats", key, seal(key, staged.stats))
    return new
