"""The fsspec file system, used the way its users do."""

from __future__ import annotations

import errno
import io
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import fsspec  # type: ignore[import-untyped]
import pytest
import torch
from safetensors.torch import load
from vfs_cases import BLOCK_SIZE, TIME, Builder, Staged, sample_tensors

from mpfs.errors import IntegrityError, NotARepositoryError, UsageError
from mpfs.objects import BlockId, Tensor
from mpfs.store import Store
from mpfs.vfs.fsspec import MPFSFileSystem

pytest_plugins = ["vfs_fixtures"]


@pytest.fixture
def fs(store: Store, staged: Staged) -> MPFSFileSystem:
    """The sample repository."""
    system = fsspec.filesystem("mpfs", repo=str(store.path))
    assert isinstance(system, MPFSFileSystem)
    return system


@pytest.fixture
def other(builder: Builder, staged: Staged) -> Staged:
    """A ref with a slash, with one file as in `main` and one not."""
    return builder.publish({"config.json": staged.content["config.json"], "x.txt": b"x"}, ref="team/model/v1")


def test_open_by_url(store: Store, staged: Staged) -> None:
    with fsspec.open("mpfs://main/config.json", repo=str(store.path)) as file:
        assert file.read() == staged.content["config.json"]
    with fsspec.open("mpfs://main/tokenizer/vocab.txt", "r", repo=str(store.path)) as file:
        lines = file.read().split("\n")
    assert lines == [f"word{number}" for number in range(3000)]


def test_an_open_file_is_a_file(fs: MPFSFileSystem, staged: Staged) -> None:
    content = staged.content["model.safetensors"]
    draw = random.Random(0)
    with fs.open("main/model.safetensors", block_size=5000) as file:
        assert isinstance(file, io.BufferedReader)
        assert file.readable()
        assert file.seekable()
        assert not file.writable()
        assert file.size == len(content)  # type: ignore[attr-defined]
        for _ in range(200):
            offset, size = draw.randrange(len(content) + 10), draw.choice([1, 100, 20_000])
            assert file.seek(offset) == offset
            assert file.read(size) == content[offset : offset + size]
        assert file.seek(-10, io.SEEK_END) == len(content) - 10
        assert file.read() == content[-10:]
        assert file.read() == b""
        file.seek(1)
        assert file.seek(4, io.SEEK_CUR) == 5
        buffer = bytearray(3 * BLOCK_SIZE)
        assert file.readinto(buffer) == len(buffer)
        assert buffer == content[5 : 5 + len(buffer)]
        with pytest.raises(OSError, match="cannot seek to -1"):
            file.seek(-1)
        with pytest.raises(io.UnsupportedOperation):
            file.write(b"x")
    with pytest.raises(ValueError, match="closed"):
        file.read()
    with fs.open("main/tokenizer/vocab.txt") as file:
        assert list(file) == staged.content["tokenizer/vocab.txt"].splitlines(keepends=True)
    loaded = load(fs.cat_file("main/model.safetensors"))
    assert all(loaded[name].shape == tensor.shape for name, tensor in sample_tensors().items())
    with fs.open("main/empty.txt") as file:
        assert file.read() == b""


def test_torch_and_pickle_read_from_it(builder: Builder, store: Store) -> None:
    data = io.BytesIO()
    torch.save({"a": torch.arange(5000)}, data)
    builder.publish({"model.bin": data.getvalue(), "p.pkl": pickle.dumps({"k": b"v" * 9000})}, ref="torch")
    fs = MPFSFileSystem(repo=store.path)
    with fs.open("torch/model.bin") as file:
        assert torch.load(file, weights_only=True)["a"].equal(torch.arange(5000))
    with fs.open("torch/p.pkl") as file:
        assert pickle.load(file) == {"k": b"v" * 9000}


