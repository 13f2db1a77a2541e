"""`mpfs diff`: what changed between two revisions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from .options import JsonOption, flag
from .output import Column, Output
from .session import Session
from .sizes import format_count

if TYPE_CHECKING:
    from mpfs.history import Diff, TensorDiff


def diff(
    ctx: typer.Context,
    before: Annotated[str, typer.Argument(metavar="A", help="A branch, a tag or a commit: before.")],
    after: Annotated[str, typer.Argument(metavar="B", help="Another one: after.")],
    stat: Annotated[bool, flag("--stat", help="Only the summary: how many tensors are in each state.")] = False,
    tensors: Annotated[bool, flag("--tensors", help="Every tensor, identical ones as well.")] = False,
    exact: Annotated[
        bool,
        flag("--exact", help="Read the blocks that differ: exact figures, and max |Δ| and elements changed."),
    ] = False,
    exit_code: Annotated[bool, flag("--exit-code", help="Exit with 3 if anything differs.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare two revisions, tensor by tensor.

    Shows what was added, removed, reshaped and changed, and by how much.
    Without --exact no block is read: the relative change |B - A| / |A| and the cosine of A and B are estimates from
    the sketches made at import, and marked with ~.

        mpfs diff base merged
        mpfs diff base merged --exact --json
    """
    from mpfs.errors import PROBLEMS_FOUND_EXIT_CODE, UsageError

    if stat and tensors:
        raise UsageError("--stat and --tensors exclude each other: a summary, or every tensor")
    session = Session.of(ctx)
    out = session.output(as_json)
    with session.open() as repository, out.progress(f"diff {before} {after}", "tensors") as progress:
        found = repository.diff(before, after, exact=exact, progress=progress)
    if as_json:
        out.document(found.as_json())
    else:
        if not stat:
            _tensors(out, found, every=tensors, exact=exact)
        _summary(out, found)
    if exit_code and not found.is_empty:
        raise typer.Exit(PROBLEMS_FOUND_EXIT_CODE)


def _tensors(out: Output, found: Diff, *, every: bool, exact: bool) -> None:
    shown = [item for item in found.tensors if every or item.status != "identical"]
    columns = [Column("status"), Column("blocks", "right"), Column("rel. change", "right"), Column("cosine", "right")]
    if exact:
        columns += [Column("max |Δ|", "right"), Column("elements", "right")]
    rows = []
    for item in shown:
        row = [
            item.status,
            f"{item.blocks_changed:,}/{item.blocks_total:,}",
            _number(item.relative_l2, ".2e", item.estimated),
            _number(item.cosine, ".6f", item.estimated),
        ]
        if exact:
            row += [
                _number(item.max_abs, ".2e", item.estimated),
                "" if item.elements_changed is None else f"{item.elements_changed:,}",
            ]
        rows.append([*row, _name(item)])
    out.table([*columns, Column("tensor")], rows, name=len(columns))
    for status, paths in (
        ("added", found.files_added),
        ("removed", found.files_removed),
        ("changed", found.files_changed),
    ):
        for path in paths:
            out.line(f"{status}  file {path}")
    if rows or found.files_added or found.files_removed or found.files_changed:
        out.line()


def _summary(out: Output, found: Diff) -> None:
    counts = [f"{count:,} {status}" for status, count in found.summary.items() if count]
    files = [
        f"{len(paths):,} {status}"
        for status, paths in (
            ("changed", found.files_changed),
            ("added", found.files_added),
            ("removed", found.files_removed),
        )
        if paths
    ]
    total = format_count(len(found.tensors), "tensor")
    out.line(f"{total}: {', '.join(counts)}" if counts else total)
    if files:
        out.line(f"other files: {', '.join(files)}")


def _number(value: float | None, form: str, estimated: bool) -> str:
    return "" if value is None else f"{'~' if estimated else ''}{value:{form}}"


def _name(item: TensorDiff) -> str:
    if item.status in ("reshaped", "retyped"):
        return f"{item.name}  {item.before} → {item.after}"
    if item.same_as is not None:
        return f"{item.name}  (the same as {item.same_as} {'before' if item.status == 'added' else 'after'})"
    return item.name
