"""Staging and publishing: batches, deduplication, all or nothing, and what happens when there is no room."""

from __future__ import annotations

import errno
import gc
import os
import re
import resource
import shutil
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import lmdb
import pytest
from store_helpers import (
    NOW,
    STATS,
    assert_clean,
    checkpoint,
    counts,
    data,
    merge,
    plan_of,
    publish,
    python,
    stage,
    staged,
    tensor_id,
    unlike,
)

from mpfs.errors import IntegrityError, MPFSError, NoSpaceError, NotFoundError, RefConflictError
from mpfs.objects import BlobFile, Commit, Snapshot, Tensor, block_id, object_id
from mpfs.store import RefMove, StagedBlock, Store, Writer, execute_gc

pytest_plugins = ["store_fixtures"]

MIB = 1 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB. Where none may be mounted, a limit on the size of files instead."""
    mount = tmp_path / "disk"
    mount.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(mount)], capture_output=True)
    if done.returncode == 0:
        yield mount
        gc.collect()
        subprocess.run(["umount", "-l", str(mount)], check=True)
        return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (24 * MIB, before[1]))
    yield mount
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def move(name: str = "main", expected: str | None = None) -> RefMove:
    return RefMove(name, expected, "branch", "test")


def test_a_commit_reads_back(store: Store) -> None:
    weights = {"w": data(1), "v": data(2, 4096), "empty": b""}
    identity = publish(store, weights)
    assert store.refs.get("main").commit == identity
    commit = store.objects.get(Commit, identity)
    snapshot = store.objects.get(Snapshot, commit.snapshot)
    for name, expected in weights.items():
        tensor = store.objects.get(Tensor, snapshot.tensors[name])
        assert b"".join(store.blocks.read(block, name) for block in tensor.blocks) == expected
    assert_clean(store)


def test_a_merge_has_its_plan_and_run(store: Store) -> None:
    merged = merge(store, publish(store, {"w": data(1)}, ref="a"), publish(store, {"w": data(2)}, ref="b"))
    run = store.objects.run_of(merged)
    assert run is not None
    assert run.commit == merged
    assert run.figures.seconds == 1.5
    assert store.objects.run_of(store.refs.get("a").commit) is None


def test_figures_count_new_and_known_blocks(store: Store) -> None:
    with store.writer() as writer:
        for piece in (b"a" * 100, b"b" * 200, b"a" * 100):
            writer.put_block(staged(piece))
        writer.flush()
        writer.put_block(staged(b"b" * 200))
        writer.flush()
        figures = writer.figures
    assert (figures.new_blocks, figures.deduplicated_blocks, figures.bytes_written) == (2, 2, 300)


def test_a_known_block_at_a_new_place_gets_its_statistics(store: Store) -> None:
    block = staged(b"a" * 4096, "F32", 0)
    with store.writer() as writer:
        writer.put_block(block)
        writer.put_block(replace(block, first_element=1024, stats=b"other"))
        writer.put_block(replace(block, dtype="BF16", stats=b"third"))
        writer.flush()
    assert store.blocks.stats(Tensor("F32", (2048,), 4096, (block.block,) * 2)) == STATS + b"other"
    assert store.blocks.stats(Tensor("BF16", (2048,), 4096, (block.block,))) == b"third"
    with pytest.raises(IntegrityError, match="statistics are missing"):
        store.blocks.stats(Tensor("F16", (2048,), 4096, (block.block,)))


@pytest.mark.parametrize("same_batch", [True, False])
def test_a_clash_of_ids_is_never_an_alias(store: Store, same_batch: bool) -> None:
    one = staged(b"one")
    with store.writer() as writer:
        tensors, snapshot = checkpoint(writer, {"w": data(1)}, 4096)
        writer.put_block(one)
        if not same_batch:
            writer.flush()
        writer.put_block(StagedBlock(one.block, b"two", "U8", 0, STATS))
        commit = Commit(object_id(snapshot.encode()), (), (), None, "", "", NOW)
        for _ in range(2):  # and there is no way on for this writer
            with pytest.raises(IntegrityError, match=re.escape(one.block.hex())):
                writer.publish(tensors=tensors, snapshot=snapshot, commit=commit, move=move())
    assert store.refs.all() == []
    assert store.objects.ids(Commit) == []
    assert_clean(store)


def test_block_info_and_statistics_appear_together(store: Store) -> None:
    """A reader beside a busy writer never sees one without the others."""
    problems: list[str] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            with store.environment.read() as txn:
                blocks = [key for key, _ in txn.scan("blocks", values=False)]
                infos = [key for key, _ in txn.scan("block_info", values=False)]
                stats = {key[:16] for key, _ in txn.scan("stats", values=False)}
            if not (blocks == infos and stats == set(blocks)):
                problems.append(f"{len(blocks)} {len(infos)} {len(stats)}")

    thread = threading.Thread(target=watch)
    thread.start()
    with Writer(store.environment, batch_bytes=16_384) as writer:
        for index in range(400):
            writer.put_block(staged(unlike(index, 4096)))
        writer.flush()
    stop.set()
    thread.join()
    assert problems == []
    assert counts(store)["blocks"] == 400


def test_many_threads_may_stage(store: Store) -> None:
    with Writer(store.environment, batch_bytes=50_000) as writer:

        def work(number: int) -> None:
            for index in range(100):
                writer.put_block(staged(unlike(number * 1000 + index, 4096)))

        threads = [threading.Thread(target=work, args=[number]) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        writer.flush()
        assert writer.figures.new_blocks == 800
    assert counts(store)["blocks"] == 800


def test_tensors_may_come_from_a_generator(store: Store) -> None:
    with store.writer() as writer:
        tensors, snapshot = checkpoint(writer, {"w": data(1)}, 4096)
        commit = Commit(object_id(snapshot.encode()), (), (), None, "", "", NOW)
        writer.publish(tensors=(tensor for tensor in tensors), snapshot=snapshot, commit=commit, move=move())
    assert_clean(store)
    assert counts(store)["tensors"] == 3


def test_a_ref_that_moved_publishes_nothing(store: Store) -> None:
    first = publish(store, {"w": data(1)})
    before = counts(store)
    with pytest.raises(RefConflictError):
        publish(store, {"w": data(2)}, expected=None)
    after = counts(store)
    staged_only = ("blocks", "block_info", "stats")
    assert {key: after[key] for key in after if key not in staged_only} == {
        key: before[key] for key in before if key not in staged_only
    }
    assert store.refs.get("main").commit == first
    assert_clean(store)


def test_a_run_that_cannot_be_made_publishes_nothing(store: Store) -> None:
    with store.writer() as writer:
        tensors, snapshot = checkpoint(writer, {"w": data(1)}, 4096)
        commit = Commit(object_id(snapshot.encode()), (), (), None, "", "", NOW)

        def fail(_: str) -> None:
            raise RuntimeError("no run")

        with pytest.raises(RuntimeError):
            writer.publish(tensors=tensors, snapshot=snapshot, commit=commit, move=move(), run=fail)  # type: ignore[arg-type]
    assert counts(store)["tensors"] == 0
    assert store.refs.all() == []


def test_nothing_is_published_that_lacks_something(store: Store) -> None:
    base = publish(store, {"w": data(1)}, ref="base")
    lost = Tensor("U8", (4,), 4096, (block_id(b"lost"),))
    tail = Tensor("F32", (1,), 4096, (block_id(b"tail"),))
    with store.writer() as writer:
        tensors, snapshot = checkpoint(writer, {"w": data(2)}, 4096)
        writer.put_block(staged(b"tail"))  # with the statistics of U8, not of F32
        commit = Commit(object_id(snapshot.encode()), (base,), (), None, "", "", NOW)

        def attempt(commit: Commit, tensors: list[Tensor], snapshot: Snapshot = snapshot) -> None:
            with pytest.raises(IntegrityError, match="nothing was published"):
                writer.publish(tensors=tensors, snapshot=snapshot, commit=commit, move=move())

        attempt(commit, [*tensors, lost])
        attempt(commit, [*tensors, tail])
        attempt(commit, tensors[:-1])
        attempt(replace(commit, parents=("1" * 64,)), tensors)
        attempt(replace(commit, plan="1" * 64), tensors)
        attempt(replace(commit, snapshot="1" * 64), tensors)
        other = Snapshot((BlobFile("x", 4, tensor_id(lost)),))
        attempt(replace(commit, snapshot=object_id(other.encode())), tensors, other)
        assert store.objects.ids(Commit) == [base]
        writer.publish(tensors=tensors, snapshot=snapshot, commit=commit, move=move())
    assert_clean(store)


def test_blocks_that_gc_took_meanwhile_are_noticed(store: Store) -> None:
    with store.writer() as writer:
        tensors, snapshot = checkpoint(writer, {"w": data(1)}, 4096)
        writer.flush()
    execute_gc(store, now=NOW)
    commit = Commit(object_id(snapshot.encode()), (), (), None, "", "", NOW)
    with store.writer() as writer, pytest.raises(IntegrityError):
        writer.publish(tensors=tensors, snapshot=snapshot, commit=commit, move=move())
    assert store.refs.all() == []


def test_a_lost_record_is_made_again(store: Store) -> None:
    commit = publish(store, {"w": data(1)})
    with store.environment.write() as txn:
        for key in [key for key, _ in txn.scan("block_info")]:
            txn.delete("block_info", key)
    publish(store, {"w": data(1)}, expected=commit)
    assert_clean(store)


def test_errors_of_the_background_thread_surface(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with Writer(store.environment, batch_bytes=1000) as writer:
        monkeypatch.setattr(writer, "_write", lambda batch: (_ for _ in ()).throw(NoSpaceError("full")))
        writer.put_block(staged(b"a" * 1000))
        with pytest.raises(NoSpaceError):
            writer.put_block(staged(b"b" * 1000))
        with pytest.raises(NoSpaceError):
            writer.flush()


def test_leaving_without_publishing_leaves_only_garbage(store: Store) -> None:
    with pytest.raises(KeyboardInterrupt), store.writer() as writer:  # noqa: PT012
        writer.put_block(staged(b"kept"))
        writer.flush()
        writer.put_block(staged(b"not even written"))
        raise KeyboardInterrupt
    assert counts(store)["blocks"] == 1
    assert_clean(store)
    assert execute_gc(store, now=NOW).blocks_removed == 1


def test_reuse_entries(store: Store) -> None:
    with store.writer() as writer:
        block = staged(b"result")
        writer.put_block(block)
        writer.put_reuse(b"k" * 32, block.block * 2)
        writer.put_reuse(b"m" * 32, block.block + b"x" * 16)
        writer.put_reuse(b"v" * 32, b"value")
        assert store.reuse.blocks_of([b"k" * 32]) == [None]
        writer.flush()
    assert store.reuse.blocks_of([b"k" * 32, b"m" * 32]) == [(block.block, block.block), None]
    assert store.reuse.values([b"v" * 32, b"n" * 32]) == {b"v" * 32: b"value"}


# S3: 300 blocks of 1 MiB.
MEMORY = """
import sys
from pathlib import Path
from mpfs.store import Store
from store_helpers import staged, unlike

