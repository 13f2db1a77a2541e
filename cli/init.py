"""`mpfs init`: make a repository."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import SIZE, JsonOption, flag
from .session import Session, author
from .sizes import format_size


def init(
    ctx: typer.Context,
    path: Annotated[
        Path | None, typer.Argument(metavar="PATH", help="The repository's directory; default: ./.mpfs.")
    ] = None,
    block_size: Annotated[
        int,
        typer.Option(
            "--block-size",
            metavar="SIZE",
            parser=SIZE,
            help="Bytes of a block, a power of two from 4KiB to 64MiB; fixed for good. Small models want small blocks.",
        ),
    ] = 1 << 20,
    map_size: Annotated[
        int | None,
        typer.Option(
            "--map-size",
            metavar="SIZE",
            parser=SIZE,
            help="The most that the store can grow to; address space only, no disk is used up by it.",
        ),
    ] = None,
    allow_network_file_system: Annotated[
        bool,
        flag("--allow-network-file-system", help="Do not refuse NFS and the like, where LMDB can lose data."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Make a repository.

    Verbs run in the directory that holds it, or below, find it by themselves.

        mpfs init
        mpfs init /data/models.mpfs --block-size 64KiB
    """
    from mpfs import Repository
    from mpfs.repository import REPOSITORY_NAME

    session = Session.of(ctx)
    out = session.output(as_json)
    target = path or Path(session.named() or REPOSITORY_NAME)
    limits = {} if map_size is None else {"map_size": map_size}
    with Repository.create(
        target,
        block_size=block_size,
        allow_network_file_system=allow_network_file_system,
        author=author(),
        **limits,
    ) as repository:
        info = repository.info
        where = str(repository.path)
    if as_json:
        out.document(
            {
                "path": where,
                "uuid": info.uuid,
                "format_version": info.format_version,
                "block_size": info.block_size,
                "hash": info.hash_name,
            }
        )
    elif session.quiet:
        out.line(where)
    else:
        out.line("made an empty repository at ", where, f", in blocks of {format_size(info.block_size)}")
