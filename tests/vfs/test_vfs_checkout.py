"""Checkout: the right bytes, all or nothing, and never over what must not be replaced."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from vfs_cases import MAP_SIZE, Builder, Staged, sample_tensors

from mpfs.errors import BadInputError, IntegrityError, MPFSError, NoSpaceError, UsageError
from mpfs.objects import BlockId, Tensor
from mpfs.store import Store, writeback
from mpfs.vfs import check_out, execute, plan_checkout, synthesise_files
from mpfs.vfs import checkout as checkout_module
from mpfs.vfs import target as target_module

pytest_plugins = ["vfs_fixtures"]


def read_tree(directory: Path) -> dict[str, bytes]:
    """Every file below a directory, by relative path."""
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal in dtype, shape and bits."""
    bits = (one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    return one.dtype == other.dtype and one.shape == other.shape and bits[0].equal(bits[1])


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A target alone in its directory, which so shows what is left beside it."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "model"


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    mount = tmp_path / "small"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(mount)], capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


def test_files_come_out_byte_for_byte(store: Store, staged: Staged, target: Path) -> None:
    calls: list[tuple[int, int]] = []
    result = check_out(store, staged.snapshot, target, progress=lambda done, total: calls.append((done, total)))
    assert read_tree(target) == staged.content
    assert os.listdir(target.parent) == ["model"]
    total = sum(map(len, staged.content.values()))
    assert result.bytes == total
    assert list(result.files) == sorted(staged.content)
    assert result.target == target
    assert result.seconds > 0
    assert calls[-1] == (total, total)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert result.as_json()["bytes"] == total


def test_the_disk_begins_while_a_file_is_written_and_is_waited_for_at_its_end(
    store: Store, staged: Staged, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: dict[int, list[tuple[int, int] | str]] = {}
    begin, sync, started = writeback.start_writing, os.fsync, set()

    def start(fd: int, offset: int, size: int) -> bool:
        assert os.fstat(fd).st_size >= offset + size
        events.setdefault(os.fstat(fd).st_ino, []).append((offset, size))
        started.add(begin(fd, offset, size))
        return False  # as where the system cannot: it is a hint, and changes nothing

    def synced(fd: int) -> None:
        events.setdefault(os.fstat(fd).st_ino, []).append("synced")
        sync(fd)

    monkeypatch.setattr(checkout_module, "EARLY_BYTES", 4096)
    monkeypatch.setattr(checkout_module, "start_writing", start)
    monkeypatch.setattr(os, "fsync", synced)
    check_out(store, staged.snapshot, target)
    assert read_tree(target) == staged.content
    assert len(started) == 1
    asked = 0
    for path, content in staged.content.items():
        *ranges, last = events[(target / path).stat().st_ino]
        assert last == "synced"
        at = 0
        for place in ranges:
            assert isinstance(place, tuple)
            assert place[0] == at
            assert place[1] >= 4096
            at += place[1]
        assert at <= len(content) < at + 4096
        asked += len(ranges)
    assert asked > 1


def test_a_plan_states_files_and_bytes_without_a_store(builder: Builder, staged: Staged, target: Path) -> None:
    plan = plan_checkout(staged.snapshot, builder.tensors(staged.snapshot), target)
    assert plan.as_json() == {
        "target": str(target),
        "files": [{"path": path, "size": len(data)} for path, data in sorted(staged.content.items())],
        "bytes": staged.snapshot.size,
    }
    assert not target.exists()


def test_large_files_are_shared_out(
    store: Store, staged: Staged, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkout_module, "TASK_BYTES", 10_001)
    check_out(store, staged.snapshot, target)
    assert read_tree(target) == staged.content
    check_out(store, staged.snapshot, target.parent / "cut", shard_size=30_000)
    assert len(list((target.parent / "cut").glob("*.safetensors"))) > 2
    loaded: dict[str, torch.Tensor] = {}
    for path in (target.parent / "cut").glob("*.safetensors"):
        loaded |= load_file(path)
    assert all(same(loaded[name], tensor) for name, tensor in sample_tensors().items())


@pytest.mark.parametrize("shard_size", [1, 20_000, 60_000, 10**9])
def test_new_shards_hold_every_tensor(store: Store, staged: Staged, target: Path, shard_size: int) -> None:
    check_out(store, staged.snapshot, target, shard_size=shard_size)
    shards = sorted(target.glob("*.safetensors"))
    found: dict[str, str] = {}
    expected = sample_tensors()
    for path in shards:
        with safe_open(path, "pt") as file:
            # The file's own metadata is kept (case C1).
            assert file.metadata() == {"format": "pt", "maker": "someone"}
            for name in file.keys():  # noqa: SIM118
                found[name] = path.name
                assert same(file.get_tensor(name), expected[name])
    assert found.keys() == expected.keys()
    index = target / "model.safetensors.index.json"
    if len(shards) == 1:
        assert shards[0].name == "model.safetensors"
        assert not index.exists()
    else:
        assert [path.name for path in shards] == [
            f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)
        ]
        total = sum(tensor.nbytes for tensor in expected.values())
        assert json.loads(index.read_bytes()) == {"metadata": {"total_size": total}, "weight_map": found}
    side = {path: data for path, data in staged.content.items() if not path.endswith(".safetensors")}
    assert {path: data for path, data in read_tree(target).items() if not path.startswith("model")} == side


