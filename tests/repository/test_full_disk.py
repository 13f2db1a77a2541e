"""A disk that fills up (DESIGN §4, invariant 8; case S4): a typed error, nothing lost, and usable afterwards."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from child_server import Children
from family import BATCH, new_repository, recipe, variant

from mpfs.repository import Repository

DISK_BYTES = 24 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system."""
    mount_point = tmp_path / "disk"
    mount_point.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(mount_point)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(
            f"this test needs a file system of its own to fill up, and may not mount one: {done.stderr.strip()}"
        )
    yield mount_point
    subprocess.run(["umount", "--lazy", str(mount_point)], check=True)


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    """A server of children: a full disk may end a process that maps its files (SIGBUS), which must not be this one."""
    with Children() as made:
        yield made


def fill(disk: Path, left: int) -> Path:
    """Fill a disk up to `left` bytes; the file that does it."""
    filler = disk / "filler"
    status = os.statvfs(disk)
    size = max(0, status.f_bavail * status.f_frsize - left)
    with filler.open("wb") as file:
        file.write(b"\1" * size)
    return filler


@pytest.mark.parametrize("left", [0, 8 << 10, 64 << 10, 200 << 10, 700 << 10, 1300 << 10])
@pytest.mark.parametrize("operation", ["import", "merge"])
def test_no_space(children: Children, disk: Path, tmp_path: Path, operation: str, left: int) -> None:
    repo = new_repository(disk / "repo", tmp_path)
    source = variant(tmp_path, 50)
    command: dict[str, object] = {"op": operation, "repo": str(repo), "batch": BATCH}
    command |= {"source": str(source), "ref": "new"} if operation == "import" else {"recipe": recipe(50), "into": "new"}
    before = children.run(op="checks", repo=str(repo)).result
    assert before["problems"] == []
    filler = fill(disk, left)
    outcome = children.run(**command)
    assert outcome.status == 0, outcome
    assert outcome.messages.get("error") == "no_space", outcome
    assert "bytes" in outcome.messages["message"]
    assert children.run(op="checks", repo=str(repo)).result == before
    filler.unlink()
    assert children.run(op="checks", repo=str(repo)).result == before
    snapshot = children.run(**command).result["snapshot"]
    calm = new_repository(tmp_path / "calm", tmp_path)
    assert children.run(**{**command, "repo": str(calm)}).result["snapshot"] == snapshot
    with Repository.open(repo) as repository:
        assert repository.fsck(read_data=True).problems == ()
        repository.gc()
        assert repository.fsck(read_data=True).problems == ()
