"""`mpfs analyze`: measure exactly how experts differ, for better plans."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import JsonOption, ThreadsOption
from .session import Session
from .sizes import format_count, format_seconds, format_size


def analyze(
    ctx: typer.Context,
    experts: Annotated[list[str], typer.Argument(metavar="EXPERT...", help="Models that were tuned from the base.")],
    base: Annotated[str, typer.Option("--base", metavar="REF", help="What they were tuned from.")],
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure exactly how experts differ, for better plans.

    Plans are made from sketches, which know the size of a block's change to about a fifth. This reads the models once and
    stores the exact figures; every later plan uses them. What is known already is not read again.

        mpfs analyze math code --base qwen3
    """
    session = Session.of(ctx)
    out = session.output(as_json)
    with session.open() as repository, out.progress("analyze", "bytes") as progress:
        report = repository.analyze(experts, base, threads=threads, progress=progress)
    if as_json:
        out.document(report.as_json())
        return
    known = f", {report.known:,} known already" if report.known else ""
    out.line(f"{format_count(report.pairs, 'pair')} of tensors measured{known}")
    out.facts([("compared", format_size(report.bytes_compared)), ("time", format_seconds(report.seconds))])
