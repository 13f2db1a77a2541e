"""Comparing tensors exactly, block by block: the squared distance of each two blocks, and how large the differences are.

The numpy functions here define what comes out; where numba works its kernels do the same (`difference_kernels`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mpfs.objects.dtypes import itemsize
from mpfs.stats.accumulators import fold_lanes
from mpfs.stats.backend import kernels_available
from mpfs.stats.decode import FORMATS, Bits, as_bits, decode
from mpfs.stats.exact import pack_distances
from mpfs.stats.hashing import GROUP
from mpfs.stats.lanesum import LaneSum
from mpfs.stats.native import Array, kernel
from mpfs.store.histogram import BINS, is_worth_keeping, pack_histogram
from mpfs.store.pairs import PairRecord

Counts = NDArray[np.int64]
"""A histogram of magnitudes, shape (BINS,): see `mpfs.store.histogram`."""

_LARGE: Final = 1 << 14
"""From so many elements on a block is counted apart, so that other threads need not wait."""


def compare_blocks(a: bytes | memoryview, b: bytes | memoryview, dtype: str, counts: Counts | None = None) -> float:
    """The squared norm of b - a, over elements that are finite in both.

    Computed in float64 and summed in the order of `LaneSum`: the same on every machine.

    Args:
        a, b: the bytes of two blocks of a mergeable dtype, equally many.
        counts: a histogram to be advanced by the magnitudes of b - a, each rounded to the dtype as merge methods round
            it; elements that are equal count as zeros, and NaNs in the bin of the pattern above infinity.
    """
    first, second = as_bits(a, dtype), as_bits(b, dtype)
    if not kernels_available():
        return _compare(first, second, dtype, counts)
    lanes = np.zeros(GROUP)
    apart = 2 * BINS if counts is not None and len(first) >= _LARGE else 0
    _kernel(dtype)(
        *(first, second, lanes, _NOTHING if counts is None else counts),
        *(np.empty(GROUP, np.uint32), np.zeros(apart, np.uint32), np.empty(2 * GROUP, FORMATS[dtype].bits)),
    )
    return fold_lanes(lanes)


class Comparison:
    """Two tensors of one mergeable dtype and one shape, being compared. Blocks come in any order, from any thread.

    Each is one call of `differ` or `equal`; after the last one `record` is what the store keeps. `binned` says whether
    magnitudes are counted, for tensors of more than one block.
    """

    def __init__(self, dtype: str, numel: int, block_size: int, *, binned: bool = True) -> None:
        self._dtype = dtype
        self._numel = numel
        self._nbytes = numel * itemsize(dtype)
        blocks = -(-self._nbytes // block_size)
        # One block is read whole or not at all: where it counts which elements are the largest is never the question.
        self._binned = binned and blocks > 1
        self._apart = block_size // itemsize(dtype) >= _LARGE
        self._lock = threading.Lock()
        self._distances = np.zeros(blocks)
        self._remaining = blocks
        self._counts: Counts | None = None
        self._histogram: bytes | None = None

    def differ(self, index: int, a: bytes | memoryview, b: bytes | memoryview) -> None:
        """The bytes of block `index` of both."""
        if self._binned and not self._apart:
            with self._lock:
                self._distances[index] = compare_blocks(a, b, self._dtype, self._all_counts())
                self._one_done()
            return
        here = np.zeros(BINS, np.int64) if self._binned else None
        distance = compare_blocks(a, b, self._dtype, here)
        with self._lock:
            self._distances[index] = distance
            if here is not None:
                np.add(self._all_counts(), here, out=self._all_counts())
            self._one_done()

    def equal(self) -> None:
        """One more block is the same in both."""
        with self._lock:
            self._one_done()

    @property
    def record(self) -> PairRecord:
        """What was found.

        Raises:
            ValueError: there are blocks to come.
        """
        if self._remaining:
            raise ValueError(f"{self._remaining} blocks were not compared")
        return PairRecord(pack_distances(self._distances), self._histogram)

    def _all_counts(self) -> Counts:
        # Not before there is something to count: many comparisons wait, a few are at work.
        if self._counts is None:
            self._counts = np.zeros(BINS, np.int64)
        return self._counts

    def _one_done(self) -> None:
        self._remaining -= 1
        if self._remaining == 0 and self._binned:
            counts = self._all_counts()
            counts[0] += self._numel - int(counts.sum())
            self._histogram = pack_histogram(counts) if is_worth_keeping(counts, self._nbytes) else b""
            self._counts = None


_NOTHING: Final = np.zeros(0, np.int64)
_loaded: dict[str, Callable[..., None]] = {}


def _kernel(dtype: str) -> Callable[..., None]:
    found = _loaded.get(dtype)
    if found is None:
        bits = f"u{8 * FORMATS[dtype].bits.itemsize}"
        block = Array(bits, unaligned=True)
        arguments = (block, block, Array("f64"), Array("i64"), Array("u32"), Array("u32"), Array(bits))
        found = kernel("mpfs.stats.difference_kernels", f"compare_{dtype.lower()}", arguments)
        _loaded[dtype] = found
    return found


def _compare(a: Bits, b: Bits, dtype: str, counts: Counts | None) -> float:
    with np.errstate(over="ignore", invalid="ignore"):
        old, new = decode(a, dtype), decode(b, dtype)
        difference = new - old
        squares = np.where(np.isfinite(difference), difference, 0.0)
        squares *= squares
        if counts is not None:
            np.add.at(counts, _digits(_rounded(old, new, dtype), old == new, dtype), 1)
    total = LaneSum()
    total.add(squares, 0)
    return total.total()


def _rounded(old: NDArray[np.float64], new: NDArray[np.float64], dtype: str) -> NDArray[np.unsignedinteger[Any]]:
    """The bit patterns of the differences in the dtype; 16-bit types by way of float32, as torch does."""
    if dtype == "F64":
        return (new - old).view(np.uint64)
    wide = new.astype(np.float32) - old.astype(np.float32)
    if dtype == "F32":
        return wide.view(np.uint32)
    if dtype == "F16":
        return wide.astype(np.float16).view(np.uint16)
    bits = wide.view(np.uint32).astype(np.uint64)
    odd = (bits >> np.uint64(16)) & np.uint64(1)
    rounded = ((bits + np.uint64(0x7FFF) + odd) >> np.uint64(16)).astype(np.uint16)
    return np.where(np.isnan(wide), np.uint16(0x7FC0), rounded)


def _digits(patterns: NDArray[np.unsignedinteger[Any]], same: NDArray[np.bool_], dtype: str) -> NDArray[np.int64]:
    layout = FORMATS[dtype]
    unsigned = layout.bits.type
    magnitude = np.minimum(patterns & unsigned(layout.magnitude), unsigned(layout.exponent + 1))
    shift = 8 * layout.bits.itemsize - 16
    digits: NDArray[np.int64] = np.where(same, unsigned(0), magnitude >> unsigned(shift)).astype(np.int64)
    return digits
