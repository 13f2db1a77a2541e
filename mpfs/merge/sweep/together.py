"""Running several plans together: tensor by tensor and stripe by stripe, each block fetched once for all that need it.

A stripe is the run of elements of the widest column among the plans that compute a tensor. One worker holds a stripe's
blocks and computes it for one plan after the other, so memory is that of one merge, and the results of each besides.
Every plan's columns are computed by an `Execution` of its own, just as if it ran alone.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice

from mpfs.merge.delta import DeltaIterator
from mpfs.merge.engine import FIXED_MEMORY, Execution, Outcome, computed_bytes
from mpfs.merge.kernels.columns import BitsColumns
from mpfs.merge.operators import Column, Operator
from mpfs.merge.options import MergeOptions
from mpfs.merge.reusing import Job, Result
from mpfs.merge.sweep.shared import (
    BATCH,
    Gathering,
    SharedPasses,
    SharedReader,
    stream,
    wanted_blocks,
)
from mpfs.objects import BlockId, Plan, PlanTensor
from mpfs.objects.dtypes import itemsize
from mpfs.objects.progress import Progress
from mpfs.store import Store, Writer
from mpfs.store.memory import MEMORY

_COUNTS = 18 << 20
"""About what the counts of magnitudes that are kept for a tensor take."""

_COUNTS_OF_EXPERT = 2 << 20
"""About what those of an expert take while columns are counted."""


@dataclass(frozen=True, slots=True)
class Together:
    """What running plans together came to: each one's outcome or what it failed with, and the distinct bytes read."""

    outcomes: tuple[Outcome | Exception, ...]
    expert_bytes_read: int
    base_bytes_read: int


class _Member(Execution):
    """One of the plans. Its failure is not the others'."""

    failure: Exception | None = None
    gathering: Gathering | None = None

    def passes(self, columns: DeltaIterator, executor: ThreadPoolExecutor) -> BitsColumns:
        """Shared with the others, while they gather."""
        return super().passes(columns, executor) if self.gathering is None else SharedPasses(columns, self.gathering)

    def stream(self, columns: DeltaIterator) -> Iterator[Column]:
        """Shared with the others, while they gather."""
        if self.gathering is None:
            return super().stream(columns)
        return stream(columns, self.gathering, self.torch.on_this_thread)


@dataclass(frozen=True, slots=True)
class _Item:
    """One plan's column of a stripe, with what is known of its result."""

    member: _Member
    job: Job
    column: int
    known: Result


def execute_together(plans: Sequence[Plan], store: Store, writer: Writer, options: MergeOptions) -> Together:
    """Run plans. The other arguments are those of `execute`.

    Raises:
        NoSpaceError: there is no room for the results. Whatever else goes wrong is the failure of one plan.
    """
    run = _Run(plans, store, writer, options)
    try:
        run.run(options.progress)
    finally:
        run.stopping.set()
        for member in run.members:
            member.torch.restore()
        MEMORY.forget()
    return run.result()


