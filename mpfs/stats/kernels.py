"""The numba kernels: one pass over the block, nogil, equal to `mpfs.stats.reference` to the last bit.

Importing this module imports numba; only `mpfs.stats.native` does so, to compile. The arrays are typed read-only and
unaligned, so one compiled version serves a buffer out of LMDB, bytes and numpy arrays alike.

Zeros, non-finite values and the largest magnitude are found on the bits. That is cheap, and it holds even on a
thread that flushes subnormal numbers.

The constants are those of `mpfs.stats.hashing`; kernels and reference are tested against each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar, cast

import numba  # type: ignore[import-untyped,unused-ignore]  # old versions ship no types
import numpy as np
from numpy.typing import NDArray

from mpfs.stats.decode import Bits

_Lanes: TypeAlias = NDArray[np.float64]
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
def _mix(z: Any) -> Any:
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@_inner
def _add_group(values: _Lanes, group: Any, sketch: _Lanes, sums: _Lanes, squares: _Lanes) -> None:
    stepped = group * np.uint64(0x9E3779B97F4A7C15)
    signs = _mix(stepped + np.uint64(0x243F6A8885A308D3))
    rotation = _mix(stepped + np.uint64(0x13198A2E03707344)) >> np.uint64(56)
    places = sketch[rotation : rotation + np.uint64(64)]
    for j in range(64):
        x = values[j]
        sums[j] += x
        squares[j] += x * x
        places[j] += x if (signs >> np.uint64(j)) & np.uint64(1) == np.uint64(0) else -x


def accumulate_bf16(
    bits: Bits,
    first_group: Any,
    sketch: _Lanes,
    sums: _Lanes,
    squares: _Lanes,
    tallies: NDArray[np.uint64],
    values: _Lanes,
) -> None:
    nonfinite, zeros, largest = np.uint64(0), np.uint64(0), np.uint32(0)
    for g in range(bits.size // 64):
        group = bits[g * 64 : g * 64 + 64]
        odd, none = np.uint32(0), np.uint32(0)
        for j in range(64):
            b = np.uint32(group[j])
            m = np.uint32(b & np.uint32(0x7FFF))
            finite = m < np.uint32(0x7F80)
            odd = np.uint32(odd + np.uint32(not finite))
            none = np.uint32(none + np.uint32(m == np.uint32(0)))
            largest = max(largest, m if finite else np.uint32(0))
            values[j] = np.float64(_as_f32(b << np.uint32(16) if finite else np.uint32(0)))
        nonfinite += np.uint64(odd)
        zeros += np.uint64(none)
        _add_group(values, first_group + np.uint64(g), sketch, sums, squares)
    tallies[0] += nonfinite
    tallies[1] += zeros
    tallies[2] = max(tallies[2], np.uint64(largest))


def accumulate_f16(
    bits: Bits,
    first_group: Any,
    sketch: _Lanes,
    sums: _Lanes,
    squares: _Lanes,
    tallies: NDArray[np.uint64],
    values: _Lanes,
) -> None:
    nonfinite, zeros, largest = np.uint64(0), np.uint64(0), np.uint32(0)
    for g in range(bits.size // 64):
        group = bits[g * 64 : g * 64 + 64]
        odd, none = np.uint32(0), np.uint32(0)
        for j in range(64):
            b = np.uint32(group[j])
            m = np.uint32(b & np.uint32(0x7FFF))
            finite = m < np.uint32(0x7C00)
            odd = np.uint32(odd + np.uint32(not finite))
            none = np.uint32(none + np.uint32(m == np.uint32(0)))
            m = m if finite else np.uint32(0)
            largest = max(largest, m)
            # As f32: move the mantissa up and rebias the exponent. A subnormal m·2^-24 comes out of
            # (1 + m/1024)·2^-14 - 2^-14, so that no subnormal f32 is ever an operand.
            normal = _as_f32((m << np.uint32(13)) + np.uint32(112 << 23))
            subnormal = _as_f32((m << np.uint32(13)) + np.uint32(113 << 23)) - _as_f32(np.uint32(113 << 23))
            x = np.float64(normal if m >= np.uint32(0x0400) else subnormal)
            values[j] = -x if b & np.uint32(0x8000) else x
        nonfinite += np.uint64(odd)
        zeros += np.uint64(none)
        _add_group(values, first_group + np.uint64(g), sketch, sums, squares)
    tallies[0] += nonfinite
    tallies[1] += zeros
    tallies[2] = max(tallies[2], np.uint64(largest))


def accumulate_f32(
    bits: Bits,
    first_group: Any,
    sketch: _Lanes,
    sums: _Lanes,
    squares: _Lanes,
    tallies: NDArray[np.uint64],
    values: _Lanes,
) -> None:
    nonfinite, zeros, largest = np.uint64(0), np.uint64(0), np.uint32(0)
    for g in range(bits.size // 64):
        group = bits[g * 64 : g * 64 + 64]
        odd, none = np.uint32(0), np.uint32(0)
        for j in range(64):
            b = group[j]
            m = np.uint32(b & np.uint32(0x7FFFFFFF))
            finite = m < np.uint32(0x7F800000)
            odd = np.uint32(odd + np.uint32(not finite))
            none = np.uint32(none + np.uint32(m == np.uint32(0)))
            largest = max(largest, m if finite else np.uint32(0))
            values[j] = np.float64(_as_f32(b if finite else np.uint32(0)))
        nonfinite += np.uint64(odd)
        zeros += np.uint64(none)
        _add_group(values, first_group + np.uint64(g), sketch, sums, squares)
    tallies[0] += nonfinite
    tallies[1] += zeros
    tallies[2] = max(tallies[2], np.uint64(largest))


def accumulate_f64(
    bits: Bits,
    first_group: Any,
    sketch: _Lanes,
    sums: _Lanes,
    squares: _Lanes,
    tallies: NDArray[np.uint64],
    values: _Lanes,
) -> None:
    nonfinite, zeros, largest = np.uint64(0), np.uint64(0), np.uint64(0)
    for g in range(bits.size // 64):
        group = bits[g * 64 : g * 64 + 64]
        for j in range(64):
            b = group[j]
            m = b & np.uint64(0x7FFFFFFFFFFFFFFF)
            finite = m < np.uint64(0x7FF0000000000000)
            nonfinite += np.uint64(not finite)
            zeros += np.uint64(m == np.uint64(0))
            largest = max(largest, m if finite else np.uint64(0))
            values[j] = _as_f64(b if finite else np.uint64(0))
        _add_group(values, first_group + np.uint64(g), sketch, sums, squares)
    tallies[0] += nonfinite
    tallies[1] += zeros
    tallies[2] = max(tallies[2], largest)


def lanes_f32(values: NDArray[Any], lanes: _Lanes) -> None:
    for g in range(values.size // 64):
        group = values[g * 64 : g * 64 + 64]
        for j in range(64):
            lanes[j] += np.float64(group[j])


def lanes_f64(values: NDArray[Any], lanes: _Lanes) -> None:
    for g in range(values.size // 64):
        group = values[g * 64 : g * 64 + 64]
        for j in range(64):
            lanes[j] += group[j]
