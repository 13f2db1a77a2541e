"""Repair: what can be made anew is, what cannot is put where it does no harm. Healing: blocks from a source.

Made anew: block_info from the blocks, statistics from the blocks and tensors, run_index from the runs, a damaged ref
from its log. Removed: statistics and reuse entries that are of no use, log entries that are damaged or name commits
that are gone. Objects that are damaged are of no use, either; their bytes are kept in the repository's `lost+found`. A
commit that has lost something gets a ref of its own, `quarantine/ID`; where its contents are not whole, branches and
tags do not point at it any more: a branch goes back to the nearest whole ancestor, a tag is removed.
"""

from __future__ import annotations

import threading
import time as clock
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from mpfs.errors import IntegrityError, RefConflictError
from mpfs.objects import BlockId, Commit, ObjectId, Plan, Run, Snapshot, Tensor, block_id, object_id
from mpfs.objects.ids import BLOCK_ID_SIZE
from mpfs.objects.progress import Progress
from mpfs.store.blocks import RAW, BlockInfo
from mpfs.store.environment import Transaction
from mpfs.store.fsck import Check, FsckReport, PairsOf, StatsOf
from mpfs.store.locks import repository_lock
from mpfs.store.objects import DATABASE_OF, decode_object, put_object
from mpfs.store.pairs import delete_pairs, pair_problem
from mpfs.store.refs import QUARANTINE, Ref, RefKind, decode_ref, decode_reflog_entry, set_ref
from mpfs.store.seal import is_sealed, seal
from mpfs.store.statistics import PACKED, missing, packed_problem, put_packed, stats_key
from mpfs.store.store import Store
from mpfs.store.writer import StagedBlock, WriteFigures, Writer

_BATCH = 512
_KINDS: tuple[type[Commit] | type[Plan] | type[Run] | type[Snapshot] | type[Tensor], ...] = (
    Commit,
    Plan,
    Run,
    Snapshot,
    Tensor,
)
LOST_AND_FOUND = "lost+found"

_LOST: dict[RefKind, str] = {
    "branch": "fsck: its commit has lost some of its contents",
    "tag": "fsck: the tag's commit has lost some of its contents",
}
"""Why a ref was moved out of the way; a ref whose last move was that goes back when the commit is whole again."""

_T = TypeVar("_T")
_ObjectT = TypeVar("_ObjectT", Commit, Plan, Run, Snapshot, Tensor)


@dataclass(frozen=True, slots=True)
class RepairReport:
    """What a repair did, and the check that followed it: what could not be repaired is in `after`."""

    actions: tuple[str, ...]
    after: FsckReport


@dataclass(frozen=True, slots=True)
class HealReport:
    """How many blocks and objects were damaged or missing, how many of them the source had, and a check afterwards."""

    wanted: int
    healed: int
    after: FsckReport


def repair(
    store: Store,
    *,
    stats_of: StatsOf,
    pairs_of: PairsOf | None = None,
    author: str,
    progress: Progress | None = None,
    lock_timeout: float = 10.0,
) -> RepairReport:
    """Check everything, with all data, and repair what can be; see the module's text. Killed, it can be run again.

    Raises:
        IntegrityError: pages of the store are damaged, so that LMDB cannot be trusted with any of it.
        LockedError: somebody is at work.
        NoSpaceError: the disk or the map is full.
    """
    with repository_lock(store.path / "lock", exclusive=True, timeout=lock_timeout):
        store.environment.catch_up()
        before = Check(store, progress, stats_of, pairs_of=pairs_of).run(1.0)
        if any(problem.kind == "damaged_page" for problem in before.problems):
            raise IntegrityError(
                f"{store.path}: pages of the store are damaged ({before.problems[0].detail}); what LMDB cannot read "
                "safely cannot be repaired in place. Restore it from a copy",
            )
        # Without a problem there may still be a quarantine to be lifted.
        sick = before.problems or any(ref.name.startswith(QUARANTINE) for ref in store.refs.all())
        actions = _Repair(store, stats_of, author, before).run() if sick else []
        return RepairReport(tuple(actions), Check(store, None, stats_of, pairs_of=pairs_of).run(1.0))


