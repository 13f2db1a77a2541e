"""Whether a part of a file is in the page cache, so that nothing has to be asked of the disk (Linux, cachestat(2)).

Asking the kernel to read what it holds already costs as much as a hash of it, once for each request; this costs a tenth.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import sys
from collections.abc import Callable
from functools import cache
from typing import Final

_NUMBER: Final = 451
"""Of the system call, on the machines below."""

_MACHINES: Final = ("x86_64", "aarch64", "riscv64")


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("size", ctypes.c_uint64))


class _Counts(ctypes.Structure):
    """struct cachestat of linux/mman.h."""

    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


def is_resident(fd: int, offset: int, size: int) -> bool:
    """Whether all pages of a range of an open file are in memory, or on their way; False where the kernel does not tell
    (Linux before 6.5, other systems, files that the caller may not write)."""
    count = _counter()
    if count is None or size <= 0:
        return False
    pages = (offset + size - 1) // mmap.PAGESIZE - offset // mmap.PAGESIZE + 1
    return count(fd, offset, size) >= pages


@cache
def _counter() -> Callable[[int, int, int], int] | None:
    """Tells how many pages of a range are in the cache, -1 if it fails. None where there is no such call."""
    if sys.platform != "linux" or platform.machine() not in _MACHINES:
        return None
    call = ctypes.CDLL(None).syscall
    call.argtypes = [ctypes.c_long, ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint]
    call.restype = ctypes.c_long

    def count(fd: int, offset: int, size: int) -> int:
        asked, found = _Range(offset, size), _Counts()
        failed = call(_NUMBER, fd, ctypes.addressof(asked), ctypes.addressof(found), 0)
        return -1 if failed else int(found.cached)

    return count
