"""What the tests of history share: small models in a small repository, and commits made by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from mpfs.objects import BlockId, Commit, Input, ObjectId, Snapshot, object_id
from mpfs.repository import Repository
from mpfs.store import BlockReader, RefMove
from mpfs.testing.checkpoints import write

BLOCK_SIZE = 4096


def new_repository(path: Path) -> Repository:
    """An empty repository with small blocks."""
    return Repository.create(path, block_size=BLOCK_SIZE, map_size=1 << 30, author="tester")


class Models:
    """Imports models given as tensors and side files."""

    def __init__(self, repository: Repository, root: Path) -> None:
        self.repository = repository
        self.root = root

    def put(
        self,
        ref: str,
        tensors: Mapping[str, torch.Tensor],
        files: Mapping[str, bytes] | None = None,
        base: str | None = None,
    ) -> ObjectId:
        """Import as `ref`; the commit's id."""
        folder = self.root / ref.replace("/", "_")
        write(folder, {"model.safetensors": save(dict(tensors), {"format": "pt"}), **(files or {})})
        return self.repository.import_checkpoint(folder, ref, base=base).commit


def publish(
    repository: Repository,
    snapshot: ObjectId,
    ref: str,
    *,
    parents: Sequence[ObjectId] = (),
    inputs: Sequence[ObjectId] = (),
    time: int = 0,
    message: str = "by hand",
) -> ObjectId:
    """Commit a snapshot that is in the store, wherever the ref is; the commit's id."""
    store = repository._store
    commit = Commit(
        snapshot,
        tuple(parents),
        tuple(Input("expert", item[:8], item) for item in inputs),
        None,
        message,
        "tester",
        time,
    )
    found = store.refs.find(ref)
    with store.writer() as writer:
        return writer.publish(
            tensors=[],
            snapshot=store.objects.get(Snapshot, snapshot),
            commit=commit,
            move=RefMove(ref, None if found is None else found.commit, "branch", "test"),
        )


def commit_id(commit: Commit) -> ObjectId:
    """A commit's id."""
    return object_id(commit.encode())


@contextmanager
def counted_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[BlockId]]:
    """Every block that is read inside the `with` block, in order."""
    read: list[BlockId] = []
    original = BlockReader.view

    @contextmanager
    def view(self: BlockReader, blocks: Sequence[BlockId], where: str) -> Iterator[list[memoryview]]:
        read.extend(blocks)
        with original(self, blocks, where) as views:
            yield views

    with monkeypatch.context() as patch:
        patch.setattr(BlockReader, "view", view)
        yield read
