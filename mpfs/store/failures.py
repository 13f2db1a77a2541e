"""LMDB's errors in our words: what a caller can do about each."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import lmdb

from mpfs.errors import IntegrityError, LockedError, MPFSError, NoSpaceError
from mpfs.store.filesystem import room_to_grow

MAX_READERS = 510
"""Reader slots of an environment."""

_MIN_FREE = 1 << 20
"""Bytes; a disk with less than this free is full."""


def translate(error: lmdb.Error, root: Path, data: Path, map_size: int, needed: int = 0) -> MPFSError:
    """An LMDB error as one of ours.

    Args:
        error: what LMDB said.
        root: the repository, for messages.
        data: its data.mdb.
        map_size: bytes of its map.
        needed: about how many bytes were to be written.
    """
    if isinstance(error, lmdb.MapFullError):
        return NoSpaceError(
            f"{root}: the repository's map of {map_size:,} bytes is full "
            f"(about {needed:,} bytes more are needed); nothing was published. Remove what is not needed (mpfs rm, "
            "mpfs gc), or make the map larger: mpfs gc --map-size",
            needed=needed,
            map_size=map_size,
        )
    text = str(error)
    free = room_to_grow(data)
    no_space = any(os.strerror(code) in text for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
    # LMDB reports a write that the file system cut short, for want of room, as an I/O error.
    if no_space or (os.strerror(errno.EIO) in text and free < needed + _MIN_FREE):
        return NoSpaceError(
            f"{root}: the disk is full: about {needed:,} bytes are needed, {free:,} are free; "
            "nothing was published and the repository is as it was",
            needed=needed,
            free=free,
        )
    if isinstance(error, lmdb.ReadersFullError):
        return LockedError(f"{root}: all {MAX_READERS} reader slots are taken; close some readers and try again")
    if isinstance(error, lmdb.CorruptedError | lmdb.PageNotFoundError | lmdb.InvalidError | lmdb.PanicError):
        return IntegrityError(f"{root}: the store is damaged: {text}; see 'mpfs fsck'")
    if isinstance(error, lmdb.MemoryError):
        return IntegrityError(
            f"{root}: the store cannot be mapped ({text}): its meta page is damaged and asks for more than there is, or "
            f"this process may not have {map_size:,} bytes of address space (ulimit -v)"
        )
    return MPFSError(f"{root}: LMDB: {text}")
