"""The files of a checkpoint directory: which there are, where they are, and which are only a tool's leftovers."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from mpfs.errors import BadInputError, FormatError, NotFoundError
from mpfs.formats.location import Location
from mpfs.formats.messages import is_unicode, show

SKIPPED_NAMES = frozenset({".git", ".cache", ".mpfs"})
"""Directories (and git's file of that name in a worktree) that belong to tools and not to the checkpoint."""

SKIPPED_SUFFIXES = (".incomplete", ".lock")
"""Files that a download leaves while it runs."""


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file: its posix path relative to the directory, and its absolute path (symlinks in it not resolved)."""

    path: str
    location: Location


def walk(root: Path) -> tuple[list[FoundFile], list[str]]:
    """All regular files under a directory, sorted by path, and the paths of what was skipped.

    Symlinks are followed, to files (the hub's cache is made of them) and to directories.

    Raises:
        NotFoundError: there is no such directory.
        BadInputError: it is not a directory, or cannot be read; it holds a pipe, socket or device, or a file
            whose name is not Unicode.
        FormatError: a symlink dangles, or leads back to a directory that it is in.
    """
    root = root.absolute()
    found: list[FoundFile] = []
    skipped: list[str] = []
    try:
        status = root.stat()
        if not stat.S_ISDIR(status.st_mode):
            raise BadInputError(f"{root}: not a directory", file=str(root))
        _walk(root, "", ((status.st_dev, status.st_ino),), found, skipped)
    except FileNotFoundError:
        raise NotFoundError(f"{root}: no such directory", file=str(root)) from None
    except OSError as error:
        raise BadInputError(f"{error.filename or root}: cannot be read: {error.strerror}", file=str(root)) from error
    return sorted(found, key=lambda file: file.path), sorted(skipped)


def _walk(
    directory: Path, prefix: str, above: tuple[tuple[int, int], ...], found: list[FoundFile], skipped: list[str]
) -> None:
    """Add what is in one directory; `above` identifies it and the directories that lead to it."""
    with os.scandir(directory) as entries:
        names = sorted(entry.name for entry in entries)
    for name in names:
        path, location = prefix + name, directory / name
        if not is_unicode(name):
            raise BadInputError(f"{directory}: the file name {show(name)} is not valid UTF-8; rename it")
        if name in SKIPPED_NAMES or name.endswith(SKIPPED_SUFFIXES):
            skipped.append(path)
            continue
        try:
            status = location.stat()
        except OSError as error:
            if not location.is_symlink():
                raise
            raise FormatError(
                f"{location}: this symlink leads nowhere (to {os.readlink(location)}: {error.strerror}); "
                "download the file again, or remove the link",
                file=str(location),
            ) from None
        if stat.S_ISREG(status.st_mode):
            found.append(FoundFile(path, location))
        elif stat.S_ISDIR(status.st_mode):
            identity = (status.st_dev, status.st_ino)
            if identity in above:
                raise FormatError(f"{location}: this symlink leads back to a directory that it is in; remove it")
            _walk(location, f"{path}/", (*above, identity), found, skipped)
        else:
            raise BadInputError(f"{location}: neither a file nor a directory; remove it", file=str(location))
