"""Each check of fsck is shown to fire, and to name what is affected."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from store_helpers import STATS, assert_clean, data, merge, plan_of, publish

from mpfs.errors import UsageError
from mpfs.objects import Commit, ObjectId, Snapshot, Tensor, object_id
from mpfs.store import BlockInfo, Store, check, stats_key
from mpfs.store.environment import Transaction
from mpfs.store.seal import seal

pytest_plugins = ["store_fixtures"]

Damage = Callable[[Transaction, "Parts"], None]


class Parts:
    """The keys of a repository's parts."""

    def __init__(self, store: Store) -> None:
        self.base = publish(store, {"w": data(1), "v": data(2, 4096)}, ref="base")
        self.expert = publish(store, {"w": data(3)}, ref="expert")
        self.merged = merge(store, self.base, self.expert)
        commit = store.objects.get(Commit, self.base)
        self.snapshot = commit.snapshot
        self.tensor = store.objects.get(Snapshot, commit.snapshot).tensors["w"]
        self.block = store.objects.get(Tensor, self.tensor).blocks[0]
        self.tail = store.objects.get(Tensor, self.tensor).blocks[-1]
        self.plan = store.objects.ids(type(plan_of([(self.base, self.snapshot, self.tensor)])))[0]
        with store.environment.read() as txn:
            self.run = bytes(next(iter(txn.scan("run_index")))[1]).hex()

    def key(self, name: str) -> bytes:
        """A binary key by attribute name."""
        value = getattr(self, name)
        return value if isinstance(value, bytes) else bytes.fromhex(value)


def delete(database: str, name: str) -> Damage:
    def damage(txn: Transaction, parts: Parts) -> None:
        assert txn.delete(database, parts.key(name))

    return damage


def flip(database: str, name: str, position: int = 20) -> Damage:
    def damage(txn: Transaction, parts: Parts) -> None:
        value = bytearray(txn.get(database, parts.key(name)) or b"")
        value[position] ^= 1
        txn.put(database, parts.key(name), bytes(value))

    return damage


def put(database: str, key: bytes | str, value: bytes) -> Damage:
    def damage(txn: Transaction, parts: Parts) -> None:
        txn.put(database, key if isinstance(key, bytes) else parts.key(key), value)

    return damage


def put_sealed(database: str, key: bytes | str, value: bytes) -> Damage:
    def damage(txn: Transaction, parts: Parts) -> None:
        place = key if isinstance(key, bytes) else parts.key(key)
        txn.put(database, place, seal(place, value))

    return damage


def rename_ref(txn: Transaction, parts: Parts) -> None:
    value = bytes(txn.get("refs", b"base") or b"")
    txn.delete("refs", b"base")
    txn.put("refs", b"basf", value)


def delete_stats(txn: Transaction, parts: Parts) -> None:
    assert txn.delete("stats", stats_key(parts.block, "F32", 0))


def flip_stats(txn: Transaction, parts: Parts) -> None:
    key = stats_key(parts.block, "F32", 0)
    value = bytearray(txn.get("stats", key) or b"")
    value[10] ^= 4
    txn.put("stats", key, bytes(value))


def flip_log(txn: Transaction, parts: Parts) -> None:
    key, value = next(iter(txn.scan("reflog", b"base\0")))
    txn.put("reflog", key, bytes(value).replace(b"tester", b"testes"))


def odd_blocks(txn: Transaction, parts: Parts) -> None:
    encoded = Tensor("U8", (100,), 64, (b"b" * 16, b"c" * 16)).encode()
    txn.put("tensors", bytes.fromhex(object_id(encoded)), encoded)


def shorten_block(txn: Transaction, parts: Parts) -> None:
    txn.put("blocks", parts.block, b"short")


def wrong_raw_size(txn: Transaction, parts: Parts) -> None:
    txn.put("block_info", parts.block, BlockInfo(0, 4095, 4095, None).pack())
    txn.put("blocks", parts.block, b"x" * 4095)


def wrong_file_size(txn: Transaction, parts: Parts) -> None:
    encoded = bytes(txn.get("snapshots", parts.key("snapshot")) or b"").replace(b'"size":22', b'"size":23')
    txn.put("snapshots", bytes.fromhex(object_id(encoded)), encoded)


def other_run(txn: Transaction, parts: Parts) -> None:
    txn.put("run_index", parts.key("base"), parts.key("run"))


def no_index(txn: Transaction, parts: Parts) -> None:
    assert txn.delete("run_index", parts.key("merged"))


def malformed_commit(txn: Transaction, parts: Parts) -> None:
    encoded = b'{"kind":"commit"}'
    txn.put("commits", bytes.fromhex(object_id(encoded)), encoded)


