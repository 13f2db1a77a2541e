"""The way of a tensor's bytes into the store: read, hash, take statistics, stage.

Worker threads do the first three for one block each (all of them release the interpreter lock); the calling thread
stages results in order, and the writer's own thread syncs batches meanwhile. A bounded window of blocks is in memory.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from mpfs.ingest.source import ByteSource
from mpfs.objects import Tensor
from mpfs.objects.dtypes import nbytes
from mpfs.objects.progress import Progress
from mpfs.objects.tensor import first_element
from mpfs.stats.staging import stage_block
from mpfs.store import StagedBlock, Writer

_WINDOW_BYTES = 64 << 20
_MAX_WINDOW_BYTES = 256 << 20
"""Bytes of blocks in memory, however many threads there are; two blocks at least."""


@dataclass(frozen=True, slots=True)
class TensorJob:
    """A tensor to be stored: dtype, shape and bytes."""

    dtype: str
    shape: tuple[int, ...]
    source: ByteSource

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.source.size

    def __post_init__(self) -> None:
        if self.source.size != nbytes(self.dtype, self.shape):
            raise ValueError(f"{self.source.where}: {self.source.size} bytes for {self.dtype} {list(self.shape)}")


@dataclass(slots=True)
class _Pending:
    """A tensor on its way: the futures of its blocks, in order."""

    job: TensorJob
    remaining: int
    blocks: list[bytes] = field(default_factory=list)


def store_tensors(
    writer: Writer,
    block_size: int,
    jobs: Iterable[TensorJob],
    *,
    threads: int | None = None,
    progress: Progress | None = None,
    total: int = 0,
) -> Generator[Tensor, None, None]:
    """Store tensors; yields each, in the order of the jobs, once all its blocks are staged.

    Closing the generator ends the workers: do so before the sources are closed.

    Args:
        writer: takes the blocks; they are durable after its next flush or publish.
        block_size: bytes of a block.
        jobs: what to store; taken as needed.
        threads: worker threads; default: the number of CPUs.
        progress: told the bytes staged so far, and `total`.
    """
    count = threads or os.cpu_count() or 1
    window = max(2, min(max(2 * count, _WINDOW_BYTES // block_size), _MAX_WINDOW_BYTES // block_size))
    queue: deque[tuple[_Pending, Future[StagedBlock] | None]] = deque()
    done = 0

    def finish_one() -> Iterator[Tensor]:
        nonlocal done
        pending, future = queue.popleft()
        if future is not None:
            staged = future.result()
            writer.put_block(staged)
            pending.blocks.append(staged.block)
            pending.remaining -= 1
            done += len(staged.data)
            if progress is not None:
                progress(done, total)
        if pending.remaining == 0:
            yield Tensor(pending.job.dtype, pending.job.shape, block_size, tuple(pending.blocks))

    with ThreadPoolExecutor(count, thread_name_prefix="mpfs-import") as executor:
        try:
            for job in jobs:
                offsets = range(0, job.nbytes, block_size)
                pending = _Pending(job, len(offsets))
                if not offsets:
                    queue.append((pending, None))
                for index, offset in enumerate(offsets):
                    size = min(block_size, job.nbytes - offset)
                    future = executor.submit(_stage, job, offset, size, first_element(job.dtype, block_size, index))
                    queue.append((pending, future))
                    while len(queue) >= window:
                        yield from finish_one()
            while queue:
                yield from finish_one()
        finally:
            for _, unfinished in queue:
                if unfinished is not None:
                    unfinished.cancel()


def _stage(job: TensorJob, offset: int, size: int, first: int) -> StagedBlock:
    return stage_block(bytes(job.source.read(offset, size)), job.dtype, first)
