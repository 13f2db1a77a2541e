"""The text graph of a log: lanes for lines of descent, drawn row by row. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Node:
    """A commit. `origins` are what it came from, each once, with whether that is a parent (or an input of a merge)."""

    identity: str
    origins: tuple[tuple[str, bool], ...]


@dataclass(frozen=True, slots=True)
class Symbols:
    """What the graph is drawn with."""

    node: str
    parent: str
    merged: str
    across: str
    cross: str
    fork_right: str
    fork_left: str
    end_right: str
    end_left: str
    open_last: str
    open_more: str


UNICODE = Symbols("●", "│", "┆", "─", "┼", "├", "┤", "╰", "╯", "╮", "┬")
ASCII = Symbols("*", "|", ":", "-", "+", "|", "|", "`", "'", ".", ".")


@dataclass(slots=True)
class _Lane:
    """A column that waits for a commit; `solid` if a child has it as its parent."""

    waits_for: str
    solid: bool


def draw(nodes: Iterable[Node], symbols: Symbols = UNICODE) -> Iterator[tuple[str, list[str], str]]:
    """For every node its row, the rows below it that turn to what it came from, and a row of what goes on below.

    The last one may be repeated, or left out, as the text beside the graph needs it. Nodes must come in an order in
    which none precedes one that came from it. All rows of a node have the same width.
    """
    lanes: list[_Lane | None] = []
    for node in nodes:
        column = _column(lanes, node.identity)
        head = [_vertical(lane, symbols) for lane in lanes]
        head[column] = symbols.node
        rows = _descend(lanes, column, node, symbols)
        while lanes and lanes[-1] is None:
            lanes.pop()
        texts = [" ".join(head), *rows, " ".join(_vertical(lane, symbols) for lane in lanes)]
        width = max(len(text) for text in texts)
        first, *turns, below = (text.ljust(width) for text in texts)
        yield first, turns, below


def _column(lanes: list[_Lane | None], identity: str) -> int:
    """Where the node goes: the lane that waits for it, or a free one."""
    for index, lane in enumerate(lanes):
        if lane is not None and lane.waits_for == identity:
            return index
    return _free(lanes, 0)


def _free(lanes: list[_Lane | None], start: int) -> int:
    for index in range(start, len(lanes)):
        if lanes[index] is None:
            return index
    lanes.append(None)
    return len(lanes) - 1


def _descend(lanes: list[_Lane | None], column: int, node: Node, symbols: Symbols) -> list[str]:
    """Replace the node's lane by lanes of its origins; return the rows that show how."""
    waiting = {lane.waits_for: index for index, lane in enumerate(lanes) if lane is not None and index != column}
    new = [(origin, solid) for origin, solid in node.origins if origin not in waiting]
    old = [(waiting[origin], solid) for origin, solid in node.origins if origin in waiting]
    lanes[column] = _Lane(*new[0]) if new else None
    rows = []
    opened = []
    before = [_vertical(lane, symbols) for lane in lanes]
    for origin, solid in new[1:]:
        index = _free(lanes, column + 1)
        lanes[index] = _Lane(origin, solid)
        opened.append(index)
    if opened:
        rows.append(_opening(before, column, opened, symbols))
    for number, (target, solid) in enumerate(old):
        lane = lanes[target]
        if lane is not None and solid:
            lane.solid = True
        ends = not new and number == len(old) - 1
        rows.append(_joining([_vertical(lane, symbols) for lane in lanes], column, target, ends, symbols))
    return rows


def _opening(cells: Sequence[str], column: int, opened: Sequence[int], symbols: Symbols) -> str:
    """A row from `column` to lanes that begin to its right."""
    last = max(opened)
    row = [*cells, *" " * (last + 1 - len(cells))]
    row[column] = symbols.fork_right
    for index in range(column + 1, last):
        if index in opened:
            row[index] = symbols.open_more
        else:
            row[index] = symbols.across if row[index] == " " else symbols.cross
    row[last] = symbols.open_last
    return _join(row, column, last, symbols)


def _joining(cells: Sequence[str], column: int, target: int, ends: bool, symbols: Symbols) -> str:
    """A row from `column` to a lane that is there already; `ends` if nothing goes on below `column`."""
    row = list(cells)
    left, right = min(column, target), max(column, target)
    for index in range(left + 1, right):
        row[index] = symbols.across if row[index] == " " else symbols.cross
    row[target] = symbols.fork_left if target > column else symbols.fork_right
    if ends:
        row[column] = symbols.end_right if target > column else symbols.end_left
    else:
        row[column] = symbols.fork_right if target > column else symbols.fork_left
    return _join(row, left, right, symbols)


def _join(cells: Sequence[str], left: int, right: int, symbols: Symbols) -> str:
    """Cells with what is between them: a line from cell `left` to `right`, blanks elsewhere."""
    text = ""
    for index, cell in enumerate(cells):
        text += cell
        if index + 1 < len(cells):
            text += symbols.across if left <= index < right else " "
    return text


def _vertical(lane: _Lane | None, symbols: Symbols) -> str:
    if lane is None:
        return " "
    return symbols.parent if lane.solid else symbols.merged
