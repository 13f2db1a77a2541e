"""`mpfs gc`: remove what nothing refers to."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import JsonOption, flag
from .session import Session
from .sizes import format_count, format_size


def gc(
    ctx: typer.Context,
    dry_run: Annotated[bool, flag("--dry-run", help="Only say what would be removed.")] = False,
    reflog_days: Annotated[
        float,
        typer.Option(
            "--reflog-days", metavar="DAYS", min=0, help="Keep what the reflog has seen in the last so many days."
        ),
    ] = 30.0,
    as_json: JsonOption = False,
) -> None:
    """Remove what no ref reaches.

    What no branch, tag or recent reflog entry reaches is removed. The space is free for new blocks afterwards.

        mpfs gc --dry-run
        mpfs gc --reflog-days 0
    """
    session = Session.of(ctx)
    out = session.output(as_json)
    with session.open() as repository:
        result = repository.gc(dry_run=dry_run, reflog_days=reflog_days)
    if as_json:
        out.document(
            {
                "blocks_removed": result.blocks_removed,
                "bytes_removed": result.bytes_removed,
                "objects_removed": result.objects_removed,
                "dry_run": result.dry_run,
            }
        )
    else:
        blocks, objects = (
            format_count(result.blocks_removed, "block"),
            format_count(result.objects_removed, "object"),
        )
        what = "would remove" if result.dry_run else "removed"
        out.line(f"{what} {blocks} ({format_size(result.bytes_removed)}) and {objects}")