@dataclass
class _Repair:
    store: Store
    stats_of: StatsOf
    author: str
    before: FsckReport
    actions: list[str] = field(default_factory=list)
    whole: dict[ObjectId, bool] = field(default_factory=dict)

    def run(self) -> list[str]:
        """Everything, in an order in which each step can rely on the ones before; what was done."""
        self._move_damaged_objects()
        self._block_infos()
        self._stats()
        self._packed()
        self._caches()
        self._run_index()
        self._refs()
        self._reflog()
        self._quarantine()
        return self.actions

    def _named(self, *kinds: str) -> list[str]:
        return [problem.object for problem in self.before.problems if problem.kind in kinds]

    def _did(self, count: int, what: str) -> None:
        if count:
            self.actions.append(f"{what}: {count:,}")

    def _move_damaged_objects(self) -> None:
        for kind in _KINDS:
            name = kind.__name__.lower()
            for identity in self._named(f"damaged_{name}"):
                folder = self.store.path / LOST_AND_FOUND
                folder.mkdir(exist_ok=True)
                with self.store.environment.write() as txn:
                    value = txn.get(DATABASE_OF[kind], bytes.fromhex(identity))
                    if value is not None:
                        (folder / f"{name}-{identity}").write_bytes(bytes(value))
                        txn.delete(DATABASE_OF[kind], bytes.fromhex(identity))
                self.actions.append(f"moved damaged {name} {identity} to {LOST_AND_FOUND}")

    def _block_infos(self) -> None:
        names = self._named("missing_block_info", "damaged_block_info", "wrong_size", "missing_block")
        blocks = [bytes.fromhex(name) for name in names if len(name) == 2 * BLOCK_ID_SIZE]
        made = removed = 0
        for txn, block in self._writing(blocks):
            payload = txn.get("blocks", block)
            if payload is None:
                removed += txn.delete("block_info", block)
            elif block_id(payload) == block:
                offset = txn.file_offset("blocks", block)
                txn.put("block_info", block, BlockInfo(RAW, len(payload), len(payload), offset).pack())
                made += 1
        self._did(made, "made block_info records anew")
        self._did(removed, "removed block_info records of blocks that are gone")

    def _stats(self) -> None:
        if not self._named("missing_stats", "damaged_stats", "wrong_stats", "stray_stats"):
            return
        useless = []
        suspect = set(self._named("damaged_stats", "wrong_stats", "stray_stats"))
        for _, batch in self.store.environment.batches("stats"):
            useless += [key for key, _ in batch if key.hex() in suspect or key[:BLOCK_ID_SIZE].hex() in suspect]
        for txn, key in self._writing(useless):
            txn.delete("stats", key)
        made = 0
        for tensor in self._readable(Tensor):
            places = ((block, tensor.block_start(index)) for index, block in enumerate(tensor.blocks))
            for txn, (block, start) in self._writing(places):
                key = stats_key(block, tensor.dtype, start)
                payload = txn.get("blocks", block)
                if payload is not None and not txn.contains("stats", key) and block_id(payload) == block:
                    txn.put("stats", key, seal(key, self.stats_of(payload, tensor.dtype, start)))
                    made += 1
        self._did(len(useless), "removed records of statistics that were wrong")
        self._did(made, "made records of statistics anew")

    def _packed(self) -> None:
        """Statistics by tensor; those that are not what the records are now, or are not there, are made anew."""
        wrong: list[ObjectId] = []
        for tensor in self._readable(Tensor):
            identity = object_id(tensor.encode())
            with self.store.environment.read() as txn:
                if packed_problem(txn, tensor, identity) is not None:
                    wrong.append(identity)
        for txn, identity in self._writing(wrong):
            txn.delete(PACKED, bytes.fromhex(identity))
        for entries in missing(self.store.environment, self._readable(Tensor)):
            with self.store.environment.write(needed=sum(len(value) for _, value in entries)) as txn:
                put_packed(txn, entries)
        self._did(len(wrong), "made statistics of tensors anew")

    def _caches(self) -> None:
        found: dict[str, list[bytes]] = {"reuse": [], "pairs": []}
        for _, batch in self.store.environment.batches("reuse"):
            found["reuse"] += [key for key, value in batch if not is_sealed(key, value)]
        for reading, batch in self.store.environment.batches("pairs"):
            found["pairs"] += [key for key, value in batch if pair_problem(reading, key, value) is not None]
        suspect = {bytes.fromhex(name) for name in self._named("wrong_pairs")}
        found["pairs"] += [key for key in suspect if key not in found["pairs"]]
        for database, useless in found.items():
            for txn, key in self._writing(useless):
                if database == "pairs":
                    delete_pairs(txn, [key])
                else:
                    txn.delete(database, key)
            self._did(len(useless), f"removed damaged entries of {database}")

    def _run_index(self) -> None:
        made_by: dict[ObjectId, ObjectId] = {run.commit: object_id(run.encode()) for run in self._readable(Run)}
        with self.store.environment.read() as txn:
            found = {key.hex(): bytes(value).hex() for key, value in txn.scan("run_index")}
            wanted = {commit: run for commit, run in made_by.items() if txn.contains("commits", bytes.fromhex(commit))}
        changed = [commit for commit in found.keys() | wanted.keys() if found.get(commit) != wanted.get(commit)]
        for txn, commit in self._writing(changed):
            if commit in wanted:
                txn.put("run_index", bytes.fromhex(commit), bytes.fromhex(wanted[commit]))
            else:
                txn.delete("run_index", bytes.fromhex(commit))
        self._did(len(changed), "put run_index entries right")

    def _refs(self) -> None:
        """Refs whose record is damaged, from their logs."""
        broken: dict[bytes, bytes] = {}
        with self.store.environment.read() as txn:
            for key, value in txn.scan("refs"):
                try:
                    decode_ref(key, bytes(value))
                except IntegrityError:
                    broken[key] = bytes(value)
        if not broken:
            return
        last = self._last_moves()
        with self.store.environment.write() as txn:
            for key in broken:
                txn.delete("refs", key)
                self.actions.append(f"removed damaged ref {key.decode(errors='replace')}")
            for name, commit in last.items():
                # The name of the damaged one may be what was damaged: every ref that should be there is looked for.
                if txn.get("refs", name.encode()) is None and txn.contains("commits", bytes.fromhex(commit)):
                    kind = b"t" if broken.get(name.encode(), b"b")[:1] == b"t" else b"b"
                    txn.put("refs", name.encode(), seal(name.encode(), kind + bytes.fromhex(commit)))
                    self.actions.append(f"made ref {name} anew at {commit[:12]}, from its log")

    def _last_moves(self) -> dict[str, ObjectId]:
        """Where each ref is, as far as its log tells."""
        last: dict[str, ObjectId] = {}
        for _, batch in self.store.environment.batches("reflog"):
            for key, value in batch:
                with suppress(IntegrityError):
                    entry = decode_reflog_entry(key, bytes(value))
                    last.pop(entry.name, None)
                    if entry.new is not None:
                        last[entry.name] = entry.new
        return last

    def _reflog(self) -> None:
        useless = []
        for txn, batch in self.store.environment.batches("reflog"):
            for key, value in batch:
                try:
                    entry = decode_reflog_entry(key, bytes(value))
                except IntegrityError:
                    useless.append(key)
                    continue
                named = [commit for commit in (entry.old, entry.new) if commit is not None]
                if not all(txn.contains("commits", bytes.fromhex(commit)) for commit in named):
                    useless.append(key)
        for txn, key in self._writing(useless):
            txn.delete("reflog", key)
        self._did(len(useless), "removed log entries that are damaged or name commits that are gone")

    def _quarantine(self) -> None:
        """Mark the commits that have lost something, and move refs to whole ones; lift it from those that are whole."""
        contents, broken = self._broken_commits()
        now = int(clock.time())
        refs = self.store.refs.all()
        commits = {object_id(commit.encode()): commit for commit in self._readable(Commit)}
        logs: dict[str, list[ObjectId]] = {}
        for entry in self.store.refs.log():
            logs.setdefault(entry.name, []).extend([] if entry.new is None else [entry.new])
        with self.store.environment.write() as txn:
            for ref in refs:
                if ref.name.startswith(QUARANTINE):
                    if ref.commit not in broken:
                        self._move(txn, ref, None, now, "fsck: whole again")
                    continue
                if ref.commit in commits and ref.commit not in contents:
                    continue
                target = (
                    None
                    if ref.kind == "tag"
                    else _whole_ancestor(commits, ref.commit, logs.get(ref.name, []), contents)
                )
                self._move(txn, ref, target, now, _LOST[ref.kind])
            self._move_back(txn, {ref.name: ref.commit for ref in refs}, commits, contents, now)
            known = {ref.name for ref in refs}
            for commit in sorted(broken):
                name = QUARANTINE + commit[:16]
                if name not in known:
                    set_ref(
                        txn, name, commit, expected=None, kind="branch", time=now, author=self.author,
                        reason="fsck: " + broken[commit],
                    )  # fmt: skip
                    self.actions.append(f"put commit {commit[:12]} under {name}: {broken[commit]}")

    def _move_back(
        self,
        txn: Transaction,
        refs: dict[str, ObjectId],
        commits: dict[ObjectId, Commit],
        contents: set[ObjectId],
        now: int,
    ) -> None:
        """Put refs that an earlier repair moved out of the way where they were, unless somebody has moved them since."""
        kinds: dict[str, RefKind] = {reason: kind for kind, reason in _LOST.items()}
        last = {entry.name: entry for entry in self.store.refs.log()}
        for entry in last.values():
            whole = entry.old in commits and entry.old not in contents
            if entry.reason in kinds and whole and refs.get(entry.name) == entry.new and entry.old is not None:
                with suppress(RefConflictError):  # its name may be in the way of a newer one
                    set_ref(
                        txn, entry.name, entry.old, expected=entry.new, kind=kinds[entry.reason], time=now,
                        author=self.author, reason="fsck: whole again",
                    )  # fmt: skip
                    self.actions.append(f"{kinds[entry.reason]} {entry.name} is at {entry.old[:12]} again")

    def _move(self, txn: Transaction, ref: Ref, target: ObjectId | None, now: int, reason: str) -> None:
        where = "removed" if target is None else f"moved to {target[:12]}"
        self.actions.append(f"{ref.kind} {ref.name} was at {ref.commit[:12]}, {where} ({reason})")
        if target is None and not txn.contains("commits", bytes.fromhex(ref.commit)):
            txn.delete("refs", ref.name.encode())
            return
        kind: RefKind = ref.kind
        set_ref(
            txn, ref.name, target, expected=ref.commit, kind=kind, time=now, author=self.author, reason=reason
        )  # fmt: skip

    def _broken_commits(self) -> tuple[set[ObjectId], dict[ObjectId, str]]:
        """The commits whose contents are not whole, and all that lack something, with what that is."""
        bad_blocks = {bytes.fromhex(name) for name in self._named("damaged_block", "missing_block")}
        with self.store.environment.read() as txn:
            bad_blocks = {block for block in bad_blocks if not _is_whole(txn, block)}
        bad_tensors = {
            object_id(tensor.encode())
            for tensor in self._readable(Tensor)
            if tensor.block_size != self.store.info.block_size or not bad_blocks.isdisjoint(tensor.blocks)
        }
        present = {kind: set(self.store.objects.ids(kind)) for kind in (Tensor, Snapshot, Commit, Plan)}
        good_tensors = present[Tensor] - bad_tensors
        bad_sizes = set(self._named("wrong_size"))
        whole = {
            identity
            for snapshot in self._readable(Snapshot)
            if good_tensors.issuperset(snapshot.references())
            and (identity := object_id(snapshot.encode())) not in bad_sizes
        }
        contents: set[ObjectId] = set()
        broken: dict[ObjectId, str] = {}
        for commit in self._readable(Commit):
            identity = object_id(commit.encode())
            needed = {*commit.parents, *(item.commit for item in commit.inputs)}
            if commit.snapshot not in whole:
                contents.add(identity)
                broken[identity] = "its contents are not whole"
            elif not needed <= present[Commit]:
                broken[identity] = "a parent or an input of it is gone"
            elif commit.plan is not None and commit.plan not in present[Plan]:
                broken[identity] = "its plan is gone"
        return contents, broken

    def _readable(self, kind: type[_ObjectT]) -> Iterator[_ObjectT]:
        for _, batch in self.store.environment.batches(DATABASE_OF[kind], 64):
            for key, value in batch:
                with suppress(IntegrityError):
                    yield decode_object(kind, key.hex(), bytes(value))

    def _writing(self, items: Iterable[_T]) -> Iterator[tuple[Transaction, _T]]:
        """Items with a write transaction, a batch of them in each."""
        iterator = iter(items)
        while batch := list(islice(iterator, _BATCH)):
            with self.store.environment.write(needed=1 << 20) as txn:
                for item in batch:
                    yield txn, item


