"""How checkpoints come into a repository: the part of the facade that imports and verifies.

The facade inherits it, so that it stays a list of what one can do. Importing it is cheap: torch waits until it is used.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpfs.errors import NotFoundError
from mpfs.objects import Commit, Input, ObjectId, Snapshot
from mpfs.objects.progress import Progress
from mpfs.store import Store

if TYPE_CHECKING:
    from mpfs.ingest.commit import ImportReport
    from mpfs.ingest.verify import VerifyReport


AUTO = "auto"
"""Stands for a base that is to be found."""


class Imports:
    """Importing, for a class that has a store, an author and can resolve revisions."""

    _store: Store
    _author: str

    def resolve(self, revision: str) -> ObjectId:
        """The id of the commit that a revision names."""
        raise NotImplementedError

    def import_checkpoint(
        self,
        source: str | os.PathLike[str],
        ref: str,
        *,
        base: str | None = None,
        key: str | None = None,
        strip_prefix: str | None = None,
        everything: bool = False,
        verify: bool = False,
        check_space: bool = True,
        message: str | None = None,
        threads: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
    ) -> ImportReport:
        """Import a checkpoint and commit it to a branch.

        Args:
            source: a directory in Hugging Face layout, a zip or tar archive of one, or a .safetensors, .gguf, .npz or torch
                file; or an fsspec URL of either, such as s3://bucket/model or zip://model::https://example.org/x.whl; or a model
                on the Hugging Face hub, as org/name or org/name@revision.
            ref: the branch; made if it does not exist.
            base: what it was fine-tuned from, as a revision; kept with the commit. "auto": the model that is nearest, by
                names, shapes and sketches, if one is near enough. The report's notes say what was found, and whether a
                base that was given is plausible.
            key: which state dict of a torch file to take, where it holds several.
            strip_prefix: taken off the names of tensors of torch and .npz files that begin with it.
            everything: also keep what a torch file holds besides the model (optimizer, scheduler, counters, …), in the
                directory training_state; see `load_training`.
            verify: read files again that an earlier import has read, and that have not changed since by their time stamps.
            check_space: see first whether there is room. Where the whole source does not fit, a local one is read once more to
                find out how much of it is stored already; a remote one is refused, although it might fit.
            message: the commit's message; default: what was imported.
            threads: worker threads; default: the number of CPUs.
            storage_options: fsspec's, for a URL.
            progress: told bytes done, of all.

        Raises:
            NotFoundError: there is nothing at `source`; or `base` names nothing.
            BadInputError: the source is damaged, unsafe or no checkpoint. Nothing is changed.
            RefConflictError: `ref` is a tag, or moved meanwhile.
            NoSpaceError: there is no room for it; or the disk or the map got full.
        """
        from mpfs.ingest.commit import import_checkpoint
        from mpfs.ingest.remote import open_source

        return import_checkpoint(
            self._store,
            open_source(source, storage_options) if isinstance(source, str) else Path(source),
            ref,
            base=None if base is None or base == AUTO else Input("base", base, self.resolve(base)),
            find_base=base == AUTO,
            key=key,
            strip_prefix=strip_prefix,
            everything=everything,
            verify=verify,
            check_space=check_space,
            message=message,
            author=self._author,
            threads=threads,
            progress=progress,
        )

    def import_delta(self, source: str | os.PathLike[str], ref: str, *, delta_of: str, **options: Any) -> ImportReport:
        """Import a checkpoint that holds the differences to a model, tensor by tensor, and commit the sum to a branch.

        The sum is computed in float32 (float64 where either is) and rounded to the model's dtypes. The differences
        themselves are kept on the branch `deltas/REF`.

        Args:
            source: as for `import_checkpoint`.
            ref: the branch of the sum; made if it does not exist.
            delta_of: the model that they are differences to, as a revision.
            options: of `import_checkpoint`, but `base`.

        Raises:
            As `import_checkpoint`; and
            MismatchError: there are tensors that the model has not, or of other shapes.
        """
        from mpfs.ingest.delta import DELTAS, add_delta

        base = self.resolve(delta_of)
        self._store.refs.branch_tip(ref)
        report = self.import_checkpoint(source, f"{DELTAS}{ref}", **options)
        return add_delta(self._store, report, ref, delta_of, base, self._author)

    def load_training(self, revision: str) -> Any:
        """The object that a training checkpoint was saved from, of an import with `everything`: what torch.load gave.

        Mappings are plain dicts; what could not be kept (the import's report has it under `skipped`) is None.

        Raises:
            NotFoundError: the commit has no state of a training.
            IntegrityError: a block is damaged.
        """
        from mpfs.formats.training import VALUES_PATH, rebuild
        from mpfs.vfs.reader import SnapshotReader

        snapshot = self._store.objects.get(Commit, self.resolve(revision)).snapshot
        reader = SnapshotReader(self._store, self._store.objects.get(Snapshot, snapshot), revision)
        if VALUES_PATH not in reader:
            raise NotFoundError(f"{revision} has no state of a training: it was not imported with --all")
        return rebuild(b"".join(reader.open(VALUES_PATH).iter_chunks()), reader.load_tensor)

    def verify(
        self,
        revision: str,
        source: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
    ) -> VerifyReport:
        """Compare a source with what was imported: names, sizes, SHA-256. No block is read.

        Args:
            revision: a commit that an import made.
            source: what was imported, or a copy: whatever `import_checkpoint` takes. It is streamed, not copied.
            storage_options: fsspec's, for a URL.
            progress: told bytes read, of all.

        Raises:
            NotFoundError: there is nothing at `source`, or the commit is no import's.
            BadInputError: a file cannot be read, or changes meanwhile.
        """
        from mpfs.ingest.remote import open_source
        from mpfs.ingest.verify import verify

        identity = self.resolve(revision)
        manifest = self._store.objects.get(Commit, identity).manifest
        place = open_source(source, storage_options) if isinstance(source, str) else Path(source)
        return verify(identity, manifest, place, progress)
