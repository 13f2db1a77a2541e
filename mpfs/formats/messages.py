"""How text out of a file is handled with care, above all in error messages: quoted, printable and never endless.

A checkpoint's header is somebody else's text. A name in it may hold control characters, or be a megabyte long.
"""

from __future__ import annotations

import json
from collections.abc import Collection

_SHOWN_CHARACTERS = 120
_SHOWN_ITEMS = 8


def show(value: object) -> str:
    """One value out of a file as JSON on one line, cut after 120 characters. Anything may be given."""
    if isinstance(value, str):
        # Cut before quoting, so that a megabyte is not escaped for nothing and the quotes still close.
        cut = value[:_SHOWN_CHARACTERS]
        return json.dumps(cut, ensure_ascii=not cut.isprintable()) + ("…" if len(value) > len(cut) else "")
    if isinstance(value, int) and abs(value) >= 10**40:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, list | tuple):
        items = ", ".join(show(item) for item in value[:_SHOWN_ITEMS])
        return f"[{items}{', …' if len(value) > _SHOWN_ITEMS else ''}]"
    if isinstance(value, dict):
        return "an object" if value else "{}"
    return json.dumps(value) if value is None or isinstance(value, bool | int | float) else repr(value)


def listing(names: Collection[str]) -> str:
    """Names, quoted and separated by commas; of more than eight the first eight and how many more there are."""
    shown = ", ".join(show(name) for name in list(names)[:_SHOWN_ITEMS])
    return shown if len(names) <= _SHOWN_ITEMS else f"{shown} and {len(names) - _SHOWN_ITEMS:,} more"


def count(number: int, noun: str) -> str:
    """A number with its noun: `1 byte`, `4,000 bytes`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def is_unicode(text: str) -> bool:
    """Whether the text has no lone surrogate, which JSON's escapes and file names can smuggle into a str."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
