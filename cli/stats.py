"""`mpfs stats`: what is stored, and what sharing saves."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import JsonOption
from .session import Session
from .sizes import format_size


def stats(
    ctx: typer.Context,
    revision: Annotated[
        str | None, typer.Argument(metavar="REF", help="One revision; default: everything that refs reach.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show how much is stored.

    As files, as distinct blocks, and as kept on disk.

        mpfs stats
        mpfs stats merged
    """
    session = Session.of(ctx)
    out = session.output(as_json)
    with session.open() as repository:
        report = repository.stats(revision)
    if as_json:
        out.document(report.as_json())
        return
    facts = [
        ("snapshots", f"{report.snapshots:,}"),
        ("tensors", f"{report.tensors:,} distinct, with side files"),
        ("blocks", f"{report.blocks:,} distinct"),
        ("as files", format_size(report.logical_bytes)),
        ("unique", f"{format_size(report.unique_bytes)}  (deduplication {report.dedup_ratio:.2f}x)"),
        ("stored", f"{format_size(report.stored_bytes)}  (codec {report.codec_ratio:.2f}x)"),
    ]
    if report.file_bytes is not None:
        facts.append(("data.mdb", format_size(report.file_bytes)))
    out.facts(facts, indent=0)
