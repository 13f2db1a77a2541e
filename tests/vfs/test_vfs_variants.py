"""Checkouts of a part, to elsewhere, again, and as an archive."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]
from safetensors.torch import load, load_file, save
from vfs_cases import TIME, Builder, Staged, sample_tensors

from mpfs.errors import IntegrityError, MPFSError, NotFoundError, UsageError
from mpfs.objects import BlockId, Tensor
from mpfs.repository import Repository
from mpfs.store import Store

pytest_plugins = ["vfs_fixtures"]


@pytest.fixture
def repository(store: Store, staged: Staged) -> Iterator[Repository]:
    """The sample checkpoint, as `main`."""
    with Repository.open(store.path) as repository:
        yield repository


@pytest.fixture
def sharded(builder: Builder) -> Staged:
    """Two shards with an index, an encoder with a model of its own, as `sharded`."""
    first, second = {"a.weight": torch.arange(2000.0)}, {"b.weight": torch.arange(10.0), "b.bias": torch.ones(3)}
    index = {
        "metadata": {"total_size": 8052},
        "weight_map": dict.fromkeys(first, "model-00001-of-00002.safetensors")
        | dict.fromkeys(second, "model-00002-of-00002.safetensors"),
    }
    content = {
        "config.json": b"{}",
        "model-00001-of-00002.safetensors": save(first, {"format": "pt", "who": "me"}),
        "model-00002-of-00002.safetensors": save(second, {"format": "pt"}),
        "model.safetensors.index.json": json.dumps(index).encode(),
        "encoder/config.json": b"{}",
        "encoder/model.safetensors": save({"c.weight": torch.arange(5.0), "c.bias": torch.ones(2)}),
    }
    return builder.publish(content, ref="sharded", prefixes={"encoder/model.safetensors": "encoder/"})


@pytest.fixture
def memory() -> Iterator[MemoryFileSystem]:
    """fsspec's file system in memory, empty."""
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


def _objects(system: Any, root: str) -> dict[str, bytes]:
    return {path.partition(f"{root}/")[2]: system.cat_file(path) for path in system.find(root)}


def _files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_some_tensors(repository: Repository, sharded: Staged, tmp_path: Path) -> None:
    result = repository.checkout("sharded", tmp_path / "out", include=["b.*", "*/c.bias"])
    files = _files(tmp_path / "out")
    assert set(result.files) == files.keys() == sharded.content.keys() - {"model-00001-of-00002.safetensors"}
    second = "model-00002-of-00002.safetensors"
    assert files[second] == sharded.content[second]
    assert json.loads(files["model.safetensors.index.json"]) == {
        "metadata": {"total_size": 52},
        "weight_map": {"b.bias": second, "b.weight": second},
    }
    assert load(files["encoder/model.safetensors"]).keys() == {"c.bias"}
    assert load(files["encoder/model.safetensors"])["c.bias"].equal(torch.ones(2))


def test_some_tensors_of_a_file(repository: Repository, tmp_path: Path) -> None:
    repository.checkout("main", tmp_path / "out", include=["layer.0.*", "mask"])
    wanted = {name for name in sample_tensors() if name.startswith("layer.0.") or name == "mask"}
    loaded = load_file(tmp_path / "out/model.safetensors")
    assert loaded.keys() == wanted
    for name in wanted:
        assert loaded[name].reshape(-1).view(torch.uint8).equal(sample_tensors()[name].reshape(-1).view(torch.uint8))
    raw = (tmp_path / "out/model.safetensors").read_bytes()
    assert json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"] == {
        "format": "pt",
        "maker": "someone",
    }
    assert (tmp_path / "out/tokenizer/vocab.txt").exists()
    with pytest.raises(NotFoundError, match=r"no tensor matches nope\.\*"):
        repository.checkout("main", tmp_path / "none", include=["nope.*"])
    assert not (tmp_path / "none").exists()


def test_weights_only(repository: Repository, sharded: Staged, tmp_path: Path) -> None:
    repository.checkout("sharded", tmp_path / "out", weights_only=True)
    expected = {path: data for path, data in sharded.content.items() if "config" not in path}
    assert _files(tmp_path / "out") == expected
    repository.checkout("sharded", tmp_path / "some", weights_only=True, include=["a.*"], shard_size=1 << 20)
    assert _files(tmp_path / "some").keys() == {"model.safetensors"}
    assert load_file(tmp_path / "some/model.safetensors")["a.weight"].equal(torch.arange(2000.0))


