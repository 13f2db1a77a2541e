"""An import as a transaction: stage a checkpoint, then publish it as a commit on a branch."""

from __future__ import annotations

import time as clock
from dataclasses import asdict, dataclass
from pathlib import Path

from mpfs.formats.training import DIRECTORY as TRAINING_STATE
from mpfs.ingest import lineage
from mpfs.ingest.importer import Ingested, ingest
from mpfs.ingest.pairs import BaseModel
from mpfs.ingest.remote import RemoteTree
from mpfs.objects import Commit, Input, ObjectId, Snapshot, Tensor, object_id
from mpfs.objects.encoding import Json
from mpfs.objects.progress import Progress
from mpfs.store import RefMove, Store, Writer
from mpfs.store.pairs import put_pairs


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What an import did. Bytes: `bytes` of the checkpoint, `bytes_written` of new blocks. `new_commit` is False when
    the ref already held just this. `skipped` are entries of the source that are no weights. `known_bytes` are of files
    that an earlier import had read, and that were not read again; their blocks count as deduplicated. `notes` are for a
    person. `base` is what the commit has as its base, by name; `stated_bases` are what the model's own files name. `pairs` counts the tensors
    that were compared with the base's."""

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
    base: str | None = None
    stated_bases: tuple[str, ...] = ()
    pairs: int = 0

    def as_json(self) -> Json:
        """The JSON form."""
        return {
            **asdict(self),
            "skipped": list(self.skipped),
            "notes": list(self.notes),
            "stated_bases": list(self.stated_bases),
        }


def import_checkpoint(
    store: Store,
    source: Path | RemoteTree,
    ref: str,
    *,
    base: Input | None,
    find_base: bool = False,
    key: str | None,
    strip_prefix: str | None = None,
    everything: bool = False,
    verify: bool = False,
    check_space: bool = True,
    message: str | None,
    author: str,
    threads: int | None,
    progress: Progress | None,
) -> ImportReport:
    """Import a checkpoint and commit it to a branch; see `Repository.import_checkpoint`."""
    started = clock.monotonic()
    tip = store.refs.branch_tip(ref)
    with store.writer() as writer:
        found = ingest(
            source,
            writer,
            store.info.block_size,
            key=key,
            strip_prefix=strip_prefix,
            everything=everything,
            known_to=None if verify else store,
            base=None if base is None else BaseModel(store, base.commit),
            space_of=store if check_space else None,
            threads=threads,
            progress=progress,
        )
        snapshot = object_id(found.snapshot.encode())
        base, notes = _lineage(store, writer, found, base, find_base, ref)
        inputs = () if base is None else (base,)
        current = None if tip is None else store.objects.get(Commit, tip)
        same = current is not None and current.snapshot == snapshot and (not inputs or current.inputs == inputs)
        if same and tip is not None:
            writer.flush()
            put_pairs(store, found.pairs)
            identity = tip
        else:
            name, place = source.name, str(source)
            if isinstance(source, Path):
                name, place = name or source.resolve().name, str(source.resolve())
            commit = Commit(
                snapshot=snapshot,
                parents=() if tip is None else (tip,),
                inputs=inputs,
                plan=None,
                message=_text(message or f"Import {name}"),
                author=author,
                time=int(clock.time()),
                source=_text(place),
                manifest=found.manifest,
            )
            identity = writer.publish(
                tensors=found.tensors,
                snapshot=found.snapshot,
                commit=commit,
                move=RefMove(ref, tip, "branch", _text(f"import: {source}")),
                pairs=found.pairs,
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
        notes=(*found.notes, *notes),
        base=None if base is None else base.name,
        stated_bases=found.stated_bases,
        pairs=len(found.pairs),
    )


def _lineage(
    store: Store, writer: Writer, found: Ingested, base: Input | None, find: bool, ref: str
) -> tuple[Input | None, list[str]]:
    """The base to be kept with the commit, and what is to be said about it."""
    stated = ", ".join(found.stated_bases[:3])
    if base is None and not find:
        return None, [f"the model names {stated} as its base; --base REF keeps that with the commit"] if stated else []
    writer.flush()
    by_id = {object_id(tensor.encode()): tensor for tensor in found.tensors}
    model = found.snapshot.outside(TRAINING_STATE)
    tensors = {name: by_id[identity] for name, identity in model.tensors.items()}
    if base is None:
        likely = lineage.likeliest(store, found.snapshot, tensors, ref)
        if likely is None:
            return None, ["no base found: no model here is near enough" + (f"; it names {stated}" if stated else "")]
        return likely[0], [f"base {likely[0].name}: {likely[1]}"]
    other = store.objects.get(Snapshot, store.objects.get(Commit, base.commit).snapshot).outside(TRAINING_STATE)
    kinship = lineage.compare(
        store, tensors, {name: store.objects.get(Tensor, identity) for name, identity in other.tensors.items()}
    )
    doubt = lineage.doubts(kinship, base.name)
    return base, [] if doubt is None else [doubt]


def _text(text: str) -> str:
    """Text that can be stored: what is not Unicode in a path or an argument becomes an escape."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
