"""`mpfs checkout`: the files of a revision into a directory."""

from __future__ import annotations

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

IncludeOption = Annotated[
    list[str] | None,
    typer.Option(
        "--include",
        metavar="PATTERN",
        help="Only tensors whose name matches, such as '*.mlp.*'; may be given several times.",
        show_default=False,
    ),
]
WeightsOnlyOption = Annotated[
    bool, flag("--weights-only", help="Only the safetensors files and their indexes, no configs or tokenizers.")
]
UpdateOption = Annotated[
    bool,
    flag("--update", help="DIR is an earlier checkout: write only the files that are not what they should be."),
]


def checkout(
    ctx: typer.Context,
    revision: Annotated[str, typer.Argument(metavar="REF", help="A branch, a tag or a commit.")],
    directory: Annotated[
        str,
        typer.Argument(
            metavar="DIR|URL", help="Where to write; must not exist, or be empty. Or a URL such as s3://bucket/prefix."
        ),
    ],
    shard_size: ShardSizeOption = None,
    include: IncludeOption = None,
    weights_only: WeightsOnlyOption = False,
    update: UpdateOption = False,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write the files of a revision into a directory.

    All or nothing: a failed checkout leaves the directory as it was. What was imported from safetensors comes back byte for byte. Every block is verified on its way.

        mpfs checkout merged ./out
        mpfs checkout v1.0 ./out --shard-size 5GB
        mpfs checkout merged ./out --update
        mpfs checkout merged s3://bucket/merged --weights-only
    """
    session = Session.of(ctx)
    out = session.output(as_json)
    with session.open() as repository, out.progress(f"check out {revision}", "bytes") as progress:
        commit = repository.resolve(revision)
        result = repository.checkout(
            commit,
            directory,
            shard_size=shard_size,
            include=include or None,
            weights_only=weights_only,
            force=force,
            update=update,
            progress=progress,
        )
    if as_json:
        out.document({"commit": commit, **result.as_json()})
    elif session.quiet:
        out.line(str(result.target))
    else:
        files = format_count(len(result.files), "file")
        out.line(str(result.target))
        written = f"{format_size(result.bytes)} written" if update else format_size(result.bytes)
        kept = f" ({len(result.unchanged):,} unchanged)" if update else ""
        out.line(f"  {files}{kept}, {written}, {format_seconds(result.seconds)}")
