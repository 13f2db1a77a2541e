"""Reading together: blocks that several merges need are fetched and verified once, and passes over a tensor are shared.

Operators prepare a tensor in passes over its columns, as many and as long as they like. So that several of them can go
over the tensor in step, each runs on a thread of its own; whenever all of them are waiting for a pass (or are done), one
pass is made for all that wait.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

from mpfs.errors import IntegrityError
from mpfs.merge.delta import DeltaIterator
from mpfs.merge.kernels.columns import BitsColumn, Only
from mpfs.merge.operators import Column
from mpfs.objects import BlockId
from mpfs.store import BlockReader
from mpfs.store.blocks import Read
from mpfs.store.environment import Environment

BATCH = 16
"""Stripes that the disk is asked for together."""

_UNDELIVERED = 2
"""Results of a pass that may wait for the one who asked for it."""

_Result = TypeVar("_Result")


class SharedReader(BlockReader):
    """A reader that can hold blocks for a thread, and then gives them without reading them again."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self._held = threading.local()

    @contextmanager
    def hold(self, blocks: Sequence[BlockId]) -> Iterator[None]:
        """Within the `with` block this thread's views of these blocks cost nothing.

        Where one is missing or damaged nothing is held, so that it is told only to those who ask for it.
        """
        with ExitStack() as stack:
            with suppress(IntegrityError):
                payloads = stack.enter_context(super().view(blocks, "the inputs"))
                self._held.payloads = dict(zip(blocks, payloads, strict=True))
            try:
                yield
            finally:
                self._held.payloads = None

    @contextmanager
    def reading(self, where: str) -> Iterator[Read]:
        """See `BlockReader`."""
        held = getattr(self._held, "payloads", None)
        with ExitStack() as stack:
            if held is None:
                yield stack.enter_context(super().reading(where))
                return
            others: list[Read] = []

            def read(blocks: Iterable[BlockId]) -> list[memoryview]:
                wanted = list(blocks)
                if all(block in held for block in wanted):
                    return [held[block] for block in wanted]
                if not others:
                    others.append(stack.enter_context(super(SharedReader, self).reading(where)))
                return others[0](wanted)

            yield read


@dataclass
class _Request:
    """A pass that somebody waits for: `work` of each of the columns `numbers`, in order, given back in `results`. `only`
    says what of them is read, if not everything."""

    columns: DeltaIterator
    numbers: Sequence[int]
    work: Callable[[int], Any]
    one_by_one: bool
    only: Only | None = None
    results: deque[tuple[int, Any]] = field(default_factory=deque)
    ended: bool = False
    error: BaseException | None = None
    closed: bool = False


