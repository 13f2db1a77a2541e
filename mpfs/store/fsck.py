"""The structural check: everything decodes, is what its id says, and has what it refers to.

Writers insert what is referred to before (or together with) what refers to it, and gc removes in the opposite order.
So whatever is in the store has all that it refers to, reachable or not, at any instant at which a process may die; the
one exception is a plan that no commit was made of, whose inputs nobody keeps. That is why the check does not begin at
the refs: damage is found wherever it is, and the detail says whether a ref reaches it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from mpfs.errors import IntegrityError, NotFoundError, UsageError
from mpfs.objects import BlockId, Commit, ObjectId, Plan, Run, Snapshot, Tensor, block_id
from mpfs.objects.dtypes import CODES
from mpfs.objects.ids import BLOCK_ID_SIZE, is_object_id
from mpfs.objects.progress import Progress
from mpfs.store.blocks import RAW, BlockInfo
from mpfs.store.environment import Transaction
from mpfs.store.locks import repository_lock
from mpfs.store.objects import DATABASE_OF, decode_object
from mpfs.store.pages import verify
from mpfs.store.pairs import Pair, PairRecord, is_recorded, new_states, pair_of, pair_problem
from mpfs.store.reach import Reach
from mpfs.store.refs import decode_ref, decode_reflog_entry
from mpfs.store.seal import SEAL_SIZE, is_sealed
from mpfs.store.statistics import packed_problem, stats_key
from mpfs.store.store import Store, meta_checksum

_BATCH_BYTES = 64 << 20
_BATCH_OBJECTS = 64
_BATCH_LOOKUPS = 4096
_STATS_KEY_SIZE = BLOCK_ID_SIZE + 1 + 8

_SCANNED = (
    "refs",
    "reflog",
    "commits",
    "plans",
    "runs",
    "run_index",
    "snapshots",
    "tensors",
    "block_info",
    "stats",
    "reuse",
    "pairs",
)
_COUNTED = ("refs", "reflog", "commits", "plans", "runs", "snapshots", "tensors", "blocks", "stats", "bytes")

StatsOf: TypeAlias = Callable[[memoryview, str, int], bytes]
"""Makes the record of a block's statistics from its bytes, its dtype and the index of its first element."""

PairsOf: TypeAlias = Callable[[Tensor, Tensor], PairRecord]
"""Compares two tensors; raises IntegrityError if a block of theirs cannot be read."""

_PAGE_ATTEMPTS = 20

