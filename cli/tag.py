"""`mpfs tag`: list tags, or make one."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import JsonOption
from .refs import list_or_make


def tag(
    ctx: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="The new tag.")] = None,
    revision: Annotated[
        str | None, typer.Argument(metavar="COMMIT", help="What it points at: a ref or commit.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the tags, or make one.

    A tag does not move; remove it with 'mpfs rm' to use its name again.

        mpfs tag
        mpfs tag v1.0 merged
    """
    list_or_make(ctx, "tag", name, revision, as_json)
