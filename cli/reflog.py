"""`mpfs reflog`: where refs have been."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer

from .commits import SHORT, local_time
from .options import JsonOption
from .output import DIM, ID, REF
from .session import Session


def reflog(
    ctx: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="REF", help="One ref, present or past; default: all.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List every move of a ref, oldest first.

    From where, to where, when, by whom and why. Refs that were removed are there, too.

        mpfs reflog merged
    """
    session = Session.of(ctx)
    out = session.output(as_json)
    with session.open() as repository:
        entries = repository.reflog(name)
    if as_json:
        out.document(
            [
                {
                    "ref": entry.name,
                    "sequence": entry.sequence,
                    "old": entry.old,
                    "new": entry.new,
                    "time": datetime.fromtimestamp(entry.time, UTC).isoformat().replace("+00:00", "Z"),
                    "author": entry.author,
                    "reason": entry.reason,
                }
                for entry in entries
            ]
        )
        return
    width = max((len(entry.name) for entry in entries), default=0)
    for entry in entries:
        old, new = ((identity or "-")[:SHORT].ljust(SHORT) for identity in (entry.old, entry.new))
        when = f"  {local_time(entry.time)}  {entry.author}  "
        out.line((entry.name.ljust(width), REF), "  ", (old, ID), " → ", (new, ID), (when, DIM), entry.reason)
