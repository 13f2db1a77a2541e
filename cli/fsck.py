"""`mpfs fsck`: check the repository."""

from __future__ import annotations

from typing import Annotated

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
    as_json: JsonOption = False,
) -> None:
    """Check the repository; change nothing.

    Everything in it must be what its id says, and must have what it refers to. Exits with 3 if there are problems.

        mpfs fsck
        mpfs fsck --read-data --subset 5%
    """
    from mpfs.errors import PROBLEMS_FOUND_EXIT_CODE

    session = Session.of(ctx)
    out = session.output(as_json)
    with session.open() as repository, out.progress("check", "records") as progress:
        report = repository.fsck(read_data=read_data or subset is not None, subset=subset, progress=progress)
    if as_json:
        out.document(
            {
                "ok": report.ok,
                "checked": report.checked,
                "problems": [
                    {"kind": problem.kind, "object": problem.object, "detail": problem.detail}
                    for problem in report.problems
                ],
            }
        )
    else:
        for problem in report.problems:
            out.line((problem.kind, BAD), f"  {problem.object}  {problem.detail}")
        counts = [f"{count:,} {name}" for name, count in report.checked.items() if count and name != "bytes"]
        if read := report.checked.get("bytes", 0):
            counts.append(f"{format_size(read)} of data read")
        result = ("ok", GOOD) if report.ok else (format_count(len(report.problems), "problem"), BAD)
        out.line(result, f": checked {', '.join(counts) or 'an empty repository'}")
    if not report.ok:
        raise typer.Exit(PROBLEMS_FOUND_EXIT_CODE)
