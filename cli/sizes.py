"""Sizes as people write them, and sizes, counts and durations for people. Parsing is `mpfs.objects.amounts`'s, which is
loaded when there is something to parse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Amount:
    """A number of bytes, or a share in percent."""

    kind: Literal["bytes", "percent"]
    value: float


def parse_amount(text: str) -> Amount:
    """A size, or a share such as `10%`; see `mpfs.objects.amounts.parse_amount`."""
    from mpfs.objects import amounts

    return Amount(*amounts.parse_amount(text))


def parse_size(text: str) -> int:
    """A size in bytes; see `mpfs.objects.amounts.parse_size`."""
    from mpfs.objects import amounts

    return amounts.parse_size(text)


def parse_share(text: str) -> float:
    """A share between 0 and 1; see `mpfs.objects.amounts.parse_share`."""
    from mpfs.objects import amounts

    return amounts.parse_share(text)


def format_size(size: float) -> str:
    """Bytes for a person: `512 B`, `1.5 MiB`."""
    if size < 1024:
        return f"{size:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1023.95:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"


def format_count(number: int, noun: str, plural: str = "") -> str:
    """A number with its noun: `1 block`, `4,000 blocks`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def format_seconds(seconds: float) -> str:
    """A duration for a person: `0.31 s`, `2 min 5 s`."""
    if seconds < 100:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
