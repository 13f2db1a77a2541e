"""A disk that fills up at every point of an import, a merge and a compaction: a typed error, an intact store.

A limit on the size of files (RLIMIT_FSIZE) stands for the full disk: it needs no rights, and cuts writes short in the
same places. Where the tests may mount one, a small tmpfs is filled as well.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parent / "full_disk.py"


def run(*arguments: str) -> dict[str, Any]:
    """Run the script; its summary."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(found)
    return found


@pytest.mark.parametrize("operation", ["import", "merge", "compact"])
def test_files_that_cannot_grow(tmp_path: Path, operation: str) -> None:
    outcomes = Counter(run("limit", operation, str(tmp_path))["outcomes"])
    assert set(outcomes) <= {"done", "no_space"}
    assert outcomes["no_space"] >= 10
    assert outcomes["done"] >= 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 16 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = (
        os.geteuid() == 0
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(place)], capture_output=True, check=False
        ).returncode
    )
    if not mounted:
        pytest.skip("no right to mount a tmpfs")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize("operation", ["import", "merge", "compact"])
def test_a_disk_that_is_full(small_disk: Path, operation: str) -> None:
    outcomes = Counter(run("fill", operation, str(small_disk))["outcomes"])
    assert set(outcomes) <= {"done", "no_space"}
    assert outcomes["no_space"] >= 5
    assert outcomes["done"] >= 1
