"""Running a plan: stream columns, merge them, stage the results; what is not touched is only referenced.

Worker threads read, verify, merge, hash and take statistics, one column each; the calling thread stages results in
order, and the writer's thread syncs. Meanwhile a few more threads prepare the tensors that come next, on the same
workers. Memory is bounded by the number of columns in flight.

Columns are merged by kernels, as they lie in the store's map, or by torch where there are none: the result is the same.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np

from mpfs.errors import MPFSError
from mpfs.merge.conversion import TYPES, converted
from mpfs.merge.delta import DeltaIterator, ReadLedger, planned_blocks
from mpfs.merge.kernels.backend import kernels
from mpfs.merge.kernels.columns import BitsColumns
from mpfs.merge.kernels.stored import StoredColumns, in_parts
from mpfs.merge.magnitudes import Counted, Histograms
from mpfs.merge.numeric import to_bytes
from mpfs.merge.operators import Column, Prepared, TensorContext, get_operator
from mpfs.merge.operators.base import FastPath, Histogram
from mpfs.merge.options import MergeOptions
from mpfs.merge.reusing import Inputs, Job, Result, Reusing, output_runs
from mpfs.merge.threads import OneThreadEach
from mpfs.objects import BlockId, Plan, PlanTensor, Tensor
from mpfs.objects.dtypes import itemsize
from mpfs.objects.encoding import encode
from mpfs.objects.progress import Progress
from mpfs.stats.staging import stage_block
from mpfs.store import StagedBlock, Store, WriteFigures, Writer
from mpfs.store.memory import MEMORY
from mpfs.store.pairs import Pair, PairRecord, PairTable

FIXED_MEMORY = 512 << 20
"""Of the memory bound, what the interpreter, torch and the writer's batches take."""

_AHEAD = 2
"""Tensors that are prepared while an other one is merged."""

_COPIES = 4
"""Copies of a column's inputs that are alive at once: as stored, in the work dtype, sparsified, weighted."""


