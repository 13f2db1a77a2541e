"""What a verb prints: data to stdout, talk and progress to stderr; styled on a terminal, plain and uncut elsewhere."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from shutil import get_terminal_size
from textwrap import wrap
from typing import IO, Literal, TypeAlias

Part: TypeAlias = "str | tuple[str, str]"
"""Text, or text with a rich style."""

ProgressCallback: TypeAlias = Callable[[int, int], object]
"""Told how much is done, and of how much."""

ID, REF, DIM, GOOD, BAD, HEAD = "yellow", "green", "dim", "green", "red", "bold"
"""Styles: object ids, refs, secondary text, what went well, what did not, titles."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    title: str
    justify: Literal["left", "right"] = "left"


class Output:
    """Where a verb's results go: a person, or with `as_json` a program."""

    def __init__(self, *, quiet: bool = False, as_json: bool = False) -> None:
        self.quiet = quiet
        self.as_json = as_json

    def document(self, value: object) -> None:
        """The one JSON document of a run with --json."""
        sys.stdout.write(to_json(value) + "\n")

    def line(self, *parts: Part, crop: bool = False) -> None:
        """A line of data. With `crop` it is cut to the width of a terminal, where a wrapped one would mislead."""
        cleaned = [(clean(part), "") if isinstance(part, str) else (clean(part[0]), part[1]) for part in parts]
        if _styled(sys.stdout):
            from rich.console import Console
            from rich.text import Text

            console = Console(file=sys.stdout, highlight=False)
            text = Text.assemble(*cleaned)
            if crop:
                console.print(text, overflow="ellipsis", no_wrap=True)
            else:
                console.print(text, soft_wrap=True)
        else:
            sys.stdout.write("".join(text for text, _ in cleaned).rstrip(" ") + "\n")

    def facts(self, pairs: Iterable[tuple[str, str]], *, indent: int = 2) -> None:
        """Names and values, one pair a line, aligned."""
        rows = list(pairs)
        width = max((len(name) for name, _ in rows), default=0)
        for name, value in rows:
            self.line(" " * indent, (name.ljust(width), DIM), "  ", value)

    def table(self, columns: Sequence[Column], rows: Iterable[Sequence[str]], *, name: int) -> None:
        """A table; nothing if it has no rows. Where it is too wide for the terminal, each row's `name` (an index of a
        column) gets a line of its own."""
        cells = [[clean(cell) for cell in row] for row in rows]
        if not cells:
            return
        width = get_terminal_size().columns if _styled(sys.stdout) else None
        titles = [column.title for column in columns]
        every = [titles, *cells]
        if width is not None and max(map(len, lay_out(columns, every))) > width:
            rest = [column for index, column in enumerate(columns) if index != name]
            below = lay_out(rest, [[cell for index, cell in enumerate(row) if index != name] for row in every])
            lines = [line for row, text in zip(every, below, strict=True) for line in (row[name], *_fold(text, width))]
            head = 2
        else:
            lines = lay_out(columns, every)
            head = 1
        for index, line in enumerate(lines):
            self.line((line, HEAD if index < head else ""))

    def note(self, text: str) -> None:
        """Talk: something that a person should know, and a program need not."""
        if not self.quiet and sys.stderr is not None:
            sys.stderr.write(f"mpfs: {clean(text)}\n")

    @contextmanager
    def progress(self, title: str, unit: Literal["bytes", "tensors", "records"]) -> Iterator[ProgressCallback | None]:
        """A progress bar on stderr for the length of the block; None where there is no terminal to see it.

        Where kernels have to be compiled first, which stops the bar for seconds, that is said, too.
        """
        if self.quiet or sys.stderr is None or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
            yield None
            return
        from mpfs.stats.native import on_compiling

        from .bars import bar

        with bar(clean(title), unit, sys.stderr) as callback:
            on_compiling(self.note)
            try:
                yield callback
            finally:
                on_compiling(None)


def to_json(value: object) -> str:
    """JSON text, ASCII only: whatever the locale, it can be written. NaN and infinities become null."""
    return json.dumps(_finite(value), indent=2, allow_nan=False, default=str)


def clean(text: str) -> str:
    """Text without control characters: names and messages come from strangers, and end up on a terminal."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def write_bytes(data: bytes) -> None:
    """Raw bytes to stdout."""
    sys.stdout.flush()
    sys.stdout.buffer.write(data)


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _styled(stream: IO[str]) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def lay_out(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines with aligned columns."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(columns))]
    lines = []
    for row in rows:
        cells = (
            cell.rjust(width) if column.justify == "right" else cell.ljust(width)
            for cell, width, column in zip(row, widths, columns, strict=True)
        )
        lines.append("  ".join(cells).rstrip(" "))
    return lines


def _fold(text: str, width: int) -> list[str]:
    """A line, indented and broken between words."""
    return wrap(text, max(width, 40), initial_indent="    ", subsequent_indent=" " * 8, drop_whitespace=True) or [""]