def _is_whole(txn: Transaction, block: BlockId) -> bool:
    payload = txn.get("blocks", block)
    return payload is not None and block_id(payload) == block


def _whole_ancestor(
    commits: dict[ObjectId, Commit], start: ObjectId, log: list[ObjectId], contents: set[ObjectId]
) -> ObjectId | None:
    """The nearest whole commit on the way back from `start`, else the newest in the ref's log."""
    seen: dict[ObjectId, None] = {}
    front = [start]
    while front:
        for identity in front:
            if identity in commits and identity not in contents:
                return identity
        seen.update(dict.fromkeys(front))
        parents = (parent for identity in front if identity in commits for parent in commits[identity].parents)
        front = [parent for parent in dict.fromkeys(parents) if parent not in seen]
    return next((item for item in reversed(log) if item in commits and item not in contents), None)


class Healer(Writer):
    """Takes what an import stages, and stores of it what is missing or damaged; nothing else."""

    def __init__(self, store: Store, before: FsckReport) -> None:
        super().__init__(store.environment)
        self._store = store
        kinds = ("damaged_block", "missing_block")
        self._blocks = {bytes.fromhex(item.object) for item in before.problems if item.kind in kinds}
        objects = ("damaged_tensor", "missing_tensor", "damaged_snapshot", "missing_snapshot")
        self._objects = {item.object for item in before.problems if item.kind in objects}
        self._lock_healing = threading.Lock()
        self.wanted = len(self._blocks) + len(self._objects)
        self.healed = 0

    def put_block(self, staged: StagedBlock, figures: WriteFigures | None = None) -> None:
        """Store a block in the place of one that is missing or damaged."""
        with self._lock_healing:
            if staged.block not in self._blocks:
                return
            self._blocks.remove(staged.block)
        key = stats_key(staged.block, staged.dtype, staged.first_element)
        with self._environment.write(needed=len(staged.data)) as txn:
            if not _is_whole(txn, staged.block):
                size = len(staged.data)
                txn.put("blocks", staged.block, staged.data)
                txn.put("block_info", staged.block, BlockInfo(RAW, size, size, None, int(clock.time())).pack())
                if not txn.contains("stats", key):
                    txn.put("stats", key, seal(key, staged.stats))
                self.healed += 1

    def put_objects(self, objects: Iterable[Tensor | Snapshot]) -> None:
        """Store the objects of the source that are missing or damaged."""
        for item in objects:
            if object_id(item.encode()) in self._objects:
                with self._environment.write(needed=1 << 20) as txn:
                    put_object(txn, item)
                self.healed += 1


def heal(
    store: Store,
    read_source: Callable[[Writer], Iterable[Tensor | Snapshot]],
    *,
    stats_of: StatsOf,
    progress: Progress | None = None,
) -> HealReport:
    """Take blocks, tensors and snapshots that are damaged or missing from a source that still has them.

    `read_source` stages the blocks of the source with the writer that it is given, and returns the objects that
    describe it: an import that is never published. Writers may be at work meanwhile; gc waits.

    Raises:
        IntegrityError: pages of the store are damaged, so that LMDB cannot be trusted with any of it.
        NoSpaceError: the disk or the map is full.
        MPFSError: the source cannot be read; what was healed until then is healed.
    """
    with repository_lock(store.path / "lock", exclusive=False):
        before = Check(store, progress).run(1.0)
        if any(problem.kind == "damaged_page" for problem in before.problems):
            raise IntegrityError(f"{store.path}: pages of the store are damaged; they cannot be healed from a source")
        healer = Healer(store, before)
        with healer:
            if healer.wanted:
                healer.put_objects(read_source(healer))
        return HealReport(healer.wanted, healer.healed, Check(store, None, stats_of).run(1.0))