def test_shards_replace_the_old_ones_and_their_index_only(builder: Builder, target: Path) -> None:
    one, two = {"a": torch.arange(10)}, {"b": torch.arange(20)}
    other = save({"a": torch.ones(3)}, metadata={"format": "pt"})
    files = {
        "model-00001-of-00002.safetensors": save(one),
        "model-00002-of-00002.safetensors": save(two),
        "model.safetensors.index.json": b"{}",
        "model.fp16.safetensors.index.json": b"keep",
        "unet/model.safetensors": other,
        "unet/model.safetensors.index.json": b"keep",
    }
    staged = builder.publish(files, prefixes={"unet/model.safetensors": "unet/"})
    check_out(builder.store, staged.snapshot, target, shard_size=5_000_000_000)
    tree = read_tree(target)
    assert tree == {
        "model.fp16.safetensors.index.json": b"keep",
        "model.safetensors": save(one | two, metadata={"format": "pt"}),
        "unet/model.safetensors": other,
        "unet/model.safetensors.index.json": b"keep",
    }


def test_a_synthesised_file_is_what_safetensors_writes(builder: Builder, staged: Staged) -> None:
    objects = builder.tensors(staged.snapshot)
    named = [(name, objects[identity]) for name, identity in staged.snapshot.tensors.items()]
    (file,) = synthesise_files(named).files
    whole = save(sample_tensors(), metadata={"format": "pt"})
    assert whole.startswith(file.header)
    assert file.size == len(whole)


def test_tied_tensors_come_out_as_two_copies(store: Store, staged: Staged, target: Path) -> None:
    # Case C2: the blocks are the same, the file has both.
    tensors = staged.snapshot.tensors
    assert tensors["embed.weight"] == tensors["lm_head.weight"]
    check_out(store, staged.snapshot, target, shard_size=10**9)
    loaded = load_file(target / "model.safetensors")
    assert same(loaded["embed.weight"], loaded["lm_head.weight"])
    assert loaded["embed.weight"].data_ptr() != loaded["lm_head.weight"].data_ptr()


def test_a_snapshot_without_tensors_or_files(builder: Builder, target: Path) -> None:
    staged = builder.publish({"README.md": b"hi"})
    check_out(builder.store, staged.snapshot, target, shard_size=100)
    assert read_tree(target) == {"README.md": b"hi"}
    empty = builder.publish({}, ref="empty")
    assert check_out(builder.store, empty.snapshot, target.parent / "none").bytes == 0
    assert list((target.parent / "none").iterdir()) == []


def test_new_shards_do_not_overwrite_a_side_file(builder: Builder, target: Path) -> None:
    header = save({"x": torch.ones(2)})
    files = {"model.safetensors": header, "other.safetensors": save({"y": torch.ones(2)})}
    staged = builder.publish(files, prefixes={"model.safetensors": "variant/"})
    with pytest.raises(BadInputError, match=r'"model.safetensors" would be written twice'):
        check_out(builder.store, staged.snapshot, target, shard_size=100)
    assert not target.exists()


def test_a_bad_shard_size_is_a_usage_error(store: Store, staged: Staged, target: Path) -> None:
    with pytest.raises(UsageError, match="positive"):
        check_out(store, staged.snapshot, target, shard_size=0)


# All or nothing.


def test_damage_leaves_the_target_as_it_was(
    store: Store, staged: Staged, target: Path, damage: Callable[[BlockId], None]
) -> None:
    block = store.objects.get(Tensor, staged.snapshot.tensors["layer.0.weight"]).blocks[0]
    damage(block)
    with pytest.raises(IntegrityError) as caught:
        check_out(store, staged.snapshot, target, name="v1")
    for part in (block.hex(), "layer.0.weight", "snapshot v1"):
        assert part in str(caught.value)
    assert os.listdir(target.parent) == []
    target.mkdir()
    (target / "mine").write_text("precious")
    with pytest.raises(IntegrityError):
        check_out(store, staged.snapshot, target, force=True)
    assert read_tree(target) == {"mine": b"precious"}
    assert os.listdir(target.parent) == ["model"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("broken")])