def test_listing(fs: MPFSFileSystem, staged: Staged, other: Staged) -> None:
    assert fs.ls("", detail=False) == ["main", "team"]
    assert fs.ls("mpfs://", detail=False) == ["main", "team"]
    assert fs.ls("team", detail=False) == ["team/model"]
    assert fs.ls("/team/model/", detail=False) == ["team/model/v1"]
    assert fs.ls("mpfs://team/model/v1", detail=False) == ["team/model/v1/config.json", "team/model/v1/x.txt"]
    assert fs.ls("main", detail=False) == [
        "main/config.json",
        "main/empty.txt",
        "main/model.safetensors",
        "main/tokenizer",
    ]
    assert fs.ls("main/config.json") == [fs.info("main/config.json")]
    assert [entry["type"] for entry in fs.ls("main")] == ["file", "file", "file", "directory"]
    sizes = {f"main/{path}": len(data) for path, data in staged.content.items()}
    assert fs.find("main", detail=False) == sorted(sizes)
    assert {name: info["size"] for name, info in fs.find("main", detail=True).items()} == sizes
    assert fs.du("main") == sum(sizes.values())
    assert fs.du("main", total=False) == sizes
    assert fs.glob("main/*.json") == ["main/config.json"]
    assert fs.glob("**/vocab.*") == ["main/tokenizer/vocab.txt"]
    assert fs.glob("team/*/v1/x.*") == ["team/model/v1/x.txt"]
    assert list(fs.walk("team")) == [
        ("team", ["model"], []),
        ("team/model", ["v1"], []),
        ("team/model/v1", [], ["config.json", "x.txt"]),
    ]
    assert fs.exists("main/tokenizer")
    assert not fs.exists("main/nope")
    assert fs.isdir("team")
    assert fs.isdir("main/tokenizer")
    assert fs.isfile("main/config.json")
    assert not fs.isfile("main")


def test_info(fs: MPFSFileSystem, store: Store, staged: Staged, other: Staged) -> None:
    info = fs.info("mpfs://main/config.json")
    content = staged.snapshot.file("config.json")
    assert info == {
        "name": "main/config.json",
        "size": 23,
        "type": "file",
        "created": float(TIME),
        "mtime": float(TIME),
        "commit": staged.commit,
        "ukey": getattr(content, "content", None),
    }
    assert fs.info("") == {"name": "", "size": 0, "type": "directory"}
    assert fs.info("team") == {"name": "team", "size": 0, "type": "directory"}
    assert fs.info("main")["commit"] == staged.commit
    time = datetime.fromtimestamp(TIME, UTC)
    assert fs.created("main/config.json") == fs.modified("main/tokenizer") == time
    with pytest.raises(IsADirectoryError):
        fs.created("team")
    assert fs.fsid == f"mpfs-{store.info.uuid}"


def test_keys_name_the_content(fs: MPFSFileSystem, builder: Builder, staged: Staged, other: Staged) -> None:
    changed = dict(staged.content)
    changed["model.safetensors"] = changed["model.safetensors"][:-1] + b"\0"
    builder.publish(changed, ref="changed")
    assert fs.ukey("main/config.json") == fs.ukey("team/model/v1/config.json") == fs.ukey("changed/config.json")
    assert fs.checksum("main/config.json") == int(fs.ukey("main/config.json"), 16)
    assert fs.ukey("main/model.safetensors") != fs.ukey("changed/model.safetensors")
    assert len({fs.checksum(path) for path in fs.find("main")}) == 4
    assert fs.ukey("main") == staged.commit
    assert fs.checksum("team") != fs.checksum("team/model")


def test_commits_are_directories_too(fs: MPFSFileSystem, staged: Staged, builder: Builder) -> None:
    config = staged.content["config.json"]
    for prefix in (staged.commit, staged.commit[:8], staged.commit[:9]):
        assert fs.cat_file(f"{prefix}/config.json") == config
        assert fs.find(prefix)[0] == f"{prefix}/config.json"
    for wrong in (staged.commit[:7], "0" * 64, staged.commit[:8].upper() + "x"):
        with pytest.raises(FileNotFoundError):
            fs.info(f"{wrong}/config.json")
    # A ref goes first.
    builder.publish({"x": b"y"}, ref=staged.commit[:8])
    assert fs.ls(staged.commit[:8], detail=False) == [f"{staged.commit[:8]}/x"]
    assert fs.cat_file(f"{staged.commit[:9]}/config.json") == config


