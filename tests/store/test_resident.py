"""Whether what is about to be read is in memory: asked of the kernel, which is told the truth by dropping it."""

from __future__ import annotations

import mmap
import os
import platform
import re
import sys
from pathlib import Path

import pytest

from mpfs.store.resident import is_resident

PAGES = 300


def _tells() -> bool:
    """Whether this kernel has cachestat(2)."""
    found = re.match(r"(\d+)\.(\d+)", platform.release())
    return sys.platform == "linux" and found is not None and tuple(map(int, found.groups())) >= (6, 5)


@pytest.fixture
def file(tmp_path: Path) -> int:
    path = tmp_path / "data"
    path.write_bytes(os.urandom(PAGES * mmap.PAGESIZE))
    handle = os.open(path, os.O_RDWR)
    os.fsync(handle)
    return handle


def test_nothing_is_in_memory_by_guess(tmp_path: Path, file: int) -> None:
    assert not is_resident(file, 0, 0)
    assert not is_resident(file, 0, (PAGES + 1) * mmap.PAGESIZE)  # beyond the end there is no page
    os.close(file)
    assert not is_resident(file, 0, mmap.PAGESIZE)


@pytest.mark.skipif(not _tells(), reason="the kernel has no cachestat(2)")
def test_pages_in_and_out(file: int) -> None:
    size = PAGES * mmap.PAGESIZE
    assert is_resident(file, 0, size)
    assert is_resident(file, mmap.PAGESIZE - 1, 2)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    if is_resident(file, 0, mmap.PAGESIZE):
        pytest.skip("this file system keeps its files in memory")
    os.pread(file, 1, 100 * mmap.PAGESIZE)
    assert is_resident(file, 100 * mmap.PAGESIZE, 1)
    assert not is_resident(file, 0, size)
    os.pread(file, size, 0)
    assert is_resident(file, 0, size)
    os.close(file)
