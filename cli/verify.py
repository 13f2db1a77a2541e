"""`mpfs verify`: a source against what was imported from it."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import JsonOption
from .output import BAD, GOOD
from .session import Session
from .sizes import format_count, format_size


def verify(
    ctx: typer.Context,
    revision: Annotated[str, typer.Argument(metavar="REF", help="The import to compare with.")],
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="What to read: whatever 'mpfs import' takes, URLs and archives too.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Compare a source with what was imported.

    Every file of SOURCE is read, without a local copy, and its size and SHA-256 are compared with those that the import noted. The repository's
    blocks are not read: that is what 'mpfs fsck --read-data' does. Exits with 3 if anything differs.

        mpfs verify qwen3 ./Qwen3-0.6B
        mpfs verify qwen3 s3://bucket/Qwen3-0.6B
    """
    from mpfs.errors import PROBLEMS_FOUND_EXIT_CODE

    session = Session.of(ctx)
    out = session.output(as_json)
    with session.open() as repository, out.progress(f"verify {revision}", "bytes") as progress:
        report = repository.verify(revision, source, progress=progress)
    if as_json:
        out.document(report.as_json())
    else:
        for problem in report.problems:
            out.line((problem.kind, BAD), f"  {problem.path}  {problem.detail}")
        result = ("ok", GOOD) if report.ok else (format_count(len(report.problems), "problem"), BAD)
        out.line(result, f": {format_count(report.files, 'file')} imported, {format_size(report.bytes)} read")
    if not report.ok:
        raise typer.Exit(PROBLEMS_FOUND_EXIT_CODE)
