"""Opening, sharing, forking; reading blocks back; locks; what lies under a repository."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from store_helpers import assert_clean, data, publish, python, staged, unlike

from mpfs.errors import (
    IntegrityError,
    LockedError,
    MPFSError,
    NoSpaceError,
    NotARepositoryError,
    UnsupportedFormatError,
    UsageError,
)
from mpfs.objects import BlockId, Commit, Snapshot, Tensor, block_id
from mpfs.store import BlockInfo, Store, check
from mpfs.store import filesystem as filesystem_module
from mpfs.store.filesystem import file_system_type, require_free_space
from mpfs.store.locks import repository_lock

pytest_plugins = ["store_fixtures"]

MIB = 1 << 20


def blocks_of(store: Store, commit: str) -> list[BlockId]:
    """All blocks of a commit's snapshot."""
    snapshot = store.objects.get(Snapshot, store.objects.get(Commit, commit).snapshot)
    return [block for tensor in snapshot.references() for block in store.objects.get(Tensor, tensor).blocks]


# Reading


def test_a_missing_block_is_named(store: Store) -> None:
    block = block_id(b"nowhere")
    with (
        pytest.raises(IntegrityError, match=f"layer.0 of main: block {block.hex()} is missing") as caught,
        store.blocks.view([block], "layer.0 of main"),
    ):
        pass
    assert caught.value.details == {"block": block.hex(), "where": "layer.0 of main"}
    assert caught.value.exit_code == 90
    assert store.blocks.info(block) is None


def test_a_bit_flipped_on_the_disk_is_noticed(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "repo", map_size=64 * MIB)
    pieces = [unlike(index, MIB) for index in range(3)]
    with store.writer() as writer:
        for piece in pieces:
            writer.put_block(staged(piece))
        writer.flush()
        writer.put_block(staged(b"the next batch notes where the first one lies"))
        writer.flush()
    ids = [block_id(piece) for piece in pieces]
    info = store.blocks.info(ids[1])
    assert info is not None
    assert info.offset is not None
    with open(store.path / "store" / "data.mdb", "r+b") as file:
        file.seek(info.offset + 12_345)
        byte = file.read(1)[0]
        file.seek(info.offset + 12_345)
        file.write(bytes([byte ^ 1]))
    assert store.blocks.read(ids[0], "w") == pieces[0]
    with pytest.raises(IntegrityError, match=f"w of main: block {ids[1].hex()} is damaged"):
        store.blocks.read(ids[1], "w of main")
    assert [(problem.kind, problem.object) for problem in check(store, read_data=True).problems] == [
        ("damaged_block", ids[1].hex())
    ]
    store.close()


@pytest.mark.parametrize("size", [4096, 4096 * 7 - 16, MIB])
def test_hints_say_where_the_bytes_are(store: Store, size: int) -> None:
    pieces = [unlike(index, size) for index in range(20)]
    with store.writer() as writer:
        for index, piece in enumerate(pieces):
            writer.put_block(staged(piece))
            if index % 5 == 4:
                writer.flush()
        writer.put_block(staged(b"last"))
        writer.flush()
    with open(store.path / "store" / "data.mdb", "rb") as file:
        for piece in pieces:
            info = store.blocks.info(block_id(piece))
            assert info is not None
            assert info.offset is not None
            assert (info.raw_size, info.stored_size) == (size, size)
            file.seek(info.offset)
            assert file.read(size) == piece


def test_publishing_notes_the_last_batch(store: Store) -> None:
    commit = publish(store, {"w": b"".join(index.to_bytes(8, "big") * 512 for index in range(9))})
    infos = [store.blocks.info(block) for block in blocks_of(store, commit)]
    assert all(info is not None and info.offset is not None for info in infos)


@pytest.mark.parametrize("offset", [0, 1 << 62, -5, None])
@pytest.mark.parametrize("size", [5, (1 << 64) - 1])
def test_a_wrong_hint_costs_nothing_but_time(store: Store, offset: int | None, size: int) -> None:
    block = staged(b"block")
    with store.writer() as writer:
        writer.put_block(block)
        writer.flush()
    with store.environment.write() as txn:
        txn.put("block_info", block.block, BlockInfo(0, 5, size, offset).pack())
    store.blocks.prefetch([block.block, b"b" * 16])
    assert store.blocks.read(block.block, "test") == b"block"
    with store.environment.write() as txn:
        txn.put("block_info", block.block, b"?")
    store.blocks.prefetch([block.block])