def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))

peak = 0
store = Store.create(Path(sys.argv[1]))
before = anonymous()
with store.writer() as writer:
    for index in range(300):
        writer.put_block(staged(unlike(index, 1 << 20)))
        peak = max(peak, anonymous())
    writer.flush()
print((peak - before) // 1024)
"""


def test_memory_does_not_grow_with_what_is_staged(tmp_path: Path) -> None:
    process = python(MEMORY, str(tmp_path / "repo"))
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    # Two batches of 64 MiB, the pages of one of them, and what malloc has not given back.
    assert 20 < int(output) < 240


def fill(store: Store, total: int) -> None:
    """Stage more than there is room for, in batches that each fit."""
    with Writer(store.environment, batch_bytes=2 * MIB) as writer:
        for index in range(total // MIB):
            writer.put_block(staged(unlike(index, MIB)))
        writer.flush()


def assert_still_usable(store: Store, first: str) -> None:
    assert [ref.commit for ref in store.refs.all()] == [first]
    assert_clean(store)
    assert execute_gc(store, now=NOW).blocks_removed > 5
    second = publish(store, {"w": unlike(9, 3 * MIB)}, expected=first, parents=[first])
    assert store.refs.get("main").commit == second
    assert_clean(store)


def test_a_full_map(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "repo", map_size=16 * MIB)
    first = publish(store, {"w": data(1)})
    with pytest.raises(NoSpaceError, match=r"map of 16,777,216 bytes is full .*2,097,152 bytes") as caught:
        fill(store, 32 * MIB)
    assert caught.value.details == {"needed": 2 * MIB, "map_size": 16 * MIB}
    assert caught.value.exit_code == 15
    assert_still_usable(store, first)
    store.close()


def test_a_full_disk(small_disk: Path) -> None:
    store = Store.create(small_disk / "repo")
    first = publish(store, {"w": data(1)})
    with pytest.raises(NoSpaceError, match=r"disk is full.*2,097,152 bytes") as caught:
        fill(store, 48 * MIB)
    assert caught.value.details["needed"] == 2 * MIB
    assert "free" in caught.value.details
    assert_still_usable(store, first)
    store.close()
    again = Store.open(small_disk / "repo")
    assert_clean(again)
    again.close()


def test_a_disk_that_others_fill_and_clear(small_disk: Path) -> None:
    store = Store.create(small_disk / "repo")
    first = publish(store, {"w": data(1)})
    other = small_disk / "other"
    with pytest.raises(OSError), other.open("wb") as file:  # noqa: PT011, PT012
        while True:
            file.write(bytes(64 << 10))
            file.flush()
    with pytest.raises(NoSpaceError):
        publish(store, {"w": unlike(1, 3 * MIB)}, expected=first)
    assert [ref.commit for ref in store.refs.all()] == [first]
    assert_clean(store)
    other.unlink()
    publish(store, {"w": unlike(1, 3 * MIB)}, expected=first)
    assert_clean(store)
    store.close()


@pytest.mark.parametrize(
    ("code", "free", "expected"),
    [
        (errno.ENOSPC, 1 << 40, NoSpaceError),
        (errno.EDQUOT, 1 << 40, NoSpaceError),
        (errno.EIO, 0, NoSpaceError),  # a write cut short
        (errno.EIO, 1 << 40, MPFSError),
    ],
)
def test_lmdbs_words_for_a_full_disk(
    store: Store, monkeypatch: pytest.MonkeyPatch, code: int, free: int, expected: type[MPFSError]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": free})())
    error = store.environment.translate(lmdb.Error(f"mdb_txn_commit: {os.strerror(code)}"), 5000)
    assert type(error) is expected


# S1: a 96 MiB map, 80 blocks of 1 MiB, every other one deleted.
def test_space_that_gc_frees_takes_new_blocks(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "repo", map_size=96 * MIB)
    with store.writer() as writer:
        tensors = [stage(writer, unlike(index, MIB), MIB) for index in range(80)]
        kept = tensors[::2]
        snapshot = Snapshot(tuple(BlobFile(f"f{i:03}", MIB, tensor_id(tensor)) for i, tensor in enumerate(kept)))
        commit = Commit(object_id(snapshot.encode()), (), (), None, "", "", NOW)
        first = writer.publish(tensors=kept, snapshot=snapshot, commit=commit, move=move())
    result = execute_gc(store, now=NOW)
    assert (result.blocks_removed, result.bytes_removed) == (40, 40 * MIB)
    with store.writer() as writer:
        for index in range(40):
            writer.put_block(staged(unlike(1000 + index, MIB)))
        writer.flush()
    assert counts(store)["blocks"] == 80
    assert_clean(store)
    with pytest.raises(NoSpaceError):
        fill(store, 40 * MIB)
    execute_gc(store, now=NOW)
    assert counts(store)["blocks"] == 40
    assert store.refs.get("main").commit == first
    assert_clean(store)
    store.close()


def test_objects_that_are_not_there(store: Store) -> None:
    for identity in ("1" * 64, "1", "not an id", ""):
        with pytest.raises(NotFoundError):
            store.objects.get(Commit, identity)
    first = publish(store, {"w": data(1)})
    assert store.objects.ids(Commit, first[:7]) == store.objects.ids(Commit, first[:8]) == [first]
    assert store.objects.ids(Commit, "not hex") == []
    assert plan_of([("1" * 64, "2" * 64, "3" * 64)]).base == 0
