"""`mpfs fsck`: check the repository."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from .options import SHARE, JsonOption, flag
from .output import BAD, GOOD
from .session import Session
from .sizes import format_count, format_size


def fsck(
    ctx: typer.Context,
    read_data: Annotated[bool, flag("--read-data", help="Read every block, too, and compare it with its id.")] = False,
    subset: Annotated[
        float | None,
        typer.Option(
            "--subset",
            metavar="N%",
            parser=SHARE,
            help="Read this share of the blocks only, other ones each time, such as 5%; implies --read-data.",
        ),
    ] = None,
    since: Annotated[
        datetime | None,
        typer.Option("--since", help="Read the blocks of commits since then only, in UTC; implies --read-data."),
    ] = None,
    repair: Annotated[
        bool, flag("--repair", help="Make anew what can be; put commits that have lost something under quarantine/.")
    ] = False,
    heal: Annotated[
        Path | None,
        typer.Option(
            "--heal", metavar="SOURCE", help="Take damaged and missing blocks from a checkpoint that has them."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check the repository, and repair or heal it if told to.

    Everything in it must be what its id says, and must have what it refers to. Exits with 3 if there are problems (or
    if there still are, after a repair). Without --repair and --heal nothing is changed.

        mpfs fsck
        mpfs fsck --read-data --subset 5%
        mpfs fsck --heal ~/models/base
    """
    from mpfs.errors import PROBLEMS_FOUND_EXIT_CODE

    session = Session.of(ctx)
    out = session.output(as_json)
    changes: dict[str, Any] = {}
    with session.open() as repository, out.progress("check", "records") as progress:
        if heal is not None:
            healed = repository.heal(heal, progress=progress)
            changes |= {"wanted": healed.wanted, "healed": healed.healed}
            report = healed.after
        if repair:
            repaired = repository.repair(progress=progress)
            changes["actions"] = list(repaired.actions)
            report = repaired.after
        elif heal is None:
            report = repository.fsck(
                read_data=read_data or subset is not None or since is not None,
                subset=subset,
                since=None if since is None else since.replace(tzinfo=UTC).timestamp(),
                progress=progress,
            )
    if as_json:
        out.document(
            {
                **changes,
                "ok": report.ok,
                "checked": report.checked,
                "problems": [
                    {"kind": problem.kind, "object": problem.object, "detail": problem.detail}
                    for problem in report.problems
                ],
            }
        )
    else:
        if heal is not None:
            out.line(f"healed {changes['healed']:,} of {changes['wanted']:,} damaged or missing blocks and objects")
        for action in changes.get("actions", ()):
            out.line(action)
        for problem in report.problems:
            out.line((problem.kind, BAD), f"  {problem.object}  {problem.detail}")
        counts = [f"{count:,} {name}" for name, count in report.checked.items() if count and name != "bytes"]
        if read := report.checked.get("bytes", 0):
            counts.append(f"{format_size(read)} of data read")
        result = ("ok", GOOD) if report.ok else (format_count(len(report.problems), "problem"), BAD)
        out.line(result, f": checked {', '.join(counts) or 'an empty repository'}")
    if not report.ok:
        raise typer.Exit(PROBLEMS_FOUND_EXIT_CODE)
