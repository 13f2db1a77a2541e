"""Histograms of whole deltas: what the store knows, for methods that keep magnitudes by rank, and what a merge counts itself."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from mpfs.merge.models import ModelTensor
from mpfs.merge.operators import Operator, Parameters
from mpfs.merge.operators.base import Histogram
from mpfs.objects import Cut
from mpfs.stats.stored import block_records
from mpfs.store import BlockReader
from mpfs.store.histogram import is_worth_keeping, pack_histogram
from mpfs.store.pairs import Pair, PairRecord, PairTable


class Histograms:
    """The histograms of experts' deltas, out of the pair table."""

    def __init__(self, reader: BlockReader, pairs: PairTable) -> None:
        self._reader = reader
        self._pairs = pairs

    def cuts(
        self,
        operator: Operator,
        parameters: Parameters,
        work: str,
        base: ModelTensor | None,
        experts: Sequence[ModelTensor],
        wanted: Sequence[bool],
    ) -> tuple[tuple[Cut, ...], ...]:
        """What histograms tell of a method's thresholds, an entry for each expert: empty where it is not `wanted`, or there
        is no histogram of its delta in the dtype that the merge computes in. Nothing if no expert has any.

        Raises:
            IntegrityError: the statistics of one of the base's blocks are missing.
        """
        if base is None or type(operator).cuts is Operator.cuts or not any(wanted):
            return ()
        found = [
            self._pairs.histogram(base.identity, expert.identity, base.tensor.numel)
            if asked and are_counted(work, base, expert)
            else None
            for expert, asked in zip(experts, wanted, strict=True)
        ]
        if all(histogram is None for histogram in found) or not _is_finite(self._reader, base):
            return ()
        cuts = tuple(map(tuple, operator.cuts(work, base.tensor.numel, parameters, found)))
        return cuts if any(cuts) else ()


class Counted:
    """Takes what a merge counts of whole deltas anyway, for the plans to come. From any thread."""

    def __init__(self, reader: BlockReader, pairs: PairTable) -> None:
        self._reader = reader
        self._pairs = pairs
        self._lock = threading.Lock()
        self.records: dict[Pair, PairRecord] = {}

    def take(self, work: str, base: ModelTensor | None, expert: ModelTensor, histogram: Histogram) -> None:
        """A histogram of all that differs between an expert and its base; elements that were not looked at have no delta."""
        if base is None or not are_counted(work, base, expert):
            return
        pair = (base.identity, expert.identity)
        if self._pairs.has_histogram(*pair) or not _is_finite(self._reader, base):
            return
        counts = histogram.copy()
        counts[0] += base.tensor.numel - int(counts.sum())
        packed = pack_histogram(counts) if is_worth_keeping(counts, base.tensor.nbytes) else b""
        with self._lock:
            self.records[pair] = PairRecord(histogram=packed)


def are_counted(work: str, base: ModelTensor, expert: ModelTensor) -> bool:
    """Whether the store keeps a histogram of such a pair, and it is of the deltas that the merge computes."""
    return (
        base.identity != expert.identity
        and base.tensor.dtype == expert.tensor.dtype == work
        and base.tensor.shape == expert.tensor.shape
        and len(base.tensor.blocks) > 1
    )


def _is_finite(reader: BlockReader, base: ModelTensor) -> bool:
    """Where a NaN of the base stays as it is, merges see a NaN for a delta, and the store a zero."""
    return int(block_records(reader, base.tensor, base.identity)["nonfinite"].sum()) == 0
