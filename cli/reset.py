"""`mpfs reset`: move a branch."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import JsonOption
from .refs import show_ref
from .session import Session


def reset(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="REF", help="The branch to move.")],
    revision: Annotated[str, typer.Argument(metavar="COMMIT", help="Where to: a ref or commit; REF~1 is its parent.")],
    as_json: JsonOption = False,
) -> None:
    """Move a branch to another commit.

    Where it was stays in its reflog.

        mpfs reset merged merged~1
    """
    session = Session.of(ctx)
    out = session.output(as_json)
    with session.open() as repository:
        ref = repository.reset(name, revision)
    show_ref(out, ref)
