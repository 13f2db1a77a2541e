"""The columns of a planned tensor as bit patterns, out of the store, on several threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Container, Iterator
from concurrent.futures import CancelledError, Executor, Future
from typing import TypeVar

from mpfs.merge.delta import DeltaIterator
from mpfs.merge.kernels.columns import BitsColumn

_Result = TypeVar("_Result")


class StoredColumns:
    """The columns that are computed (`BitsColumns`). In the others no delta is read.

    `map` has at most `window` columns in work, by `executor`, which must not be the one that its caller runs on. Once
    `stopping` is set nothing is worth finishing.
    """

    def __init__(self, columns: DeltaIterator, executor: Executor, window: int, stopping: threading.Event) -> None:
        self._columns = columns
        self._executor = executor
        self._window = window
        self._stopping = stopping

    def map(
        self, function: Callable[[BitsColumn], _Result], only: Container[int] | None = None
    ) -> Iterator[tuple[int, _Result]]:
        """See `BitsColumns`."""
        pending: deque[tuple[int, Future[_Result]]] = deque()
        try:
            for batch in self._columns.batches():
                wanted = [number for number in batch if only is None or number in only]
                self._columns.prefetch(wanted)
                for number in wanted:
                    if len(pending) >= self._window:
                        first, result = pending.popleft()
                        yield first, result.result()
                    pending.append((number, self._executor.submit(self._one, number, function)))
            while pending:
                first, result = pending.popleft()
                yield first, result.result()
        finally:
            for _, result in pending:
                result.cancel()

    def in_order(self, function: Callable[[BitsColumn], None]) -> None:
        """See `BitsColumns`."""
        for batch in self._columns.batches():
            self._columns.prefetch(batch)
            for number in batch:
                self._one(number, function)

    def _one(self, number: int, function: Callable[[BitsColumn], _Result]) -> _Result:
        if self._stopping.is_set():
            raise CancelledError
        with self._columns.view(number) as column:
            return function(column)
