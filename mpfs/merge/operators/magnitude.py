"""Finding the k largest magnitudes of a tensor that is never held whole.

The bit pattern of a float without its sign orders magnitudes: |x| < |y| iff pattern(x) < pattern(y). So the k-th
largest is found by counting patterns, 15 or 16 bits a pass, from the top: one pass for 16-bit types, two for float32,
four for float64, with 65,536 counters at most. Among equal magnitudes the lowest indices are kept, which is what a
stable descending sort keeps; where only some of those at the threshold are, one more pass finds the index to stop at.

Infinities order above all numbers, and NaN above those, as torch sorts them.

Where a histogram of the whole delta is at hand, by the 15 leading bits of the patterns, it takes the place of the first
pass (`Cut`): of 16-bit types nothing is left to count, of wider ones the bits below are resolved among the elements that
have the leading ones. Under a budget these are the ones that are read: the unread ones in that bin, which is 1/128 wide in
float32, are taken to lie as they do. Of equal magnitudes at the threshold their share is kept.

Without one, under a budget, some elements are unknown. They are taken to be normally distributed around zero with the RMS
that the plan states, and the magnitude is sought that the read elements (exactly) and the unread ones (in expectation)
exceed k times together.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mpfs.merge.deferred import torch
from mpfs.merge.numeric import dtype_name
from mpfs.merge.operators.base import Histogram, LeftOut
from mpfs.objects import Cut

Patterns: TypeAlias = NDArray[np.signedinteger[Any]]
"""Magnitude patterns: non-negative int16, int32 or int64."""

PatternSource: TypeAlias = Callable[[Set[int]], Iterator[tuple[int, Sequence[Patterns | None]]]]
"""Streams a tensor: given the experts that are wanted, yields each column's first element and, an entry for each
expert, its patterns (None where it is not wanted or not read)."""


class Counts(Protocol):
    """How often magnitude patterns occur in a tensor's deltas; each call is a pass over the tensor."""

    def histograms(self, shift: int, bits: int, prefixes: Mapping[int, int]) -> dict[int, NDArray[np.int64]]:
        """For each expert in `prefixes` the number of patterns that have each value of the `bits` bits above `shift`,
        of those whose bits above these equal its prefix; shape (2^bits,)."""

    def equal(self, wanted: Mapping[int, int]) -> dict[int, int]:
        """For each expert, given a pattern, how many elements have it."""

    def cutoffs(self, wanted: Mapping[int, tuple[int, int, int]]) -> dict[int, int]:
        """For each expert, given a pattern, how many elements that have it to keep, and how many have it: the index after
        the last that is kept."""


@dataclass(frozen=True)
class FloatLayout:
    """How a float type's magnitude is laid out: its width without the sign, and the pattern of infinity."""

    bits: int
    infinity: int

    @property
    def nan(self) -> int:
        """The one pattern that stands for every NaN; the largest there is."""
        return self.infinity + 1

    @property
    def last(self) -> int:
        """The last pattern in the bin of NaN, by the 15 leading bits."""
        low = self.bits - 15
        return (self.nan >> low << low) + (1 << low) - 1

    @property
    def levels(self) -> tuple[tuple[int, int], ...]:
        """The passes of a search, as (shift, bits): which bits of the pattern each one resolves."""
        shifts = range(self.bits - 15, -1, -16)
        return tuple((shift, 15 if shift == self.bits - 15 else 16) for shift in shifts)


LAYOUTS: dict[str, FloatLayout] = {
    "F16": FloatLayout(15, 0x7C00),
    "BF16": FloatLayout(15, 0x7F80),
    "F32": FloatLayout(31, 0x7F800000),
    "F64": FloatLayout(63, 0x7FF0000000000000),
}
"""By stored dtype."""


def patterns(delta: torch.Tensor) -> torch.Tensor:
    """The magnitude patterns of a float tensor: its shape, and an integer dtype of its width."""
    layout = LAYOUTS[dtype_name(delta.dtype)]
    integer = {15: torch.int16, 31: torch.int32, 63: torch.int64}[layout.bits]
    return torch.bitwise_and(delta.view(integer), 2**layout.bits - 1).clamp_(max=layout.nan)


def magnitude(pattern: int, dtype: str) -> float:
    """The magnitude that a pattern stands for; inf or NaN for the two above the numbers."""
    if dtype == "BF16":
        return float(struct.unpack("<f", struct.pack("<I", pattern << 16))[0])
    code, integer = {"F16": ("<e", "<H"), "F32": ("<f", "<I"), "F64": ("<d", "<Q")}[dtype]
    return float(struct.unpack(code, struct.pack(integer, pattern))[0])


@dataclass(frozen=True)
class Threshold:
    """Which elements are kept: pattern above `pattern`, or equal to it and index below `cutoff`."""

    pattern: int
    cutoff: int


def keep_everything(numel: int) -> Threshold:
    """The threshold that every element of a tensor of `numel` passes."""
    return Threshold(0, numel)