def test_update_writes_what_changed(repository: Repository, builder: Builder, staged: Staged, tmp_path: Path) -> None:
    changed = {**staged.content, "config.json": b'{"model_type": "new!"}\n', "new.txt": b"new"}
    builder.publish(changed, ref="next")
    target = tmp_path / "out"
    repository.checkout("main", target)
    inodes = {path: (target / path).stat().st_ino for path in staged.content}
    result = repository.checkout("next", target, update=True)
    assert _files(target) == changed
    assert set(result.unchanged) == staged.content.keys() - {"config.json"}
    assert set(result.files) == changed.keys()
    assert result.bytes == len(changed["config.json"]) + 3
    for path, inode in inodes.items():
        assert ((target / path).stat().st_ino == inode) == (path != "config.json")
    again = repository.checkout("next", target, update=True)
    assert (again.bytes, set(again.unchanged)) == (0, set(changed))
    # A file more than there should be is somebody's, until they say otherwise.
    with pytest.raises(UsageError, match=r'"new\.txt"; to remove them use --update with --force'):
        repository.checkout("main", target, update=True)
    assert _files(target) == changed
    repository.checkout("main", target, update=True, force=True)
    assert _files(target) == staged.content


def test_update_repairs_what_was_touched(repository: Repository, staged: Staged, tmp_path: Path) -> None:
    target = tmp_path / "out"
    assert repository.checkout("main", target, update=True).unchanged == ()
    data = bytearray(staged.content["model.safetensors"])
    data[-1] ^= 1
    (target / "model.safetensors").write_bytes(data)
    (target / "config.json").unlink()
    (target / "config.json").symlink_to(tmp_path / "elsewhere.json")
    (tmp_path / "elsewhere.json").write_bytes(staged.content["config.json"])
    (target / "empty.txt").unlink()
    os.mkfifo(target / "empty.txt")
    result = repository.checkout("main", target, update=True)
    assert result.unchanged == ("tokenizer/vocab.txt",)
    assert _files(target) == staged.content
    assert not (target / "config.json").is_symlink()


def test_a_failed_update_changes_nothing(
    repository: Repository, builder: Builder, staged: Staged, damage: Callable[[BlockId], None], tmp_path: Path
) -> None:
    changed = {**staged.content, "config.json": b"{}"}
    snapshot = builder.publish(changed, ref="next").snapshot
    repository.checkout("main", tmp_path / "out")
    content = snapshot.file("config.json")
    damage(builder.store.objects.get(Tensor, getattr(content, "content", "")).blocks[0])
    with pytest.raises(IntegrityError):
        repository.checkout("next", tmp_path / "out", update=True)
    assert _files(tmp_path / "out") == staged.content
    assert os.listdir(tmp_path) == ["repo", "out"] or sorted(os.listdir(tmp_path)) == ["out", "repo"]


def test_to_a_url(repository: Repository, staged: Staged, memory: MemoryFileSystem) -> None:
    seen: list[tuple[int, int]] = []
    result = repository.checkout("main", "memory://bucket/out", progress=lambda *state: seen.append(state))
    assert _objects(memory, "/bucket/out") == staged.content
    total = sum(map(len, staged.content.values()))
    assert (result.target, result.bytes, seen[-1]) == ("memory://bucket/out", total, (total, total))
    with pytest.raises(UsageError, match="there are files already"):
        repository.checkout("main", "memory://bucket/out")
    memory.pipe("/bucket/out/config.json", b"old")
    repository.checkout("main", "memory://bucket/out", force=True)
    assert memory.cat("/bucket/out/config.json") == staged.content["config.json"]
    with pytest.raises(UsageError, match="nonsense"):
        repository.checkout("main", "nonsense://x/y")


def test_a_failed_upload_leaves_nothing_new(
    repository: Repository, staged: Staged, damage: Callable[[BlockId], None], memory: MemoryFileSystem
) -> None:
    damage(repository.reader("main").tensor("mask").blocks[0])
    memory.pipe("/bucket/out/config.json", b"old")
    with pytest.raises(IntegrityError):
        repository.checkout("main", "memory://bucket/out", force=True)
    assert _objects(memory, "/bucket/out") == {"config.json": b"old"}