class Gathering:
    """Runs tasks that pass over the same tensors, in step.

    `executor` does the work on columns; it must not be the one that its caller runs on. At most `window` stripes are in
    work. Once `stopping` is set nothing is worth finishing.
    """

    def __init__(self, executor: Executor, reader: SharedReader, window: int, stopping: threading.Event) -> None:
        self._executor = executor
        self._reader = reader
        self._window = window
        self._stopping = stopping
        self._changed = threading.Condition()
        self._running = 0
        self._asked: list[_Request] = []
        self._open = threading.local()

    def run(self, tasks: Sequence[Callable[[], _Result]]) -> list[_Result | Exception]:
        """The result of each task, or what it raised. Tasks ask for passes by `Passes` and `stream`."""
        self._running = len(tasks)
        with ThreadPoolExecutor(len(tasks), thread_name_prefix="mpfs-gather") as pool:
            futures = [pool.submit(self._task, task) for task in tasks]
            while requests := self._wait():
                error: BaseException | None = None
                try:
                    self._pass(requests)
                except BaseException as caught:  # whatever it is, those who wait must be told
                    error = caught
                with self._changed:
                    for request in requests:
                        request.ended = True
                        request.error = request.error or error
                    self._changed.notify_all()
        return [future.result() for future in futures]

    def ask(
        self,
        columns: DeltaIterator,
        numbers: Sequence[int],
        work: Callable[[int], _Result],
        *,
        one_by_one: bool = False,
        only: Only | None = None,
    ) -> Iterator[tuple[int, _Result]]:
        """`work` of each of some columns, with its number, in order; within a task."""
        if getattr(self._open, "request", None) is not None:
            # A pass within a pass cannot wait for the one around it.
            for number in numbers:
                yield number, work(number)
            return
        request = _Request(columns, numbers, work, one_by_one, only)
        self._open.request = request
        with self._changed:
            self._asked.append(request)
            self._changed.notify_all()
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: request.results or request.ended)
                    if not request.results:
                        if request.error is not None:
                            raise request.error
                        return
                    item = request.results.popleft()
                    self._changed.notify_all()
                yield item
        finally:
            self._open.request = None
            with self._changed:
                request.closed = True
                request.results.clear()
                self._changed.notify_all()

    def _task(self, task: Callable[[], _Result]) -> _Result | Exception:
        try:
            return task()
        except Exception as error:
            return error
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _wait(self) -> list[_Request]:
        """The passes that are wanted once nobody can go on without one; none when all tasks are done."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._asked) >= self._running)
            asked, self._asked = self._asked, []
        return asked

    def _pass(self, requests: Sequence[_Request]) -> None:
        widest = max(request.columns.column_elements for request in requests)
        stripes: dict[int, list[tuple[_Request, int]]] = {}
        for request in requests:
            for number in request.numbers:
                stripes.setdefault(number * request.columns.column_elements // widest, []).append((request, number))
        window = 1 if any(request.one_by_one for request in requests) else self._window
        pending: deque[tuple[list[tuple[_Request, int]], Future[list[Any]]]] = deque()
        rest = iter(sorted(stripes))
        try:
            while batch := list(islice(rest, BATCH)):
                wanted = [pair for stripe in batch for pair in stripes[stripe] if not pair[0].closed]
                self._reader.prefetch(list(_blocks(wanted)))
                for stripe in batch:
                    while len(pending) >= window:
                        self._deliver(*pending.popleft())
                    pairs = [pair for pair in stripes[stripe] if not pair[0].closed]
                    pending.append((pairs, self._executor.submit(self._stripe, pairs)))
            while pending:
                self._deliver(*pending.popleft())
        finally:
            for _, future in pending:
                future.cancel()

    def _stripe(self, pairs: Sequence[tuple[_Request, int]]) -> list[Any]:
        """On a worker thread: the results of one stripe, or what was raised, one for each pair."""
        if self._stopping.is_set():
            raise CancelledError
        results: list[Any] = []
        with self._reader.hold(list(_blocks(pairs))):
            for request, number in pairs:
                try:
                    results.append(request.work(number))
                except Exception as error:
                    results.append(error)
        return results

    def _deliver(self, pairs: Sequence[tuple[_Request, int]], future: Future[list[Any]]) -> None:
        results = future.result()
        with self._changed:
            for (request, number), result in zip(pairs, results, strict=True):
                if request.ended:
                    continue
                if isinstance(result, Exception):
                    request.error, request.ended = result, True
                else:
                    request.results.append((number, result))
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: all(request.closed or len(request.results) < _UNDELIVERED for request, _ in pairs)
            )


class SharedPasses:
    """The columns of a tensor that are computed (`BitsColumns`), by the passes of a gathering."""

    def __init__(self, columns: DeltaIterator, gathering: Gathering) -> None:
        self._columns = columns
        self._gathering = gathering

    def numbers(self) -> list[int]:
        """See `BitsColumns`."""
        return [number for batch in self._columns.batches() for number in batch]

    def map(self, function: Callable[[BitsColumn], _Result], only: Only | None = None) -> Iterator[tuple[int, _Result]]:
        """See `BitsColumns`."""
        numbers = [number for number in self.numbers() if only is None or number in only]
        return self._gathering.ask(self._columns, numbers, lambda number: self._one(number, function, only), only=only)

    def in_order(self, function: Callable[[BitsColumn], None]) -> None:
        """See `BitsColumns`."""
        for _ in self._gathering.ask(
            self._columns, self.numbers(), lambda number: self._one(number, function), one_by_one=True
        ):
            pass

    def _one(self, number: int, function: Callable[[BitsColumn], _Result], only: Only | None = None) -> _Result:
        with self._columns.view([number], only) as (column,):
            return function(column)


def stream(columns: DeltaIterator, gathering: Gathering, before: Callable[[], None]) -> Iterator[Column]:
    """The columns of a tensor that are computed, in the work dtype, by a pass of a gathering; `before` runs on the
    thread that reads one."""

    def read(number: int) -> Column:
        before()
        return columns.read(number)

    numbers = [number for batch in columns.batches() for number in batch]
    for _, column in gathering.ask(columns, numbers, read):
        yield column


def _blocks(pairs: Iterable[tuple[_Request, int]]) -> dict[BlockId, None]:
    return {block: None for item, number in pairs for block in item.columns.wanted([number], item.only)}


def wanted_blocks(columns: Iterator[tuple[DeltaIterator, int]]) -> dict[BlockId, None]:
    """The blocks that some columns read, each once, in order."""
    return {block: None for item, number in columns for block in item.wanted([number])}
