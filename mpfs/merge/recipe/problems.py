"""Telling what is wrong with a recipe: a key path and a sentence for each mistake."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TypeAlias

Problem: TypeAlias = "dict[str, str]"
"""`path` and `message`."""


def problem(path: str, message: str) -> Problem:
    """One mistake."""
    return {"path": path, "message": message}


def near(name: str, names: Iterable[str]) -> str:
    """A hint at the name that was probably meant, or nothing."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def kind(value: object) -> str:
    """What a YAML value is, in words."""
    names = {type(None): "nothing", dict: "a mapping", list: "a list", str: "text", bool: "true/false"}
    return names.get(type(value), type(value).__name__)


def one_line(error: Exception) -> str:
    """An error's text without line breaks."""
    return " ".join(str(error).split())
