"""Memory for blocks on their way into the store (read from a source, or results of a merge), used again once nobody holds it.

Fresh memory is cleared by the system, page by page, when it is first written to: for methods that compute little, and
for an import, that is a good part of what they take. Memory begins with a page, since reading a file to
a place 16 bytes into one, where `malloc` and so numpy put large arrays, takes three times as long on some processors.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpfs.deferred import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MOST = 64 << 20
"""Bytes that are kept, at the most: as many as the writer holds."""

_SMALL = 256 << 10
"""Bytes; smaller memory is numpy's own."""


class Memory:
    """Arrays whose memory is used again. Safe to use from several threads."""

    def __init__(self) -> None:
        self._free: dict[int, list[NDArray[np.uint8]]] = {}

    def empty(self, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """An array of so many elements, not initialised. Its memory is used again when no array or view of it is left."""
        free = self._free.setdefault(count * dtype.itemsize, [])
        try:
            memory = free.pop()
        except IndexError:
            memory = _fresh(count * dtype.itemsize)
        found: NDArray[Any] = np.asarray(_Lease(memory, self._take_back)).view(dtype)
        return found

    def _take_back(self, memory: NDArray[np.uint8]) -> None:
        if sum(size * len(free) for size, free in list(self._free.items())) + memory.nbytes <= _MOST:
            self._free[memory.nbytes].append(memory)

    def forget(self) -> None:
        """Give memory back that nobody holds."""
        for free in list(self._free.values()):
            free.clear()


def _fresh(size: int) -> NDArray[np.uint8]:
    if size < _SMALL:
        return np.empty(size, np.uint8)
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


class _Lease:
    """Owns memory for as long as arrays need it."""

    def __init__(self, memory: NDArray[np.uint8], take_back: Callable[[NDArray[np.uint8]], None]) -> None:
        self._memory = memory
        self._take_back = take_back
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self._take_back(self._memory)


MEMORY = Memory()
"""That of this process."""