def commit_with_odd_ids(txn: Transaction, parts: Parts) -> None:
    encoded = Commit("odd", (), (), None, "", "", 0).encode()
    txn.put("commits", bytes.fromhex(object_id(encoded)), encoded)


def log_to_nowhere(txn: Transaction, parts: Parts) -> None:
    key, value = next(iter(txn.scan("reflog", b"base\0")))
    txn.put("reflog", key, seal(key, bytes(value)[:-8].replace(parts.base.encode(), b"0" * 64)))


CASES: list[tuple[str, Damage, str, str | None]] = [
    ("block deleted", delete("blocks", "block"), "missing_block", "block"),
    ("short block deleted", delete("blocks", "tail"), "missing_block", "tail"),
    ("block_info deleted", delete("block_info", "block"), "missing_block_info", "block"),
    ("block_info unreadable", put("block_info", "block", b"?"), "damaged_block_info", "block"),
    ("block_info of unknown codec", flip("block_info", "block", 0), "damaged_block_info", "block"),
    ("unneeded block without info", put("blocks", b"b" * 16, b"x"), "missing_block_info", None),
    ("info without block", put("block_info", b"b" * 16, BlockInfo(0, 1, 1, None).pack()), "missing_block", None),
    ("stats deleted", delete_stats, "missing_stats", "block"),
    ("stats of no block", put("stats", b"b" * 16 + bytes(9), STATS), "stray_stats", None),
    ("stats key of no sense", put("stats", b"b" * 16, STATS), "damaged_stats", None),
    ("block shortened", shorten_block, "wrong_size", "block"),
    ("block of another size", wrong_raw_size, "wrong_size", "block"),
    ("block flipped", flip("blocks", "block"), "damaged_block", "block"),
    ("tensor flipped", flip("tensors", "tensor"), "damaged_tensor", "tensor"),
    ("tensor deleted", delete("tensors", "tensor"), "missing_tensor", "tensor"),
    ("snapshot flipped", flip("snapshots", "snapshot"), "damaged_snapshot", "snapshot"),
    ("snapshot deleted", delete("snapshots", "snapshot"), "missing_snapshot", "snapshot"),
    ("file size wrong", wrong_file_size, "wrong_size", None),
    ("commit flipped", flip("commits", "base"), "damaged_commit", "base"),
    ("commit deleted", delete("commits", "base"), "missing_commit", "base"),
    ("commit malformed", malformed_commit, "damaged_commit", None),
    ("commit with odd ids", commit_with_odd_ids, "damaged_commit", None),
    ("plan flipped", flip("plans", "plan"), "damaged_plan", "plan"),
    ("plan deleted", delete("plans", "plan"), "missing_plan", "plan"),
    ("run flipped", flip("runs", "run"), "damaged_run", "run"),
    ("run deleted", delete("runs", "run"), "missing_run", "run"),
    ("run of another commit", other_run, "wrong_run_index", "base"),
    ("run without index", no_index, "wrong_run_index", "merged"),
    ("stats flipped", flip_stats, "damaged_stats", "block"),
    ("stats of a tensor flipped", flip("tensor_stats", "tensor"), "damaged_tensor_stats", "tensor"),
    ("stats of a tensor cut short", put_sealed("tensor_stats", "tensor", STATS), "damaged_tensor_stats", "tensor"),
    (
        "stats of another tensor",
        put_sealed("tensor_stats", "tensor", STATS[:-1] + b"x" + STATS),
        "damaged_tensor_stats",
        "tensor",
    ),
    ("reuse entry flipped", put("reuse", b"r" * 32, b"{}" + bytes(8)), "damaged_reuse", None),
    ("pair flipped", put("pairs", b"p" * 64, b"{}" + bytes(8)), "damaged_pairs", None),
    ("blocks of another size", odd_blocks, "wrong_size", None),
    ("ref renamed", rename_ref, "damaged_ref", None),
    ("ref to nowhere", put_sealed("refs", b"lost", b"b" + b"\1" * 32), "missing_commit", None),
    ("ref too short", put("refs", b"base", b"b"), "damaged_ref", None),
    ("ref of no kind", put_sealed("refs", b"base", b"x" * 33), "damaged_ref", None),
    ("ref of an odd name", put_sealed("refs", b"\xff", b"b" * 33), "damaged_ref", None),
    ("log entry unreadable", put_sealed("reflog", b"base\0" + bytes(8), b"?"), "damaged_reflog", None),
    ("log entry of an odd key", put_sealed("reflog", b"base", b"{}"), "damaged_reflog", None),
    ("log entry to nowhere", log_to_nowhere, "missing_commit", None),
    ("log entry flipped", flip_log, "damaged_reflog", None),
    ("meta checksum", put("meta", b"checksum", b"?"), "damaged_meta", None),
    ("meta of no sense", put("meta", b"colour", b"blue"), "damaged_meta", None),
    ("meta changed", put("meta", b"uuid", b"?"), "damaged_meta", None),
]


