"""Garbage collection: what no ref and no young reflog entry reaches any more is removed.

Whatever holds references goes before what it refers to: reflog entries, then commits (children first, each with its
runs and its plan), snapshots, tensors, reuse entries, blocks. So in every state that a crash can leave behind, each
stored commit, snapshot and tensor has all that it refers to, and the next collection finds the rest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from mpfs.errors import IntegrityError
from mpfs.objects import BlockId, Commit, ObjectId, Plan, Run, Snapshot, Tensor
from mpfs.store.blocks import BlockInfo
from mpfs.store.compact import compact_store, remove_leftovers
from mpfs.store.environment import Transaction
from mpfs.store.locks import repository_lock
from mpfs.store.objects import DATABASE_OF, decode_object
from mpfs.store.pairs import delete_pairs, pair_states
from mpfs.store.refs import QUARANTINE, decode_ref, decode_reflog_entry
from mpfs.store.reuse import useless
from mpfs.store.statistics import PACKED
from mpfs.store.store import Store

DAY_SECONDS = 86400

_BATCH_KEYS = 1024
"""Keys of one transaction."""

_BATCH_BYTES = 64 << 20
"""Payload bytes that one transaction frees: LMDB lists every freed page in one record."""

_BATCH_OBJECTS = 64
"""Objects that are decoded within one read transaction."""

_T = TypeVar("_T")
_Object = TypeVar("_Object", Commit, Plan, Run, Snapshot, Tensor)


@dataclass(frozen=True, slots=True)
class DeadCommit:
    """A commit to be removed, and what goes in the same transaction: its runs, and plans that only it still needs."""

    commit: ObjectId
    runs: tuple[ObjectId, ...]
    plans: tuple[ObjectId, ...]


@dataclass(frozen=True, slots=True)
class GcPlan:
    """What a collection would remove. `reflog` are keys of the reflog; `nbytes` is the stored bytes of `blocks`.

    `commits` are in an order in which none precedes a commit that refers to it. `runs` are records of runs whose
    commit is gone already.
    """

    reflog: tuple[bytes, ...]
    commits: tuple[DeadCommit, ...]
    runs: tuple[ObjectId, ...]
    snapshots: tuple[ObjectId, ...]
    tensors: tuple[ObjectId, ...]
    blocks: tuple[BlockId, ...]
    nbytes: int

    @property
    def objects(self) -> dict[str, int]:
        """Number of objects to be removed, by kind."""
        return {
            "commits": len(self.commits),
            "plans": sum(len(item.plans) for item in self.commits),
            "runs": len(self.runs) + sum(len(item.runs) for item in self.commits),
            "snapshots": len(self.snapshots),
            "tensors": len(self.tensors),
        }


@dataclass(frozen=True, slots=True)
class GcResult:
    """What a collection removed, or with `dry_run` would remove. Bytes are stored bytes of blocks.

    The space is free for new blocks; the file shrinks only by compaction. `file_bytes_freed` is by how much it did.
    """

    blocks_removed: int
    bytes_removed: int
    objects_removed: int
    dry_run: bool
    file_bytes_freed: int = 0


def plan_gc(store: Store, *, now: int, reflog_days: float = 30.0, grace_seconds: float = 0.0) -> GcPlan:
    """What a collection at `now` (seconds since 1970, UTC) would remove.

    Kept is what refs, reflog entries younger than `reflog_days` and, from there, parents, inputs and plans reach, and
    every plan that no commit was ever made of. An older reflog entry goes if one of its commits does. Blocks that were
    stored in the last `grace_seconds` are kept as well: an import that died can go on with them. Of a commit that fsck
    has put under `quarantine/`, what is left is kept.

    Raises:
        IntegrityError: something that must be kept is missing or damaged, so what it refers to is not known.
        LockedError: a collection is at work and does not end soon.
    """
    with repository_lock(store.path / "lock", exclusive=False):
        return _plan(store, now - reflog_days * DAY_SECONDS, _young(now, grace_seconds))


def execute_gc(
    store: Store,
    *,
    now: int,
    reflog_days: float = 30.0,
    grace_seconds: float = 0.0,
    dry_run: bool = False,
    compact: bool = False,
    lock_timeout: float = 10.0,
) -> GcResult:
    """Collect: see `plan_gc` for what is removed. It is found and removed under one exclusive lock.

    With `compact` the store is then copied without its free space, which goes back to the file system.

    Killed at any instant it leaves a repository that is whole; the next collection goes on. `lock_timeout` in seconds.

    Raises:
        IntegrityError: something that must be kept is missing or damaged; nothing was removed.
        LockedError: writers were at work for all of `lock_timeout`.
        NoSpaceError: there was no room for the few pages that removing takes, or for the compacted copy.
    """
    freed = 0
    if dry_run:
        plan = plan_gc(store, now=now, reflog_days=reflog_days, grace_seconds=grace_seconds)
    else:
        with repository_lock(store.path / "lock", exclusive=True, timeout=lock_timeout):
            store.environment.catch_up()
            remove_leftovers(store)
            plan = _plan(store, now - reflog_days * DAY_SECONDS, _young(now, grace_seconds))
            _execute(store, plan)
            _settle(store, now)
            if compact:
                freed = compact_store(store)
    return GcResult(len(plan.blocks), plan.nbytes, sum(plan.objects.values()), dry_run, freed)


def _young(now: int, grace_seconds: float) -> float:
    """From when on a block is young, whatever the clocks of writers say if there is no grace."""
    return now - grace_seconds if grace_seconds > 0 else math.inf


@dataclass
class _Live:
    """What is reachable, by binary id."""

    commits: set[bytes] = field(default_factory=set)
    plans: set[bytes] = field(default_factory=set)
    snapshots: set[bytes] = field(default_factory=set)
    tensors: set[bytes] = field(default_factory=set)
    blocks: set[BlockId] = field(default_factory=set)
    broken: set[bytes] = field(default_factory=set)
    """Commits in quarantine: what they alone need, the `remnants`, may be missing or damaged."""
    remnants: set[bytes] = field(default_factory=set)
    """Snapshots of broken commits."""


def _plan(store: Store, cutoff: float, young: float) -> GcPlan:
    live, old_entries = _mark(store, cutoff)
    reflog = tuple(key for key, commits in old_entries if not live.commits.issuperset(commits))
    commits, runs = _dead_commits(store, live)
    snapshots = tuple(_dead(store, "snapshots", live.snapshots))
    tensors = tuple(_dead(store, "tensors", live.tensors))
    blocks: list[BlockId] = []
    nbytes = 0
    for _, batch in store.environment.batches("block_info"):
        for block, record in batch:
            if block not in live.blocks and _staged(record) <= young:
                blocks.append(block)
                nbytes += _stored_size(record)
    return GcPlan(reflog, commits, runs, snapshots, tensors, tuple(blocks), nbytes)


def _mark(store: Store, cutoff: float) -> tuple[_Live, list[tuple[bytes, set[bytes]]]]:
    """What is reachable, and the reflog entries that keep nothing alive with the commits that they name."""
    roots: set[bytes] = set()
    old_entries: list[tuple[bytes, set[bytes]]] = []
    # The log first: a ref that moves meanwhile is then seen either in its old or in its new place.
    for _, batch in store.environment.batches("reflog"):
        for key, value in batch:
            entry = decode_reflog_entry(key, bytes(value))
            named = {bytes.fromhex(commit) for commit in (entry.old, entry.new) if commit is not None}
            if entry.time > cutoff:
                roots |= named
            else:
                old_entries.append((key, named))
    for _, batch in store.environment.batches("refs"):
        roots.update(bytes.fromhex(decode_ref(key, bytes(value)).commit) for key, value in batch)

    live = _Live()
    live.broken = {bytes.fromhex(ref.commit) for ref in store.refs.all() if ref.name.startswith(QUARANTINE)}
    _mark_commits(store, live, roots)
    for snapshot in _load(store, Snapshot, live.snapshots - live.remnants):
        live.tensors.update(map(bytes.fromhex, snapshot.references()))
    for tensor in _load(store, Tensor, live.tensors):
        live.blocks.update(tensor.blocks)
    # What only broken commits need may be missing; what another commit needs as well may not, and was loaded above.
    live.snapshots |= live.remnants
    for _, snapshot in _load_readable(store, Snapshot, {item.hex() for item in live.remnants}):
        references = {item for item in snapshot.references() if bytes.fromhex(item) not in live.tensors}
        for _, tensor in _load_readable(store, Tensor, references):
            live.blocks.update(tensor.blocks)
        live.tensors.update(map(bytes.fromhex, references))
    return live, old_entries


def _mark_commits(store: Store, live: _Live, roots: set[bytes]) -> None:
    front = roots
    while front:
        live.commits |= front
        following: set[bytes] = set()
        plans: set[bytes] = set()
        for commit in _load(store, Commit, front & live.broken):
            live.remnants.add(bytes.fromhex(commit.snapshot))
            needed = (*commit.parents, *(item.commit for item in commit.inputs))
            following |= _present(store, "commits", needed)
            live.plans |= _present(store, "plans", () if commit.plan is None else (commit.plan,))
        for commit in _load(store, Commit, front - live.broken):
            live.snapshots.add(bytes.fromhex(commit.snapshot))
            following.update(map(bytes.fromhex, commit.parents))
            following.update(bytes.fromhex(item.commit) for item in commit.inputs)
            if commit.plan is not None:
                plans.add(bytes.fromhex(commit.plan))
        for plan in _load(store, Plan, plans - live.plans):
            # What a commit was made of is among its inputs; should a plan name more, that is kept while it is there.
            following |= _present(store, "commits", (model.commit for model in plan.models))
            live.snapshots |= _present(store, "snapshots", (model.snapshot for model in plan.models))
            live.tensors |= _present(store, "tensors", _plan_tensors(plan))
        live.plans |= plans
        front = following - live.commits


def _plan_tensors(plan: Plan) -> Iterator[ObjectId]:
    for tensor in plan.tensors:
        if tensor.base is not None:
            yield tensor.base
        yield from (expert for _, expert in tensor.experts)


def _dead_commits(store: Store, live: _Live) -> tuple[tuple[DeadCommit, ...], tuple[ObjectId, ...]]:
    """The commits to be removed, in order, and the runs that are left of commits that do not exist."""
    dead = set(_dead(store, "commits", live.commits))
    references: dict[ObjectId, set[ObjectId]] = {commit: set() for commit in dead}
    plans: dict[ObjectId, set[ObjectId]] = {commit: set() for commit in dead}
    for identity, commit in _load_readable(store, Commit, dead):
        references[identity] = dead & {*commit.parents, *(item.commit for item in commit.inputs)}
        if commit.plan is not None:
            plans[identity].add(commit.plan)

    runs: dict[ObjectId, list[ObjectId]] = {commit: [] for commit in dead}
    lost_runs: list[ObjectId] = []
    kept_plans = set(live.plans)
    for _, batch in store.environment.batches("runs"):
        for key, value in batch:
            try:
                run = decode_object(Run, key.hex(), bytes(value))
            except IntegrityError:
                continue
            if run.commit in dead:
                runs[run.commit].append(key.hex())
                plans[run.commit].add(run.plan)
            elif bytes.fromhex(run.commit) in live.commits:
                kept_plans.add(bytes.fromhex(run.plan))
            else:
                lost_runs.append(key.hex())

    order = _children_first(references)
    removable = {plan for plan in set().union(*plans.values()) if bytes.fromhex(plan) not in kept_plans}
    last = {plan: commit for commit in order for plan in plans[commit] if plan in removable}
    going: dict[ObjectId, list[ObjectId]] = {commit: [] for commit in order}
    for plan, commit_id in sorted(last.items()):
        going[commit_id].append(plan)
    commits = tuple(DeadCommit(commit, tuple(runs[commit]), tuple(going[commit])) for commit in order)
    return commits, tuple(lost_runs)


def _children_first(references: dict[ObjectId, set[ObjectId]]) -> list[ObjectId]:
    waiting = dict.fromkeys(references, 0)
    for targets in references.values():
        for target in targets:
            waiting[target] += 1
    ready = sorted(commit for commit, count in waiting.items() if count == 0)
    order = []
    while ready:
        commit = ready.pop()
        order.append(commit)
        for target in sorted(references[commit]):
            waiting[target] -= 1
            if waiting[target] == 0:
                ready.append(target)
    return order


def _execute(store: Store, plan: GcPlan) -> None:
    _delete(store, "reflog", plan.reflog)
    for steps in _chunks(plan.commits, _BATCH_KEYS // 4):
        with store.environment.write() as txn:
            for step in steps:
                key = bytes.fromhex(step.commit)
                txn.delete("run_index", key)
                for run in step.runs:
                    txn.delete("runs", bytes.fromhex(run))
                txn.delete("commits", key)
                for gone in step.plans:
                    txn.delete("plans", bytes.fromhex(gone))
    _delete(store, "runs", map(bytes.fromhex, plan.runs))
    _delete(store, "snapshots", map(bytes.fromhex, plan.snapshots))
    for keys in _chunks(_pairs_of(store, set(map(bytes.fromhex, plan.tensors))), _BATCH_KEYS):
        with store.environment.write() as txn:
            delete_pairs(txn, keys)
    _delete(store, "tensors", map(bytes.fromhex, plan.tensors))
    _delete(store, PACKED, _without_tensor(store))
    _delete(store, "reuse", _reuse_of(store, set(plan.blocks)))
    remaining = iter(plan.blocks)
    while _delete_blocks(store, remaining):
        pass


def _settle(store: Store, now: int) -> None:
    """Make what was freed usable at once: LMDB reuses a page only in the second transaction after it was freed."""
    for _ in range(2):
        with store.environment.write() as txn:
            txn.put("meta", b"last_gc", str(now).encode())


def _delete_blocks(store: Store, blocks: Iterator[BlockId]) -> bool:
    """Remove a batch of blocks with all that is kept about each; whether there was one."""
    found, nbytes = 0, 0
    with store.environment.write() as txn:
        for block in blocks:
            record = txn.get("block_info", block)
            nbytes += 0 if record is None else _stored_size(record)
            for key in [key for key, _ in txn.scan("stats", block, values=False)]:
                txn.delete("stats", key)
            txn.delete("block_info", block)
            txn.delete("blocks", block)
            found += 1
            if found >= _BATCH_KEYS or nbytes >= _BATCH_BYTES:
                break
    return found > 0


def _pairs_of(store: Store, tensors: set[bytes]) -> list[bytes]:
    """Keys of pair records whose base or expert tensor goes."""
    if not tensors:
        return []
    batches = store.environment.batches("pairs", values=False)
    return [key for _, batch in batches for key, _ in batch if key[:32] in tensors or key[32:64] in tensors]


def _without_tensor(store: Store) -> list[bytes]:
    """Keys of statistics by tensor whose tensor is gone, or was never published."""
    batches = store.environment.batches(PACKED, values=False)
    return [key for txn, batch in batches for key, _ in batch if not txn.contains("tensors", key)]


def _reuse_of(store: Store, blocks: set[BlockId]) -> list[bytes]:
    """Keys of reuse entries that name a block that goes or a plan that is gone, or say what was planned by other records
    of pairs."""
    states = pair_states(store)
    return [
        key
        for txn, batch in store.environment.batches("reuse")
        for key, value in batch
        if useless(txn, value, blocks, states)
    ]


def _delete(store: Store, database: str, keys: Iterable[bytes]) -> None:
    for chunk in _chunks(keys, _BATCH_KEYS):
        with store.environment.write() as txn:
            for key in chunk:
                txn.delete(database, key)


def _dead(store: Store, database: str, live: set[bytes]) -> Iterator[ObjectId]:
    for _, batch in store.environment.batches(database, values=False):
        yield from (key.hex() for key, _ in batch if key not in live)


def _present(store: Store, database: str, identities: Iterable[ObjectId]) -> set[bytes]:
    found: set[bytes] = set()
    for chunk in _chunks(map(bytes.fromhex, identities), _BATCH_KEYS):
        with store.environment.read() as txn:
            found.update(key for key in chunk if txn.contains(database, key))
    return found


def _load(store: Store, kind: type[_Object], keys: Iterable[bytes]) -> Iterator[_Object]:
    """The objects under these keys, all of which must be there and whole."""
    for chunk in _chunks(keys, _BATCH_OBJECTS):
        with store.environment.read() as txn:
            loaded = [_get(txn, kind, key) for key in chunk]
        yield from loaded


def _get(txn: Transaction, kind: type[_Object], key: bytes) -> _Object:
    view = txn.get(DATABASE_OF[kind], key)
    if view is None:
        raise IntegrityError(
            f"{kind.__name__.lower()} {key.hex()} is missing from the store, so what it refers to cannot be told from "
            "garbage; nothing was removed. See 'mpfs fsck'",
            id=key.hex(),
        )
    return decode_object(kind, key.hex(), bytes(view))


def _load_readable(store: Store, kind: type[_Object], identities: set[ObjectId]) -> Iterator[tuple[ObjectId, _Object]]:
    """The objects with these ids, as far as they can be read: damage to what goes anyway is no obstacle."""
    for chunk in _chunks(identities, _BATCH_OBJECTS):
        loaded = []
        with store.environment.read() as txn:
            for identity in chunk:
                view = txn.get(DATABASE_OF[kind], bytes.fromhex(identity))
                try:
                    loaded.append((identity, decode_object(kind, identity, bytes(view or b""))))
                except IntegrityError:
                    continue
        yield from loaded


def _stored_size(record: memoryview) -> int:
    try:
        return BlockInfo.unpack(record).stored_size
    except ValueError:
        return 0


def _staged(record: memoryview) -> int:
    try:
        return BlockInfo.unpack(record).staged
    except ValueError:
        return 0


def _chunks(items: Iterable[_T], size: int) -> Iterator[Sequence[_T]]:
    iterator = iter(items)
    while chunk := list(itertools.islice(iterator, size)):
        yield chunk