_Object = TypeVar("_Object", Commit, Plan, Run, Snapshot, Tensor)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    `kind` is a stable word: `missing_X` (it is referred to and not there), `damaged_X` (its bytes are not what its id
    or checksum says, or cannot be read), with X one of meta, ref, reflog, commit, snapshot, plan, run, tensor, block,
    block_info, stats, tensor_stats, reuse, pairs, page; `wrong_size`, `wrong_run_index`, `wrong_stats`, `wrong_pairs` and `stray_stats`. `object` is the
    id, or the ref's name. While there is a `damaged_page`, nothing else is looked at: LMDB itself cannot be trusted.
    """

    kind: str
    object: str
    detail: str


@dataclass(frozen=True, slots=True)
class FsckReport:
    """What was checked (`bytes`: payload bytes that were re-hashed, the rest: how many) and what is wrong."""

    checked: dict[str, int]
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def check(
    store: Store,
    *,
    read_data: bool = False,
    subset: float | None = None,
    since: float | None = None,
    stats_of: StatsOf | None = None,
    pairs_of: PairsOf | None = None,
    progress: Progress | None = None,
) -> FsckReport:
    """Check a store, reading only, under the shared lock: writers may go on, gc waits.

    With `read_data` every block is read and hashed, or of all blocks a random share `subset` (0 < subset <= 1), another
    one each time; with `since` (seconds since 1970, UTC) only the blocks of younger commits. With `stats_of` the
    statistics of what is read are computed again, with `pairs_of` those of pairs of tensors, or of the same share of them
    (not with `since`). `progress` is called with (done, total), in records.

    Raises:
        UsageError: `subset` is not a share, or it or `since` was given without `read_data`.
        LockedError: a garbage collection is at work and does not end soon.
        IntegrityError: LMDB itself cannot read the file.
    """
    if subset is not None and not (read_data and 0 < subset <= 1):
        raise UsageError("a subset to check is a share of the data, above 0% and up to 100%, and needs the data read")
    if since is not None and not read_data:
        raise UsageError("a time since when to check the data needs the data read")
    with repository_lock(store.path / "lock", exclusive=False):
        share = subset if subset is not None else float(read_data)
        return Check(store, progress, stats_of, since, pairs_of).run(share)


@dataclass
class Check:
    """One check; the caller holds the repository lock."""

    store: Store
    progress: Progress | None = None
    stats_of: StatsOf | None = None
    since: float | None = None
    pairs_of: PairsOf | None = None
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTED, 0))
    problems: dict[tuple[str, str], str] = field(default_factory=dict)
    used_plans: set[ObjectId] = field(default_factory=set)
    sizes: dict[ObjectId, tuple[str, int]] = field(default_factory=dict)
    done: int = 0
    total: int = 0

    def run(self, share: float) -> FsckReport:
        """All checks, and the data of a share of the blocks."""
        self._pages()
        if not self.problems:
            self._records(share)
        reach = Reach(self.store, [name for _, name in self.problems])
        problems = [Problem(kind, name, reach.explain(name, text)) for (kind, name), text in self.problems.items()]
        return FsckReport(self.counts, tuple(problems))

    def _pages(self) -> None:
        """LMDB trusts its pages; so they come first."""
        for attempt in range(_PAGE_ATTEMPTS):
            try:
                with self.store.environment.read() as txn:
                    found = verify(txn.path / "data.mdb", txn.number)
            except IntegrityError:
                # Writers may have gone on by two transactions before the meta page was read.
                if attempt == _PAGE_ATTEMPTS - 1:
                    raise
                continue
            for item in found:
                where = f" ({item.tree})" if item.tree else ""
                self._problem("damaged_page", f"page {item.page}{where}", item.detail)
            return

    def _records(self, share: float) -> None:
        """All records. What refers comes before what is referred to, so that what writers add meanwhile is no problem."""
        with self.store.environment.read() as txn:
            self.total = sum(txn.count(database) for database in _SCANNED)
            self.total += math.ceil(share * txn.count("block_info"))
        self._meta()
        self._refs()
        self._reflog()
        self._commits()
        self._runs()
        self._run_index()
        self._plans()
        self._snapshots()
        self._tensors()
        self._blocks()
        self._stats()
        self._caches()
        if share:
            self._data(share)
        if share and self.pairs_of is not None and self.since is None:
            self._pairs(share, self.pairs_of)

    def _problem(self, kind: str, name: str, detail: str) -> None:
        self.problems.setdefault((kind, name), detail)

    def _advance(self, count: int, counted: str | None = None) -> None:
        if counted is not None:
            self.counts[counted] += count
        self.done += count
        if self.progress is not None:
            self.progress(self.done, max(self.total, self.done))

    def _require(self, txn: Transaction, database: str, identity: object, needed_by: str) -> None:
        kind = database[:-1]
        if not isinstance(identity, str) or not is_object_id(identity):
            self._problem(f"missing_{kind}", str(identity), f"{needed_by} names it, and it is not an id")
        elif not txn.contains(database, bytes.fromhex(identity)):
            self._problem(f"missing_{kind}", identity, f"needed by {needed_by}")

    def _objects(self, kind: type[_Object]) -> Iterator[tuple[Transaction, ObjectId, _Object]]:
        """All readable objects of a kind, each with a transaction to look further; the others are problems."""
        database = DATABASE_OF[kind]
        # Tensors are the large ones, and have the most to look up.
        count = _BATCH_OBJECTS // 8 if kind is Tensor else _BATCH_OBJECTS
        for txn, batch in self.store.environment.batches(database, count):
            for key, value in batch:
                try:
                    item = decode_object(kind, key.hex(), bytes(value))
                except IntegrityError as error:
                    self._problem(f"damaged_{database[:-1]}", key.hex(), error.message)
                else:
                    yield txn, key.hex(), item
            self._advance(len(batch), database)

    def _meta(self) -> None:
        info = self.store.info
        expected = {
            "format_version": str(info.format_version),
            "block_size": str(info.block_size),
            "hash_name": info.hash_name,
            "uuid": info.uuid,
        }
        with self.store.environment.read() as txn:
            found = {key: bytes(value) for key, value in txn.scan("meta")}
        for name, value in expected.items():
            if found.get(name.encode()) != value.encode():
                self._problem("damaged_meta", name, f"is {found.get(name.encode())!r}, was {value!r} when opened")
        if found.get(b"checksum") != meta_checksum(expected).encode():
            self._problem("damaged_meta", "checksum", "it does not match the other records")
        known = {*expected, *new_states(), "checksum", "last_gc"}
        for key in found.keys() - {name.encode() for name in known}:
            self._problem("damaged_meta", key.decode(errors="replace"), "there is no such record")

    def _refs(self) -> None:
        for txn, batch in self.store.environment.batches("refs"):
            for key, value in batch:
                try:
                    ref = decode_ref(key, bytes(value))
                except IntegrityError as error:
                    self._problem("damaged_ref", key.decode(errors="replace"), error.message)
                else:
                    self._require(txn, "commits", ref.commit, f"{ref.kind} {ref.name}")
            self._advance(len(batch), "refs")

    def _reflog(self) -> None:
        for txn, batch in self.store.environment.batches("reflog"):
            for key, value in batch:
                try:
                    entry = decode_reflog_entry(key, bytes(value))
                except IntegrityError as error:
                    self._problem("damaged_reflog", key.decode(errors="replace"), error.message)
                    continue
                for commit in (entry.old, entry.new):
                    if commit is not None:
                        self._require(txn, "commits", commit, f"entry {entry.sequence} in the log of {entry.name}")
            self._advance(len(batch), "reflog")

    def _commits(self) -> None:
        for txn, identity, commit in self._objects(Commit):
            name = f"commit {identity}"
            self._require(txn, "snapshots", commit.snapshot, name)
            for other in (*commit.parents, *(item.commit for item in commit.inputs)):
                self._require(txn, "commits", other, name)
            if commit.plan is not None:
                self._require(txn, "plans", commit.plan, name)
                self.used_plans.add(commit.plan)

    def _runs(self) -> None:
        for txn, identity, run in self._objects(Run):
            self._require(txn, "commits", run.commit, f"run {identity}")
            self._require(txn, "plans", run.plan, f"run {identity}")
            if is_object_id(run.commit) and not txn.contains("run_index", bytes.fromhex(run.commit)):
                self._problem("wrong_run_index", run.commit, f"no entry, although run {identity} made it")

    def _run_index(self) -> None:
        for txn, batch in self.store.environment.batches("run_index"):
            for key, value in batch:
                run_id = bytes(value).hex()
                self._require(txn, "commits", key.hex(), "run_index")
                self._require(txn, "runs", run_id, f"run_index, for commit {key.hex()}")
                data = txn.get("runs", bytes(value)) if value else None
                if data is not None and not _run_made(bytes(data), key.hex()):
                    self._problem("wrong_run_index", key.hex(), f"its entry names run {run_id}, which did not make it")
            self._advance(len(batch))

    def _plans(self) -> None:
        for txn, identity, plan in self._objects(Plan):
            if identity not in self.used_plans:
                continue
            for tensor in plan.tensors:
                for needed in (tensor.base, *(expert for _, expert in tensor.experts)):
                    if needed is not None:
                        self._require(txn, "tensors", needed, f"plan {identity}, for {tensor.name}")

    def _snapshots(self) -> None:
        for txn, identity, snapshot in self._objects(Snapshot):
            for reference in snapshot.references():
                self._require(txn, "tensors", reference, f"snapshot {identity}")
            for file in snapshot.files:
                parts = [self._size(txn, part) for part in file.references()]
                if None in parts:
                    continue  # missing or damaged, and reported as that
                known = [part for part in parts if part is not None]
                size = sum(nbytes for _, nbytes in known)
                if size != file.size or known[0][0] != "U8":
                    detail = f"{file.path}: its parts have {size:,} bytes, the file {file.size:,}"
                    self._problem("wrong_size", identity, detail)

    def _size(self, txn: Transaction, tensor: ObjectId) -> tuple[str, int] | None:
        """Dtype and bytes of a tensor, None if it cannot be read."""
        if tensor not in self.sizes:
            data = txn.get("tensors", bytes.fromhex(tensor)) if is_object_id(tensor) else None
            if data is None:
                return None
            try:
                decoded = decode_object(Tensor, tensor, bytes(data))
            except IntegrityError:
                return None
            self.sizes[tensor] = decoded.dtype, decoded.nbytes
        return self.sizes[tensor]

    def _tensors(self) -> None:
        places: list[tuple[BlockId, int, bytes, ObjectId]] = []
        for txn, identity, tensor in self._objects(Tensor):
            if tensor.block_size != self.store.info.block_size:
                self._problem("wrong_size", identity, f"it has blocks of {tensor.block_size:,} bytes, unlike the store")
            problem = packed_problem(txn, tensor, identity)
            if problem is not None:
                self._problem("damaged_tensor_stats", identity, problem)
            for index, (block, size) in enumerate(tensor.sized_blocks()):
                places.append((block, size, stats_key(block, tensor.dtype, tensor.block_start(index)), identity))
                if len(places) >= _BATCH_LOOKUPS:
                    self._places(places)
                    places = []
        self._places(places)

    def _places(self, places: Iterable[tuple[BlockId, int, bytes, ObjectId]]) -> None:
        """Blocks where tensors have them: block, size, key of the statistics, tensor."""
        with self.store.environment.read() as txn:
            for block, size, key, tensor in places:
                name, needed_by = block.hex(), f"needed by tensor {tensor}"
                record = txn.get("block_info", block)
                if not txn.contains("blocks", block):
                    self._problem("missing_block", name, needed_by)
                elif record is None:
                    self._problem("missing_block_info", name, needed_by)
                else:
                    info = _info(record)
                    if info is not None and info.raw_size != size:
                        self._problem(
                            "wrong_size", name, f"has {info.raw_size:,} bytes; tensor {tensor} needs {size:,}"
                        )
                if not txn.contains("stats", key):
                    start = int.from_bytes(key[-8:], "big")
                    dtype = next(dtype for dtype, code in CODES.items() if code == key[BLOCK_ID_SIZE])
                    self._problem("missing_stats", name, f"as {dtype} from element {start}, {needed_by}")

    def _blocks(self) -> None:
        missing = False
        for txn, batch in self.store.environment.batches("block_info"):
            for block, record in batch:
                info, size = _info(record), txn.size("blocks", block)
                if size is None:
                    missing = True
                    self._problem("missing_block", block.hex(), "block_info has a record of it")
                elif info is None or info.codec != RAW or info.stored_size != info.raw_size:
                    self._problem("damaged_block_info", block.hex(), "its record cannot be read")
                elif size != info.stored_size:
                    detail = f"has {size:,} bytes, its record says {info.stored_size:,}"
                    self._problem("wrong_size", block.hex(), detail)
            self._advance(len(batch), "blocks")
        with self.store.environment.read() as txn:
            uneven = txn.count("blocks") != txn.count("block_info")
        if missing or uneven:
            for txn, batch in self.store.environment.batches("blocks", values=False):
                for block, _ in batch:
                    if not txn.contains("block_info", block):
                        self._problem("missing_block_info", block.hex(), "the block has no record")

    def _stats(self) -> None:
        codes = set(CODES.values())
        for txn, batch in self.store.environment.batches("stats"):
            for key, value in batch:
                block = key[:BLOCK_ID_SIZE]
                if len(key) != _STATS_KEY_SIZE or key[BLOCK_ID_SIZE] not in codes or not value:
                    self._problem("damaged_stats", key.hex(), "not a record of a block's statistics")
                elif not txn.contains("block_info", block) and not txn.contains("blocks", block):
                    self._problem("stray_stats", block.hex(), "statistics of a block that is not there")
                elif not is_sealed(key, value):
                    self._problem(
                        "damaged_stats", block.hex(), "a record of its statistics does not match its checksum"
                    )
            self._advance(len(batch), "stats")

    def _caches(self) -> None:
        for _, batch in self.store.environment.batches("reuse"):
            for key, value in batch:
                if not is_sealed(key, value):
                    self._problem("damaged_reuse", key.hex(), "it does not match its checksum; it is not used")
            self._advance(len(batch))
        for txn, batch in self.store.environment.batches("pairs"):
            for key, value in batch:
                problem = pair_problem(txn, key, value)
                if problem is not None:
                    self._problem("damaged_pairs", key.hex(), problem)
            self._advance(len(batch))

    def _data(self, share: float) -> None:
        for chosen in self._chosen(share):
            self.store.blocks.prefetch(chosen)
            with self.store.environment.read() as txn:
                for block in chosen:
                    payload = txn.get("blocks", block)
                    if payload is None:
                        continue  # reported already
                    self.counts["bytes"] += len(payload)
                    found = block_id(payload)
                    if found != block:
                        self._problem("damaged_block", block.hex(), f"its bytes have the id {found.hex()}")
                    elif self.stats_of is not None:
                        self._recompute(txn, block, payload, self.stats_of)
            self._advance(len(chosen))

    def _pairs(self, share: float, pairs_of: PairsOf) -> None:
        """Pairs of tensors, compared again."""
        source = random.Random()
        chosen: dict[Pair, list[bytes]] = {}
        for _, batch in self.store.environment.batches("pairs", values=False):
            for key, _ in batch:
                pair = pair_of(key)
                if pair is not None and (pair in chosen or source.random() < share):
                    chosen.setdefault(pair, []).append(key)
        for pair, keys in chosen.items():
            try:
                a, b = (self.store.objects.get(Tensor, name) for name in pair)
                wanted = pairs_of(a, b)
            except (IntegrityError, NotFoundError):
                continue  # reported already
            with self.store.environment.read() as txn:
                for key in keys:
                    value = txn.get("pairs", key)
                    if value is None or pair_problem(txn, key, value) is not None:
                        continue  # likewise
                    if not is_recorded(wanted, key, bytes(value[:-SEAL_SIZE]), a.numel):
                        self._problem("wrong_pairs", key.hex(), "its statistics are not those of its tensors")

    def _recompute(self, txn: Transaction, block: BlockId, payload: memoryview, stats_of: StatsOf) -> None:
        for key, value in txn.scan("stats", block):
            if is_sealed(key, value) and expected_stats(key, payload, stats_of) != bytes(value[:-SEAL_SIZE]):
                start = int.from_bytes(key[-8:], "big")
                self._problem("wrong_stats", block.hex(), f"its statistics from element {start} are not what it has")

    def _recent_blocks(self) -> set[BlockId]:
        """The blocks of commits that are not older than `since`."""
        counts = dict(self.counts)
        recent = {commit.snapshot for _, _, commit in self._objects(Commit) if commit.time >= (self.since or 0)}
        tensors = {
            tensor
            for _, identity, snapshot in self._objects(Snapshot)
            if identity in recent
            for tensor in snapshot.references()
        }
        blocks = {
            block for _, identity, tensor in self._objects(Tensor) if identity in tensors for block in tensor.blocks
        }
        self.counts = counts  # all of these were counted already
        return blocks

    def _chosen(self, share: float) -> Iterator[list[BlockId]]:
        """The blocks to be read, in batches of bounded size."""
        source = random.Random()
        recent = None if self.since is None else self._recent_blocks()
        with self.store.environment.read() as txn:
            left = txn.count("block_info")
        wanted = math.ceil(share * left)
        chosen: list[BlockId] = []
        nbytes = 0
        for _, batch in self.store.environment.batches("block_info"):
            # Selection sampling: exactly `wanted` of `left`, each equally likely.
            taken = []
            for block, record in batch:
                if share == 1 or source.random() * left < wanted:
                    wanted -= 1
                    info = _info(record)
                    if recent is None or block in recent:
                        taken.append((block, 0 if info is None else info.stored_size))
                left -= 1
            for block, size in taken:
                if chosen and nbytes + size > _BATCH_BYTES:
                    yield chosen
                    chosen, nbytes = [], 0
                chosen.append(block)
                nbytes += size
        if chosen:
            yield chosen


def expected_stats(key: bytes, payload: memoryview, stats_of: StatsOf) -> bytes | None:
    """What the record of statistics under `key` should be; None if no block has statistics for that place."""
    names = {code: name for name, code in CODES.items()}
    try:
        return stats_of(payload, names[key[BLOCK_ID_SIZE]], int.from_bytes(key[BLOCK_ID_SIZE + 1 :], "big"))
    except (ValueError, KeyError, IndexError):
        return None


def _info(record: memoryview) -> BlockInfo | None:
    try:
        return BlockInfo.unpack(record)
    except ValueError:
        return None


def _run_made(data: bytes, commit: ObjectId) -> bool:
    try:
        return Run.decode(data).commit == commit
    except ValueError:
        return True  # damaged, and reported as that
