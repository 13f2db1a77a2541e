"""The progress bar. A module of its own, since importing rich's takes longer than most verbs run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from .output import ProgressCallback
from .sizes import format_size

Unit = Literal["bytes", "tensors", "records"]


class _Bytes(ProgressColumn):
    """How much is done, of how much, how fast; in the units that the verbs print."""

    def render(self, task: Task) -> Text:
        total = "" if task.total is None else f" of {format_size(task.total)}"
        speed = "" if task.speed is None else f", {format_size(task.speed)}/s"
        return Text(f"{format_size(task.completed)}{total}{speed}")


@contextmanager
def bar(title: str, unit: Unit, stream: IO[str]) -> Iterator[ProgressCallback]:
    """A progress bar on a terminal for the length of the block; it vanishes afterwards."""
    figures: list[ProgressColumn] = [_Bytes()] if unit == "bytes" else [MofNCompleteColumn(), TextColumn(unit)]
    shown = [TextColumn("{task.description}", markup=False), BarColumn(), *figures, TimeRemainingColumn()]
    with Progress(*shown, console=Console(file=stream, highlight=False), transient=True) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