@dataclass(slots=True)
class Outcome:
    """What running a plan produced: the output tensors by name, and what was read, reused, computed and written. `pairs`
    are statistics that were counted on the way."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    expert_bytes_read: int = 0
    base_bytes_read: int = 0
    blocks_kept: int = 0
    blocks_computed: int = 0
    blocks_reused: int = 0
    pairs: dict[Pair, PairRecord] = field(default_factory=dict)
    written: WriteFigures = field(default_factory=WriteFigures)


@dataclass(frozen=True, slots=True)
class _InFlight:
    """Columns of a tensor on their way."""

    job: Job
    columns: Sequence[int]
    results: Future[list[Result]]


def execute(plan: Plan, store: Store, writer: Writer, options: MergeOptions) -> Outcome:
    """Run a plan.

    Args:
        plan: what to do.
        store: where the inputs are.
        writer: takes the output's blocks, and remembers results for reuse.
        options: how.

    Raises:
        IntegrityError: an input block is missing or damaged.
        NotFoundError: an input of the plan is not in this repository.
    """
    run = Execution(plan, store, writer, options)
    try:
        return run.run(options.progress)
    finally:
        run.torch.restore()
        MEMORY.forget()


class Execution(Reusing):
    """One execution of a plan. Blocks are read by `reader`."""

    def __init__(
        self,
        plan: Plan,
        store: Store,
        writer: Writer,
        options: MergeOptions,
    ) -> None:
        inputs = Inputs(plan, store.objects)

        def allowed() -> set[BlockId]:
            # Of what is known as a whole nothing is read.
            left = (tensor for tensor in plan.tensors if tensor.name not in self.outcome.tensors)
            return set().union(*(planned_blocks(tensor, inputs[tensor.name]) for tensor in left))

        super().__init__(plan, store, get_operator(plan.method), inputs, ReadLedger(allowed))
        self.writer = writer
        self.reuse = options.reuse
        self.threads = options.workers
        self.memory = options.memory
        self.fast = options.device is None
        self.device = options.device or "cpu"
        self.stopping = threading.Event()
        table = PairTable(store.environment)
        self.histograms = Histograms(store.blocks, table)
        # Of a merge under a budget they would make the next one, of the same recipe, an other one.
        everything = plan.cost.expert_bytes_planned == plan.cost.expert_bytes_full
        self.counted = Counted(store.blocks, table) if everything else None
        self.outcome = Outcome(pairs={} if self.counted is None else self.counted.records)
        self.torch = OneThreadEach()

    def run(self, progress: Progress | None) -> Outcome:
        total = sum(computed_bytes(tensor) for tensor in self.plan.tensors if tensor.action == "compute")
        done, waiting = self._finish_known(), 0
        if done and progress is not None:
            progress(done, total)
        queue: deque[_InFlight] = deque()

        def finish_one() -> None:
            nonlocal done, waiting
            item = queue.popleft()
            waiting -= len(item.columns)
            for column, result in zip(item.columns, item.results.result(), strict=True):
                done += self.finish(item.job, column, result)
            if progress is not None:
                progress(done, total)

        def wait_for_any(coming: Sequence[Future[Job]]) -> None:
            futures: list[Future[Any]] = [*coming]
            if queue:
                futures.append(queue[0].results)
            wait(futures, return_when=FIRST_COMPLETED)
            if queue and queue[0].results.done():
                finish_one()

        with ThreadPoolExecutor(self.threads, thread_name_prefix="mpfs-merge") as executor:
            try:
                for job in self._jobs(executor, wait_for_any):
                    window = 8 * self.threads
                    for columns in job.columns.batches():
                        known = self.look_up(job, columns)
                        unknown = [column for column, found in zip(columns, known, strict=True) if not found.reused]
                        if unknown:
                            window = self._window(job)
                            job.columns.prefetch(unknown)
                        for part in in_parts(list(zip(columns, known, strict=True)), window):
                            while queue and waiting + len(part) > window:
                                finish_one()
                            waiting += len(part)
                            numbers = [column for column, _ in part]
                            queue.append(_InFlight(job, numbers, executor.submit(self.columns, job, part)))
                while queue:
                    finish_one()
            finally:
                self.stopping.set()
                for item in queue:
                    item.results.cancel()
        return self.finished()

    def _finish_known(self) -> int:
        """Take over the tensors that earlier merges have computed; the bytes of output that they are."""
        done = 0
        wanted = [tensor for tensor in self.plan.tensors if tensor.action != "keep"]
        whole = self.known_whole(wanted)
        for tensor in wanted:
            if tensor.name in whole:
                self._take(tensor, whole[tensor.name])
                done += tensor.bytes_computed
        for job, results in self.known([tensor for tensor in wanted if tensor.name not in whole]):
            if all(result.reused is not None for result in results):
                if not results:
                    self.finish_tensor(job)
                for column, result in zip(job.tensor.columns.columns(), results, strict=True):
                    done += self.finish(job, column, result)
        return done

    def _take(self, tensor: PlanTensor, computed: Sequence[BlockId]) -> None:
        """Take over all that is computed of a tensor."""
        count = -(-tensor.numel * itemsize(tensor.dtype) // self.plan.block_size)
        blocks = list(computed)
        if len(computed) < count:
            base = self.inputs[tensor.name].base
            blocks = [b""] * count if base is None else list(base.tensor.blocks)
            left = iter(computed)
            for first, last in output_runs(tensor, self.plan):
                blocks[first:last] = islice(left, last - first)
        self.outcome.blocks_reused += len(computed)
        self.outcome.blocks_kept += count - len(computed)
        self.outcome.tensors[tensor.name] = Tensor(tensor.dtype, tensor.shape, self.plan.block_size, tuple(blocks))

    def finished(self) -> Outcome:
        """What came out, once all is done."""
        # Tensors are finished in any order; the output has the plan's.
        self.outcome.tensors = {tensor.name: self.outcome.tensors[tensor.name] for tensor in self.plan.tensors}
        self.outcome.expert_bytes_read = self.ledger.expert_bytes
        self.outcome.base_bytes_read = self.ledger.base_bytes
        return self.outcome

    def _jobs(
        self, executor: ThreadPoolExecutor, wait_for_any: Callable[[Sequence[Future[Job]]], None]
    ) -> Iterator[Job]:
        """The tensors to compute, prepared, in any order; those to keep are dealt with on the way.

        `wait_for_any` returns when something has changed that may be one of these.
        """
        finished = self.outcome.tensors
        wanted = [tensor for tensor in self.plan.tensors if tensor.action != "keep" and tensor.name not in finished]
        for tensor in self.plan.tensors:
            if tensor.action == "keep":
                self.keep(tensor)
        left = deque(wanted)
        coming: list[Future[Job]] = []
        with ThreadPoolExecutor(_AHEAD, thread_name_prefix="mpfs-prepare") as preparers:
            try:
                while left or coming:
                    while left and len(coming) <= _AHEAD:
                        coming.append(preparers.submit(self.job, left.popleft(), executor))
                    # Whichever is ready: a large tensor may take long, and nobody has to wait for it.
                    ready = next((future for future in coming if future.done()), None)
                    if ready is None:
                        wait_for_any(coming)
                        continue
                    coming.remove(ready)
                    job = ready.result()
                    if job.remaining:
                        yield job
                    else:
                        self.finish_tensor(job)
            finally:
                self.stopping.set()
                for future in coming:
                    future.cancel()

    def _window(self, job: Job) -> int:
        """How many columns may be in flight."""
        held = (_AHEAD + 1) * job.operator.held(job.context, job.parameters)
        return max(1, min(8 * self.threads, (self.memory - FIXED_MEMORY - held) // self.in_flight(job)))

    def in_flight(self, job: Job) -> int:
        """The memory that a column takes while it is computed, in bytes: its inputs in the work dtype, and operators'
        temporaries.

        Kernels take what lies in the map as it is, and make the result only, which is copied once.
        """
        work = itemsize(job.context.work)
        inputs = self.inputs[job.tensor.name]
        dtypes = {item.tensor.dtype for item in (inputs.base, *inputs.experts) if item is not None}
        copies = (len(job.tensor.experts) + 2) * _COPIES
        if self._path(job) is not None:
            copies = 3 if dtypes == {job.context.work} else len(job.tensor.experts) + 5
        return copies * max(1, job.tensor.column_elements) * work

    def keep(self, tensor: PlanTensor) -> None:
        """A tensor that comes out as it went in."""
        base = self.inputs[tensor.name].base
        if base is None:
            raise MPFSError(f"the plan keeps {tensor.name}, but names no tensor to keep")
        self.outcome.tensors[tensor.name] = base.tensor
        self.outcome.blocks_kept += len(base.tensor.blocks)

    def job(self, tensor: PlanTensor, executor: ThreadPoolExecutor) -> Job:
        """On a thread of its own: get a tensor ready."""
        job = self.begin(tensor)
        job.prepare(self._prepare(job, executor))
        return job

    def _path(self, job: Job) -> FastPath | None:
        """How kernels do a tensor; only asked for when something is computed, since numba takes its time to load."""
        if not job.path_known:
            found = kernels() if self.fast and job.tensor.experts else None
            job.path = None if found is None else job.operator.fast(job.context, job.parameters, found)
            job.path_known = True
        return job.path

    def _prepare(self, job: Job, executor: ThreadPoolExecutor) -> Prepared:
        key = self.preparation(job)
        if key is None:
            return {}
        known = self.prepared([key])
        if known:
            return known[key]
        job.context = self._with_histograms(job)
        path = self._path(job)
        if path is not None:
            prepared = path.prepare(self.passes(job.columns, executor))
        else:
            self.torch.on_this_thread()
            prepared = job.operator.prepare(job.context, job.parameters, lambda: self.stream(job.columns))
        self.writer.put_reuse(key, encode({"kind": "prepared", "values": dict(prepared)}))
        return prepared

    def _with_histograms(self, job: Job) -> TensorContext:
        """What the store knows of deltas that are read whole: it saves counting them, and changes no result."""
        context, inputs = job.context, self.inputs[job.tensor.name]
        planned = job.tensor.cuts or ((),) * len(inputs.experts)
        wanted = [not (cuts or runs) for cuts, runs in zip(planned, context.left_out, strict=True)]
        known = self.histograms.cuts(job.operator, job.parameters, context.work, inputs.base, inputs.experts, wanted)
        cuts = [ours or theirs for ours, theirs in zip(planned, known, strict=True)] if known else job.tensor.cuts

        def count(expert: int, histogram: Histogram) -> None:
            if self.counted is not None:
                self.counted.take(context.work, inputs.base, inputs.experts[expert], histogram)

        return replace(context, cuts=cuts, counted=count)

    def passes(self, columns: DeltaIterator, executor: ThreadPoolExecutor) -> BitsColumns:
        """How kernels pass over a tensor that is prepared."""
        return StoredColumns(columns, executor, 2 * self.threads, self.stopping)

    def stream(self, columns: DeltaIterator) -> Iterator[Column]:
        """The same for operators."""
        return iter(columns)

    def columns(self, job: Job, wanted: Sequence[tuple[int, Result]]) -> list[Result]:
        """On a worker thread: compute columns' results, unless they are known."""
        unknown = [column for column, known in wanted if known.reused is None]
        path = self._path(job) if unknown else None
        staged: dict[int, tuple[StagedBlock, ...]] = {}
        if path is None:
            for column in unknown:
                staged[column] = self._stage(job, column, memoryview(self._by_torch(job, column)))
        else:
            work = job.context.work
            with job.columns.view(unknown) as views:
                for column, bits in zip(unknown, views, strict=True):
                    merged = converted(path.apply(job.prepared, bits).view(TYPES[work]), work, job.tensor.dtype)
                    staged[column] = self._stage(job, column, merged.view(np.uint8).data)
        return [Result(known.key, None, staged[column]) if known.reused is None else known for column, known in wanted]

    def _by_torch(self, job: Job, column: int) -> bytes:
        """The bytes of a merged column."""
        self.torch.on_this_thread()
        inputs = job.columns.read(column)
        if not job.tensor.experts and inputs.base is not None:
            # Nothing to merge: it only changes its dtype.
            return to_bytes(inputs.base, job.tensor.dtype)
        merged = job.operator.apply(job.context, job.parameters, job.prepared, inputs)
        return to_bytes(merged, job.tensor.dtype)

    def _stage(self, job: Job, column: int, data: memoryview) -> tuple[StagedBlock, ...]:
        """A merged column as blocks."""
        size = self.plan.block_size
        first, per_block = column * job.tensor.column_elements, size // itemsize(job.tensor.dtype)
        return tuple(
            stage_block(data[offset : offset + size], job.tensor.dtype, first + offset // size * per_block)
            for offset in range(0, len(data), size)
        )

    def finish(self, job: Job, column: int, result: Result) -> int:
        """On the calling thread: stage a column's result; the bytes of output that this makes."""
        first, last = job.span(column, self.plan.block_size)
        blocks = result.reused
        if blocks is None:
            for staged in result.staged:
                self.writer.put_block(staged, self.outcome.written)
            blocks = tuple(staged.block for staged in result.staged)
            self.writer.put_reuse(result.key, b"".join(blocks))
            self.outcome.blocks_computed += len(blocks)
        else:
            self.outcome.blocks_reused += len(blocks)
        if len(blocks) != last - first:
            raise MPFSError(f"{job.tensor.name}: column {column} came out as {len(blocks)} blocks, not {last - first}")
        job.blocks[first:last] = blocks
        job.remaining -= 1
        if job.remaining == 0:
            self.finish_tensor(job)
        size = self.plan.block_size
        nbytes = job.tensor.numel * itemsize(job.tensor.dtype)
        return min(last * size, nbytes) - first * size

    def finish_tensor(self, job: Job) -> None:
        computed = [block for first, last in output_runs(job.tensor, self.plan) for block in job.blocks[first:last]]
        if computed:
            self.writer.put_reuse(self.tensor_key(job.tensor), b"".join(computed))
        self.outcome.blocks_kept += len(job.blocks) - len(computed)
        self.outcome.tensors[job.tensor.name] = Tensor(
            job.tensor.dtype, job.tensor.shape, self.plan.block_size, tuple(job.blocks)
        )


def computed_bytes(tensor: PlanTensor) -> int:
    size = tensor.column_elements * itemsize(tensor.dtype)
    nbytes = tensor.numel * itemsize(tensor.dtype)
    return sum(min(stop * size, nbytes) - start * size for start, stop in tensor.columns.ranges)
