"""fsspec's own abstract tests, as far as they are about reading: `get`, in all the ways that copying can be meant.

The suite makes its scenarios through the file system under test. This one is read-only; so here what the scenarios
write is noted, and committed to the branch `main` when something is first read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.tests.abstract import AbstractFixtures, AbstractGetTests  # type: ignore[import-untyped]
from vfs_cases import MAP_SIZE, Builder

from mpfs.store import Store
from mpfs.vfs.fsspec import MPFSFileSystem


class _Scenario(MPFSFileSystem):
    """The file system under test, with a way to say what is in it."""

    cachable = False

    def __init__(self, store: Store) -> None:
        super().__init__(repo=store.path)
        self._builder = Builder(store)
        self._noted: dict[str, bytes] = {}

    def note(self, path: str, value: bytes = b"", **_: Any) -> None:
        self._noted[self._strip_protocol(path).removeprefix("main/")] = value

    def ignore(self, path: str, **_: Any) -> None:
        """A repository has no empty directories, and nothing is removed from a commit."""

    touch = pipe = note  # type: ignore[assignment]
    mkdir = makedirs = rm = ignore  # type: ignore[assignment]

    def _place(self, path: str) -> Any:
        if self._noted:
            content, self._noted = self._noted, {}
            self._builder.publish(content)
        return super()._place(path)


class TestGet(AbstractFixtures, AbstractGetTests):  # type: ignore[misc]
    """Every test of `AbstractGetTests`."""

    @pytest.fixture
    def fs(self, tmp_path: Path) -> Iterator[_Scenario]:
        store = Store.create(tmp_path / "repository", block_size=4096, map_size=MAP_SIZE)
        yield _Scenario(store)
        store.close()

    @pytest.fixture
    def fs_path(self) -> str:
        return "main"

    @pytest.fixture
    def fs_join(self) -> Any:
        return lambda *parts: "/".join(parts)

    @pytest.fixture
    def supports_empty_directories(self) -> bool:
        return False

    @pytest.fixture
    def local_path(self, tmp_path: Path) -> str:
        (tmp_path / "local").mkdir()
        return str(tmp_path / "local")


def test_the_suite_is_what_it_was() -> None:
    assert len([name for name in dir(TestGet) if name.startswith("test_get_")]) >= 13
