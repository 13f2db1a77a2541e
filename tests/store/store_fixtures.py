"""Stores for tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mpfs.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A new store with blocks of 4 KiB."""
    made = Store.create(tmp_path / "repo", block_size=4096, map_size=1 << 30)
    yield made
    made.close()
