"""An import as a transaction: stage a checkpoint, then publish it as a commit on a branch."""

from __future__ import annotations

import time as clock
from dataclasses import asdict, dataclass
from pathlib import Path

from mpfs.ingest.importer import ingest
from mpfs.objects import Commit, Input, ObjectId, object_id
from mpfs.objects.encoding import Json
from mpfs.objects.progress import Progress
from mpfs.store import RefMove, Store


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What an import did. Bytes: `bytes` of the checkpoint, `bytes_written` of new blocks. `new_commit` is False when
    the ref already held just this. `skipped` are entries of the source that are no weights. `known_bytes` are of files
    that an earlier import had read, and that were not read again; their blocks count as deduplicated. `notes` are for a
    person."""

    commit: ObjectId
    ref: str
    snapshot: ObjectId
    tensors: int
    bytes: int
    new_blocks: int
    deduplicated_blocks: int
    bytes_written: int
    seconds: float
    new_commit: bool
    skipped: tuple[str, ...]
    known_bytes: int = 0
    notes: tuple[str, ...] = ()

    def as_json(self) -> Json:
        """The JSON form."""
        return {**asdict(self), "skipped": list(self.skipped), "notes": list(self.notes)}


def import_checkpoint(
    store: Store,
    source: Path,
    ref: str,
    *,
    base: Input | None,
    key: str | None,
    strip_prefix: str | None = None,
    verify: bool = False,
    message: str | None,
    author: str,
    threads: int | None,
    progress: Progress | None,
) -> ImportReport:
    """Import a checkpoint and commit it to a branch; see `Repository.import_checkpoint`."""
    started = clock.monotonic()
    tip = store.refs.branch_tip(ref)
    inputs = () if base is None else (base,)
    with store.writer() as writer:
        found = ingest(
            source,
            writer,
            store.info.block_size,
            key=key,
            strip_prefix=strip_prefix,
            known_to=None if verify else store,
            threads=threads,
            progress=progress,
        )
        snapshot = object_id(found.snapshot.encode())
        current = None if tip is None else store.objects.get(Commit, tip)
        same = current is not None and current.snapshot == snapshot and (not inputs or current.inputs == inputs)
        if same and tip is not None:
            writer.flush()
            identity = tip
        else:
            commit = Commit(
                snapshot=snapshot,
                parents=() if tip is None else (tip,),
                inputs=inputs,
                plan=None,
                message=_text(message or f"Import {source.name or source.resolve().name}"),
                author=author,
                time=int(clock.time()),
                source=_text(str(source.resolve())),
                manifest=found.manifest,
            )
            identity = writer.publish(
                tensors=found.tensors,
                snapshot=found.snapshot,
                commit=commit,
                move=RefMove(ref, tip, "branch", _text(f"import: {source}")),
            )
        figures = writer.figures
    return ImportReport(
        commit=identity,
        ref=ref,
        snapshot=snapshot,
        tensors=len(found.snapshot.tensors),
        bytes=found.size,
        new_blocks=figures.new_blocks,
        deduplicated_blocks=figures.deduplicated_blocks + found.known_blocks,
        bytes_written=figures.bytes_written,
        seconds=clock.monotonic() - started,
        new_commit=not same,
        skipped=found.skipped,
        known_bytes=found.known_bytes,
        notes=found.notes,
    )


def _text(text: str) -> str:
    """Text that can be stored: what is not Unicode in a path or an argument becomes an escape."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