@pytest.mark.parametrize(("damage", "kind", "name"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_each_damage_is_found(store: Store, damage: Damage, kind: str, name: str | None) -> None:
    parts = Parts(store)
    assert_clean(store)
    with store.environment.write() as txn:
        damage(txn, parts)
    report = check(store, read_data=True)
    assert not report.ok
    found = [problem for problem in report.problems if problem.kind == kind]
    assert found, report.problems
    if name is not None:
        assert parts.key(name).hex() in [problem.object for problem in found]


def test_the_detail_names_what_is_affected(store: Store) -> None:
    parts = Parts(store)
    with store.environment.write() as txn:
        flip("blocks", "block")(txn, parts)
    assert check(store).ok  # only reading the data can tell
    (problem,) = check(store, read_data=True).problems
    assert problem.kind == "damaged_block"
    assert f"tensor w ({parts.tensor[:12]})" in problem.detail
    assert f"snapshot {parts.snapshot[:12]}" in problem.detail
    for ref in ("base", "merged"):
        assert ref in problem.detail
    assert "expert" not in problem.detail


def test_damage_that_no_ref_reaches_says_so(store: Store) -> None:
    Parts(store)
    with store.environment.write() as txn:
        put("blocks", b"b" * 16, b"x")(txn, None)  # type: ignore[arg-type]
    (problem,) = check(store).problems
    assert "no ref reaches it" in problem.detail


def test_missing_is_told_from_damaged(store: Store) -> None:
    parts = Parts(store)
    with store.environment.write() as txn:
        delete("blocks", "block")(txn, parts)
        flip("blocks", "tail")(txn, parts)
    kinds = {problem.object: problem.kind for problem in check(store, read_data=True).problems}
    assert kinds == {parts.block.hex(): "missing_block", parts.tail.hex(): "damaged_block"}


def test_a_saved_plan_may_outlive_its_inputs(store: Store) -> None:
    parts = Parts(store)
    nowhere: ObjectId = "1" * 64
    with store.environment.write() as txn:
        encoded = plan_of([(nowhere, nowhere, nowhere)]).encode()
        txn.put("plans", bytes.fromhex(object_id(encoded)), encoded)
    assert_clean(store)
    with store.environment.write() as txn:  # but not one that a commit was made of
        delete("tensors", "tensor")(txn, parts)
    details = [problem.detail for problem in check(store).problems]
    assert any("needed by" in detail for detail in details)


def test_counts_and_progress(store: Store) -> None:
    Parts(store)
    calls: list[tuple[int, int]] = []
    report = check(store, read_data=True, progress=lambda done, total: calls.append((done, total)))
    assert report.ok
    with store.environment.read() as txn:
        nbytes = sum(len(value) for _, value in txn.scan("blocks"))
        blocks, stats = txn.count("blocks"), txn.count("stats")
    assert report.checked == {
        "refs": 3, "reflog": 3, "commits": 3, "plans": 1, "runs": 1, "snapshots": 3, "tensors": 7,
        "blocks": blocks, "stats": stats, "bytes": nbytes,
    }  # fmt: skip
    assert calls[-1][0] == calls[-1][1]
    assert calls == sorted(calls)
    assert check(store).checked["bytes"] == 0


def test_a_subset_of_the_data(store: Store) -> None:
    publish(store, {"w": b"".join(i.to_bytes(8, "big") * 512 for i in range(100))})
    some = check(store, read_data=True, subset=0.1).checked["bytes"]
    assert 0 < some <= 11 * 4096
    whole = check(store, read_data=True, subset=1.0).checked["bytes"]
    assert whole == check(store, read_data=True).checked["bytes"] > 100 * 4096
    with store.environment.write() as txn:
        for block in [key for key, _ in txn.scan("blocks", values=False)]:
            txn.put("blocks", block, b"x" * len(txn.get("blocks", block) or b""))
    damaged = set()
    for _ in range(4):  # an other share each time
        problems = check(store, read_data=True, subset=0.1).problems
        assert all(problem.kind == "damaged_block" for problem in problems)
        damaged |= {problem.object for problem in problems}
    assert len(damaged) > 11


@pytest.mark.parametrize("subset", [0.0, -1.0, 1.1])
def test_a_subset_must_be_a_share(store: Store, subset: float) -> None:
    with pytest.raises(UsageError):
        check(store, read_data=True, subset=subset)
    with pytest.raises(UsageError):
        check(store, subset=0.5)


def test_an_empty_store_is_clean(store: Store) -> None:
    assert check(store, read_data=True).problems == ()