def test_a_place_that_cannot_be_written(
    repository: Repository, memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("not allowed to write there")

    monkeypatch.setattr(MemoryFileSystem, "makedirs", refuse)
    with pytest.raises(MPFSError, match="memory://bucket/x: cannot be written: not allowed"):
        repository.checkout("main", "memory://bucket/x")


def test_a_local_url_is_a_directory(repository: Repository, staged: Staged, tmp_path: Path) -> None:
    result = repository.checkout("main", f"file://{tmp_path}/out")
    assert result.target == tmp_path / "out"
    assert _files(tmp_path / "out") == staged.content


@pytest.fixture
def s3() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A bucket of its own on moto's server on the loopback, and the storage options that lead there."""
    pytest.importorskip("s3fs", reason="NOT TESTED AGAINST S3: needs the extra s3 (s3fs)")
    server_module = pytest.importorskip("moto.server", reason="NOT TESTED AGAINST S3: needs moto[server]")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    options = {"key": "test", "secret": "test", "client_kwargs": {"endpoint_url": f"http://{host}:{port}"}}
    bucket = f"models-{uuid.uuid4()}"  # moto's servers in one process share what they hold
    fsspec.filesystem("s3", **options).mkdir(bucket)
    yield bucket, options
    server.stop()


def test_to_s3(repository: Repository, staged: Staged, builder: Builder, s3: tuple[str, Mapping[str, Any]]) -> None:
    bucket, options = s3
    large = {**staged.content, "large.safetensors": save({"t": torch.arange(3 << 20, dtype=torch.int64)})}
    builder.publish(large, ref="large", prefixes={"large.safetensors": "large."})
    repository.checkout("large", f"s3://{bucket}/team/out", storage_options=options)
    system = fsspec.filesystem("s3", **options, skip_instance_cache=True)
    assert _objects(system, f"{bucket}/team/out") == large
    with pytest.raises(UsageError, match="there are files already"):
        repository.checkout("main", f"s3://{bucket}/team/out", storage_options=options)


def test_a_failed_upload_to_s3_leaves_nothing(
    repository: Repository, staged: Staged, damage: Callable[[BlockId], None], s3: tuple[str, Mapping[str, Any]]
) -> None:
    damage(repository.reader("main").tensor("mask").blocks[0])
    bucket, options = s3
    with pytest.raises(IntegrityError):
        repository.checkout("main", f"s3://{bucket}/out", storage_options=options)
    assert fsspec.filesystem("s3", **options, skip_instance_cache=True).find(bucket) == []


def test_export(repository: Repository, staged: Staged, tmp_path: Path) -> None:
    first, second = io.BytesIO(), io.BytesIO()
    assert repository.export("main", first.write) == len(first.getvalue())
    repository.export(staged.commit, second.write)
    assert first.getvalue() == second.getvalue()
    assert len(first.getvalue()) % 10240 == 0
    first.seek(0)
    with tarfile.open(fileobj=first) as archive:
        members = archive.getmembers()
        assert [member.name for member in members] == sorted(staged.content)
        assert {member.mtime for member in members} == {TIME}
        for member in members:
            content = archive.extractfile(member)
            assert content is not None
            assert content.read() == staged.content[member.name]
    (tmp_path / "out").mkdir()
    subprocess.run(["tar", "-x", "-C", str(tmp_path / "out")], input=second.getvalue(), check=True)
    assert _files(tmp_path / "out") == staged.content


def test_export_names_that_are_long_or_foreign(repository: Repository, builder: Builder) -> None:
    content = {"d" * 120 + "/" + "n" * 180: b"x", "wörter/重み.txt": b"y" * 513}
    builder.publish(content, ref="names")
    archive = io.BytesIO()
    repository.export("names", archive.write)
    archive.seek(0)
    with tarfile.open(fileobj=archive) as found:
        assert [member.name for member in found] == sorted(content)


def test_on_the_command_line(store: Store, staged: Staged, tmp_path: Path) -> None:
    def mpfs(*arguments: str) -> subprocess.CompletedProcess[bytes]:
        command = [sys.executable, "-m", "mpfs_cli.main", "-r", str(store.path), *arguments]
        return subprocess.run(command, capture_output=True)

    done = mpfs("export", "main", "--include", "mask", "--weights-only")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        assert archive.getnames() == ["model.safetensors"]
    out = str(tmp_path / "out")
    assert mpfs("checkout", "main", out, "--include", "layer.*", "--include", "steps", "--weights-only").returncode == 0
    assert "steps" in load_file(f"{out}/model.safetensors")
    refused = mpfs("checkout", "main", out)
    assert refused.returncode == 2
    done = mpfs("checkout", "main", out, "--update", "--json")
    assert json.loads(done.stdout)["unchanged"] == []
    done = mpfs("checkout", "main", out, "--update", "--json")
    assert sorted(json.loads(done.stdout)["unchanged"]) == sorted(staged.content)
    assert mpfs("checkout", "main", f"file://{tmp_path}/url").returncode == 0
    assert _files(tmp_path / "url") == staged.content
    assert mpfs("checkout", "main", out, "--update", "--include", "zzz").returncode == 13
