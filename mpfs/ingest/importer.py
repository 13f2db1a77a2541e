"""Importing a checkpoint: look at the source, store every file's bytes, and describe them as a snapshot."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from mpfs.errors import BadInputError
from mpfs.formats import portable
from mpfs.formats.messages import is_unicode, show
from mpfs.ingest import known
from mpfs.ingest.files import source_files
from mpfs.ingest.incoming import Incoming
from mpfs.ingest.lineage import stated_bases
from mpfs.ingest.look import Choice, Found, look_at
from mpfs.ingest.pairs import BaseModel
from mpfs.ingest.pipeline import TensorJob, store_tensors
from mpfs.ingest.remote import RemoteTree
from mpfs.ingest.room import require_room, unstored_bytes
from mpfs.objects import File, ManifestFile, Snapshot, Tensor, object_id
from mpfs.objects.progress import Progress
from mpfs.store import Store, Writer
from mpfs.store.pairs import Pair, PairRecord


@dataclass(frozen=True, slots=True)
class Ingested:
    """What an import found and staged: objects that are not published yet. `size` is the snapshot's, in bytes.

    `skipped` are entries of torch checkpoints that are not weights, by dotted path. `manifest` are the source's files.
    `stated_bases` are what it says that it was fine-tuned from. `pairs` is how its tensors differ from the base's. `known_bytes` and `known_blocks` were not read, as an earlier import had read the same files. `notes` are for a person.
    """

    snapshot: Snapshot
    tensors: tuple[Tensor, ...]
    skipped: tuple[str, ...]
    manifest: tuple[ManifestFile, ...] = ()
    known_bytes: int = 0
    known_blocks: int = 0
    notes: tuple[str, ...] = ()
    stated_bases: tuple[str, ...] = ()
    pairs: Mapping[Pair, PairRecord] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return self.snapshot.size


def ingest(
    source: Path | RemoteTree,
    writer: Writer,
    block_size: int,
    *,
    key: str | None = None,
    strip_prefix: str | None = None,
    everything: bool = False,
    known_to: Store | None = None,
    base: BaseModel | None = None,
    space_of: Store | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Ingested:
    """Read a checkpoint and stage all of it.

    Args:
        source: a directory in Hugging Face layout, an archive of one, or a .safetensors, .gguf, .npz or torch file.
        writer: takes the blocks.
        block_size: bytes of a block.
        key: which state dict of a torch file to take, where it holds several.
        strip_prefix: taken off the names of tensors of torch and .npz files.
        everything: also take what a torch file holds besides a model.
        known_to: the writer's store, if files that an earlier import has read need not be read again.
        base: what it is compared with on the way, but for files that are not read again.
        space_of: the writer's store, if it is to be seen first whether there is room.
        threads: worker threads; default: the number of CPUs.
        progress: told the bytes staged, of all.

    Raises:
        NoSpaceError: there is no room for it; nothing was written.
        IntegrityError: a block of the base is missing or damaged.
        NotFoundError: there is nothing at `source`, or nothing under `key`.
        BadInputError: it is damaged, unsafe or no checkpoint; the subclasses tell which.
    """
    with source_files() as files:
        found = look_at(source, Choice(key, strip_prefix, everything), files)
        found.incoming.sort(key=lambda item: item.path)
        _refuse_impossible(source, found.incoming)
        found.notes.extend(portable.notes(item.path for item in found.incoming))
        staging = _Staging(found, writer, block_size, known_to, base)
        if space_of is not None:
            _require_room(space_of, source, Choice(key, strip_prefix, everything), staging, threads)
        # Closed before the files are: when this fails no worker may still be reading.
        with closing(staging.run(threads, progress)) as described:
            snapshot = Snapshot(tuple(described))
        manifest = staging.manifest()
        files.check_unchanged()
    return Ingested(
        snapshot,
        tuple(staging.tensors),
        tuple(found.skipped),
        manifest,
        staging.known_bytes,
        staging.known_blocks,
        tuple(found.notes),
        stated_bases(found.stated),
        {} if base is None else base.records(snapshot.tensors),
    )


class _Staging:
    """Storing what was found, file by file, but for what is known already."""

    def __init__(
        self, found: Found, writer: Writer, block_size: int, known_to: Store | None, base: BaseModel | None
    ) -> None:
        self.tensors: dict[Tensor, None] = {}
        self.known_bytes = 0
        self.known_blocks = 0
        self._found = found
        self._writer = writer
        self._block_size = block_size
        self._base = base
        self._sha256: dict[str, str] = {}
        self._known: dict[str, known.KnownFile] = {}
        for item in found.incoming if known_to is not None else ():
            entry = known.look_up(known_to, item) if known_to is not None else None
            if entry is not None:
                self._known[item.path] = entry
                self._sha256[item.path] = entry.sha256
                self.known_bytes += item.size
                self.known_blocks += sum(len(tensor.blocks) for tensor in entry.tensors)

    def run(self, threads: int | None, progress: Progress | None) -> Generator[File, None, None]:
        """The files of the snapshot, in order. A generator, to be closed."""
        incoming = self._found.incoming
        unknown = (job for item in incoming if item.path not in self._known for job in self._jobs(item))
        total = sum(item.size for item in incoming)
        with closing(
            store_tensors(
                self._writer,
                self._block_size,
                unknown,
                threads=threads,
                progress=progress,
                done=self.known_bytes,
                total=total,
            )
        ) as stored:
            for item in incoming:
                yield item.described(iter([object_id(tensor.encode()) for tensor in self._tensors_of(item, stored)]))

    def _jobs(self, item: Incoming) -> Iterator[TensorJob]:
        names = [None, *(name for name, _ in item.parts)]
        for name, job in zip(names, item.jobs(), strict=True):
            yield job if name is None or self._base is None else self._base.compared(f"{item.prefix}{name}", job)

    @property
    def unknown(self) -> list[Incoming]:
        """The files that are read."""
        return [item for item in self._found.incoming if item.path not in self._known]

    def manifest(self) -> tuple[ManifestFile, ...]:
        """The source's files, with the hashes of those that were not stored as they are taken now."""
        return tuple(
            ManifestFile(path, file.size, self._sha256.get(path) or file.sha256())
            for path, file in sorted(self._found.sources.items())
        )

    def _tensors_of(self, item: Incoming, stored: Iterator[Tensor]) -> list[Tensor]:
        entry = self._known.get(item.path)
        tensors = list(entry.tensors) if entry is not None else [next(stored) for _ in range(1 + len(item.parts))]
        self.tensors.update(dict.fromkeys(tensors))
        if entry is None and item.whole is not None:
            self._sha256[item.path] = item.whole.digest.hexdigest()
            item.whole.check_unchanged()
            known.remember(self._writer, self._block_size, item, tensors, self._sha256[item.path])
        return tensors


def _require_room(
    store: Store, source: Path | RemoteTree, choice: Choice, staging: _Staging, threads: int | None
) -> None:
    unknown = {item.path: item.size for item in staging.unknown}

    def measure() -> int:
        # Looked at anew: every byte of a source is read once.
        with source_files() as files:
            incoming = [item for item in look_at(source, choice, files).incoming if item.path in unknown]
            return unstored_bytes(store, (job for item in incoming for job in item.jobs()), threads)

    require_room(store, source, sum(unknown.values()), measure)


def _refuse_impossible(source: Path | RemoteTree, incoming: list[Incoming]) -> None:
    """Refuse what no snapshot can hold (odd paths, names twice) before anything is stored."""
    for item in incoming:
        if not is_unicode(item.path):
            raise BadInputError(f"{source}: the file name {show(item.path)} is not valid UTF-8; rename it")
    nothing = iter(lambda: "", None)
    try:
        Snapshot(tuple(item.described(nothing) for item in incoming))
    except ValueError as error:
        raise BadInputError(f"{source}: {error}", file=str(source)) from error