def keep_nothing(dtype: str) -> Threshold:
    """The threshold that no element passes."""
    return Threshold(LAYOUTS[dtype].nan, 0)


def kept(pattern: torch.Tensor, threshold: Threshold, start: int) -> torch.Tensor:
    """Which of a column's elements pass: bool, of the shape of its patterns (1-D); `start` is the first one's index."""
    mask = pattern > threshold.pattern
    below_cutoff = min(max(threshold.cutoff - start, 0), pattern.numel())
    mask[:below_cutoff] |= pattern[:below_cutoff] == threshold.pattern
    return mask


def keep_count(density: float, numel: int) -> int:
    """How many of `numel` elements a density keeps: rounded down, but at least one unless the density is ≤ 0."""
    if density <= 0:
        return 0
    return min(max(int(density * numel), 1), numel)


def count(values: Patterns, shift: int, bits: int, prefix: int) -> NDArray[np.int64]:
    """How many patterns have each value of the `bits` bits above `shift`; shape (2^bits,).

    Only those patterns count whose bits above these equal `prefix`.
    """
    digits = values >> shift
    if prefix or int(digits.max(initial=0)) >> bits:
        digits = digits[digits >> bits == prefix] & (2**bits - 1)
    return np.bincount(digits, minlength=2**bits).astype(np.int64, copy=False)


def cut_of(histogram: Histogram, keep: int) -> Cut:
    """Where the `keep` largest of all counted magnitudes end; a cut of nothing if there are not so many, or none are kept."""
    bins = np.flatnonzero(histogram)
    counts = histogram[bins]
    at_least = np.cumsum(counts[::-1])[::-1]
    place = int(np.count_nonzero(at_least >= keep)) - 1
    if keep <= 0 or place < 0:
        return Cut(0, 0, 0)
    total = int(counts[place])
    return Cut(int(bins[place]), keep - int(at_least[place]) + total, total)


def mirrored(histogram: Histogram, work: str) -> Histogram:
    """The histogram of `LAYOUTS[work].last` minus the patterns, which order the other way round."""
    top = LAYOUTS[work].last >> (LAYOUTS[work].bits - 15)
    result = np.zeros_like(histogram)
    result[: top + 1] = histogram[: top + 1][::-1]
    return result


def expected_at_least(pattern: int, dtype: str, left_out: Sequence[LeftOut]) -> float:
    """How many of the unread elements may be expected to have this pattern or a larger one.

    An element rounds to the pattern or above when it passes the midpoint between the magnitudes below and at it.
    """
    if pattern == 0:
        return float(sum(run.numel for run in left_out))
    edge = (magnitude(pattern - 1, dtype) + magnitude(pattern, dtype)) / 2
    if not math.isfinite(edge):
        return 0.0
    return math.fsum(run.numel * math.erfc(edge / (run.rms * math.sqrt(2))) for run in left_out if run.rms > 0)


@dataclass
class _Search:
    """The state of one expert's search between passes.

    The threshold's bits above the current level are `prefix`; `above` read elements have larger ones. After the last
    level `prefix` is the threshold, and `at` read elements equal it.
    """

    dtype: str
    keep: int | Fraction
    left_out: Sequence[LeftOut]
    cut: Cut | None = None
    prefix: int = 0
    above: int = 0
    at: int = 0

    def __post_init__(self) -> None:
        if self.cut is not None:
            self.prefix, self.at, self.keep = self.cut.digit, self.cut.total, self.cut.wanted

    def among(self, read: int) -> None:
        """Of the elements in the cut's bin only so many are read: their share of what is wanted is sought."""
        if self.cut is not None:
            self.keep = Fraction(self.cut.wanted * read, max(self.cut.total, 1))
            self.at = read

    def descend(self, histogram: NDArray[np.int64], shift: int, bits: int) -> None:
        """Resolve the next `bits` bits of the threshold from the counts of one pass."""
        # at_least[b]: read elements at or above digit b; one entry more, for none.
        at_least = np.zeros(len(histogram) + 1, dtype=np.int64)
        at_least[:-1] = np.cumsum(histogram[::-1])[::-1]
        low, high = 0, len(histogram)
        while high - low > 1:
            middle = (low + high) // 2
            edge = (self.prefix << bits | middle) << shift
            if self.above + int(at_least[middle]) + self._expected(edge) >= self.keep:
                low = middle
            else:
                high = middle
        self.prefix = self.prefix << bits | low
        self.above += int(at_least[low + 1])
        self.at = int(histogram[low])

    def ties_kept(self) -> int:
        """How many of the read elements at the threshold are kept; unread ones there take their share."""
        beyond = self._expected(self.prefix + 1)
        level = self._expected(self.prefix) - beyond
        if isinstance(self.keep, Fraction):
            wanted: float = round(self.keep - self.above)
        else:
            wanted = self.keep - self.above - beyond
        if level > 0:
            wanted = round(wanted * self.at / (self.at + level))
        return int(min(max(wanted, 0), self.at))

    def _expected(self, pattern: int) -> float | int:
        # Exact integers when everything is read.
        if not self.left_out or self.cut is not None:
            return 0
        return expected_at_least(min(pattern, LAYOUTS[self.dtype].nan), self.dtype, self.left_out)


