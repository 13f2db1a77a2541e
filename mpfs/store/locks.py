"""The repository lock: shared for writers, exclusive for whoever removes things.

It is an flock(2) on a file: the kernel drops it with the process, so a crash leaves no lock behind.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mpfs.errors import LockedError

_POLL_SECONDS = 0.05


@contextmanager
def repository_lock(path: Path, *, exclusive: bool, timeout: float = 10.0) -> Iterator[None]:
    """Hold the lock on the file `path` for the length of the block.

    Raises:
        LockedError: others held it for all of `timeout` seconds.
    """
    # Every holder opens the file anew: flock belongs to the open file, so threads exclude each other as well.
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        _acquire(fd, path, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH, timeout)
        try:
            yield
        finally:
            # A process forked meanwhile shares the open file: closing it here would not end the lock.
            fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)


@contextmanager
def opening(path: Path) -> Iterator[None]:
    """Be the only process that opens or closes the LMDB environment in the directory `path`.

    LMDB's first opener fills its shared lock file in while it holds a lock on it. Is it killed before it is done, a
    second one that waits for that lock takes it for done, counts transactions from 0 and overwrites what is in use.
    With this, nobody waits there: after a death the next one is the first again.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # a file system without locks; a user has allowed that
            fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)


def _acquire(fd: int, path: Path, mode: int, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while True:
        try:
            fcntl.flock(fd, mode | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                wanted = "exclusively" if mode == fcntl.LOCK_EX else "for writing"
                holder = "writers" if mode == fcntl.LOCK_EX else "a garbage collection"
                raise LockedError(
                    f"{path.parent}: could not be locked {wanted} within {timeout:g} s: {holder} at work; try again later"
                ) from None
            time.sleep(_POLL_SECONDS)
