"""What gc keeps, what it removes, and that no order of deaths leaves a broken repository."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from store_helpers import (
    DAY,
    NOW,
    assert_clean,
    counts,
    data,
    merge,
    plan_of,
    publish,
    python,
    remove,
    stage,
    staged,
    tensor_id,
)

from mpfs.errors import IntegrityError, LockedError
from mpfs.objects import BlobFile, Commit, Plan, Snapshot, Tensor, object_id
from mpfs.store import RefMove, Store, execute_gc, plan_gc
from mpfs.store.environment import Environment, Transaction
from mpfs.store.locks import repository_lock

pytest_plugins = ["store_fixtures"]

LATER = NOW + 31 * DAY


def test_nothing_to_collect(store: Store) -> None:
    publish(store, {"w": data(1)})
    before = counts(store)
    result = execute_gc(store, now=LATER)
    assert (result.blocks_removed, result.bytes_removed, result.objects_removed, result.dry_run) == (0, 0, 0, False)
    assert counts(store) == before


def test_a_removed_ref_is_kept_by_its_young_log(store: Store) -> None:
    commit = publish(store, {"w": data(1)})
    remove(store, "main")
    assert execute_gc(store, now=NOW + 29 * DAY).objects_removed == 0
    assert store.objects.get(Commit, commit).message == "test"
    plan = plan_gc(store, now=LATER)
    assert plan.objects == {"commits": 1, "plans": 0, "runs": 0, "snapshots": 1, "tensors": 3}
    dry = execute_gc(store, now=LATER, dry_run=True)
    assert dry.dry_run
    assert (dry.blocks_removed, dry.bytes_removed) == (len(plan.blocks), plan.nbytes)
    assert dry.objects_removed == 5
    real = execute_gc(store, now=LATER)
    assert (real.blocks_removed, real.bytes_removed, real.objects_removed) == (len(plan.blocks), plan.nbytes, 5)
    assert set(counts(store).values()) == {0}
    assert_clean(store)


def test_reflog_days_is_a_parameter(store: Store) -> None:
    publish(store, {"w": data(1)})
    remove(store, "main", time=NOW + 10)
    assert plan_gc(store, now=NOW + DAY, reflog_days=2).blocks == ()
    assert plan_gc(store, now=NOW + 10, reflog_days=0).blocks != ()
    assert plan_gc(store, now=NOW + DAY, reflog_days=0.5).blocks != ()


def test_both_sides_of_a_log_entry_are_kept(store: Store) -> None:
    first = publish(store, {"w": data(1)})
    second = publish(store, {"w": data(2)}, expected=first)
    execute_gc(store, now=NOW + DAY)
    assert store.objects.ids(Commit) == sorted([first, second])
    execute_gc(store, now=LATER)
    assert store.objects.ids(Commit) == [second]
    assert_clean(store)
    # The entry that named `first` is gone with it, and the log goes on.
    third = publish(store, {"w": data(3)}, expected=second, time=LATER)
    assert [entry.new for entry in store.refs.log("main")] == [third]
    assert_clean(store)


def test_old_log_entries_stay_while_their_commits_do(store: Store) -> None:
    first = publish(store, {"w": data(1)})
    second = publish(store, {"w": data(2)}, expected=first, parents=[first])
    execute_gc(store, now=LATER)
    assert [entry.new for entry in store.refs.log("main")] == [first, second]


def test_parents_inputs_plans_and_runs_are_kept(store: Store) -> None:
    base = publish(store, {"w": data(1)}, ref="base")
    expert = publish(store, {"w": data(2)}, ref="expert")
    merged = merge(store, base, expert)
    remove(store, "base")
    remove(store, "expert")
    before = counts(store)
    assert execute_gc(store, now=LATER).objects_removed == 0
    assert counts(store) == before
    assert store.objects.run_of(merged) is not None
    remove(store, "merged")
    plan = plan_gc(store, now=LATER)
    assert plan.commits[0].commit == merged
    assert plan.objects["plans"] == plan.objects["runs"] == 1
    execute_gc(store, now=LATER)
    assert set(counts(store).values()) == {0}


def test_what_two_commits_share_stays_with_one(store: Store) -> None:
    shared = data(7, 40_000)
    publish(store, {"w": shared, "x": data(1)}, ref="a")
    keep = publish(store, {"w": shared, "y": data(2)}, ref="b")
    remove(store, "a")
    assert execute_gc(store, now=LATER).objects_removed > 0
    snapshot = store.objects.get(Snapshot, store.objects.get(Commit, keep).snapshot)
    for tensor in snapshot.references():
        for block in store.objects.get(Tensor, tensor).blocks:
            store.blocks.read(block, "test")
    assert_clean(store)


def test_a_saved_plan_stays_and_keeps_nothing(store: Store) -> None:
    base = publish(store, {"w": data(1)}, ref="base")
    snapshot = store.objects.get(Commit, base).snapshot
    plan = plan_of([(base, snapshot, store.objects.get(Snapshot, snapshot).tensors["w"])], note="saved")
    encoded = plan.encode()
    with store.environment.write() as txn:
        txn.put("plans", bytes.fromhex(object_id(encoded)), encoded)
    remove(store, "base")
    execute_gc(store, now=LATER)
    assert store.objects.ids(Plan) == [object_id(encoded)]
    assert counts(store)["blocks"] == counts(store)["commits"] == 0
    assert_clean(store)


def test_caches_go_with_what_they_are_about(store: Store) -> None:
    dead = publish(store, {"w": data(1)}, ref="dead")
    live = publish(store, {"w": data(2)}, ref="live")
    ids = {}
    for name, commit in (("dead", dead), ("live", live)):
        ids[name] = store.objects.get(Snapshot, store.objects.get(Commit, commit).snapshot).tensors["w"]
    blocks = {name: store.objects.get(Tensor, tensor).blocks[0] for name, tensor in ids.items()}
    live_key, dead_key = bytes.fromhex(ids["live"]), bytes.fromhex(ids["dead"])
    with store.writer() as writer:
        writer.put_reuse(b"k1" * 16, blocks["live"])
        writer.put_reuse(b"k2" * 16, blocks["live"] + blocks["dead"])
        writer.put_reuse(b"k3" * 16, b"what prepare found")
        writer.flush()
    with store.environment.write() as txn:
        for key in (live_key + live_key, live_key + dead_key, dead_key + live_key):
            txn.put("pairs", key, b"histogram")
    remove(store, "dead")
    execute_gc(store, now=LATER)
    with store.environment.read() as txn:
        assert [key[:2] for key, _ in txn.scan("reuse")] == [b"k1", b"k3"]
        assert [key for key, _ in txn.scan("pairs")] == [live_key + live_key]


def test_staged_blocks_are_safe_from_gc_until_the_writer_ends(store: Store) -> None:
    with store.writer() as writer:
        writer.put_block(staged(b"staged"))
        writer.flush()
        with pytest.raises(LockedError) as caught:
            execute_gc(store, now=NOW, lock_timeout=0.1)
        assert caught.value.exit_code == 11
    assert_clean(store)
    assert execute_gc(store, now=NOW).blocks_removed == 1


def test_gc_at_work_keeps_others_out(store: Store) -> None:
    with repository_lock(store.path / "lock", exclusive=True):
        for exclusive in (False, True):
            with (
                pytest.raises(LockedError),
                repository_lock(store.path / "lock", exclusive=exclusive, timeout=0.1),
            ):
                pass


@pytest.mark.parametrize("what", ["commits", "snapshots", "tensors"])
@pytest.mark.parametrize("missing", [True, False])
def test_gc_refuses_to_guess(store: Store, what: str, missing: bool) -> None:
    publish(store, {"w": data(1)})
    publish(store, {"w": data(2)}, ref="dead")
    main = store.objects.get(Commit, store.refs.get("main").commit)
    key = {
        "commits": store.refs.get("main").commit,
        "snapshots": main.snapshot,
        "tensors": store.objects.get(Snapshot, main.snapshot).tensors["w"],
    }[what]
    remove(store, "dead")
    with store.environment.write() as txn:
        if missing:
            txn.delete(what, bytes.fromhex(key))
        else:
            txn.put(what, bytes.fromhex(key), b"{}")
    before = counts(store)
    with pytest.raises(IntegrityError, match=key):
        execute_gc(store, now=LATER)
    assert counts(store) == before


def test_damaged_garbage_is_garbage(store: Store) -> None:
    commit = publish(store, {"w": data(1)})
    remove(store, "main")
    with store.environment.write() as txn:
        txn.put("commits", bytes.fromhex(commit), b"{}")
    execute_gc(store, now=LATER)
    assert set(counts(store).values()) == {0}


class DiedError(Exception):
    """The process is gone."""


@pytest.mark.parametrize("seed", range(3))
def test_dying_between_any_two_transactions(store: Store, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Every prefix of gc's transactions leaves a clean store; small batches give many of them."""
    monkeypatch.setattr("mpfs.store.gc._BATCH_KEYS", 4)
    rng = random.Random(seed)
    commits: list[str] = []
    for index in range(12):
        if index % 3 == 2:
            commits.append(merge(store, *rng.sample(commits, 2), ref=f"m{index}", seed=rng.randrange(4)))
        else:
            parents = rng.sample(commits, min(len(commits), 1))
            commits.append(
                publish(store, {"w": data(rng.randrange(4))}, ref=f"r{index}", parents=parents, message=f"{index}")
            )
    keep = rng.choice([ref.name for ref in store.refs.all()])
    for ref in store.refs.all():
        if ref.name != keep:
            remove(store, ref.name)
    kept = store.refs.get(keep)
    original = Environment.write
    writes = 0

    @contextmanager
    def limited(self: Environment, needed: int = 0) -> Iterator[Transaction]:
        nonlocal writes
        writes += 1
        if writes > 2:  # the first only catches up
            raise DiedError
        with original(self, needed) as txn:
            yield txn

    monkeypatch.setattr(Environment, "write", limited)
    deaths = 0
    for _ in range(1000):
        writes = 0
        try:
            execute_gc(store, now=LATER)
        except DiedError:
            deaths += 1
        else:
            break
        assert_clean(store)
        assert store.refs.all() == [kept]
    assert deaths >= 5
    assert_clean(store)
    assert plan_gc(store, now=LATER).blocks == ()
    assert plan_gc(store, now=LATER).objects == dict.fromkeys(("commits", "plans", "runs", "snapshots", "tensors"), 0)


