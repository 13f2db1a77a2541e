"""`mpfs cat`: a file's bytes to stdout."""

from __future__ import annotations

from typing import Annotated

import typer

from .output import write_bytes
from .session import Session


def cat(
    ctx: typer.Context,
    target: Annotated[str, typer.Argument(metavar="REF:PATH", help="A revision, and a file in it.")],
) -> None:
    """Write a file of a revision to stdout.

    Byte for byte. It is streamed, and every block is verified on its way; if one is damaged the exit code is 90.

        mpfs cat merged:config.json
        mpfs cat merged:model.safetensors | sha256sum
    """
    from mpfs.errors import UsageError

    session = Session.of(ctx)
    revision, colon, path = target.partition(":")
    if not colon or not path:
        raise UsageError(f"{target}: write REF:PATH, such as main:config.json; 'mpfs ls REF' lists the paths")
    with session.open() as repository:
        for chunk in repository.reader(revision).open(path).iter_chunks():
            write_bytes(chunk)