def test_a_view_is_one_batch_without_copies(store: Store) -> None:
    commit = publish(store, {"w": data(1, 9000)})
    blocks = blocks_of(store, commit)
    with store.blocks.view(blocks, "test") as views:
        assert all(isinstance(view, memoryview) for view in views)
        assert [block_id(view) for view in views] == blocks


def test_block_info_packs_and_unpacks() -> None:
    for info in (
        BlockInfo(0, 1, 2, None),
        BlockInfo(0, 1, 2, 3, 1_800_000_000),
        BlockInfo(255, 1 << 40, 1 << 63, 0),
        BlockInfo(1, 0, 0, 1 << 50),
    ):
        assert len(info.pack()) == 32
        assert BlockInfo.unpack(info.pack()) == info
    with pytest.raises(ValueError, match="32 bytes"):
        BlockInfo.unpack(b"")


# One environment per process


def test_a_path_may_be_opened_twice(store: Store) -> None:
    again = Store.open(store.path)
    assert again.environment is store.environment
    commit = publish(again, {"w": data(1)})
    again.close()
    again.close()  # once is enough, and twice takes nothing from others
    assert store.refs.get("main").commit == commit
    link = store.path.parent / "link"
    link.symlink_to(store.path)
    other = Store.open(link)
    assert other.environment is store.environment
    other.close()


def test_a_pickled_store_is_opened_anew(store: Store) -> None:
    commit = publish(store, {"w": data(1)})
    again: Store = pickle.loads(pickle.dumps(store))
    assert again.environment is store.environment
    again.close()
    assert store.refs.get("main").commit == commit
    assert in_child(write_in_child, store, commit, method="spawn") == 0
    assert store.refs.get("child").commit != commit


def test_opening_and_closing_in_many_threads(store: Store) -> None:
    path = store.path
    store.close()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                opened = Store.open(path)
                opened.refs.all()
                opened.close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def in_child(target: Callable[..., object], *arguments: object, method: str = "fork") -> int | None:
    """Run in a child process; its exit code."""
    process = multiprocessing.get_context(method).Process(target=target, args=arguments)  # type: ignore[attr-defined]
    process.start()
    process.join(60)
    code = process.exitcode
    assert code is None or isinstance(code, int)
    return code


def write_in_child(store: Store, expected: str) -> None:
    assert store.refs.get("main").commit == expected
    publish(store, {"w": data(2)}, ref="child")
    assert_clean(store)
    store.close()


def open_in_child(path: Path, expected: str) -> None:
    write_in_child(Store.open(path), expected)


def expect_locked(store: Store) -> None:
    try:
        store.refs.all()
    except LockedError:
        os._exit(17)
    os._exit(1)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_may_use_the_store(store: Store) -> None:
    commit = publish(store, {"w": data(1)})
    assert in_child(write_in_child, store, commit) == 0
    assert store.refs.get("child").commit != commit
    publish(store, {"w": data(3)}, expected=commit)
    assert in_child(store.close) == 0
    assert_clean(store)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_forked_within_a_transaction_is_told(store: Store) -> None:
    publish(store, {"w": data(1)})
    with store.environment.read() as txn:
        assert in_child(expect_locked, store) == 17
        assert txn.count("refs") == 1
    assert_clean(store)


def test_a_spawned_child_may_open_the_store(store: Store) -> None:
    commit = publish(store, {"w": data(1)})
    code = "import sys; from pathlib import Path; from test_environment import open_in_child as f; f(Path(sys.argv[1]), sys.argv[2])"
    process = python(code, str(store.path), commit)
    assert process.wait(60) == 0, process.stderr and process.stderr.read()
    assert store.refs.get("child").commit != commit


def test_readers_that_were_killed_are_cleared(store: Store) -> None:
    code = """
import sys, time
from pathlib import Path
from mpfs.store import Store
store = Store.open(Path(sys.argv[1]))
with store.environment.read():
    print("reading", flush=True)
    time.sleep(60)
"""
    process = python(code, str(store.path))
    assert process.stdout is not None
    process.stdout.readline()
    process.kill()
    process.wait()
    store.close()
    again = Store.open(store.path)
    assert again.environment._env.reader_check() == 0  # nothing left to clear
    again.close()


