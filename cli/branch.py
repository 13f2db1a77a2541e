"""`mpfs branch`: list branches, or make one."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import JsonOption
from .refs import list_refs, show_ref
from .session import Session


def branch(
    ctx: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="The new branch.")] = None,
    revision: Annotated[
        str | None, typer.Argument(metavar="[COMMIT]", help="What it points at: a ref or commit.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the branches, or make one.

    A branch moves with each import or merge into it.

        mpfs branch
        mpfs branch experiment merged~1
    """
    from mpfs.errors import UsageError

    session = Session.of(ctx)
    out = session.output(as_json)
    with session.open() as repository:
        if name is None:
            list_refs(out, repository, "branch")
        elif revision is None:
            raise UsageError(f"branch {name}: at what? 'mpfs branch {name} COMMIT' makes it at a ref or commit")
        else:
            show_ref(out, repository.branch(name, revision))
