"""`mpfs checkout`: the files of a revision into a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import SIZE, JsonOption, flag
from .session import Session
from .sizes import format_count, format_seconds, format_size

ShardSizeOption = Annotated[
    int | None,
    typer.Option(
        "--shard-size",
        metavar="SIZE",
        parser=SIZE,
        help="Cut the weights into files of at most this size; default: as they are in the repository.",
    ),
]
ForceOption = Annotated[
    bool, flag("--force", help="Replace the directory, with all that is in it, if it is not empty.")
]


def checkout(
    ctx: typer.Context,
    revision: Annotated[str, typer.Argument(metavar="REF", help="A branch, a tag or a commit.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write; must not exist, or be empty.")],
    shard_size: ShardSizeOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write the files of a revision into a directory.

    All or nothing: a failed checkout leaves the directory as it was. What was imported from safetensors comes back byte for byte. Every block is verified on its way.

        mpfs checkout merged ./out
        mpfs checkout v1.0 ./out --shard-size 5GB
    """
    session = Session.of(ctx)
    out = session.output(as_json)
    with session.open() as repository, out.progress(f"check out {revision}", "bytes") as progress:
        commit = repository.resolve(revision)
        result = repository.checkout(commit, directory, shard_size=shard_size, force=force, progress=progress)
    if as_json:
        out.document({"commit": commit, **result.as_json()})
    elif session.quiet:
        out.line(str(result.target))
    else:
        files = format_count(len(result.files), "file")
        out.line(str(result.target))
        out.line(f"  {files}, {format_size(result.bytes)}, {format_seconds(result.seconds)}")
