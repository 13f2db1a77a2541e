"""Measuring exactly how experts differ from their base and from each other, for better plans; see `Repository.analyze`."""

from __future__ import annotations

import os
import time as clock
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import TypeAlias

from mpfs.objects import Commit, ObjectId, Snapshot, Tensor
from mpfs.objects.dtypes import MERGEABLE
from mpfs.objects.encoding import Json
from mpfs.objects.progress import Progress
from mpfs.stats.stored import compare
from mpfs.store import Store
from mpfs.store.pairs import PairRecord, PairTable, put_pairs

_AT_ONCE = 64
"""Pairs of tensors that are stored in one transaction."""


@dataclass(frozen=True, slots=True)
class AnalysisReport:
    """What an analysis found: pairs of tensors measured, those known before, and the bytes compared (of both sides)."""

    pairs: int
    known: int
    bytes_compared: int
    seconds: float

    def as_json(self) -> Json:
        """The JSON form."""
        return asdict(self)


_Model: TypeAlias = Mapping[str, tuple[ObjectId, Tensor]]


@dataclass(frozen=True, slots=True)
class _Task:
    """Two tensors to compare. Magnitudes are counted (`binned`) of what experts change of the base."""

    name: str
    a: Tensor
    b: Tensor
    binned: bool

    @property
    def nbytes(self) -> int:
        pairs = zip(self.a.sized_blocks(), self.b.sized_blocks(), strict=True)
        return sum(2 * size for (ours, size), (theirs, _) in pairs if ours != theirs)


def analyze(
    store: Store,
    base: ObjectId,
    experts: Sequence[ObjectId],
    *,
    threads: int | None = None,
    progress: Progress | None = None,
) -> AnalysisReport:
    """Measure the experts of some commits against a base's, and in pairs; what is known already is not read again."""
    started = clock.monotonic()
    models = [_model(store, commit) for commit in dict.fromkeys([base, *experts])]
    table = PairTable(store.environment)
    tasks: dict[tuple[ObjectId, ObjectId], _Task] = {}
    for a, b in combinations(models, 2):
        for pair, task in _comparable(a, b, binned=a is models[0]):
            tasks.setdefault(pair, task)
    missing = {pair: task for pair, task in tasks.items() if not _is_known(table, pair, task)}
    total, done = sum(task.nbytes for task in missing.values()), 0
    found: dict[tuple[ObjectId, ObjectId], PairRecord] = {}
    with ThreadPoolExecutor(threads or os.cpu_count() or 1, thread_name_prefix="mpfs-analyze") as executor:
        results = executor.map(
            lambda task: compare(store.blocks, task.a, task.b, task.name, binned=task.binned),
            missing.values(),
        )
        for (pair, task), record in zip(missing.items(), results, strict=True):
            found[pair] = record
            if len(found) >= _AT_ONCE:
                put_pairs(store, found)
                found.clear()
            done += task.nbytes
            if progress is not None:
                progress(done, total)
    put_pairs(store, found)
    return AnalysisReport(len(missing), len(tasks) - len(missing), total, clock.monotonic() - started)


def _model(store: Store, commit: ObjectId) -> _Model:
    snapshot = store.objects.get(Snapshot, store.objects.get(Commit, commit).snapshot)
    return {name: (identity, store.objects.get(Tensor, identity)) for name, identity in snapshot.tensors.items()}


def _is_known(table: PairTable, pair: tuple[ObjectId, ObjectId], task: _Task) -> bool:
    counted = not task.binned or len(task.a.blocks) < 2 or table.has_histogram(*pair)
    return counted and table.get(*pair) is not None


def _comparable(a: _Model, b: _Model, *, binned: bool) -> Iterator[tuple[tuple[ObjectId, ObjectId], _Task]]:
    """Tensors of one name, dtype and shape, with the smaller id first."""
    for name, first in a.items():
        second = b.get(name)
        if second is None or first[0] == second[0] or first[1].dtype not in MERGEABLE:
            continue
        if (first[1].dtype, first[1].shape) == (second[1].dtype, second[1].shape):
            low, high = sorted((first, second), key=lambda item: item[0])
            yield (low[0], high[0]), _Task(name, low[1], high[1], binned)
