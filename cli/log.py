"""`mpfs log`: where commits came from."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from .commits import origin, title
from .options import JsonOption, flag
from .output import DIM, Output
from .session import Session

if TYPE_CHECKING:
    from mpfs.history import LogEntry


def log(
    ctx: typer.Context,
    revision: Annotated[
        str | None, typer.Argument(metavar="REF", help="Where to start; default: every branch and tag.")
    ] = None,
    graph: Annotated[
        bool,
        flag("--graph", help="Draw the history, and follow what was merged, too: │ to a parent, ┆ to an input."),
    ] = False,
    number: Annotated[
        int | None, typer.Option("--number", "-n", metavar="N", min=0, help="Show the newest N commits only.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List commits, newest first.

    Each with its id, refs, time, author and message, and with what went into it, if it is a merge.

        mpfs log merged -n 5
        mpfs log --graph
    """
    session = Session.of(ctx)
    out = session.output(as_json)
    with session.open() as repository:
        entries = repository.log(revision, inputs=graph)[:number]
    if as_json:
        out.document([entry.as_json() for entry in entries])
    elif graph:
        _draw(out, entries)
    else:
        for entry in entries:
            out.line(*title(entry))
            if text := origin(entry.commit):
                out.line("    ", (text, DIM))
    if not entries and not as_json and number != 0:
        out.note("no commits yet; 'mpfs import SOURCE --as REF' makes one")


def _draw(out: Output, entries: list[LogEntry]) -> None:
    from .graph import ASCII, UNICODE, Node, draw

    nodes = []
    for entry in entries:
        origins = dict.fromkeys(entry.commit.parents, True)
        for item in entry.commit.inputs:
            origins.setdefault(item.commit, False)
        nodes.append(Node(entry.identity, tuple(origins.items())))
    drawn = draw(nodes, UNICODE if _can_draw() else ASCII)
    for entry, node, (head, turns, below) in zip(entries, nodes, drawn, strict=True):
        out.line(head, "  ", *title(entry), crop=True)
        text = origin(entry.commit)
        # A row that goes straight down tells a commit's parent from a neighbour that it has nothing to do with.
        for row in turns or ([below] if text or node.origins else []):
            out.line(row, "    ", (text, DIM), crop=True)
            text = ""


def _can_draw() -> bool:
    """Whether stdout can show box characters."""
    try:
        "●│┆╮".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