class _Run:
    """One execution of several plans."""

    def __init__(self, plans: Sequence[Plan], store: Store, writer: Writer, options: MergeOptions) -> None:
        self.threads = options.workers
        self.memory = options.memory
        self.stopping = threading.Event()
        self.reader = SharedReader(store.environment)
        self.found: list[_Member | Exception] = []
        for plan in plans:
            try:
                member = _Member(plan, store, writer, options)
            except Exception as error:
                self.found.append(error)
                continue
            member.reader = self.reader
            member.stopping = self.stopping
            self.found.append(member)
        self.members = [item for item in self.found if isinstance(item, _Member)]
        # Statistics that are counted on the way are the same for all: the first one keeps them.
        counting = [member for member in self.members if member.counted is not None]
        for member in counting[1:]:
            member.counted, member.outcome.pairs = counting[0].counted, {}
        self.queue: deque[tuple[list[_Item], Future[list[Result | Exception | None]]]] = deque()
        self.done = 0

    def run(self, progress: Progress | None) -> None:
        """Compute everything."""
        total = sum(
            computed_bytes(tensor)
            for member in self.members
            for tensor in member.plan.tensors
            if tensor.action == "compute"
        )

        def finish_one() -> None:
            items, future = self.queue.popleft()
            for item, result in zip(items, future.result(), strict=True):
                if isinstance(result, Exception):
                    item.member.failure = item.member.failure or result
                elif result is not None:
                    # Also of a plan that has failed since: another one may have taken over the result.
                    self.done += item.member.finish(item.job, item.column, result)
            if progress is not None:
                progress(self.done, total)

        with ThreadPoolExecutor(self.threads, thread_name_prefix="mpfs-merge") as executor:
            try:
                for jobs in self._prepared(executor):
                    for items, window in self._stripes(jobs):
                        while len(self.queue) >= window:
                            finish_one()
                        self.queue.append((items, executor.submit(self._compute, items)))
                while self.queue:
                    finish_one()
            finally:
                self.stopping.set()
                for _, future in self.queue:
                    future.cancel()

    def result(self) -> Together:
        """What came out."""
        experts: dict[BlockId, int] = {}
        bases: dict[BlockId, int] = {}
        for member in self.members:
            experts.update(member.ledger.expert_blocks)
            bases.update(member.ledger.base_blocks)
        outcomes = tuple(
            item if isinstance(item, Exception) else item.failure or item.finished() for item in self.found
        )
        return Together(outcomes, sum(experts.values()), sum(bases.values()))

    def _prepared(self, executor: ThreadPoolExecutor) -> Iterator[list[tuple[_Member, Job]]]:
        """The tensors to compute, prepared, those together that have inputs in common."""
        for member in self.members:
            try:
                for tensor in member.plan.tensors:
                    if tensor.action == "keep":
                        member.keep(tensor)
            except Exception as error:
                member.failure = error
        groups = _groups(self.members)
        coming: deque[Future[list[tuple[_Member, Job]]]] = deque()
        with ThreadPoolExecutor(1, thread_name_prefix="mpfs-prepare") as preparer:
            try:
                if groups:
                    coming.append(preparer.submit(self._prepare, groups[0], executor))
                for index in range(len(groups)):
                    jobs = coming.popleft().result()
                    if index + 1 < len(groups):
                        coming.append(preparer.submit(self._prepare, groups[index + 1], executor))
                    yield jobs
            finally:
                self.stopping.set()
                for future in coming:
                    future.cancel()

    def _prepare(
        self, group: Sequence[tuple[_Member, PlanTensor]], executor: ThreadPoolExecutor
    ) -> list[tuple[_Member, Job]]:
        """On a thread of its own: get a group ready, as many at a time as there is memory for."""
        ready: list[tuple[_Member, Job]] = []
        waiting = [pair for pair in group if pair[0].failure is None]
        together = [pair for pair in waiting if type(pair[0].operator).prepare is not Operator.prepare]
        most = max((_preparing(*pair) for pair in together), default=1)
        many = max(1, (self.memory - FIXED_MEMORY) // 2 // most)
        chunks = [[pair] for pair in waiting if pair not in together]
        chunks += [together[start : start + many] for start in range(0, len(together), many)]
        for chunk in chunks:
            if self.stopping.is_set():
                raise CancelledError
            tasks = [partial(member.job, tensor, executor) for member, tensor in chunk]
            gathering = None
            if len(chunk) > 1:
                window = max(1, 2 * self.threads // len(chunk))
                gathering = Gathering(executor, self.reader, window, self.stopping)
            for member, _ in chunk:
                member.gathering = gathering
            jobs = [_attempt(tasks[0])] if gathering is None else gathering.run(tasks)
            for (member, _), job in zip(chunk, jobs, strict=True):
                if isinstance(job, Exception):
                    member.failure = member.failure or job
                elif job.remaining:
                    ready.append((member, job))
                else:
                    member.finish_tensor(job)
        return ready

    def _stripes(self, jobs: Sequence[tuple[_Member, Job]]) -> Iterator[tuple[list[_Item], int]]:
        """What is computed at a time, and how many of it may be in flight."""
        if not jobs:
            return
        widest = max(job.tensor.column_elements for _, job in jobs)
        stripes: dict[int, list[tuple[_Member, Job, int]]] = {}
        for member, job in jobs:
            for column in job.tensor.columns.columns():
                stripes.setdefault(column * job.tensor.column_elements // widest, []).append((member, job, column))
        room = max(1, self.memory - FIXED_MEMORY)
        # Results wait for the writer; were there too many of them, a stripe would be read more than once.
        many = max(1, room // 2 // max(_output_bytes(job) for _, job in jobs))
        window = 8 * self.threads
        rest = iter(sorted(stripes))
        while batch := list(islice(rest, BATCH)):
            found = {
                stripe: [
                    _Item(member, job, column, member.look_up(job, [column])[0])
                    for member, job, column in stripes[stripe]
                    if member.failure is None
                ]
                for stripe in batch
            }
            unknown = [item for items in found.values() for item in items if item.known.reused is None]
            if unknown:
                largest = max(item.member.in_flight(item.job) for item in unknown)
                results = max(sum(_output_bytes(item.job) for item in items[:many]) for items in found.values())
                window = max(1, min(window, room // (largest + results)))
                self.reader.prefetch(list(wanted_blocks((item.job.columns, item.column) for item in unknown)))
            for items in found.values():
                for start in range(0, len(items), many):
                    yield items[start : start + many], window

    def _compute(self, items: Sequence[_Item]) -> list[Result | Exception | None]:
        """On a worker thread: the results of a stripe; None for plans that have failed before."""
        results: list[Result | Exception | None] = []
        made: dict[bytes, Result] = {}
        unknown = [item for item in items if item.known.reused is None and item.member.failure is None]
        with self.reader.hold(list(wanted_blocks((item.job.columns, item.column) for item in unknown))):
            for item in items:
                if item.member.failure is not None:
                    results.append(None)
                    continue
                if item.known.key in made:
                    blocks = tuple(staged.block for staged in made[item.known.key].staged)
                    results.append(Result(item.known.key, blocks))
                    continue
                try:
                    [result] = item.member.columns(item.job, [(item.column, item.known)])
                except Exception as error:
                    results.append(error)
                    continue
                if result.reused is None:
                    made[result.key] = result
                results.append(result)
        return results


def _groups(members: Sequence[_Member]) -> list[list[tuple[_Member, PlanTensor]]]:
    """The tensors to compute, those together that have an input in common, in the order of the plans."""
    leader: dict[object, object] = {}

    def find(node: object) -> object:
        while leader.setdefault(node, node) != node:
            leader[node] = leader[leader[node]]
            node = leader[node]
        return node

    pairs = [(member, tensor) for member in members for tensor in member.plan.tensors if tensor.action != "keep"]
    for _, tensor in pairs:
        inputs = tensor.inputs
        for other in inputs[1:]:
            leader[find(other)] = find(inputs[0])
    groups: dict[object, list[tuple[_Member, PlanTensor]]] = {}
    for member, tensor in pairs:
        groups.setdefault(find(tensor.inputs[0]), []).append((member, tensor))
    return list(groups.values())


def _output_bytes(job: Job) -> int:
    return max(1, job.tensor.column_elements) * itemsize(job.tensor.dtype)


def _attempt(task: Callable[[], Job]) -> Job | Exception:
    try:
        return task()
    except Exception as error:
        return error


def _preparing(member: _Member, tensor: PlanTensor) -> int:
    """About what preparing a tensor takes, in bytes: counts of magnitudes by kernels, columns in a wide dtype without."""
    experts = len(tensor.experts) + 2
    if member.fast and type(member.operator).fast is not Operator.fast:
        return _COUNTS + experts * _COUNTS_OF_EXPERT
    return _COUNTS + experts * 32 * max(1, tensor.column_elements)
