"""File names that not every file system can have, or can keep apart. Pure; paths are relative and posix.

A snapshot holds whatever Linux allows. Windows reserves names and characters (learn.microsoft.com, "Naming Files, Paths,
and Namespaces"); Windows and macOS take names for the same that differ in case, and macOS those that differ in how an
accent is written (Unicode normalisation).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from pathlib import PurePosixPath

from mpfs.formats.messages import listing, show

_DEVICES = frozenset(
    {"con", "prn", "aux", "nul", "conin$", "conout$"}
    | {f"{port}{n}" for port in ("com", "lpt") for n in "123456789¹²³"}
)
_FORBIDDEN = re.compile(r'[<>:"|?*\x00-\x1f]')


def same_elsewhere(paths: Iterable[str]) -> list[tuple[str, ...]]:
    """Files and directories that are several here, and one where case or accents do not count; each group sorted."""
    groups: dict[str, set[str]] = {}
    for path in paths:
        pure = PurePosixPath(path)
        for item in (path, *(str(parent) for parent in pure.parents)):
            groups.setdefault(_folded(item), set()).add(item)
    return sorted(tuple(sorted(group)) for group in groups.values() if len(group) > 1)


def windows_problem(path: str) -> str | None:
    """Why Windows cannot have a path; None if it can."""
    for part in PurePosixPath(path).parts:
        forbidden = _FORBIDDEN.search(part)
        if forbidden:
            return f"{show(forbidden[0])} is in {show(part)}"
        if part.endswith((".", " ")):
            return f"{show(part)} ends in a {'dot' if part.endswith('.') else 'space'}"
        if part.partition(".")[0].rstrip(" ").lower() in _DEVICES:
            return f"{show(part)} is a device"
    return None


def notes(paths: Iterable[str]) -> list[str]:
    """What a person should know of the names of a checkpoint's files."""
    known = list(paths)
    said = []
    groups = same_elsewhere(known)
    if groups:
        names = [name for group in groups for name in group]
        said.append(
            f"{listing(names)} differ in case or accents only: they cannot be checked out where those do not count (Windows, "
            "macOS)"
        )
    odd = {path: problem for path in known if (problem := windows_problem(path)) is not None}
    if odd:
        first = next(iter(odd))
        said.append(f"Windows cannot have {listing(odd)} ({odd[first]})")
    return said


def _folded(path: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", path).casefold())
