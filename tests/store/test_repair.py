"""What fsck can make anew, what it puts in quarantine, and what a source heals."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress

import pytest
from store_helpers import DAY, NOW, STATS, assert_clean, checkpoint, data, merge, publish, remove, unlike
from test_fsck import CASES, Damage, Parts

from mpfs.errors import IntegrityError, LockedError
from mpfs.objects import Commit, Snapshot, Tensor
from mpfs.store import BlockInfo, FsckReport, RepairReport, Store, Writer, check, execute_gc, stats_key
from mpfs.store.environment import Transaction
from mpfs.store.repair import heal, repair
from mpfs.store.seal import seal

pytest_plugins = ["store_fixtures"]

LATER = NOW + 10_000 * DAY


def stats_of(payload: memoryview, dtype: str, first_element: int) -> bytes:
    """What the helpers give as statistics."""
    return STATS


def run(store: Store) -> RepairReport:
    """Repair."""
    return repair(store, stats_of=stats_of, author="doctor", lock_timeout=0.2)


def kinds(report: FsckReport) -> set[str]:
    """Kinds of problems."""
    return {problem.kind for problem in report.problems}


def spoil(store: Store, damage: Damage, parts: Parts) -> None:
    """Damage."""
    with store.environment.write() as txn:
        damage(txn, parts)


REBUILT = [
    "block_info deleted", "block_info unreadable", "block_info of unknown codec", "info without block", "stats deleted",
    "stats of no block", "stats flipped", "stats key of no sense", "run of another commit", "run without index",
    "ref too short", "ref of no kind", "ref of an odd name", "ref renamed", "log entry unreadable", "run flipped",
    "log entry of an odd key", "log entry to nowhere", "log entry flipped", "reuse entry flipped", "pair flipped", "ref to nowhere",
    "run deleted",
]  # fmt: skip


@pytest.mark.parametrize("name", REBUILT)
def test_what_can_be_rebuilt_is(store: Store, name: str) -> None:
    parts = Parts(store)
    before = {ref.name: ref.commit for ref in store.refs.all()}
    spoil(store, next(case[1] for case in CASES if case[0] == name), parts)
    report = run(store)
    assert report.after.ok, report
    assert report.actions
    assert {ref.name: ref.commit for ref in store.refs.all()} == before
    assert run(store).actions == ()


def test_every_damage_can_be_put_away(store: Store) -> None:
    """After a repair nothing is in the way of gc; and when what is in quarantine is given up, all is clean."""
    parts = Parts(store)
    for _, damage, kind, _ in CASES:
        if kind != "damaged_meta":
            with store.environment.write() as txn, suppress(AssertionError, IndexError, StopIteration):
                damage(txn, parts)  # unless another damage was there first
    report = run(store)
    assert not any(kind.startswith("damaged") for kind in kinds(report.after) - {"damaged_block"})
    execute_gc(store, now=LATER, reflog_days=100_000)
    lost = {ref.commit for ref in store.refs.all() if ref.name.startswith("quarantine/")}
    assert lost
    for ref in store.refs.all():
        if ref.commit in lost:
            remove(store, ref.name, time=NOW)
    execute_gc(store, now=LATER, reflog_days=0)
    run(store)
    assert kinds(check(store, read_data=True)) <= {"missing_block_info"}  # of a block that is not what its key says


def wrong_stats(txn: Transaction, parts: Parts) -> None:
    key = stats_key(parts.block, "F32", 0)
    txn.put("stats", key, seal(key, b"x" * len(STATS)))
    # What holds the tensor's records together would tell of it.
    txn.delete("tensor_stats", parts.key("tensor"))


def test_statistics_are_computed_again_on_request(store: Store) -> None:
    parts = Parts(store)
    spoil(store, wrong_stats, parts)
    assert check(store, read_data=True).ok
    report = check(store, read_data=True, stats_of=stats_of)
    assert [(item.kind, item.object) for item in report.problems] == [("wrong_stats", parts.block.hex())]
    assert run(store).after.ok
    assert store.blocks.stats(store.objects.get(Tensor, parts.tensor))[: len(STATS)] == STATS


def flip_block(txn: Transaction, parts: Parts) -> None:
    payload = bytearray(txn.get("blocks", parts.block) or b"")
    payload[7] ^= 16
    txn.put("blocks", parts.block, bytes(payload))


def test_a_branch_goes_back_to_a_whole_commit(store: Store) -> None:
    first = publish(store, {"w": unlike(1, 20_000)})
    weights = unlike(2, 20_000)
    second = publish(store, {"w": weights}, expected=first, parents=[first])
    third = publish(store, {"w": weights, "v": data(3)}, expected=second, parents=[second])
    store.move_ref("v1", second, expected=None, kind="tag", time=NOW, author="", reason="tag")
    snapshot = store.objects.get(Snapshot, store.objects.get(Commit, second).snapshot)
    block = store.objects.get(Tensor, snapshot.tensors["w"]).blocks[1]
    with store.environment.write() as txn:
        txn.put("blocks", block, b"?" * 4096)
    report = run(store)
    refs = {ref.name: ref.commit for ref in store.refs.all()}
    assert refs["quarantine/" + second[:16]] == second
    assert "v1" not in refs
    assert refs["main"] == first
    assert kinds(report.after) == {"damaged_block"}
    assert "quarantine/" in report.after.problems[0].detail
    assert any("branch main was at" in action for action in report.actions)
    log = store.refs.log("main")[-1]
    assert log.old == third
    assert log.reason.startswith("fsck")
    # Work goes on, and so does gc, with the remnants kept.
    publish(store, {"w": unlike(9, 20_000)}, expected=refs["main"], parents=[refs["main"]])
    execute_gc(store, now=LATER, reflog_days=0)
    assert store.refs.get("quarantine/" + second[:16]).commit == second
    assert kinds(check(store, read_data=True)) == {"damaged_block"}
    for ref in store.refs.all():
        if ref.name.startswith("quarantine/"):
            remove(store, ref.name)
    execute_gc(store, now=LATER, reflog_days=0)
    assert_clean(store)


def test_a_commit_that_is_gone(store: Store) -> None:
    first = publish(store, {"w": data(1)})
    second = publish(store, {"w": data(2)}, expected=first, parents=[first])
    third = publish(store, {"w": data(3)}, expected=second, parents=[second])
    with store.environment.write() as txn:
        value = bytes(txn.get("commits", bytes.fromhex(second)) or b"")
        txn.put("commits", bytes.fromhex(second), value[:-1] + b"!")
    with pytest.raises(IntegrityError):
        execute_gc(store, now=LATER)
    report = run(store)
    assert (store.path / "lost+found" / f"commit-{second}").read_bytes() == value[:-1] + b"!"
    assert store.refs.get("main").commit == third  # its contents are whole
    assert store.refs.get("quarantine/" + third[:16]).commit == third
    assert kinds(report.after) == {"missing_commit"}
    execute_gc(store, now=LATER, reflog_days=100_000)
    with store.environment.write() as txn:
        txn.put("commits", bytes.fromhex(third), b"rubbish")
    run(store)
    assert [ref.name for ref in store.refs.all()] == ["main"]
    assert store.refs.get("main").commit == first


def test_pages_that_are_damaged_cannot_be_repaired(store: Store) -> None:
    publish(store, {"w": data(1)})
    with store.environment.read() as txn:
        offset = txn.file_offset("tensors", next(iter(txn.scan("tensors")))[0])
    assert offset is not None
    with open(store.environment.path / "data.mdb", "r+b") as file:
        file.seek(offset // 4096 * 4096 + 10)
        file.write(b"\xff")
    for act in (lambda: run(store), lambda: heal(store, nothing, stats_of=stats_of)):
        with pytest.raises(IntegrityError, match="pages of the store are damaged"):
            act()


def test_a_repair_waits_for_writers(store: Store) -> None:
    with store.writer(), pytest.raises(LockedError):
        run(store)


# Healing


def nothing(writer: Writer) -> list[Tensor | Snapshot]:
    """A source that has nothing."""
    return []


def source(weights: dict[str, bytes]) -> Callable[[Writer], Iterable[Tensor | Snapshot]]:
    """A source that has a checkpoint."""

    def read(writer: Writer) -> list[Tensor | Snapshot]:
        tensors, snapshot = checkpoint(writer, weights, 4096)
        return [*tensors, snapshot]

    return read


@pytest.mark.parametrize(
    "name",
    ["block deleted", "block flipped", "block shortened", "tensor flipped", "tensor deleted", "snapshot deleted",
     "snapshot flipped", "short block deleted"],
)  # fmt: skip
@pytest.mark.parametrize("repaired", [True, False])
def test_a_source_heals(store: Store, name: str, repaired: bool) -> None:
    parts = Parts(store)
    store.move_ref("v1", parts.base, expected=None, kind="tag", time=NOW, author="", reason="tag")
    before = store.refs.all()
    spoil(store, next(case[1] for case in CASES if case[0] == name), parts)
    assert not check(store, read_data=True).ok
    if repaired:
        run(store)
    report = heal(store, source({"w": data(1), "v": data(2, 4096)}), stats_of=stats_of)
    assert report.wanted == report.healed >= 1
    if not report.after.ok:  # of a block_info that was damaged, too
        run(store)
    assert_clean(store)
    assert run(store).after.ok
    assert store.refs.all() == before  # what was moved out of the way is where it was


def test_a_source_without_the_block_heals_nothing(store: Store) -> None:
    parts = Parts(store)
    spoil(store, flip_block, parts)
    report = heal(store, source({"w": data(77)}), stats_of=stats_of)
    assert (report.wanted, report.healed) == (1, 0)
    assert kinds(report.after) == {"damaged_block"}
    with store.environment.read() as txn:
        assert txn.count("block_info") == txn.count("blocks")


def test_a_whole_store_does_not_look_at_the_source(store: Store) -> None:
    base = publish(store, {"w": data(1)})
    merge(store, base, base)

    def unread(writer: Writer) -> list[Tensor | Snapshot]:
        raise AssertionError

    report = heal(store, unread, stats_of=stats_of)
    assert (report.wanted, report.healed, report.after.ok) == (0, 0, True)


def test_a_block_of_a_false_size(store: Store) -> None:
    parts = Parts(store)
    with store.environment.write() as txn:
        txn.put("block_info", parts.block, BlockInfo(0, 1, 1, None).pack())
    assert kinds(check(store)) == {"wrong_size"}
    assert run(store).after.ok