HOLD_WRITE_LOCK = """
import sys, time
from pathlib import Path
from mpfs.store import Store
with Store.open(Path(sys.argv[1])).environment.write():
    print("writing", flush=True)
    time.sleep(60)
"""


def test_a_commit_whose_writer_was_killed_as_it_became_durable_is_kept(store: Store) -> None:
    """LMDB writes its meta page, and then the number of the last transaction into the lock file. A process that dies in
    between leaves a publication that no reader sees before the next write transaction."""
    publish(store, {"w": data(1)}, ref="old")
    with store.writer() as writer:
        tensor = stage(writer, data(2), 4096)
        writer.flush()
        snapshot = Snapshot((BlobFile("x", tensor.nbytes, tensor_id(tensor)),))
        commit = Commit(object_id(snapshot.encode()), (), (), None, "", "", NOW)
        writer.publish(tensors=[tensor], snapshot=snapshot, commit=commit, move=RefMove("new", None, "branch", "test"))
    process = python(HOLD_WRITE_LOCK, str(store.path))
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    process.kill()
    process.wait()
    last = struct.pack("<Q", store.environment._env.info()["last_txnid"])
    with open(store.path / "store" / "lock.mdb", "r+b") as file:
        place = next(place for place in range(8, 128, 8) if file.seek(place) and file.read(8) == last)
        file.seek(place)
        file.write(struct.pack("<Q", int.from_bytes(last, "little") - 1))
    assert [ref.name for ref in store.refs.all()] == ["old"]  # so it looks
    execute_gc(store, now=LATER)
    assert [ref.name for ref in store.refs.all()] == ["new", "old"]
    assert_clean(store)