def test_an_ambiguous_prefix_says_so(fs: MPFSFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fs.store.objects, "ids", lambda kind, prefix: ["a" * 64, "b" * 64])
    with pytest.raises(FileNotFoundError, match="2 commits begin with abcdabcd"):
        fs.info("abcdabcd")


def test_moved_refs_are_seen_at_once(fs: MPFSFileSystem, store: Store, staged: Staged, other: Staged) -> None:
    assert fs.exists("main/model.safetensors")
    store.move_ref("main", other.commit, expected=staged.commit, kind="branch", time=TIME, author="t", reason="r")
    assert fs.ls("main", detail=False) == ["main/config.json", "main/x.txt"]


def test_ranges(fs: MPFSFileSystem, staged: Staged) -> None:
    content = staged.content["model.safetensors"]
    path = "main/model.safetensors"
    for start, end in ((None, None), (5, 10), (None, 9), (-7, None), (-7, -2), (10, 5), (10**9, None), (0, 10**9)):
        assert fs.cat_file(path, start, end) == content[start:end]
    starts, ends = [0, 100, 5000], [10, 20_000, 5001]
    assert fs.cat_ranges([path] * 3, starts, ends) == [content[a:b] for a, b in zip(starts, ends, strict=True)]
    assert fs.head("main/config.json", 5) == staged.content["config.json"][:5]
    assert fs.tail("main/config.json", 5) == staged.content["config.json"][-5:]
    assert fs.read_block(path, 10, 100) == content[10:110]
    with fs.open(path) as file:
        file.seek(len(content) + 5)
        assert file.read() == b""
    assert fs.open_reader(path).read_at(3, 4) == content[3:7]


def test_cat_and_get_whole_trees(fs: MPFSFileSystem, staged: Staged, tmp_path: Path) -> None:
    everything = {f"main/{path}": data for path, data in staged.content.items()}
    assert fs.cat(fs.find("main")) == everything
    assert fs.cat("main", recursive=True, on_error="omit") == everything
    fs.get("main", str(tmp_path / "copy"), recursive=True)
    assert {str(p.relative_to(tmp_path / "copy")) for p in (tmp_path / "copy").rglob("*") if p.is_file()} == set(
        staged.content
    )
    for path, data in staged.content.items():
        assert (tmp_path / "copy" / path).read_bytes() == data
    fs.get_file("main/config.json", str(tmp_path / "one"))
    assert (tmp_path / "one").read_bytes() == staged.content["config.json"]


def test_mapper(store: Store, staged: Staged) -> None:
    mapper = fsspec.get_mapper("mpfs://main", repo=str(store.path))
    assert set(mapper) == set(staged.content)
    assert mapper["tokenizer/vocab.txt"] == staged.content["tokenizer/vocab.txt"]
    assert "nope" not in mapper
    with pytest.raises(KeyError):
        mapper["nope"]
    with pytest.raises(OSError, match="read-only"):
        mapper["new"] = b"x"


@pytest.mark.parametrize("cache", ["simplecache", "filecache"])
def test_fsspecs_caches_work_on_top(cache: str, store: Store, staged: Staged, tmp_path: Path) -> None:
    options = {"mpfs": {"repo": str(store.path)}, cache: {"cache_storage": str(tmp_path / "cache")}}
    for _ in range(2):
        with fsspec.open(f"{cache}::mpfs://main/model.safetensors", **options) as file:
            assert file.read() == staged.content["model.safetensors"]
            file.seek(7)
            assert file.read(10) == staged.content["model.safetensors"][7:17]


def test_it_can_be_pickled(fs: MPFSFileSystem, store: Store, staged: Staged) -> None:
    fs.ls("main")
    copy = pickle.loads(pickle.dumps(fs))
    assert copy.cat_file("main/config.json") == staged.content["config.json"]
    code = "import pickle, sys; sys.stdout.buffer.write(pickle.load(sys.stdin.buffer).cat_file('main/config.json'))"
    done = subprocess.run([sys.executable, "-c", code], input=pickle.dumps(fs), capture_output=True)
    assert done.stdout == staged.content["config.json"], done.stderr.decode()


