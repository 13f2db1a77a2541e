"""`mpfs export`: the files of a revision as a tar archive on stdout."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from .checkout import IncludeOption, ShardSizeOption, WeightsOnlyOption
from .output import write_bytes
from .session import Session


def export(
    ctx: typer.Context,
    revision: Annotated[str, typer.Argument(metavar="REF", help="A branch, a tag or a commit.")],
    shard_size: ShardSizeOption = None,
    include: IncludeOption = None,
    weights_only: WeightsOnlyOption = False,
) -> None:
    """Write the files of a revision to stdout, as a tar archive.

    The same revision gives the same bytes. Every block is verified on its way; if one is damaged the exit code is 90, and what was written is not a whole archive.

        mpfs export merged | ssh gpu tar -x -C /models/merged
        mpfs export merged --weights-only > merged.tar
    """
    from mpfs.errors import UsageError

    if sys.stdout.isatty():
        raise UsageError("an archive is not for a terminal: send it to a pipe or a file, such as '> merged.tar'")
    session = Session.of(ctx)
    out = session.output(False)
    with session.open() as repository, out.progress(f"export {revision}", "bytes") as progress:
        commit = repository.resolve(revision)
        repository.export(
            commit,
            write_bytes,
            shard_size=shard_size,
            include=include or None,
            weights_only=weights_only,
            progress=progress,
        )
