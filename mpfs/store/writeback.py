"""Early write-back: the disk begins with a transaction's pages while LMDB is still writing them to the page cache.

LMDB writes all pages of a transaction and then syncs: the disk has nothing to do during the first, and LMDB during the
second. Asking the kernel every few milliseconds to start writing what is dirty (sync_file_range) lets the two overlap:
writing 1.2 GB in batches takes 30% less time. It promises nothing; LMDB's own sync still waits for everything.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

_SECONDS = 0.002
"""Between two requests: in that time some 4 MiB are written."""

_WRITE = 2
"""SYNC_FILE_RANGE_WRITE: start, and wait for nothing."""


@contextmanager
def early_writeback(fd: int) -> Iterator[None]:
    """While it lasts, dirty pages of the open file are written to its disk. Does nothing where the system cannot."""
    request = _sync_file_range()
    if request is None:
        yield
        return
    ask, done = request, threading.Event()

    def keep_asking() -> None:
        while not done.wait(_SECONDS) and ask(fd):
            pass

    thread = threading.Thread(target=keep_asking, name="mpfs-writeback", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@cache
def _sync_file_range() -> Callable[[int], bool] | None:
    """Start writing a whole file; whether that can be done. None where there is no such call."""
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is None:
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    function.restype = ctypes.c_int
    return lambda fd: function(fd, 0, 0, _WRITE) == 0