def test_a_directory_with_a_repository_in_it_will_do(builder: Builder, staged: Staged, tmp_path: Path) -> None:
    builder.store.close()
    (tmp_path / "work").mkdir()
    builder.store.path.rename(tmp_path / "work" / ".mpfs")
    fs = MPFSFileSystem(repo=tmp_path / "work")
    assert fs.cat_file("main/config.json") == staged.content["config.json"]


def test_the_repository_from_the_environment(
    store: Store, staged: Staged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs = fsspec.filesystem("mpfs")
    with pytest.raises(UsageError, match="MPFS_REPO"):
        fs.ls("")
    monkeypatch.setenv("MPFS_REPO", str(store.path))
    assert fs.ls("", detail=False) == ["main"]
    with fsspec.open("mpfs://main/config.json") as file:
        assert file.read() == staged.content["config.json"]
    monkeypatch.setenv("MPFS_REPO", str(tmp_path / "nope"))
    with pytest.raises(NotARepositoryError):
        fs.ls("")


def test_what_is_not_there(fs: MPFSFileSystem, other: Staged) -> None:
    for path in (
        "nope",
        "main/nope",
        "main/config.json/x",
        "tea",
        "team/mod",
        "team/model/v1/nope/x",
        "main/token",
        "n" * 600,
        "ü/\0",
    ):
        for call in (fs.info, fs.ls, fs.open, fs.cat_file):
            with pytest.raises(FileNotFoundError) as caught:
                call(path)
            assert caught.value.filename == path
    for path in ("", "main", "team", "main/tokenizer"):
        with pytest.raises(IsADirectoryError):
            fs.open(path)


def test_writing_is_refused(fs: MPFSFileSystem, tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    calls: list[Callable[[], object]] = [
        lambda: fs.open("main/x", "wb"),
        lambda: fs.open("main/x", "w"),
        lambda: fs.open("main/config.json", "ab"),
        lambda: fs.open("main/config.json", "r+b"),
        lambda: fs.pipe_file("main/x", b""),
        lambda: fs.pipe({"main/x": b""}),
        lambda: fs.write_text("main/x", ""),
        lambda: fs.touch("main/x"),
        lambda: fs.mkdir("main/x"),
        lambda: fs.makedirs("main/x", exist_ok=True),
        lambda: fs.rmdir("main/tokenizer"),
        lambda: fs.rm("main/config.json"),
        lambda: fs.rm_file("main/config.json"),
        lambda: fs.delete("main/config.json"),
        lambda: fs.mv("main/config.json", "main/x"),
        lambda: fs.cp_file("main/config.json", "main/x"),
        lambda: fs.copy("main/config.json", "main/x"),
        lambda: fs.put_file(str(tmp_path / "f"), "main/x"),
        lambda: fs.put(str(tmp_path / "f"), "main/x"),
        lambda: fs.upload(str(tmp_path / "f"), "main/x"),
    ]
    for number, call in enumerate(calls):
        with pytest.raises(OSError, match="read-only") as caught:
            call()
        assert caught.value.errno == errno.EROFS, number


def test_damage_is_not_hidden(
    fs: MPFSFileSystem, store: Store, staged: Staged, damage: Callable[[BlockId], None]
) -> None:
    damage(store.objects.get(Tensor, staged.snapshot.tensors["mask"]).blocks[0])
    with pytest.raises(IntegrityError, match=rf'snapshot {staged.commit}, .* tensor "mask"'):
        fs.cat_file("main/model.safetensors")
    with fs.open("main/model.safetensors") as file, pytest.raises(IntegrityError):
        file.read()


def test_opening_leaks_nothing_and_closing_the_last_instance_closes_the_store(
    fs: MPFSFileSystem, store: Store, staged: Staged
) -> None:
    fs.cat_file("main/config.json")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(300):
        with fs.open("main/model.safetensors") as file:
            file.read(10)
    assert len(os.listdir("/proc/self/fd")) == before
    references = store.environment._references
    extra = MPFSFileSystem(repo=store.path, skip_instance_cache=True)
    with extra.open("main/config.json") as file:
        assert store.environment._references == references + 1
        del extra
        assert file.read() == staged.content["config.json"]
    del file
    assert store.environment._references == references