def find_thresholds(
    dtype: str,
    numel: int,
    keep: Sequence[int],
    left_out: Sequence[Sequence[LeftOut]],
    source: PatternSource,
    *,
    cuts: Sequence[Cut | None] = (),
    counted: Callable[[int, Histogram], None] | None = None,
) -> list[Threshold]:
    """`search_thresholds` by streaming patterns: `source` is called once a pass."""
    return search_thresholds(dtype, numel, keep, left_out, Streamed(source), cuts=cuts, counted=counted)


def search_thresholds(
    dtype: str,
    numel: int,
    keep: Sequence[int],
    left_out: Sequence[Sequence[LeftOut]],
    counts: Counts,
    *,
    cuts: Sequence[Cut | None] = (),
    counted: Callable[[int, Histogram], None] | None = None,
) -> list[Threshold]:
    """For each expert the threshold that keeps its `keep[i]` largest magnitudes.

    Args:
        dtype: the dtype of the deltas, by its stored name.
        numel: elements in the whole tensor, read or not.
        keep: for each expert how many of those to keep; if that is more than what was read, everything read is kept.
        left_out: for each expert the runs that are not read; where there are none the result is exact.
        counts: counts the patterns; called once a pass, and not at all when every expert keeps all or nothing.
        cuts: for each expert where `keep[i]` ends in its whole delta, if that is known.
        counted: told the histogram of an expert's whole delta, if one is made.
    """
    found: dict[int, Threshold] = {}
    searches: dict[int, _Search] = {}
    for i, (k, runs) in enumerate(zip(keep, left_out, strict=True)):
        if k >= numel:
            found[i] = keep_everything(numel)
        elif k <= 0:
            found[i] = keep_nothing(dtype)
        else:
            searches[i] = _Search(dtype, k, [run for run in runs if run.numel], cuts[i] if cuts else None)
    for level, (shift, bits) in enumerate(LAYOUTS[dtype].levels):
        chosen = {i: search.prefix for i, search in searches.items() if level or search.cut is None}
        histograms = counts.histograms(shift, bits, chosen) if chosen else {}
        for i, histogram in histograms.items():
            if level == 1:
                searches[i].among(int(histogram.sum()))
            elif level == 0 and counted is not None and not searches[i].left_out:
                counted(i, histogram)
            searches[i].descend(histogram, shift, bits)
    if len(LAYOUTS[dtype].levels) == 1:
        partly = {i: search.prefix for i, search in searches.items() if search.cut and search.left_out}
        for i, read in (counts.equal(partly) if partly else {}).items():
            searches[i].among(read)
    ties: dict[int, int] = {}
    for i, search in searches.items():
        if search.prefix == 0:
            # Every element that is not zero is kept, so which zeros are does not matter.
            found[i] = keep_everything(numel)
            continue
        wanted = search.ties_kept()
        found[i] = Threshold(search.prefix, numel if wanted == search.at else 0)
        if 0 < wanted < search.at:
            ties[i] = wanted
    if ties:
        cutoffs = counts.cutoffs({i: (found[i].pattern, wanted, searches[i].at) for i, wanted in ties.items()})
        found.update((i, Threshold(found[i].pattern, cutoff)) for i, cutoff in cutoffs.items())
    return [found[i] for i in range(len(keep))]


class Streamed:
    """`Counts` of streamed patterns."""

    def __init__(self, source: PatternSource) -> None:
        self._source = source

    def histograms(self, shift: int, bits: int, prefixes: Mapping[int, int]) -> dict[int, NDArray[np.int64]]:
        found = {i: np.zeros(2**bits, dtype=np.int64) for i in prefixes}
        for _, values in self._source(prefixes.keys()):
            for i, prefix in prefixes.items():
                column = values[i]
                if column is not None:
                    found[i] += count(column, shift, bits, prefix)
        return found

    def equal(self, wanted: Mapping[int, int]) -> dict[int, int]:
        found = dict.fromkeys(wanted, 0)
        for _, values in self._source(wanted.keys()):
            for i, pattern in wanted.items():
                column = values[i]
                if column is not None:
                    found[i] += int(np.count_nonzero(column == pattern))
        return found

    def cutoffs(self, wanted: Mapping[int, tuple[int, int, int]]) -> dict[int, int]:
        remaining = {i: number for i, (_, number, _) in wanted.items()}
        found: dict[int, int] = {}
        for start, values in self._source(wanted.keys()):
            for i in list(remaining):
                column = values[i]
                if column is None:
                    continue
                places = np.flatnonzero(column == wanted[i][0])
                if len(places) >= remaining[i]:
                    found[i] = start + int(places[remaining.pop(i) - 1]) + 1
                else:
                    remaining[i] -= len(places)
            if not remaining:
                break
        return found
