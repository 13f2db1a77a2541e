"""`mpfs branch`: list branches, or make one."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import JsonOption
from .refs import list_or_make


def branch(
    ctx: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="The new branch.")] = None,
    revision: Annotated[
        str | None, typer.Argument(metavar="COMMIT", help="What it points at: a ref or commit.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the branches, or make one.

    A branch moves with each import or merge into it.

        mpfs branch
        mpfs branch experiment merged~1
    """
    list_or_make(ctx, "branch", name, revision, as_json)
