"""What a revision holds, in every way there is to get at it: the part of `mpfs.Repository` that reads.

The facade inherits it, so that it stays a list of what one can do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpfs.errors import NotFoundError
from mpfs.objects import Commit, File, ObjectId, Snapshot, Tensor
from mpfs.objects.progress import Progress
from mpfs.store import Store

if TYPE_CHECKING:
    import torch

    from mpfs.vfs.checkout import CheckoutResult
    from mpfs.vfs.mount import Mount
    from mpfs.vfs.reader import SnapshotReader
    from mpfs.vfs.weights import Weights


class Contents:
    """Reads revisions out of a store. A subclass says what a revision is."""

    _store: Store

    def resolve(self, revision: str) -> ObjectId:
        """The id of the commit that a revision names."""
        raise NotImplementedError

    def snapshot(self, revision: str) -> Snapshot:
        """The snapshot of a commit."""
        raise NotImplementedError

    def reader(self, revision: str) -> SnapshotReader:
        """Random access to the files and tensors of a revision."""
        from mpfs.vfs.reader import SnapshotReader

        return SnapshotReader(self._store, self.snapshot(revision), revision)

    def ls(self, revision: str, path: str = "") -> list[File]:
        """The files of a revision at or under `path`.

        Raises:
            NotFoundError: there are none.
        """
        files = self.snapshot(revision).files_under(path)
        if path.strip("/") and not files:
            raise NotFoundError(f"{revision} has no file {path}", path=path)
        return files

    def tensors(self, revision: str) -> dict[str, Tensor]:
        """Every tensor object (dtype, shape, blocks) of a revision, by name; no block is read."""
        return {
            name: self._store.objects.get(Tensor, identity)
            for name, identity in self.snapshot(revision).tensors.items()
        }

    def load(self, revision: str) -> dict[str, torch.Tensor]:
        """All tensors of a revision, on the CPU, each with memory of its own: `model.load_state_dict(repo.load("main"))`."""
        return self.open_weights(revision).load()

    def open_weights(self, revision: str) -> Weights:
        """The tensors of a revision behind the interface of safetensors' `safe_open`, read when they are asked for.

        with repo.open_weights("merged") as weights:
            head = weights.get_slice("lm_head.weight")[:1000]
        """
        from mpfs.vfs.weights import Weights

        return Weights(self.reader(revision))

    def tensor(self, revision: str, name: str) -> torch.Tensor:
        """One tensor of a revision, on the CPU.

        Raises:
            NotFoundError: there is no such tensor.
        """
        return self.reader(revision).load_tensor(name)

    def checkout(
        self,
        revision: str,
        target: str | os.PathLike[str],
        *,
        shard_size: int | None = None,
        include: Iterable[str] | None = None,
        weights_only: bool = False,
        force: bool = False,
        update: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
    ) -> CheckoutResult:
        """Write the files of a revision into a directory, all or nothing; or to where an fsspec URL leads.

        Args:
            revision: what to write.
            target: a directory that must not exist, or be empty; or a URL such as s3://bucket/prefix.
            shard_size: bytes of tensors a file; None: the files as they are in the snapshot, byte for byte.
            include: patterns (`*.mlp.*`); only tensors whose name matches one of them. None: all.
            weights_only: only safetensors files and their indexes.
            force: replace a directory that is not empty, as a whole. At a URL: write over what is there.
            update: the directory is an earlier checkout: write only the files that are no longer what they should be.
                Without `force` it is refused if there are files in it that the revision does not have.
            storage_options: fsspec's, for a URL.
            progress: told bytes done, of all.

        Raises:
            UsageError: the directory is not empty, or must not be replaced.
            NotFoundError: no tensor matches `include`.
            IntegrityError: a block is damaged; nothing is left in the directory.
            NoSpaceError: the disk is full; nothing is left in the directory.
        """
        from mpfs.vfs.checkout import check_out
        from mpfs.vfs.plan import Variant, plan_from
        from mpfs.vfs.remote import is_url, local_path, upload

        variant = Variant(shard_size, None if include is None else tuple(include), weights_only)
        snapshot, place = self.snapshot(revision), os.fspath(target)
        if is_url(place):
            files = plan_from(self._store, snapshot, revision, variant)
            return upload(
                files,
                self._store,
                place,
                revision,
                force=force,
                update=update,
                options=storage_options,
                progress=progress,
            )
        return check_out(
            self._store,
            snapshot,
            Path(local_path(place)),
            name=revision,
            variant=variant,
            force=force,
            update=update,
            progress=progress,
        )

    def export(
        self,
        revision: str,
        write: Callable[[bytes], object],
        *,
        shard_size: int | None = None,
        include: Iterable[str] | None = None,
        weights_only: bool = False,
        progress: Progress | None = None,
    ) -> int:
        """Hand the files of a revision to `write` as a tar archive, always the same bytes; its length.

        Args:
            revision, shard_size, include, weights_only, progress: as for `checkout`.
            write: such as the `write` of a file opened for binary writing.

        Raises:
            As `checkout`. What was written by then is not a whole archive.
        """
        from mpfs.vfs.export import export_tar
        from mpfs.vfs.plan import Variant, plan_from

        variant = Variant(shard_size, None if include is None else tuple(include), weights_only)
        commit = self._store.objects.get(Commit, self.resolve(revision))
        files = plan_from(self._store, self.snapshot(revision), revision, variant)
        return export_tar(files, self._store, revision, write, time=commit.time, progress=progress)

    def check_checkout_target(self, directory: str | os.PathLike[str], *, force: bool = False) -> None:
        """Whether `checkout` may write to a directory, before anything costly is done for it.

        Raises:
            UsageError: it is not empty, or must not be replaced.
        """
        from mpfs.vfs.target import check_target, resolve_target

        check_target(resolve_target(Path(directory)), self._store.path, force=force)

    def mount(
        self,
        directory: str | os.PathLike[str],
        *,
        allow_other: bool = False,
        report: Callable[[str], object] = lambda message: None,
    ) -> Mount:
        """Mount every ref as a read-only directory, until the result is closed (use it in a `with` block).

        It is for other processes: see `mpfs.vfs.mount.Mount`, which also says what the arguments mean.

        Raises:
            UsageError: the directory is not empty, or in the repository.
            FuseUnavailableError: the machine lacks libfuse 3 or /dev/fuse; the message says what to install.
        """
        from mpfs.vfs.mount import Mount

        return Mount(self._store, Path(directory), allow_other=allow_other, report=report)

    def check_mountpoint(self, directory: str | os.PathLike[str]) -> Path:
        """The absolute path of a directory that `mount` can take, made if need be.

        Raises:
            As `mount`.
        """
        from mpfs.vfs.libfuse import require_fuse
        from mpfs.vfs.mount import check_mountpoint

        require_fuse()
        return check_mountpoint(Path(directory), self._store.path)
