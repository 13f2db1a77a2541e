"""The numba kernels of `mpfs.stats.differences`: one pass over two blocks, nogil, equal to the numpy code to the last bit.

Importing this module imports numba; only `mpfs.stats.native` does so, to compile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpfs.stats.inlined import as_f32, as_f64, bits_of_f32, inline


@inline
def _magnitude32(x: Any) -> Any:
    return np.uint32(bits_of_f32(x) & np.uint32(0x7FFFFFFF))


@inline
def _square(old: Any, new: Any) -> Any:
    difference = np.float64(new) - np.float64(old)
    difference = difference if abs(difference) < np.inf else np.float64(0)
    return difference * difference


@inline
def _from_f16(b: Any) -> Any:
    m = np.uint32(b & np.uint32(0x7FFF))
    # As f32: move the mantissa up and rebias the exponent; a subnormal m·2^-24 comes out of (1 + m/1024)·2^-14 - 2^-14,
    # so that no subnormal f32 is ever an operand.
    high = np.uint32(0x70000000) if m >= np.uint32(0x7C00) else np.uint32(112 << 23)
    normal = as_f32(np.uint32((m << np.uint32(13)) + high))
    subnormal = as_f32((m << np.uint32(13)) + np.uint32(113 << 23)) - as_f32(np.uint32(113 << 23))
    x = normal if m >= np.uint32(0x0400) else subnormal
    return -x if b & np.uint32(0x8000) else x


@inline
def _bf16(a: Any, b: Any, lanes: Any, digits: Any) -> None:
    for j in range(64):
        old, new = as_f32(np.uint32(a[j]) << np.uint32(16)), as_f32(np.uint32(b[j]) << np.uint32(16))
        lanes[j] += _square(old, new)
        u = _magnitude32(new - old)
        u = np.uint32(u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        digits[j] = np.uint32(0) if old == new else min(np.uint32(u), np.uint32(0x7F81))


@inline
def _f16(a: Any, b: Any, lanes: Any, digits: Any) -> None:
    for j in range(64):
        old, new = _from_f16(np.uint32(a[j])), _from_f16(np.uint32(b[j]))
        lanes[j] += _square(old, new)
        u = _magnitude32(new - old)
        odd = np.uint32((u >> np.uint32(13)) & np.uint32(1))
        r = np.uint32(np.uint32(u + np.uint32(0x0FFF) + odd) - np.uint32(112 << 23)) >> np.uint32(13)
        # One unit in the last place of 0.5 is the smallest subnormal float16.
        tiny = np.uint32(_magnitude32(as_f32(u) + np.float32(0.5)) - np.uint32(0x3F000000))
        r = tiny if u < np.uint32(0x38800000) else min(np.uint32(r), np.uint32(0x7C00))
        r = np.uint32(0x7C01) if u > np.uint32(0x7F800000) else r
        digits[j] = np.uint32(0) if old == new else r


@inline
def _f32(a: Any, b: Any, lanes: Any, digits: Any) -> None:
    for j in range(64):
        old, new = as_f32(a[j]), as_f32(b[j])
        lanes[j] += _square(old, new)
        u = min(_magnitude32(new - old), np.uint32(0x7F800001)) >> np.uint32(16)
        digits[j] = np.uint32(0) if old == new else np.uint32(u)


@inline
def _f64(a: Any, b: Any, lanes: Any, digits: Any) -> None:
    for j in range(64):
        old, new = as_f64(a[j]), as_f64(b[j])
        lanes[j] += _square(old, new)
        u = np.uint64(np.float64(new - old).view(np.uint64) & np.uint64(0x7FFFFFFFFFFFFFFF))
        u = min(u, np.uint64(0x7FF0000000000001)) >> np.uint64(48)
        digits[j] = np.uint32(0) if old == new else np.uint32(u)


@inline
def _count(digits: Any, n: Any, counts: Any, tally: Any) -> None:
    # Neighbours often have the same magnitude; so that one need not wait for the other, they are counted apart.
    if tally.size > 0 and n == 64:
        first, second = tally[: counts.size], tally[counts.size :]
        for j in range(0, 64, 2):
            first[digits[j]] += np.uint32(1)
            second[digits[j + 1]] += np.uint32(1)
    elif counts.size > 0:
        for j in range(n):
            counts[digits[j]] += np.int64(1)


@inline
def _add_up(counts: Any, tally: Any) -> None:
    for j in range(tally.size // 2):
        counts[j] += np.int64(tally[j]) + np.int64(tally[counts.size + j])


@inline
def _fill(a: Any, into: Any) -> None:
    """The elements after the last whole group, filled up with zeros, whose differences add nothing."""
    left = a.size % 64
    for j in range(64):
        into[j] = a[a.size - left + j] if j < left else into.dtype.type(0)


def _comparison(group: Callable[..., Any]) -> Callable[..., None]:
    """The kernel that compares blocks of one dtype, given what compares 64 elements."""

    def compare(a: Any, b: Any, lanes: Any, counts: Any, digits: Any, tally: Any, rest: Any) -> None:
        whole = a.size - a.size % 64
        for g in range(0, whole, 64):
            group(a[g : g + 64], b[g : g + 64], lanes, digits)
            _count(digits, 64, counts, tally)
        if whole < a.size:
            _fill(a, rest[:64])
            _fill(b, rest[64:])
            group(rest[:64], rest[64:], lanes, digits)
            _count(digits, a.size - whole, counts, tally)
        _add_up(counts, tally)

    return compare


compare_bf16, compare_f16, compare_f32, compare_f64 = map(_comparison, (_bf16, _f16, _f32, _f64))
"""Each adds the squares of b - a to the lanes, and counts the differences' magnitudes where there are counts.

Args:
    a, b: the bits of two blocks, as many.
    lanes: float64, shape (64,).
    counts: int64, shape (BINS,) or (0,).
    digits: uint32, shape (64,), to work in.
    tally: uint32, zeros, shape (2 · BINS,) where a large block is counted apart, or (0,).
    rest: bits, shape (128,), to work in.
"""
