"""The columns of a planned tensor as bit patterns, out of the store, on several threads."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future
from typing import TypeVar

from mpfs.merge.delta import DeltaIterator
from mpfs.merge.kernels.columns import BitsColumn, Only

_Result = TypeVar("_Result")
_Item = TypeVar("_Item")


TOGETHER = 4
"""Columns that one thread takes at a time: so many share a transaction and a hand-over between threads."""


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

    def numbers(self) -> list[int]:
        """See `BitsColumns`."""
        return [number for batch in self._columns.batches() for number in batch]

    def map(self, function: Callable[[BitsColumn], _Result], only: Only | None = None) -> Iterator[tuple[int, _Result]]:
        """See `BitsColumns`."""
        pending: deque[tuple[Sequence[int], Future[list[_Result]]]] = deque()
        waiting = 0
        try:
            for batch in self._columns.batches():
                wanted = [number for number in batch if only is None or number in only]
                self._columns.prefetch(wanted, only)
                for numbers in in_parts(wanted, self._window):
                    while waiting + len(numbers) > self._window and pending:
                        first, results = pending.popleft()
                        waiting -= len(first)
                        yield from zip(first, results.result(), strict=True)
                    waiting += len(numbers)
                    pending.append((numbers, self._executor.submit(self._several, numbers, function, only)))
            while pending:
                first, results = pending.popleft()
                yield from zip(first, results.result(), strict=True)
        finally:
            for _, results in pending:
                results.cancel()

    def in_order(self, function: Callable[[BitsColumn], None]) -> None:
        """See `BitsColumns`."""
        for batch in self._columns.batches():
            self._columns.prefetch(batch)
            for numbers in in_parts(batch, TOGETHER):
                self._several(numbers, function)

    def _several(
        self, numbers: Sequence[int], function: Callable[[BitsColumn], _Result], only: Only | None = None
    ) -> list[_Result]:
        if self._stopping.is_set():
            raise CancelledError
        with self._columns.view(numbers, only) as columns:
            return [function(column) for column in columns]


def in_parts(numbers: Sequence[_Item], window: int) -> list[Sequence[_Item]]:
    """What threads take at a time, in order, where at most `window` may be in work."""
    size = max(1, min(TOGETHER, window // 4))
    return [numbers[start : start + size] for start in range(0, len(numbers), size)]
