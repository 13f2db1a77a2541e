"""`mpfs gc`: remove what nothing refers to."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import SIZE, JsonOption, flag
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
    grace: Annotated[
        float,
        typer.Option("--grace", metavar="HOURS", min=0, help="Keep blocks stored in the last so many hours, too."),
    ] = 0.0,
    compact: Annotated[
        bool, flag("--compact", help="Give the free space back to the file system; needs room for a copy.")
    ] = False,
    map_size: Annotated[
        int | None,
        typer.Option("--map-size", metavar="SIZE", parser=SIZE, help="Let the store grow to SIZE; do nothing else."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Remove what no ref reaches.

    What no branch, tag or recent reflog entry reaches is removed. The space is free for new blocks afterwards.

        mpfs gc --dry-run
        mpfs gc --reflog-days 0 --compact
        mpfs gc --map-size 4TiB
    """
    session = Session.of(ctx)
    out = session.output(as_json)
    with session.open() as repository:
        if map_size is not None:
            grown = repository.grow_map(map_size)
            if as_json:
                out.document({"map_size": grown})
            else:
                out.line(f"the store can grow to {format_size(grown)}")
            return
        result = repository.gc(dry_run=dry_run, reflog_days=reflog_days, grace_hours=grace, compact=compact)
    if as_json:
        out.document(
            {
                "blocks_removed": result.blocks_removed,
                "bytes_removed": result.bytes_removed,
                "objects_removed": result.objects_removed,
                "dry_run": result.dry_run,
                "file_bytes_freed": result.file_bytes_freed,
            }
        )
    else:
        blocks, objects = (
            format_count(result.blocks_removed, "block"),
            format_count(result.objects_removed, "object"),
        )
        what = "would remove" if result.dry_run else "removed"
        freed = f"; the file is {format_size(result.file_bytes_freed)} smaller" if compact and not dry_run else ""
        out.line(f"{what} {blocks} ({format_size(result.bytes_removed)}) and {objects}{freed}")
