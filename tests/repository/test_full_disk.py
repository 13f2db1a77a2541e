"""A disk that fills up (DESIGN §4, invariant 8; case S4): a typed error, nothing lost, and usable afterwards."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import fsspec  # type: ignore[import-untyped]
import numpy as np
import pytest
from child_server import Children
from family import BATCH, new_repository, recipe, variant

from mpfs.errors import NoSpaceError
from mpfs.repository import Repository
from mpfs.testing.checkpoints import TensorContent, safetensors_bytes, write

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
    calm = shutil.copytree(repo, tmp_path / "calm")
    source = variant(tmp_path, 50)
    command: dict[str, object] = {"op": operation, "repo": str(repo), "batch": BATCH, "check_space": False}
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
    assert children.run(**{**command, "repo": str(calm)}).result["snapshot"] == snapshot
    with Repository.open(repo) as repository:
        assert repository.fsck(read_data=True).problems == ()
        repository.gc()
        assert repository.fsck(read_data=True).problems == ()


MODEL_BYTES = 4 * 256 * 400 * 4


def state(repository: Repository) -> tuple[object, ...]:
    """What must not change when something is refused."""
    store = repository._store
    with store.environment.read() as txn:
        return txn.number, store.environment.data_size(), [(ref.name, ref.commit) for ref in repository.refs()]


def figure(error: NoSpaceError, name: str) -> int:
    """A number of bytes that an error tells."""
    value = error.details[name]
    assert isinstance(value, int)
    return value


class TestBeforeWorkStarts:
    """Free space is looked at first: refused is what cannot fit, and not what is stored already."""

    def test_an_import_that_cannot_fit_writes_nothing(self, disk: Path, tmp_path: Path) -> None:
        with Repository.open(new_repository(disk / "repo", tmp_path)) as repository:
            before = state(repository)
            filler = fill(disk, MODEL_BYTES - (100 << 10))
            with pytest.raises(
                NoSpaceError, match=r"needs 2,\d+,\d+ bytes, 1,\d+,\d+ are free.*--no-space-check"
            ) as caught:
                repository.import_checkpoint(variant(tmp_path, 50), "new")
            assert state(repository) == before
            assert caught.value.exit_code == 15
            # A block of 16 KiB takes five pages, with LMDB's header before it.
            assert MODEL_BYTES < figure(caught.value, "needed") < MODEL_BYTES * 1.4
            assert 0 < figure(caught.value, "free") < MODEL_BYTES * 1.2
            filler.unlink()
            repository.import_checkpoint(variant(tmp_path, 50), "new")

    def test_what_is_stored_already_needs_no_room(self, disk: Path, tmp_path: Path) -> None:
        with Repository.open(new_repository(disk / "repo", tmp_path)) as repository:
            expected = repository.resolve("one")
            copy = shutil.copytree(variant(tmp_path, 1), tmp_path / "copy")
            fill(disk, 400 << 10)
            report = repository.import_checkpoint(copy, "new")
            assert report.new_blocks == 0
            assert report.snapshot == repository.show(expected).commit.snapshot

    def test_what_is_new_in_part_needs_that_part(self, disk: Path, tmp_path: Path) -> None:
        """A base with one tensor of four changed."""
        with Repository.open(new_repository(disk / "repo", tmp_path)) as repository:
            tensors = [
                TensorContent(name, "F32", tuple(tensor.shape), np.asarray(tensor).tobytes())
                for name, tensor in repository.load("base").items()
            ]
            tensors[2] = TensorContent(tensors[2].name, "F32", tensors[2].shape, os.urandom(len(tensors[2].data)))
            source = write(tmp_path / "in", {"model.safetensors": safetensors_bytes(tensors, {"format": "pt"})})
            filler = fill(disk, 100 << 10)
            with pytest.raises(NoSpaceError, match="without what is stored already") as caught:
                repository.import_checkpoint(source, "new")
            assert MODEL_BYTES / 4 < figure(caught.value, "needed") < MODEL_BYTES / 2
            filler.unlink()
            fill(disk, 1100 << 10)
            assert repository.import_checkpoint(source, "new").bytes_written < MODEL_BYTES / 2

    def test_a_source_elsewhere_is_not_read_twice(self, disk: Path, tmp_path: Path) -> None:
        with Repository.open(new_repository(disk / "repo", tmp_path)) as repository:
            system = fsspec.filesystem("memory")
            try:
                for path in variant(tmp_path, 1).iterdir():
                    system.pipe(f"/full-disk/{path.name}", path.read_bytes())
                before = state(repository)
                fill(disk, 400 << 10)
                with pytest.raises(NoSpaceError, match="if nothing of it is stored already"):
                    repository.import_checkpoint("memory://full-disk", "new")
                assert state(repository) == before
                assert repository.import_checkpoint("memory://full-disk", "new", check_space=False).new_blocks == 0
            finally:
                system.rm("/full-disk", recursive=True)

    @pytest.mark.parametrize("method", ["task_arithmetic", "ties"])
    def test_a_merge(self, disk: Path, tmp_path: Path, method: str) -> None:
        """What an earlier merge has computed needs no room."""
        with Repository.open(new_repository(disk / "repo", tmp_path)) as repository:
            what = recipe(50, method)
            if method == "ties":
                for model in what["models"]:
                    model["parameters"]["density"] = 0.5
            before = state(repository)
            filler = fill(disk, MODEL_BYTES - (100 << 10))
            with pytest.raises(NoSpaceError, match=r"the merge .* needs") as caught:
                repository.merge(what, "new")
            assert state(repository) == before
            assert MODEL_BYTES < figure(caught.value, "needed") < MODEL_BYTES * 1.4
            filler.unlink()
            first = repository.merge(what, "new")
            fill(disk, 400 << 10)
            assert repository.merge(what, "again").snapshot == first.snapshot
            with pytest.raises(NoSpaceError):
                repository.merge(what, "again", reuse=False)
            assert repository.merge(what, "once-more", reuse=False, check_space=False).snapshot == first.snapshot
