"""What the tests of imports share: small repositories, and what must be the same after a failed import."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from mpfs.errors import MPFSError
from mpfs.repository import Repository
from mpfs.testing import checkpoints

MAP_SIZE = 1 << 33
OBJECT_DATABASES = ("tensors", "snapshots", "commits", "plans", "runs", "refs", "reflog")


def new_repository(path: Path, block_size: int = 4096) -> Repository:
    """An empty repository."""
    return Repository.create(path, block_size=block_size, map_size=MAP_SIZE, author="tester")


def digests(files: Mapping[str, bytes]) -> dict[str, str]:
    """SHA-256 of each file."""
    return {path: hashlib.sha256(content).hexdigest() for path, content in files.items()}


def directory_digests(directory: Path) -> dict[str, str]:
    """SHA-256 of each file of a directory."""
    return digests(checkpoints.read(directory))


def object_counts(repository: Repository) -> dict[str, int]:
    """How many objects and refs there are."""
    with repository._store.environment.read() as txn:
        return {name: txn.count(name) for name in OBJECT_DATABASES}


def assert_clean(repository: Repository) -> None:
    """fsck, with the data read, finds nothing."""
    assert repository.fsck(read_data=True).problems == ()


@contextmanager
def refused(repository: Repository, error: type[MPFSError], match: str | None = None) -> Iterator[None]:
    """The block raises just this error, leaves refs and objects as they are, and the repository whole."""
    before = object_counts(repository), repository.refs(), repository.reflog()
    with pytest.raises(error, match=match) as caught:
        yield
    assert type(caught.value) is error
    assert "\n" not in caught.value.message
    assert (object_counts(repository), repository.refs(), repository.reflog()) == before
    assert_clean(repository)
