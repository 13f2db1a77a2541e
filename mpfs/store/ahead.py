"""Room ahead: the disk space that data.mdb will grow into, taken in large steps before LMDB writes there.

A file that grows by a write at a time makes the file system look for space at each of them, and that is half of the
system's time of writing 1.2 GB in batches. Space beyond the end of a file (FALLOC_FL_KEEP_SIZE) changes neither its size
nor what anybody reads of it; only the disk is fuller by it, by one step at the most, until it is given back.

Where it cannot be had (another system, a file system without it, little room) LMDB finds its space itself, as ever.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

from mpfs.store.filesystem import room_to_grow

STEP = 256 << 20
"""Bytes that are taken at a time."""

SMALLEST = 8 << 20
"""Bytes; for a smaller batch nothing is taken."""

_PLENTY = 4
"""How many steps must be free: on a disk that is nearly full nothing is taken that may not be needed."""

_KEEP_SIZE = 1


class RoomAhead:
    """Of one data.mdb. To be used only inside of a write transaction, so by one process at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._end = 0
        self.taken = False
        """Whether there may be something to give back."""

    def take(self, end: int, size: int) -> None:
        """See to it that there is room for `size` bytes from where the file's used pages end.

        It is no error if there is none: then LMDB will meet it.
        """
        if size < SMALLEST or end + size <= self._end:
            return
        step = max(STEP, size)
        if room_to_grow(self._path) < _PLENTY * step:
            return
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            try:
                self.taken = True
                _fallocate()(fd, end, step)
            finally:
                os.close(fd)
        except OSError:
            # A failed one may have taken a part.
            self.give_back()
            self._end = 1 << 62
            return
        self._end = end + step

    def give_back(self) -> None:
        """Give back what is beyond the end of the file, if anything was taken."""
        if not self.taken:
            return
        self.taken, self._end = False, 0
        with suppress(OSError):
            fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            try:
                # To the size that it has. Only a write transaction changes that, and this is the only one.
                os.ftruncate(fd, os.fstat(fd).st_size)
            finally:
                os.close(fd)


@cache
def _fallocate() -> Callable[[int, int, int], None]:
    """fallocate(2) with FALLOC_FL_KEEP_SIZE: descriptor, offset, length. Python's own would change the file's size.

    Raises:
        OSError: this system has none.
    """
    function = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
    if function is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    function.restype = ctypes.c_int

    def call(fd: int, offset: int, length: int) -> None:
        if function(fd, _KEEP_SIZE, offset, length):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    return call
