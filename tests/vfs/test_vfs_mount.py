"""The mount, by way of the kernel: what other programs see of it."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from vfs_cases import TIME, Builder, Staged, sample_tensors

from mpfs.errors import UsageError
from mpfs.objects import BlockId, Tensor
from mpfs.store import Store
from mpfs.vfs import libfuse
from mpfs.vfs.libfuse import ROOT, FuseUnavailableError, require_fuse
from mpfs.vfs.mount import RepositoryFiles, check_mountpoint

pytest_plugins = ["vfs_fixtures"]

Mounting = Callable[..., AbstractContextManager[Path]]


def _move(store: Store, ref: str, new: Staged, old: Staged) -> None:
    store.move_ref(ref, new.commit, expected=old.commit, kind="branch", time=TIME, author="t", reason="r")


def test_the_tree(store: Store, staged: Staged, builder: Builder, mounting: Mounting, tmp_path: Path) -> None:
    other = builder.publish({"x.txt": b"x"}, ref="team/model/v1")
    with mounting(store.path, tmp_path / "new" / "mnt") as root:
        assert sorted(os.listdir(root)) == [".commits", "main", "team"]
        assert os.listdir(root / "team") == ["model"]
        assert os.listdir(root / "team/model/v1") == ["x.txt"]
        assert sorted(os.listdir(root / ".commits")) == sorted([staged.commit, other.commit])
        assert not (root / "main").is_symlink()
        found = {str(path.relative_to(root / "main")): path for path in (root / "main").rglob("*") if path.is_file()}
        assert found.keys() == staged.content.keys()
        for path, data in staged.content.items():
            for top in (root / "main", root / ".commits" / staged.commit, root / ".commits" / staged.commit[:8]):
                assert (top / path).read_bytes() == data
            status = found[path].stat()
            assert (status.st_size, status.st_mtime, status.st_mode & 0o777) == (len(data), TIME, 0o444)
        for missing in (
            "nope",
            "main/nope",
            "main/config.json/x",
            ".commits/12345678",
            ".commits/xyz",
            "tea",
            "n" * 250,
        ):
            with pytest.raises(OSError, match=r"No such file|Not a directory"):
                os.stat(root / missing)


def test_it_is_read_only(store: Store, staged: Staged, mounting: Mounting, tmp_path: Path) -> None:
    with mounting(store.path, tmp_path / "mnt") as root:
        calls: list[Callable[[], object]] = [
            lambda: (root / "main/new").write_bytes(b""),
            lambda: (root / "main/config.json").write_bytes(b""),
            lambda: (root / "main/config.json").unlink(),
            lambda: (root / "main/dir").mkdir(),
            lambda: (root / "main").rename(root / "other"),
            lambda: os.chmod(root / "main/config.json", 0o777),
        ]
        for call in calls:
            with pytest.raises(OSError, match="Read-only") as caught:
                call()
            assert caught.value.errno == errno.EROFS


def test_random_access_from_many_threads(store: Store, staged: Staged, mounting: Mounting, tmp_path: Path) -> None:
    content = staged.content["model.safetensors"]
    with mounting(store.path, tmp_path / "mnt") as root:

        def read(seed: int) -> bool:
            draw = random.Random(seed)
            fd = os.open(root / "main/model.safetensors", os.O_RDONLY)
            try:
                ranges = [(draw.randrange(len(content)), draw.choice([1, 50, 9000])) for _ in range(50)]
                return all(os.pread(fd, size, start) == content[start : start + size] for start, size in ranges)
            finally:
                os.close(fd)

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(read, range(24)))


def test_safetensors_opens_a_model_in_place(store: Store, staged: Staged, mounting: Mounting, tmp_path: Path) -> None:
    # In another process, as anywhere: this one only has a mapped file, whose pages the mount's own process gives.
    with mounting(store.path, tmp_path / "mnt") as root:
        path = root / "main/model.safetensors"
        loaded = load_file(path)
        for name, tensor in sample_tensors().items():
            assert loaded[name].view(torch.uint8).equal(tensor.view(torch.uint8)) if tensor.dim() else True
        with safe_open(path, framework="pt") as file:
            assert set(file.keys()) == sample_tensors().keys()
            assert file.metadata() == {"format": "pt", "maker": "someone"}
            assert file.get_slice("embed.weight")[10:20].equal(sample_tensors()["embed.weight"][10:20])


def test_md5sum_sees_the_original_files(store: Store, staged: Staged, mounting: Mounting, tmp_path: Path) -> None:
    with mounting(store.path, tmp_path / "mnt") as root:
        done = subprocess.run(
            ["md5sum", *staged.content], cwd=root / "main", capture_output=True, text=True, check=True
        )
    expected = [f"{hashlib.md5(data).hexdigest()}  {path}" for path, data in staged.content.items()]
    assert done.stdout.splitlines() == expected


def test_moves_are_seen_at_once_and_held_files_stay(
    store: Store, staged: Staged, builder: Builder, mounting: Mounting, tmp_path: Path
) -> None:
    changed = {**staged.content, "config.json": b"{}", "more.txt": b"more"}
    first = changed["model.safetensors"]
    changed["model.safetensors"] = first[:-1] + bytes([first[-1] ^ 1])
    with mounting(store.path, tmp_path / "mnt") as root:
        path = root / "main/model.safetensors"
        with open(path, "rb") as held, open(root / "main/config.json", "rb") as config:
            mapped = mmap.mmap(held.fileno(), 0, access=mmap.ACCESS_READ)
            assert mapped[:100] == first[:100]
            assert not (root / "next").exists()
            new = builder.publish(changed, ref="next")
            assert (root / "next/more.txt").read_bytes() == b"more"
            _move(store, "main", new, staged)
            assert path.read_bytes() == changed["model.safetensors"]
            assert (root / "main/config.json").stat().st_size == 2
            assert sorted(os.listdir(root / "main")) == sorted({path.split("/")[0] for path in changed})
            assert held.read() == first
            assert mapped[:] == first
            assert config.read() == staged.content["config.json"]
            mapped.close()
            _move(store, "main", staged, new)
            assert path.read_bytes() == first
            assert not (root / "main/more.txt").exists()
        store.move_ref("main", None, expected=staged.commit, kind="branch", time=TIME, author="t", reason="r")
        assert not (root / "main").exists()
        assert (root / ".commits" / staged.commit / "config.json").exists()


def test_damage_is_an_io_error(
    store: Store, staged: Staged, damage: Callable[[BlockId], None], mounting: Mounting, tmp_path: Path
) -> None:
    damage(store.objects.get(Tensor, staged.snapshot.tensors["mask"]).blocks[0])
    with mounting(store.path, tmp_path / "mnt") as root:
        with pytest.raises(OSError, match="Input/output error"):
            (root / "main/model.safetensors").read_bytes()
        assert (root / "main/config.json").read_bytes() == staged.content["config.json"]


def test_many_opens_leak_nothing(store: Store, staged: Staged, mounting: Mounting, tmp_path: Path) -> None:
    with mounting(store.path, tmp_path / "mnt") as root:
        server = next(
            int(entry)
            for entry in os.listdir("/proc")
            if entry.isdigit() and str(root).encode() in _command_line(int(entry)) and int(entry) != os.getpid()
        )

        def rounds(count: int) -> tuple[int, int]:
            for _ in range(count):
                with open(root / "main/config.json", "rb") as file:
                    file.read(10)
            time.sleep(0.1)
            status = Path(f"/proc/{server}/status").read_text()
            memory = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))
            return len(os.listdir(f"/proc/{server}/fd")), memory

        descriptors, memory = rounds(500)
        after = rounds(3000)
        assert after[0] == descriptors
        assert after[1] < memory + 2000  # KiB


def _command_line(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def test_daemon(store: Store, staged: Staged, mounting: Mounting, tmp_path: Path) -> None:
    root = tmp_path / "mnt"
    command = [sys.executable, "-m", "mpfs_cli.main", "-r", str(store.path), "mount"]
    done = subprocess.run([*command, str(root), "--daemon"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    try:
        assert done.stdout == f"{root}\n"
        assert (root / "main/config.json").read_bytes() == staged.content["config.json"]
        again = subprocess.run([*command, str(root)], capture_output=True, text=True)
        assert again.returncode == 2
        assert "something is mounted there already" in again.stderr
    finally:
        subprocess.run(["umount", str(root)], check=True)
    assert os.listdir(root) == []


def test_where_it_may_not_be_mounted(store: Store, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/x").touch()
    for directory, reason in (
        (store.path, "in or above the repository"),
        (store.path / "mnt", "in or above the repository"),
        (tmp_path, "in or above the repository"),
        (tmp_path / "file", "is a file"),
        (tmp_path / "full", "not empty"),
    ):
        with pytest.raises(UsageError, match=reason):
            check_mountpoint(directory, store.path)
    assert check_mountpoint(tmp_path / "a/b", store.path) == tmp_path / "a/b"


def test_a_machine_without_fuse_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libfuse, "_LIBRARIES", ("libnothing.so",))
    monkeypatch.setattr(libfuse, "find_library", lambda name: None)
    with pytest.raises(FuseUnavailableError, match="apt-get install fuse3"):
        require_fuse()


def test_the_answers_without_a_kernel(store: Store, staged: Staged) -> None:
    files = RepositoryFiles(store)
    main = files.lookup(ROOT, "main")
    assert main.timeout == 0
    config = files.lookup(main.attributes.ino, "config.json")
    assert config.timeout > 3600
    again = files.lookup(
        files.lookup(files.lookup(ROOT, ".commits").attributes.ino, staged.commit).attributes.ino, "config.json"
    )
    assert again.attributes == config.attributes
    assert files.known_inodes() == 5
    handle = files.open(config.attributes.ino)
    pieces: list[bytes] = []
    for offset, size in ((0, 1000), (5, 7), (23, 10), (100, 1)):
        pieces.clear()
        files.read(handle, offset, size, lambda batch: pieces.extend(map(bytes, batch)))
        assert b"".join(pieces) == staged.content["config.json"][offset : offset + size]
    files.release(handle)
    assert files.open_files() == 0
    with pytest.raises(IsADirectoryError):
        files.open(main.attributes.ino)
    files.forget(config.attributes.ino, 1)
    assert files.attributes(config.attributes.ino) == config
    files.forget(config.attributes.ino, 1)
    files.forget(main.attributes.ino, 1)
    files.forget(ROOT, 5)
    assert files.known_inodes() == 3
    assert files.lookup(ROOT, "main").attributes.ino != main.attributes.ino
