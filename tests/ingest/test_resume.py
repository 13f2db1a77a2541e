"""Imports that go on where another one stopped, files that are not read twice, and the list of source files."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from ingest_cases import assert_clean, directory_digests, new_repository

from mpfs.errors import NotFoundError
from mpfs.ingest import known
from mpfs.ingest import source as source_module
from mpfs.objects import Commit
from mpfs.repository import Repository
from mpfs.store.writer import BATCH_BYTES, UNSYNCED_BYTES
from mpfs.testing.checkpoints import TensorContent, safetensors_bytes, write

CHILD = """
import sys
from mpfs.repository import Repository
with Repository.open(sys.argv[1]) as repository:
    def progress(done, total):
        print(done, flush=True)
    repository.import_checkpoint(sys.argv[2], "main", progress=progress)
"""


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    with new_repository(tmp_path / "repo") as made:
        yield made


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are remembered however young they are."""
    monkeypatch.setattr(known, "SETTLED_NS", -1_000_000_000)


def shard(seed: int, tensors: int = 4, size: int = 10_000) -> bytes:
    rng = np.random.default_rng(seed)
    return safetensors_bytes(
        [
            TensorContent(f"t{seed}.{n}", "F32", (size,), rng.standard_normal(size, np.float32).tobytes())
            for n in range(tensors)
        ],
        {"format": "pt"},
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(
        tmp_path / "in", {"a.safetensors": shard(1), "b.safetensors": shard(2), "config.json": b"{}", "e": b""}
    )


def reads(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes that are read of each source file's contents from now on."""
    found: dict[str, int] = {}
    original = source_module.SourceFile.read

    def read(self: source_module.SourceFile, offset: int, size: int) -> bytes | memoryview:
        found[self.path.name] = found.get(self.path.name, 0) + size
        return original(self, offset, size)

    monkeypatch.setattr(source_module.SourceFile, "read", read)
    return found


@pytest.mark.usefixtures("settled")
class TestKnownFiles:
    def test_are_not_read_again(self, repository: Repository, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        first = repository.import_checkpoint(model, "main")
        assert first.known_bytes == 0
        found = reads(monkeypatch)
        calls: list[tuple[int, int]] = []
        second = repository.import_checkpoint(model, "other", progress=lambda *call: calls.append(call))
        assert found == {}
        assert second.snapshot == first.snapshot
        assert second.known_bytes == second.bytes == first.bytes
        assert (second.new_blocks, second.deduplicated_blocks) == (0, first.new_blocks + first.deduplicated_blocks)
        manifests = [repository._store.objects.get(Commit, item.commit).manifest for item in (first, second)]
        assert manifests[0] == manifests[1]
        assert_clean(repository)

    def test_are_read_with_verify(self, repository: Repository, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        repository.import_checkpoint(model, "main")
        found = reads(monkeypatch)
        assert repository.import_checkpoint(model, "other", verify=True).known_bytes == 0
        assert sum(found.values()) == sum(path.stat().st_size for path in model.iterdir())

    def test_a_changed_file_is_read(self, repository: Repository, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        repository.import_checkpoint(model, "main")
        (model / "b.safetensors").write_bytes(shard(3))
        found = reads(monkeypatch)
        repository.import_checkpoint(model, "main")
        assert set(found) == {"b.safetensors"}
        assert "t3.0" in repository.tensors("main")

    def test_a_copy_with_the_same_times_is_read(
        self, repository: Repository, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Size and time of modification can be forged, the time of the change of the inode cannot."""
        repository.import_checkpoint(model, "main")
        path = model / "b.safetensors"
        status = path.stat()
        other = bytearray(path.read_bytes())
        other[-1] ^= 1
        path.write_bytes(bytes(other))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        found = reads(monkeypatch)
        repository.import_checkpoint(model, "main")
        assert set(found) == {"b.safetensors"}

    def test_blocks_that_are_gone_are_read_again(
        self, repository: Repository, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        repository.import_checkpoint(model, "main")
        repository.remove_ref("main")
        repository.gc(reflog_days=0)
        found = reads(monkeypatch)
        assert repository.import_checkpoint(model, "main").new_blocks > 0
        assert {"a.safetensors", "b.safetensors"} <= set(found)
        assert_clean(repository)


def test_a_young_file_is_not_remembered(repository: Repository, model: Path) -> None:
    repository.import_checkpoint(model, "main")
    assert repository.import_checkpoint(model, "other").known_bytes == 0


@pytest.mark.usefixtures("settled")
def test_files_that_were_finished_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two files is in a batch that was full, so it is durable when the second one is interrupted."""
    tensors = BATCH_BYTES >> 21
    source = write(
        tmp_path / "in", {"a.safetensors": shard(1, tensors, 1 << 18), "b.safetensors": shard(2, tensors + 8, 1 << 18)}
    )

    def stop(done: int, total: int) -> None:
        if done > total - (4 << 20):
            raise KeyboardInterrupt

    with new_repository(tmp_path / "repo", 1 << 20) as repository:
        with pytest.raises(KeyboardInterrupt):
            repository.import_checkpoint(source, "main", progress=stop)
        assert list(repository.refs()) == []
        found = reads(monkeypatch)
        report = repository.import_checkpoint(source, "main")
        assert set(found) == {"b.safetensors"}
        assert report.known_bytes == (source / "a.safetensors").stat().st_size
        assert_clean(repository)


def test_a_killed_import_stores_at_most_64_mib_again(tmp_path: Path) -> None:
    """The batch in flight may have been committed or not; what was committed is found again."""
    assert UNSYNCED_BYTES == 64 << 20
    size = 4 * UNSYNCED_BYTES
    rng = np.random.default_rng(5)
    tensors = [TensorContent(f"t{n}", "F32", (1 << 20,), rng.bytes(4 << 20)) for n in range(size >> 22)]
    source = write(tmp_path / "in", {"model.safetensors": safetensors_bytes(tensors)}) / "model.safetensors"
    with new_repository(tmp_path / "repo", 1 << 20) as repository:
        path = repository.path
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path), str(source)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        staged = 0
        killed = False
        for line in child.stdout:  # to the end: the child goes on until the signal arrives
            staged = int(line)
            if staged > 0.6 * size and not killed:
                killed = True
                child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    with Repository.open(path) as repository:
        assert repository.refs() == []
        stored = sum(
            len(value) for _, batch in repository._store.environment.batches("blocks", 8) for _, value in batch
        )
        assert stored > 0
        report = repository.import_checkpoint(source, "main")
        # Every block that was durable is found again, and of those staged two batches of 32 MiB were lost at the most:
        # the one that was being written, and the one that was being filled.
        assert report.bytes_written == report.bytes - stored
        assert staged - stored <= UNSYNCED_BYTES + (1 << 20)
        assert_clean(repository)


class TestManifest:
    def test_it_lists_the_source_files(self, repository: Repository, model: Path) -> None:
        report = repository.import_checkpoint(model, "main")
        manifest = repository._store.objects.get(Commit, report.commit).manifest
        assert {item.path: item.sha256 for item in manifest} == directory_digests(model)
        assert {item.path: item.size for item in manifest} == {
            path.name: path.stat().st_size for path in model.iterdir()
        }
        assert repository.verify("main", model).ok

    def test_of_torch_files(self, repository: Repository, tmp_path: Path) -> None:
        (tmp_path / "in").mkdir()
        torch.save({"w": torch.ones(300, 40)}, tmp_path / "in/pytorch_model.bin")
        write(tmp_path / "in", {"config.json": b"{}"})
        report = repository.import_checkpoint(tmp_path / "in", "main")
        manifest = repository._store.objects.get(Commit, report.commit).manifest
        assert {item.path: item.sha256 for item in manifest} == directory_digests(tmp_path / "in")
        assert repository.verify("main", tmp_path / "in").ok

    def test_of_one_file_under_any_name(self, repository: Repository, model: Path, tmp_path: Path) -> None:
        repository.import_checkpoint(model / "a.safetensors", "main")
        write(tmp_path, {"copy.safetensors": shard(1)})
        assert repository.verify("main", tmp_path / "copy.safetensors").ok
        write(tmp_path, {"copy.safetensors": shard(2)})
        (problem,) = repository.verify("main", tmp_path / "copy.safetensors").problems
        assert problem.kind == "sha256"

    def test_differences(self, repository: Repository, model: Path) -> None:
        repository.import_checkpoint(model, "main")
        content = bytearray(shard(1))
        content[-1] ^= 1
        write(model, {"a.safetensors": bytes(content), "config.json": b"{ }", "new.txt": b"x"})
        (model / "b.safetensors").unlink()
        report = repository.verify("main", model)
        assert not report.ok
        assert [(item.kind, item.path) for item in report.problems] == [
            ("sha256", "a.safetensors"),
            ("missing", "b.safetensors"),
            ("size", "config.json"),
            ("extra", "new.txt"),
        ]
        assert hashlib.sha256(content).hexdigest() in report.problems[0].detail

    def test_what_cannot_be_verified(self, repository: Repository, model: Path, tmp_path: Path) -> None:
        repository.import_checkpoint(model, "main")
        with pytest.raises(NotFoundError, match="there is nothing"):
            repository.verify("main", tmp_path / "none")
        recipe = {
            "merge_method": "linear",
            "models": [{"model": "main", "parameters": {"weight": 1}}],
            "dtype": "float32",
        }
        repository.merge(recipe, into="merged")
        with pytest.raises(NotFoundError, match="not made by an import"):
            repository.verify("merged", model)


@pytest.mark.slow
def test_twenty_thousand_small_tensors(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = [TensorContent(f"layers.{n}.weight", "F32", (256,), rng.bytes(1024)) for n in range(20_000)]
    source = write(tmp_path / "in", {"model.safetensors": safetensors_bytes(tensors)})
    with new_repository(tmp_path / "repo", 1 << 20) as repository:
        started = time.monotonic()
        assert repository.import_checkpoint(source, "main").tensors == 20_000
        # Takes 4 s alone on two cores.
        assert time.monotonic() - started < 30