# Locks


def test_shared_locks_go_together(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with repository_lock(lock, exclusive=False), repository_lock(lock, exclusive=False, timeout=0):
        pass
    with repository_lock(lock, exclusive=True, timeout=0):
        pass


def test_an_exclusive_lock_waits(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    ready, got = threading.Event(), threading.Event()

    def hold() -> None:
        with repository_lock(lock, exclusive=False):
            ready.set()
            time.sleep(0.3)
            assert not got.is_set()

    thread = threading.Thread(target=hold)
    thread.start()
    ready.wait()
    with (
        pytest.raises(LockedError, match=r"exclusively within 0.05 s") as caught,
        repository_lock(lock, exclusive=True, timeout=0.05),
    ):
        pass
    assert caught.value.exit_code == 11
    with repository_lock(lock, exclusive=True, timeout=10):
        got.set()
    thread.join()


HOLD = """
import sys, time
from pathlib import Path
from mpfs.store.locks import repository_lock
with repository_lock(Path(sys.argv[1]), exclusive=sys.argv[2] == "True"):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("exclusive", [True, False])
def test_a_killed_holder_leaves_no_lock(tmp_path: Path, exclusive: bool) -> None:
    lock = tmp_path / "lock"
    process = python(HOLD, str(lock), str(exclusive))
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    with pytest.raises(LockedError), repository_lock(lock, exclusive=True, timeout=0.1):
        pass
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with repository_lock(lock, exclusive=True, timeout=0):
        pass


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_prolong_a_lock(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with repository_lock(lock, exclusive=True):
        process = multiprocessing.get_context("fork").Process(target=time.sleep, args=[30])
        process.start()
    try:
        with repository_lock(lock, exclusive=True, timeout=0):
            pass
    finally:
        process.kill()
        process.join()


# Creating and opening


def test_create_makes_a_whole_repository(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / ".mpfs"
    store = Store.create(path, block_size=8192)
    assert sorted(item.name for item in path.iterdir()) == ["config.json", "lock", "store"]
    assert [item.name for item in path.parent.iterdir()] == [".mpfs"]
    assert store.info.block_size == 8192
    assert len(store.info.uuid) == 36
    store.close()
    again = Store.open(path)
    assert again.info == store.info
    again.close()
    (tmp_path / "empty").mkdir()
    Store.create(tmp_path / "empty").close()


@pytest.mark.parametrize("size", [0, -4096, 4095, 2048, 5000, 12_288, 128 << 20])
def test_odd_block_sizes_are_refused(tmp_path: Path, size: int) -> None:
    with pytest.raises(UsageError, match="power of two"):
        Store.create(tmp_path / "repo", block_size=size)
    assert list(tmp_path.iterdir()) == []


def test_a_taken_path_is_refused(store: Store, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a repository is there already"):
        Store.create(store.path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="the path is taken"):
        Store.create(tmp_path / "file")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(UsageError, match="the path is taken"):
        Store.create(tmp_path / "full")
    assert sorted(item.name for item in tmp_path.iterdir()) == ["file", "full", "repo"]


def test_a_path_that_is_taken_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(source: object, target: Path) -> None:
        raise OSError(39, "Directory not empty")

    monkeypatch.setattr(os, "rename", taken)
    with pytest.raises(UsageError, match="taken"):
        Store.create(tmp_path / "repo")
    assert list(tmp_path.iterdir()) == []


def test_no_repository(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(NotARepositoryError, match="mpfs init") as caught:
            Store.open(path)
        assert caught.value.exit_code == 10
    (tmp_path / "file").touch()
    with pytest.raises(NotARepositoryError):
        Store.open(tmp_path / "file")


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"format_version": "x"}', "\0"])
def test_a_config_of_no_sense(store: Store, text: str) -> None:
    (store.path / "config.json").write_text(text)
    with pytest.raises(NotARepositoryError):
        Store.open(store.path)


def test_a_newer_format(store: Store) -> None:
    config = json.loads((store.path / "config.json").read_text())
    (store.path / "config.json").write_text(json.dumps({**config, "format_version": 2}))
    with pytest.raises(UnsupportedFormatError, match="newer") as caught:
        Store.open(store.path)
    assert caught.value.exit_code == 10
    (store.path / "config.json").write_text(json.dumps(config))
    for key, value in ((b"format_version", b"2"), (b"hash_name", b"md5")):
        with store.environment.write() as txn:
            old = bytes(txn.get("meta", key) or b"")
            txn.put("meta", key, value)
        with pytest.raises(UnsupportedFormatError):
            Store.open(store.path)
        with store.environment.write() as txn:
            txn.put("meta", key, old)
    for key in (b"uuid", b"block_size"):
        with store.environment.write() as txn:
            old = bytes(txn.get("meta", key) or b"")
            txn.delete("meta", key)
        with pytest.raises(NotARepositoryError, match="meta"):
            Store.open(store.path)
        with store.environment.write() as txn:
            txn.put("meta", key, old)
    Store.open(store.path).close()


def test_a_store_without_data(store: Store) -> None:
    store.close()
    (store.path / "store" / "data.mdb").rename(store.path / "elsewhere")
    with pytest.raises(NotARepositoryError, match=r"data\.mdb is missing"):
        Store.open(store.path)


def test_a_file_that_is_not_lmdb(store: Store) -> None:
    store.close()
    (store.path / "store" / "data.mdb").write_bytes(b"not LMDB " * 1000)
    with pytest.raises(IntegrityError, match="damaged"):
        Store.open(store.path)


def test_a_closed_store_says_so(store: Store) -> None:
    store.close()
    with pytest.raises(MPFSError):
        store.refs.all()


# What lies under it


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "smb3", "9p", "lustre", "fuse.sshfs", "ceph"])
def test_network_file_systems_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(filesystem_module, "file_system_type", lambda path: kind)
    with pytest.raises(NotARepositoryError, match="network file system") as caught:
        Store.create(tmp_path / "repo")
    assert caught.value.details["file_system"] == kind
    assert list(tmp_path.iterdir()) == []
    store = Store.create(tmp_path / "repo", allow_network_file_system=True)
    store.close()
    Store.open(tmp_path / "repo").close()
    config = json.loads((tmp_path / "repo" / "config.json").read_text())
    (tmp_path / "repo" / "config.json").write_text(json.dumps({**config, "allow_network_file_system": False}))
    with pytest.raises(NotARepositoryError, match="network file system"):
        Store.open(tmp_path / "repo")


@pytest.mark.parametrize("kind", ["ext4", "xfs", "tmpfs", "overlay", "btrfs", "fuseblk", "zfs", ""])
def test_local_file_systems_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(filesystem_module, "file_system_type", lambda path: kind)
    Store.create(tmp_path / "repo").close()


def test_file_system_types() -> None:
    assert file_system_type(Path("/proc/self")) == "proc"
    assert file_system_type(Path("/")) not in ("", "proc")


@pytest.mark.parametrize(
    ("written", "path"),
    [
        ("/plain", "/plain"),
        (r"/a\040b", "/a b"),
        ("/m\u00e4h", "/m\u00e4h"),
        (r"/b\134c", "/b\\c"),
        ("/\udcff", "/\udcff"),
    ],
)
def test_mount_points_of_every_spelling(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, written: str, path: str
) -> None:
    table = tmp_path / "mountinfo"
    line = f"1 0 0:1 / {written} rw - nfs4 server:/x rw\n"
    root = "0 0 0:0 / / rw - ext4 /dev/x rw\n"
    table.write_bytes((root + line).encode("utf-8", "surrogateescape"))
    real = open

    def fake(name: str, **options: str) -> object:
        return real(table if name == "/proc/self/mountinfo" else name, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(filesystem_module, "open", fake, raising=False)
    assert file_system_type(Path(path)) == "nfs4"
    assert file_system_type(Path(path + "/inside")) == "nfs4"
    assert file_system_type(Path(path + "not")) == "ext4"


def test_free_space_is_checked_before_work_starts(tmp_path: Path) -> None:
    require_free_space(tmp_path, 1, "a test")
    with pytest.raises(NoSpaceError, match="a test needs up to 1,000,000,016,777,216 bytes"):
        require_free_space(tmp_path, 10**15, "a test")
