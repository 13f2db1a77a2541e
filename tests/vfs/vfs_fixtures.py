"""Fixtures of the tests beside this file, which name it in `pytest_plugins`.

Not a conftest.py, of which mypy allows only one without packages.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from vfs_cases import BLOCK_SIZE, MAP_SIZE, Builder, Staged, sample_files

from mpfs.objects import BlockId
from mpfs.store import Store
from mpfs.vfs.fsspec import MPFSFileSystem
from mpfs.vfs.libfuse import FuseUnavailableError, require_fuse


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """An empty repository with small blocks."""
    store = Store.create(tmp_path / "repo", block_size=BLOCK_SIZE, map_size=MAP_SIZE)
    yield store
    store.close()


@pytest.fixture
def builder(store: Store) -> Builder:
    """Publishes into `store`."""
    return Builder(store)


@pytest.fixture
def staged(builder: Builder) -> Staged:
    """The sample checkpoint, as `main`."""
    return builder.publish(sample_files())


@pytest.fixture
def damage(store: Store) -> Callable[[BlockId], None]:
    """Flip a bit of a block's payload where it lies."""

    def flip(block: BlockId) -> None:
        with store.environment.write() as txn:
            payload = txn.get("blocks", block)
            assert payload is not None
            data = bytearray(payload)
            data[len(data) // 2] ^= 1
            txn.put("blocks", block, bytes(data))

    return flip


@pytest.fixture(autouse=True)
def _forget_file_systems() -> Iterator[None]:
    """fsspec keeps instances, and they keep repositories open."""
    yield
    MPFSFileSystem.clear_instance_cache()


@pytest.fixture
def mounting() -> Callable[..., AbstractContextManager[Path]]:
    """`with mounting(repository, directory) as root`: mounted by a process of its own, as users do.

    Skips, and says so, where the machine has no FUSE: .ci/run installs fuse3, so there it is tested.
    """
    try:
        require_fuse()
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except (FuseUnavailableError, OSError) as error:
        pytest.skip(f"THE MOUNT IS NOT TESTED on this machine: {error}")
    return _mounted


@contextmanager
def _mounted(repository: Path, directory: Path) -> Iterator[Path]:
    command = [sys.executable, "-m", "mpfs_cli.main", "-r", str(repository), "mount", str(directory)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.rstrip("\n") == os.path.realpath(directory), line + process.stdout.read()
        yield directory
    finally:
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 0, output
    assert not os.path.ismount(directory)
