"""`mpfs ls`: the files or tensors of a revision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from .options import JsonOption, flag
from .output import Column
from .session import Session
from .sizes import format_count, format_size

if TYPE_CHECKING:
    from mpfs.objects import File


def ls(
    ctx: typer.Context,
    revision: Annotated[str, typer.Argument(metavar="REF", help="A branch, a tag or a commit.")],
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="Only files at or under this path; with --tensors: of these files.")
    ] = "",
    tensors: Annotated[
        bool, flag("--tensors", help="List tensors (dtype, shape, bytes, name) instead of files.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List the files of a revision, or its tensors.

    Files with their sizes and how many tensors they hold; tensors with dtype, shape and size.

        mpfs ls merged
        mpfs ls merged --tensors
        mpfs ls merged 1_Pooling
    """
    session = Session.of(ctx)
    out = session.output(as_json)
    with session.open() as repository:
        files = repository.ls(revision, path)
        if tensors:
            held = repository.tensors(revision)
            if path:
                wanted = {file.path for file in files}
                snapshot = repository.snapshot(revision)
                inside = {
                    file.prefix + name
                    for file in snapshot.tensor_files()
                    if file.path in wanted
                    for name, _ in file.tensors
                }
                held = {name: tensor for name, tensor in held.items() if name in inside}
    if tensors:
        if as_json:
            out.document(
                [
                    {
                        "name": name,
                        "dtype": tensor.dtype,
                        "shape": list(tensor.shape),
                        "bytes": tensor.nbytes,
                        "blocks": len(tensor.blocks),
                    }
                    for name, tensor in held.items()
                ]
            )
        else:
            out.table(
                [Column("dtype"), Column("shape"), Column("size", "right"), Column("tensor")],
                [
                    [tensor.dtype, str(list(tensor.shape)), format_size(tensor.nbytes), name]
                    for name, tensor in held.items()
                ],
                name=3,
            )
    elif as_json:
        out.document([{"path": file.path, "size": file.size, "tensors": _held(file)} for file in files])
    else:
        out.table(
            [Column("size", "right"), Column("tensors", "right"), Column("file")],
            [[format_size(file.size), "" if _held(file) is None else f"{_held(file):,}", file.path] for file in files],
            name=2,
        )
    if not as_json:
        total = sum(tensor.nbytes for tensor in held.values()) if tensors else sum(file.size for file in files)
        what = format_count(len(held), "tensor") if tensors else format_count(len(files), "file")
        out.note(f"{what}, {format_size(total)}")


def _held(file: File) -> int | None:
    """How many tensors a file holds; None for one that holds none."""
    names = getattr(file, "tensors", None)
    return None if names is None else len(names)
