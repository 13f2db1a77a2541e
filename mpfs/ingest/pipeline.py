"""The way of a tensor's bytes into the store: read, hash, take statistics, stage.

Worker threads do the first three (all of them release the interpreter lock); the calling thread stages results in
order, and the writer's own thread syncs batches meanwhile. A worker's task is one block, or a run of small tensors of
about as many bytes: a checkpoint of 20,000 small tensors is no 20,000 tasks. A bounded window of blocks is in memory.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol, TypeVar

from mpfs.ingest.source import ByteSource
from mpfs.objects import BlockId, Tensor, block_id
from mpfs.objects.dtypes import nbytes
from mpfs.objects.progress import Progress
from mpfs.objects.tensor import first_element
from mpfs.stats.staging import stage_block
from mpfs.store import StagedBlock, Writer

_T = TypeVar("_T")

_WINDOW_BYTES = 64 << 20
_MAX_WINDOW_BYTES = 256 << 20
"""Bytes of blocks in memory, however many threads there are; two blocks at least."""

_RUN_BYTES = 256 << 10
_RUN_BLOCKS = 64
"""How much one task does at the most, if it is more than one block."""


class Digest(Protocol):
    """A hash that takes bytes in order, such as hashlib's."""

    def update(self, data: bytes | memoryview, /) -> object:
        """Take more bytes."""


class Companion(Protocol):
    """Whoever looks at a tensor's blocks as they come in, on any thread and in any order."""

    def announce(self, offsets: Sequence[int], /) -> None:
        """The blocks at these offsets within the tensor, in bytes, will come next."""

    def take(self, offset: int, block: BlockId, data: bytes | memoryview, /) -> None:
        """A block: its offset, id and bytes."""


@dataclass(frozen=True, slots=True)
class TensorJob:
    """A tensor to be stored: dtype, shape and bytes. `digest` is told the bytes in order, over all jobs that share it."""

    dtype: str
    shape: tuple[int, ...]
    source: ByteSource
    digest: Digest | None = None
    companion: Companion | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.source.size

    def __post_init__(self) -> None:
        if self.source.size != nbytes(self.dtype, self.shape):
            raise ValueError(f"{self.source.where}: {self.source.size} bytes for {self.dtype} {list(self.shape)}")


@dataclass(slots=True)
class _Piece:
    """A block to be read: `size` bytes from `offset` of a job's tensor. `ends` says whether it is the last one; a tensor
    without bytes has one piece of no size."""

    job: TensorJob
    offset: int
    size: int
    first: int
    ends: bool


@dataclass(slots=True)
class _Run:
    """Pieces that one task reads."""

    pieces: list[_Piece] = field(default_factory=list)
    nbytes: int = 0

    def takes(self, piece: _Piece) -> bool:
        return not self.pieces or (self.nbytes + piece.size <= _RUN_BYTES and len(self.pieces) < _RUN_BLOCKS)

    def add(self, piece: _Piece) -> None:
        self.pieces.append(piece)
        self.nbytes += piece.size


def store_tensors(
    writer: Writer,
    block_size: int,
    jobs: Iterable[TensorJob],
    *,
    threads: int | None = None,
    progress: Progress | None = None,
    done: int = 0,
    total: int = 0,
) -> Generator[Tensor, None, None]:
    """Store tensors; yields each, in the order of the jobs, once all its blocks are staged.

    Closing the generator ends the workers: do so before the sources are closed.

    Args:
        writer: takes the blocks; they are durable after its next flush or publish.
        block_size: bytes of a block.
        jobs: what to store; taken as needed.
        threads: worker threads; default: the number of CPUs.
        progress: told the bytes staged so far, `done` before the first, and `total`.
    """
    blocks: list[BlockId] = []
    with closing(_in_order(jobs, block_size, _stage, threads)) as results:
        for run, found in results:
            _digest(run, found)
            for piece, staged in zip(run.pieces, found, strict=True):
                if staged is not None:
                    writer.put_block(staged)
                    blocks.append(staged.block)
                    done += piece.size
                    if progress is not None:
                        progress(done, total)
                if piece.ends:
                    yield Tensor(piece.job.dtype, piece.job.shape, block_size, tuple(blocks))
                    blocks.clear()


def name_blocks(
    block_size: int, jobs: Iterable[TensorJob], *, threads: int | None = None
) -> Generator[tuple[BlockId, int], None, None]:
    """The ids and sizes of the blocks that `store_tensors` would stage; nothing is stored, and no digest told."""
    with closing(_in_order(jobs, block_size, _name, threads)) as results:
        for _, named in results:
            yield from named


def _in_order(
    jobs: Iterable[TensorJob], block_size: int, task: Callable[[_Run], _T], threads: int | None
) -> Generator[tuple[_Run, _T], None, None]:
    """What a task makes of each run, in order; worker threads do it, a bounded window ahead."""
    count = threads or os.cpu_count() or 1
    unit = max(block_size, _RUN_BYTES)
    window = max(2, min(max(2 * count, _WINDOW_BYTES // unit), _MAX_WINDOW_BYTES // unit))
    queue: deque[tuple[_Run, Future[_T]]] = deque()
    with ThreadPoolExecutor(count, thread_name_prefix="mpfs-import") as executor:
        try:
            for run in _runs(jobs, block_size):
                _announce(run)
                queue.append((run, executor.submit(task, run)))
                while len(queue) >= window:
                    first, future = queue.popleft()
                    yield first, future.result()
            while queue:
                first, future = queue.popleft()
                yield first, future.result()
        finally:
            for _, unfinished in queue:
                unfinished.cancel()


def _digest(run: _Run, found: Sequence[StagedBlock | None]) -> None:
    """Tell the digests of a run's jobs what was read, in as few calls as can be."""
    for _, group in groupby(zip(run.pieces, found, strict=True), key=lambda pair: id(pair[0].job.digest)):
        pairs = list(group)
        digest = pairs[0][0].job.digest
        if digest is not None:
            data = [staged.data for _, staged in pairs if staged is not None]
            digest.update(data[0] if len(data) == 1 else b"".join(data))


def _runs(jobs: Iterable[TensorJob], block_size: int) -> Iterator[_Run]:
    run = _Run()
    for job in jobs:
        for piece in _pieces(job, block_size):
            if not run.takes(piece):
                yield run
                run = _Run()
            run.add(piece)
    if run.pieces:
        yield run


def _pieces(job: TensorJob, block_size: int) -> Iterator[_Piece]:
    size = job.nbytes
    if not size:
        yield _Piece(job, 0, 0, 0, True)
    for index, offset in enumerate(range(0, size, block_size)):
        end = min(offset + block_size, size)
        yield _Piece(job, offset, end - offset, first_element(job.dtype, block_size, index), end == size)


def _announce(run: _Run) -> None:
    for _, group in groupby(run.pieces, key=lambda piece: id(piece.job)):
        pieces = list(group)
        companion = pieces[0].job.companion
        if companion is not None:
            companion.announce([piece.offset for piece in pieces if piece.size])


def _name(run: _Run) -> list[tuple[BlockId, int]]:
    return [
        (block_id(piece.job.source.read(piece.offset, piece.size)), piece.size) for piece in run.pieces if piece.size
    ]


def _stage(run: _Run) -> list[StagedBlock | None]:
    return [_stage_piece(piece) if piece.size else None for piece in run.pieces]


def _stage_piece(piece: _Piece) -> StagedBlock:
    job = piece.job
    staged = stage_block(job.source.read(piece.offset, piece.size), job.dtype, piece.first)
    if job.companion is not None:
        job.companion.take(piece.offset, staged.block, staged.data)
    return staged