def test_interruption_leaves_nothing(store: Store, staged: Staged, target: Path, error: BaseException) -> None:
    def progress(done: int, total: int) -> None:
        raise error

    with pytest.raises(type(error)):
        check_out(store, staged.snapshot, target.parent / "new" / "deep" / "model", progress=progress)
    assert os.listdir(target.parent) == []


def test_missing_parents_are_made(store: Store, staged: Staged, target: Path) -> None:
    check_out(store, staged.snapshot, target / "a" / "b")
    assert read_tree(target / "a" / "b") == staged.content


def test_a_full_disk_is_seen_beforehand(store: Store, staged: Staged, tmpfs: Path) -> None:
    with pytest.raises(NoSpaceError, match="checking out main needs"):
        check_out(store, staged.snapshot, tmpfs / "model", name="main")
    assert os.listdir(tmpfs) == []


@pytest.mark.parametrize("allocate", [True, False])
def test_a_disk_that_fills_up_leaves_nothing(
    builder: Builder, tmpfs: Path, monkeypatch: pytest.MonkeyPatch, allocate: bool
) -> None:
    monkeypatch.setattr(checkout_module, "require_free_space", lambda *args: None)
    if not allocate:
        monkeypatch.setattr(checkout_module, "_allocate", os.ftruncate)
    size = 10 << 20
    staged = builder.publish({"a.bin": random.Random(1).randbytes(size), "b.bin": b"x" * 100})
    with pytest.raises(NoSpaceError, match=f"{size + 100:,} bytes are needed") as caught:
        check_out(builder.store, staged.snapshot, tmpfs / "deep" / "model")
    assert caught.value.details["needed"] == size + 100
    assert os.listdir(tmpfs) == []


def test_other_errors_of_the_system_are_ours(store: Store, staged: Staged, target: Path) -> None:
    target.write_text("a file")
    with pytest.raises(MPFSError, match="cannot be written: Not a directory"):
        check_out(store, staged.snapshot, target / "inside")
    with pytest.raises(MPFSError, match="cannot be written: File name too long"):
        check_out(store, staged.snapshot, target.parent / ("n" * 300))
    assert read_tree(target.parent) == {"model": b"a file"}


def test_long_names_work(store: Store, staged: Staged, target: Path) -> None:
    target = target.parent / ("ü" * 127)
    check_out(store, staged.snapshot, target)
    assert read_tree(target) == staged.content
    assert len(os.listdir(target.parent)) == 1


# What may be replaced.


def test_an_empty_directory_may_be_the_target(store: Store, staged: Staged, target: Path) -> None:
    target.mkdir(mode=0o750)
    check_out(store, staged.snapshot, target)
    assert read_tree(target) == staged.content
    assert target.stat().st_mode & 0o777 == 0o750


def test_modes_follow_the_umask(store: Store, staged: Staged, target: Path) -> None:
    old = os.umask(0o027)
    try:
        check_out(store, staged.snapshot, target)
    finally:
        os.umask(old)
    assert target.stat().st_mode & 0o777 == 0o750
    assert (target / "config.json").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("exchange", [True, False])
