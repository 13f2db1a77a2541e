"""`mpfs show`: one commit."""

from __future__ import annotations

from typing import Annotated

import typer

from .commits import local_time
from .explained import run_facts
from .options import JsonOption
from .output import HEAD, ID, REF, Part
from .session import Session
from .sizes import format_count, format_size


def show(
    ctx: typer.Context,
    revision: Annotated[str, typer.Argument(metavar="REF", help="A branch, a tag or a commit; REF~1 is its parent.")],
    as_json: JsonOption = False,
) -> None:
    """Show one commit.

    Who made it, when and of what; for a merge also what its run read and wrote.

        mpfs show merged
        mpfs show merged~1 --json
    """
    session = Session.of(ctx)
    out = session.output(as_json)
    with session.open() as repository:
        entry = repository.show(revision)
        snapshot = repository.snapshot(entry.identity)
        run = repository.run_of(entry.identity)
    commit = entry.commit
    if as_json:
        out.document(
            {
                **entry.as_json(),
                "files": len(snapshot.files),
                "tensors": len(snapshot.tensors),
                "bytes": snapshot.size,
                "run": None if run is None else run.figures.as_json(),
            }
        )
        return
    refs: list[Part] = [" (", (", ".join(entry.refs), REF), ")"] if entry.refs else []
    out.line("commit ", (entry.identity, ID), *refs)
    facts = [("author", commit.author), ("time", local_time(commit.time)), ("snapshot", commit.snapshot)]
    facts += [("parent", parent) for parent in commit.parents]
    facts += [(item.role, f"{item.commit}  {item.name}") for item in commit.inputs]
    if commit.plan is not None:
        facts.append(("plan", commit.plan))
    if commit.source is not None:
        facts.append(("source", commit.source))
    files, tensors = format_count(len(snapshot.files), "file"), format_count(len(snapshot.tensors), "tensor")
    facts.append(("contents", f"{files}, {tensors}, {format_size(snapshot.size)}"))
    out.facts(facts, indent=0)
    out.line()
    for line in commit.message.strip().split("\n"):
        out.line("    ", line)
    if run is not None:
        out.line()
        out.line(("run", HEAD))
        out.facts(run_facts(run.figures))
