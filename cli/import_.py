"""`mpfs import`: a checkpoint into the repository."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from .options import JsonOption, MessageOption, NoSpaceCheckOption, ThreadsOption, flag
from .output import ID, REF
from .session import Session
from .sizes import format_count, format_seconds, format_size


def import_checkpoint(
    ctx: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A directory in Hugging Face layout, a zip or tar archive of one, a .safetensors, .gguf, .onnx, .npz, .bin, "
            ".pt or .pth file, an fsspec URL such as s3://bucket/model, or org/name[@revision] on the hub.",
        ),
    ],
    ref: Annotated[str, typer.Option("--as", metavar="REF", help="The branch to commit to; made if it is new.")],
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            metavar="REF",
            help="What it was fine-tuned from: kept with the commit, and compared with on the way. 'auto': the nearest model.",
        ),
    ] = None,
    delta_of: Annotated[
        str | None,
        typer.Option(
            "--delta-of",
            metavar="REF",
            help="SOURCE holds differences to this model: commit the sum, and keep the differences at deltas/REF.",
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option("--key", metavar="KEY", help="Which state dict of a torch file to take, where it holds several."),
    ] = None,
    strip_prefix: Annotated[
        str | None,
        typer.Option(
            "--strip-prefix",
            metavar="TEXT",
            help="Take this off the beginning of names in torch and .npz files, such as 'module.'.",
        ),
    ] = None,
    everything: Annotated[
        bool, flag("--all", help="Also keep what a torch file holds besides the model: optimizer, scheduler, counters.")
    ] = False,
    verify: Annotated[
        bool, flag("--verify", help="Read files again that an earlier import has read and that did not change since.")
    ] = False,
    no_space_check: NoSpaceCheckOption = False,
    message: MessageOption = None,
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Import a checkpoint to a branch.

    Blocks that are in the repository already are not stored again, and files that did not change since an earlier import
    are not read again. Torch files are read without running code. With --base, how each tensor differs from the base's is
    measured in the same pass, for better plans.

        mpfs import ./Qwen3-0.6B --as qwen3
        mpfs import tuned/model.safetensors --as math --base qwen3 -m "math expert, epoch 3"
    """
    session = Session.of(ctx)
    out = session.output(as_json)
    if delta_of is not None and base is not None:
        raise typer.BadParameter("--base and --delta-of exclude each other: the latter is the base")
    with session.open() as repository, out.progress(f"import {ref}", "bytes") as progress:
        options: dict[str, Any] = {
            "key": key,
            "strip_prefix": strip_prefix,
            "everything": everything,
            "verify": verify,
            "check_space": not no_space_check,
            "message": message,
            "threads": threads,
            "progress": progress,
        }
        if delta_of is not None:
            report = repository.import_delta(source, ref, delta_of=delta_of, **options)
        else:
            report = repository.import_checkpoint(source, ref, base=base, **options)
    if report.skipped:
        out.note(f"left out, being no part of a model: {', '.join(report.skipped)}")
    for note in report.notes:
        out.note(note)
    if as_json:
        out.document(report.as_json())
    elif session.quiet:
        out.line(report.commit)
    else:
        what = "" if report.new_commit else "  (nothing new: the branch holds just this already)"
        out.line((report.ref, REF), "  ", (report.commit[:12], ID), what)
        out.facts(
            [
                ("tensors", f"{report.tensors:,}, {format_size(report.bytes)} with all files"),
                ("written", f"{format_size(report.bytes_written)} in {format_count(report.new_blocks, 'new block')}"),
                ("deduplicated", format_count(report.deduplicated_blocks, "block")),
                *(
                    [("not read", f"{format_size(report.known_bytes)} in files known already")]
                    if report.known_bytes
                    else []
                ),
                ("time", format_seconds(report.seconds)),
            ]
        )
