"""How a commit is shown: its line in a log, and its parts."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from .output import DIM, ID, REF, Part

if TYPE_CHECKING:
    from mpfs.history import LogEntry
    from mpfs.objects import Commit

SHORT = 10
"""Digits of an id in a listing."""


def title(entry: LogEntry) -> list[Part]:
    """Short id, refs, time, author and the message's first line."""
    commit = entry.commit
    parts: list[Part] = [(entry.identity[:SHORT], ID), " "]
    if entry.refs:
        parts += ["(", (", ".join(entry.refs), REF), ") "]
    first = commit.message.strip().split("\n")[0]
    return [*parts, (f"{local_time(commit.time)}  {commit.author}  ", DIM), first]


def origin(commit: Commit) -> str:
    """What went into a merge, or what an expert was tuned from; "" for anything else."""
    parts = [f"{item.role} {item.name} @ {item.commit[:SHORT]}" for item in commit.inputs]
    return f"from {', '.join(parts)}" if parts else ""


def local_time(seconds: int) -> str:
    """A time for a person, in this machine's time zone."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
