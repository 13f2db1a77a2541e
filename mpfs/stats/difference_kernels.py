"""The numba kernels of `mpfs.stats.differences`: one pass over two blocks, nogil, equal to the numpy code to the last bit.

Compiled one dtype at a time, when it is first asked for. The constants and helpers are written out here again, since
numba's cache cannot see a change in another module.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar, cast

import numba  # type: ignore[import-untyped,unused-ignore]  # old versions ship no types
import numpy as np
from numba import types

_F = TypeVar("_F", bound=Callable[..., Any])


def _inner(function: _F) -> _F:
    """Compile a helper that the kernels below inline."""
    return cast(_F, numba.njit(nogil=True, fastmath=False)(function))


@_inner
def _as_f32(bits: Any) -> Any:
    return np.uint32(bits).view(np.float32)


@_inner
def _as_f64(bits: Any) -> Any:
    return np.uint64(bits).view(np.float64)


@_inner
def _magnitude32(x: Any) -> Any:
    return np.uint32(np.float32(x).view(np.uint32) & np.uint32(0x7FFFFFFF))


@_inner
def _square(old: Any, new: Any) -> Any:
    difference = np.float64(new) - np.float64(old)
    difference = difference if abs(difference) < np.inf else np.float64(0)
    return difference * difference


@_inner
def _from_f16(b: Any) -> Any:
    m = np.uint32(b & np.uint32(0x7FFF))
    # As f32: move the mantissa up and rebias the exponent; a subnormal m·2^-24 comes out of (1 + m/1024)·2^-14 - 2^-14,
    # so that no subnormal f32 is ever an operand.
    high = np.uint32(0x70000000) if m >= np.uint32(0x7C00) else np.uint32(112 << 23)
    normal = _as_f32(np.uint32((m << np.uint32(13)) + high))
    subnormal = _as_f32((m << np.uint32(13)) + np.uint32(113 << 23)) - _as_f32(np.uint32(113 << 23))
    x = normal if m >= np.uint32(0x0400) else subnormal
    return -x if b & np.uint32(0x8000) else x


@_inner
def _bf16(a: Any, b: Any, lanes: Any, digits: Any) -> None:
    for j in range(64):
        old, new = _as_f32(np.uint32(a[j]) << np.uint32(16)), _as_f32(np.uint32(b[j]) << np.uint32(16))
        lanes[j] += _square(old, new)
        u = _magnitude32(new - old)
        u = np.uint32(u + np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        digits[j] = np.uint32(0) if old == new else min(np.uint32(u), np.uint32(0x7F81))


@_inner
def _f16(a: Any, b: Any, lanes: Any, digits: Any) -> None:
    for j in range(64):
        old, new = _from_f16(np.uint32(a[j])), _from_f16(np.uint32(b[j]))
        lanes[j] += _square(old, new)
        u = _magnitude32(new - old)
        odd = np.uint32((u >> np.uint32(13)) & np.uint32(1))
        r = np.uint32(np.uint32(u + np.uint32(0x0FFF) + odd) - np.uint32(112 << 23)) >> np.uint32(13)
        # One unit in the last place of 0.5 is the smallest subnormal float16.
        tiny = np.uint32(_magnitude32(_as_f32(u) + np.float32(0.5)) - np.uint32(0x3F000000))
        r = tiny if u < np.uint32(0x38800000) else min(np.uint32(r), np.uint32(0x7C00))
        r = np.uint32(0x7C01) if u > np.uint32(0x7F800000) else r
        digits[j] = np.uint32(0) if old == new else r


@_inner
def _f32(a: Any, b: Any, lanes: Any, digits: Any) -> None:
    for j in range(64):
        old, new = _as_f32(a[j]), _as_f32(b[j])
        lanes[j] += _square(old, new)
        u = min(_magnitude32(new - old), np.uint32(0x7F800001)) >> np.uint32(16)
        digits[j] = np.uint32(0) if old == new else np.uint32(u)


@_inner
def _f64(a: Any, b: Any, lanes: Any, digits: Any) -> None:
    for j in range(64):
        old, new = _as_f64(a[j]), _as_f64(b[j])
        lanes[j] += _square(old, new)
        u = np.uint64(np.float64(new - old).view(np.uint64) & np.uint64(0x7FFFFFFFFFFFFFFF))
        u = min(u, np.uint64(0x7FF0000000000001)) >> np.uint64(48)
        digits[j] = np.uint32(0) if old == new else np.uint32(u)


@_inner
def _tally(a: Any, counts: Any) -> Any:
    """Where large blocks are counted apart. Neighbours often have the same magnitude; so that one need not wait for the
    other, there are two."""
    return np.zeros((2, counts.size if a.size >= 16384 else 0), np.uint32)


@_inner
def _count(digits: Any, n: Any, counts: Any, tally: Any) -> None:
    if tally.size > 0 and n == 64:
        first, second = tally[0], tally[1]
        for j in range(0, 64, 2):
            first[digits[j]] += np.uint32(1)
            second[digits[j + 1]] += np.uint32(1)
    elif counts.size > 0:
        for j in range(n):
            counts[digits[j]] += np.int64(1)


@_inner
def _add_up(counts: Any, tally: Any) -> None:
    for j in range(tally.shape[1]):
        counts[j] += np.int64(tally[0, j]) + np.int64(tally[1, j])


@_inner
def _rest(a: Any) -> Any:
    """The elements after the last whole group, filled up with zeros, whose differences add nothing."""
    filled = np.zeros(64, a.dtype)
    left = a.size % 64
    filled[:left] = a[a.size - left :]
    return filled


def _compare_bf16(a: Any, b: Any, lanes: Any, counts: Any) -> None:
    digits, tally = np.zeros(64, np.uint32), _tally(a, counts)
    for g in range(0, a.size - a.size % 64, 64):
        _bf16(a[g : g + 64], b[g : g + 64], lanes, digits)
        _count(digits, 64, counts, tally)
    if a.size % 64:
        _bf16(_rest(a), _rest(b), lanes, digits)
        _count(digits, a.size % 64, counts, tally)
    _add_up(counts, tally)


def _compare_f16(a: Any, b: Any, lanes: Any, counts: Any) -> None:
    digits, tally = np.zeros(64, np.uint32), _tally(a, counts)
    for g in range(0, a.size - a.size % 64, 64):
        _f16(a[g : g + 64], b[g : g + 64], lanes, digits)
        _count(digits, 64, counts, tally)
    if a.size % 64:
        _f16(_rest(a), _rest(b), lanes, digits)
        _count(digits, a.size % 64, counts, tally)
    _add_up(counts, tally)


def _compare_f32(a: Any, b: Any, lanes: Any, counts: Any) -> None:
    digits, tally = np.zeros(64, np.uint32), _tally(a, counts)
    for g in range(0, a.size - a.size % 64, 64):
        _f32(a[g : g + 64], b[g : g + 64], lanes, digits)
        _count(digits, 64, counts, tally)
    if a.size % 64:
        _f32(_rest(a), _rest(b), lanes, digits)
        _count(digits, a.size % 64, counts, tally)
    _add_up(counts, tally)


def _compare_f64(a: Any, b: Any, lanes: Any, counts: Any) -> None:
    digits, tally = np.zeros(64, np.uint32), _tally(a, counts)
    for g in range(0, a.size - a.size % 64, 64):
        _f64(a[g : g + 64], b[g : g + 64], lanes, digits)
        _count(digits, 64, counts, tally)
    if a.size % 64:
        _f64(_rest(a), _rest(b), lanes, digits)
        _count(digits, a.size % 64, counts, tally)
    _add_up(counts, tally)


_FUNCTIONS: Final[dict[str, tuple[Callable[..., None], Any]]] = {
    "BF16": (_compare_bf16, types.uint16),
    "F16": (_compare_f16, types.uint16),
    "F32": (_compare_f32, types.uint32),
    "F64": (_compare_f64, types.uint64),
}
_compiled: dict[str, Callable[..., None]] = {}
_compiling = threading.Lock()


def kernel(dtype: str) -> Callable[..., None]:
    """The kernel of a dtype: (bits of a, bits of b, float64 lanes of shape (64,), int64 counts of shape (BINS,) or (0,)).

    It adds the squares of b - a to the lanes, and counts the differences' magnitudes where there are counts. Compiled,
    or out of numba's cache on disk, or without that cache.
    """
    with _compiling:
        if dtype not in _compiled:
            function, element = _FUNCTIONS[dtype]
            bits = types.Array(element, 1, "C", readonly=True, aligned=False)
            signature = types.void(bits, bits, types.Array(types.float64, 1, "C"), types.Array(types.int64, 1, "C"))
            try:
                found = numba.njit(signature, nogil=True, fastmath=False, cache=True)(function)
            except Exception:  # no writable place, a full disk, a damaged cache: whatever it is, the cache is optional
                found = numba.njit(signature, nogil=True, fastmath=False)(function)
            _compiled[dtype] = found
        return _compiled[dtype]
