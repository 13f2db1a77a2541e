"""`mpfs rm`: remove a branch or tag."""

from __future__ import annotations

from typing import Annotated

import typer

from .options import JsonOption
from .refs import show_ref
from .session import Session


def rm(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="REF", help="The branch or tag to remove.")],
    as_json: JsonOption = False,
) -> None:
    """Remove a branch or tag.

    Its commit stays in the reflog, and in the store until 'mpfs gc'.

        mpfs rm experiment
        mpfs branch experiment 4f1c09ab   # and back again, with the id from 'mpfs reflog experiment'
    """
    session = Session.of(ctx)
    out = session.output(as_json)
    with session.open() as repository:
        ref = repository.remove_ref(name)
    show_ref(out, ref)
