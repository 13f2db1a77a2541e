"""Planned files as a tar stream, for pipes: the same bytes each time."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Sequence

from mpfs.objects.progress import Progress
from mpfs.store import Store
from mpfs.vfs.plan import PlannedFile, chunks

_BLOCK = tarfile.BLOCKSIZE
_RECORD = tarfile.RECORDSIZE


def export_tar(
    files: Sequence[PlannedFile],
    store: Store,
    name: str,
    write: Callable[[bytes], object],
    *,
    time: int,
    progress: Progress | None = None,
) -> int:
    """Write planned files as a POSIX (pax) tar archive, in order of their paths; its length in bytes.

    Owners, modes and times do not depend on who exports and when, so that the archive's bytes do not, either.

    Args:
        files: from `plan_files`.
        store: holds the blocks.
        name: what the snapshot is called, for messages.
        write: takes the archive, piece by piece.
        time: of every member, in seconds since 1970; the commit's.
        progress: told about the bytes of files written.

    Raises:
        IntegrityError: a block is missing or damaged. What was written so far is no whole archive.
    """
    total, done, length = sum(file.size for file in files), 0, 0
    for file in files:
        member = tarfile.TarInfo(file.path)
        member.size, member.mtime, member.mode = file.size, time, 0o644
        header = member.tobuf(tarfile.PAX_FORMAT)
        write(header)
        for chunk in chunks(file, store, name):
            write(chunk)
            done += len(chunk)
            if progress is not None:
                progress(done, total)
        padding = -file.size % _BLOCK
        write(bytes(padding))
        length += len(header) + file.size + padding
    end = 2 * _BLOCK
    end += -(length + end) % _RECORD
    write(bytes(end))
    return length + end
