"""Sizes and shares as people write them: `512MiB`, `2GB`, `10%`, plain bytes. Pure text to numbers."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Literal, TypeAlias

UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}
"""Bytes of a unit, in lower case."""

_LIMIT = 1 << 63
_MAX_LENGTH = 40
_NUMBER = re.compile(r"(?P<number>\d+(?:\.\d*)?|\.\d+)\s*(?P<unit>[A-Za-z%]*)", re.ASCII)
_EXPECTED = "write a number with a unit, such as 512MiB, 2GB or plain bytes"


Amount: TypeAlias = "tuple[Literal['bytes', 'percent'], float]"
"""A number of bytes, or a share in percent."""


def parse_amount(text: str) -> Amount:
    """A size, or a share such as `10%`.

    Raises:
        ValueError: it is neither; the message says what is wrong and what is expected.
    """
    number, unit = _split(text, f"{_EXPECTED}; or a share, such as 10%")
    if unit != "%":
        return "bytes", _bytes(text, number, unit)
    if number > 100:
        raise ValueError(f"{text.strip()}: a share is at most 100%")
    return "percent", float(number)


def parse_size(text: str) -> int:
    """A size in bytes; fractions of a byte are dropped.

    Raises:
        ValueError: it is none; the message says what is wrong and what is expected.
    """
    number, unit = _split(text, _EXPECTED)
    if unit == "%":
        raise ValueError(f"{text.strip()}: a share of what? {_EXPECTED}")
    return _bytes(text, number, unit)


def parse_share(text: str) -> float:
    """A share between 0 and 1, written as `0.95` or as `95%`.

    Raises:
        ValueError: it is none; the message says what is wrong and what is expected.
    """
    number, unit = _split(text, "write a share, such as 0.95 or 95%")
    if unit not in ("", "%"):
        raise ValueError(f"{text.strip()}: write a share, such as 0.95 or 95%")
    share = number / 100 if unit == "%" else number
    if share > 1:
        raise ValueError(f"{text.strip()}: is more than everything; write a share, such as 0.95 or 95%")
    return float(share)


def _split(text: str, expected: str) -> tuple[Fraction, str]:
    match = _NUMBER.fullmatch(text.strip()) if len(text) <= _MAX_LENGTH else None
    if match is None:
        shown = text if len(text) <= _MAX_LENGTH else text[:_MAX_LENGTH] + "…"
        raise ValueError(f"{shown!r} is no size: {expected}")
    return Fraction(match["number"]), match["unit"].lower()


def _bytes(text: str, number: Fraction, unit: str) -> int:
    factor = UNITS.get(unit)
    if factor is None:
        if unit in ("k", "m", "g", "t"):
            letter = unit.upper()
            raise ValueError(f"{text.strip()}: is that 1000s or 1024s? Write {letter}B or {letter}iB")
        raise ValueError(f"{text.strip()}: unknown unit; the units are B, kB, MB, GB, TB, KiB, MiB, GiB and TiB")
    size = int(number * factor)
    if size >= _LIMIT:
        raise ValueError(f"{text.strip()}: is more than any store can hold")
    return size
