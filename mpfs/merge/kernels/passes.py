"""The kernels that count or add up a tensor's deltas before they are merged; see `mpfs.merge.kernels.compiled`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[import-untyped,attr-defined,unused-ignore]

from mpfs.merge.kernels.draws import GROUP, drawn, group_word, signed
from mpfs.merge.kernels.formats import TILE, delta_of, magnitude, place, pointer, wide
from mpfs.stats.inlined import inline


@inline
def _sizes(expert: Any, base: Any, n: Any, sizes: Any, like: Any) -> None:
    """The magnitude patterns of the deltas, every NaN's being the one above infinity's."""
    for j in range(n):
        sizes[j] = magnitude(delta_of(wide(expert[j]), wide(base[j]), like), like)


@inline
def _digits(sizes: Any, n: Any, shift: Any, bits: Any, prefix: Any, nowhere: Any) -> None:
    mask = np.uint32((np.int64(1) << bits) - 1)
    for j in range(n):
        digits = np.uint32(sizes[j] >> np.uint32(shift))
        inside = np.uint32(digits >> np.uint32(bits)) == prefix
        sizes[j] = np.uint32(digits & mask) if inside else nowhere


def histogram(
    like: Any,
    size: Any,
    base_address: Any,
    experts: Any,
    shift: Any,
    bits: Any,
    prefixes: Any,
    counts: Any,
    sizes: Any,
    tally: Any,
) -> None:
    """Add up how many of the deltas' magnitude patterns have each value of the `bits` bits above `shift`.

    Only those count whose bits above these equal the expert's prefix.

    Args:
        like: any array of the format's type.
        size: elements of the column.
        experts: uint64, shape (experts,): where their columns are; 0 for none.
        prefixes: uint32, shape (experts,).
        counts: int64, shape (experts, 2^bits).
        sizes: uint32, shape (TILE,), to work in.
        tally: uint32, shape (2 · (2^bits + 1),), zeros, which are left so.
    """
    nowhere = np.uint32(counts.shape[1])
    width = np.uint64(like.itemsize)
    work = place(sizes, 0)
    # Neighbours often have the same magnitude; so that one need not wait for the other, they are counted apart.
    first, second = place(tally, 0), place(tally, np.int64(nowhere) + 1)
    # A pattern of a 16-bit type is its own digit.
    everything = shift == 0 and bits == 8 * like.itemsize - 1
    for e in range(experts.size):
        if experts[e] == np.uint64(0):
            continue
        for low in range(0, size, TILE):
            n = min(TILE, size - low)
            ours = pointer(base_address + np.uint64(low) * width, like)
            _sizes(pointer(experts[e] + np.uint64(low) * width, like), ours, n, work, like)
            if not everything:
                _digits(work, n, shift, bits, prefixes[e], nowhere)
            for j in range(0, n - 1, 2):
                first[work[j]] += np.uint32(1)
                second[work[j + 1]] += np.uint32(1)
            if n % 2:
                first[work[n - 1]] += np.uint32(1)
        into = counts[e]
        for j in range(into.size):
            into[j] += np.int64(first[j]) + np.int64(second[j])
        for j in range(tally.size):
            first[j] = np.uint32(0)


@inline
def _equal(expert: Any, base: Any, n: Any, pattern: Any, like: Any) -> Any:
    """How many deltas have a magnitude pattern."""
    found = np.uint32(0)
    for j in range(n):
        same = magnitude(delta_of(wide(expert[j]), wide(base[j]), like), like) == pattern
        found = np.uint32(found + np.uint32(same))
    return np.int64(found)


def find_equal(
    like: Any, size: Any, base_address: Any, expert_address: Any, pattern: Any, wanted: Any, found: Any
) -> None:
    """How many deltas of a column have a magnitude pattern, and the place after the `wanted`-th (-1: there are fewer).

    Args:
        found: int64, shape (2,): takes the two.
    """
    width = np.uint64(like.itemsize)
    count, at = np.int64(0), np.int64(-1)
    for low in range(0, size, TILE):
        n = min(TILE, size - low)
        ours = pointer(base_address + np.uint64(low) * width, like)
        theirs = pointer(expert_address + np.uint64(low) * width, like)
        here = _equal(theirs, ours, n, pattern, like)
        if count < wanted <= count + here:
            seen = count
            for j in range(n):
                delta = delta_of(wide(theirs[j]), wide(ours[j]), like)
                seen += np.int64(magnitude(delta, like) == pattern)
                if seen == wanted:
                    at = np.int64(low + j + 1)
                    break
        count += here
    found[0], found[1] = count, at


@inline
def _draw(expert: Any, n: Any, word: Any, at: Any, last: Any, tile: Any, like: Any) -> None:
    first, second = np.uint32(np.uint32(word) + np.uint32(at)), np.uint32(word >> np.uint64(32))
    for j in range(n):
        size = abs(delta_of(wide(expert[j]), tile[j], like))
        tile[TILE + j] = size
        tile[2 * TILE + j] = size if drawn(first, second, last) else np.float32(0)
        first = np.uint32(first + np.uint32(1))


@inline
def _add_tile(values: Any, lanes: Any) -> None:
    for j in range(64):
        total = lanes[j] + np.float64(values[j])
        for row in range(64, TILE, 64):
            total += np.float64(values[row + j])
        lanes[j] = total


@inline
def _add_rows(values: Any, n: Any, lanes: Any) -> None:
    for low in range(0, n, 64):
        for j in range(min(64, n - low)):
            lanes[j] += np.float64(values[low + j])


def drawn_norms(
    like: Any,
    size: Any,
    start: Any,
    base_address: Any,
    experts: Any,
    keys: Any,
    last: Any,
    lanes: Any,
    tile: Any,
) -> None:
    """Add the magnitudes of the deltas of a column's experts, all and those that the draw keeps, to lanes; see `LaneSum`.

    Args:
        like: any array of the format's type.
        size: elements of the column.
        start: the first one's index in the tensor, a multiple of 64.
        experts: uint64, shape (experts,): where their columns are; 0 for none.
        keys, last: shape (experts,): the streams (uint64), and the last bits that are kept (uint32).
        lanes: float64, shape (experts, 128): all, and behind them what is kept.
        tile: float32, shape (3 · TILE,), to work in.
    """
    width = np.uint64(like.itemsize)
    work = place(tile, 0)
    all_sizes, kept_sizes = place(tile, TILE), place(tile, 2 * TILE)
    low = np.int64(0)
    while low < size:
        at = (start + low) % GROUP
        n = min(TILE - at % TILE, size - low)
        ours = pointer(base_address + np.uint64(low) * width, like)
        for j in range(n):
            work[j] = wide(ours[j])
        for e in range(experts.size):
            if experts[e] == np.uint64(0):
                continue
            theirs = pointer(experts[e] + np.uint64(low) * width, like)
            _draw(theirs, n, group_word(keys[e], (start + low) // GROUP), at, signed(last[e]), work, like)
            all_lanes, kept_lanes = place(lanes[e], 0), place(lanes[e], 64)
            if n == TILE:
                _add_tile(all_sizes, all_lanes)
                _add_tile(kept_sizes, kept_lanes)
            else:
                _add_rows(all_sizes, n, all_lanes)
                _add_rows(kept_sizes, n, kept_lanes)
        low += n


def products(like: Any, size: Any, base_address: Any, other_address: Any, lanes: Any) -> None:
    """Add the squares of a column's base and of the other model, and their products, to the lanes; see `LaneSum`.

    Args:
        like: any array of the format's type.
        size: elements of the column, which starts at a multiple of 64.
        lanes: float64, shape (3, 64).
    """
    base = carray(pointer(base_address, like), size)
    other = carray(pointer(other_address, like), size)
    ours, theirs, both = lanes[0], lanes[1], lanes[2]
    for low in range(0, size, 64):
        n = min(64, size - low)
        old, new = base[low : low + n], other[low : low + n]
        for j in range(n):
            a, b = np.float64(wide(old[j])), np.float64(wide(new[j]))
            ours[j] += a * a
            theirs[j] += b * b
            both[j] += a * b