def test_force_replaces_the_whole_directory(
    store: Store, staged: Staged, target: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:
        monkeypatch.setattr(target_module, "_exchange", lambda first, second: False)
    target.mkdir()
    (target / "old.txt").write_text("old")
    with pytest.raises(UsageError, match="--force"):
        check_out(store, staged.snapshot, target)
    assert read_tree(target) == {"old.txt": b"old"}
    check_out(store, staged.snapshot, target, force=True)
    assert read_tree(target) == staged.content
    assert os.listdir(target.parent) == ["model"]


def test_a_symbolic_link_means_what_it_points_to(store: Store, staged: Staged, target: Path) -> None:
    link = target.parent / "link"
    link.symlink_to(target)
    assert check_out(store, staged.snapshot, link).target == target
    assert link.is_symlink()
    assert read_tree(target) == staged.content


def test_what_must_not_be_replaced_is_not(
    store: Store, staged: Staged, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, match: str, **options: object) -> None:
        with pytest.raises(UsageError, match=match):
            check_out(store, staged.snapshot, path, force=True, **options)  # type: ignore[arg-type]

    refused(store.path, "in or above the repository")
    refused(store.path / "store" / "new", "in or above the repository")
    refused(tmp_path, "in or above the repository")
    (target / "inner").mkdir(parents=True)
    (target / "file").touch()
    refused(target / "file", "is a file")
    refused(target, "protected directory", protected=[target / "inner"])
    monkeypatch.setattr(target_module, "_home", lambda: [target / "inner"])
    refused(target, "home directory")
    monkeypatch.undo()
    monkeypatch.chdir(target / "inner")
    refused(Path(), "current directory")
    refused(target, "current directory")
    monkeypatch.undo()
    (target / "inner" / ".git").mkdir()
    refused(target, "git repository")
    (target / "inner" / ".git").rmdir()
    with_repository = target / "inner" / "other"
    Store.create(with_repository, block_size=4096, map_size=MAP_SIZE).close()
    refused(target, "MPFS repository")
    with_repository.rename(target / "inner" / ".mpfs")
    refused(target, "MPFS repository")
    refused(Path("/"), "root directory|above the repository")
    assert (target / "file").exists()


def test_mounts_are_not_replaced(store: Store, staged: Staged, tmpfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkout_module, "require_free_space", lambda *args: None)
    inner = tmpfs / "wide name" / "mnt"
    inner.mkdir(parents=True)
    subprocess.run(["mount", "--bind", str(tmpfs / "wide name"), str(inner)], check=True)
    try:
        with pytest.raises(UsageError, match="mount point"):
            check_out(store, staged.snapshot, tmpfs)
        with pytest.raises(UsageError, match="is mounted in it"):
            check_out(store, staged.snapshot, tmpfs / "wide name", force=True)
    finally:
        subprocess.run(["umount", str(inner)], check=True)
    check_out(store, staged.snapshot, tmpfs / "wide name", force=True)
    assert read_tree(tmpfs / "wide name") == staged.content


# After a kill.


def test_leftovers_are_cleared_and_a_lost_target_is_brought_back(store: Store, staged: Staged, target: Path) -> None:
    beside = target.parent
    (beside / ".model.mpfs-checkout-01234567" / "deep").mkdir(parents=True)
    (beside / ".model.mpfs-checkout-notes").mkdir()
    (beside / ".model2.mpfs-checkout-01234567").mkdir()
    (beside / ".model.mpfs-replaced-01234567").mkdir()
    (beside / ".model.mpfs-replaced-01234567" / "mine").write_text("precious")
    # The target was set aside, and its maker killed before the new one took its place.
    with pytest.raises(OSError, match="not empty"):
        check_out_unforced(store, staged, target)
    assert read_tree(target) == {"mine": b"precious"}
    assert sorted(os.listdir(beside)) == [".model.mpfs-checkout-notes", ".model2.mpfs-checkout-01234567", "model"]
    check_out(store, staged.snapshot, target, force=True)
    assert read_tree(target) == staged.content


def check_out_unforced(store: Store, staged: Staged, target: Path) -> None:
    """A checkout that is refused, with the refusal as an OSError."""
    try:
        check_out(store, staged.snapshot, target)
    except UsageError as error:
        raise OSError(errno.ENOTEMPTY, str(error)) from error


def test_a_living_makers_directory_is_left_alone(store: Store, staged: Staged, target: Path) -> None:
    with target_module.building(target) as other:
        (other / "half").touch()
        check_out(store, staged.snapshot, target)
        assert (other / "half").exists()
    assert os.listdir(target.parent) == ["model"]


CHILD = """
import sys
from pathlib import Path
from mpfs.objects import Commit, Snapshot
from mpfs.store import Store, writeback
from mpfs.vfs import check_out
store = Store.open(Path(sys.argv[1]))
commit = store.objects.get(Commit, store.refs.get("main").commit)
snapshot = store.objects.get(Snapshot, commit.snapshot)
print("ready", flush=True)
while True:
    check_out(store, snapshot, Path(sys.argv[2]), force=True)
"""


def test_a_kill_leaves_the_old_target_or_the_new_one(store: Store, staged: Staged, target: Path) -> None:
    target.mkdir()
    old = {"old.txt": b"old"}
    draw = random.Random(3)
    left_behind = []
    for _ in range(24):
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        (target / "old.txt").write_bytes(b"old")
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(store.path), str(target)], stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        time.sleep(draw.uniform(0, 0.03))
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        tree = read_tree(target)
        assert tree in (old, staged.content)
        names = [name for name in os.listdir(target.parent) if name != "model"]
        left_behind.append(bool(names))
        assert all(name.startswith(".model.mpfs-checkout-") for name in names)
    assert any(left_behind)
    check_out(store, staged.snapshot, target, force=True)
    assert os.listdir(target.parent) == ["model"]
    assert read_tree(target) == staged.content


def test_checkouts_leak_no_descriptors(store: Store, staged: Staged, target: Path) -> None:
    check_out(store, staged.snapshot, target)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        check_out(store, staged.snapshot, target, force=True)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_plan_can_be_executed_with_any_number_of_threads(builder: Builder, staged: Staged, target: Path) -> None:
    for workers in (1, 5):
        plan = plan_checkout(staged.snapshot, builder.tensors(staged.snapshot), target / str(workers))
        execute(plan, builder.store, "main", workers=workers)
        assert read_tree(target / str(workers)) == staged.content
