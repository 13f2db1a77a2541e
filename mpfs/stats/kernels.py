"""The numba kernels: one pass over the block, nogil, equal to `mpfs.stats.reference` to the last bit.

Importing this module imports numba; only `mpfs.stats.native` does so, to compile. The arrays are typed read-only and
unaligned, so one compiled version serves a buffer out of LMDB, bytes and numpy arrays alike.

Zeros, non-finite values and the largest magnitude are found on the bits. That is cheap, and it holds even on a
thread that flushes subnormal numbers.

A kernel takes a tile of groups through short loops, one after the other, which LLVM makes vectors of each: that takes half the
time of one loop that does everything to an element. Tiles without a non-finite value, as nearly all are, need no choices.

The constants are those of `mpfs.stats.hashing`; kernels and reference are tested against each other.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mpfs.stats.decode import Bits
from mpfs.stats.hashing import TILE
from mpfs.stats.inlined import as_f32, as_f64, inline

_Lanes: TypeAlias = NDArray[np.float64]


@inline
def _bits_of(x: Any) -> Any:
    return np.float64(x).view(np.uint64)


@inline
def _mix(z: Any) -> Any:
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@inline
def _add_tile(values: _Lanes, groups: int, first_group: Any, sketch: _Lanes, sums: _Lanes, squares: _Lanes) -> None:
    for g in range(groups):
        group = values[g * 64 : g * 64 + 64]
        for j in range(64):
            x = group[j]
            sums[j] += x
            squares[j] += x * x
    for g in range(groups):
        group = values[g * 64 : g * 64 + 64]
        stepped = (first_group + np.uint64(g)) * np.uint64(0x9E3779B97F4A7C15)
        signs = _mix(stepped + np.uint64(0x243F6A8885A308D3))
        rotation = _mix(stepped + np.uint64(0x13198A2E03707344)) >> np.uint64(56)
        places = sketch[rotation : rotation + np.uint64(64)]
        for j in range(64):
            sign = (signs << np.uint64(63 - j)) & np.uint64(0x8000000000000000)
            places[j] += as_f64(_bits_of(group[j]) ^ sign)


@inline
def _survey_16(tile: Bits) -> Any:
    """How many zeros, and the largest magnitude."""
    none, top = np.uint16(0), np.uint16(0)
    for i in range(tile.size):
        m = np.uint16(tile[i] & np.uint16(0x7FFF))
        none = np.uint16(none + np.uint16(m == np.uint16(0)))
        top = max(top, m)
    return np.uint64(none), np.uint64(top)


@inline
def _survey_32(tile: Bits) -> Any:
    none, top = np.uint32(0), np.uint32(0)
    for i in range(tile.size):
        m = np.uint32(tile[i] & np.uint32(0x7FFFFFFF))
        none = np.uint32(none + np.uint32(m == np.uint32(0)))
        top = max(top, m)
    return np.uint64(none), np.uint64(top)


@inline
def _survey_64(tile: Bits) -> Any:
    none, top = np.uint64(0), np.uint64(0)
    for i in range(tile.size):
        m = tile[i] & np.uint64(0x7FFFFFFFFFFFFFFF)
        none += np.uint64(m == np.uint64(0))
        top = max(top, m)
    return none, top


@inline
def _read_odd_tile(tile: Bits, magnitude: Any, exponent: Any, decode: Any, values: _Lanes) -> Any:
    """Read a tile with something in it that is not finite, as 0; how many those are, and the largest magnitude of the rest."""
    odd, top = np.uint64(0), np.uint64(0)
    for i in range(tile.size):
        b = np.uint64(tile[i])
        m = b & magnitude
        finite = m < exponent
        odd += np.uint64(not finite)
        top = max(top, m if finite else np.uint64(0))
        values[i] = decode(b if finite else np.uint64(0))
    return odd, top


@inline
def _decode_bf16(b: Any) -> Any:
    return np.float64(as_f32(np.uint32(b) << np.uint32(16)))


@inline
def _decode_f16(b: Any) -> Any:
    # As f32: move the mantissa up and rebias the exponent. A subnormal m·2^-24 comes out of
    # (1 + m/1024)·2^-14 - 2^-14, so that no subnormal f32 is ever an operand.
    m = np.uint32(np.uint32(b) & np.uint32(0x7FFF))
    normal = as_f32((m << np.uint32(13)) + np.uint32(112 << 23))
    subnormal = as_f32((m << np.uint32(13)) + np.uint32(113 << 23)) - as_f32(np.uint32(113 << 23))
    x = np.float64(normal if m >= np.uint32(0x0400) else subnormal)
    return as_f64(_bits_of(x) | ((np.uint64(b) & np.uint64(0x8000)) << np.uint64(48)))


@inline
def _decode_f32(b: Any) -> Any:
    return np.float64(as_f32(b))


@inline
def _decode_f64(b: Any) -> Any:
    return as_f64(b)


def accumulate_bf16(
    bits: Bits,
    first_group: Any,
    sketch: _Lanes,
    sums: _Lanes,
    squares: _Lanes,
    tallies: NDArray[np.uint64],
    values: _Lanes,
) -> None:
    groups = bits.size // 64
    for start in range(0, groups, TILE):
        count = min(TILE, groups - start)
        tile = bits[start * 64 : (start + count) * 64]
        none, top = _survey_16(tile)
        if top < np.uint64(0x7F80):
            for i in range(tile.size):
                values[i] = _decode_bf16(tile[i])
        else:
            odd, top = _read_odd_tile(tile, np.uint64(0x7FFF), np.uint64(0x7F80), _decode_bf16, values)
            tallies[0] += odd
        tallies[1] += none
        tallies[2] = max(tallies[2], top)
        _add_tile(values, count, first_group + np.uint64(start), sketch, sums, squares)


def accumulate_f16(
    bits: Bits,
    first_group: Any,
    sketch: _Lanes,
    sums: _Lanes,
    squares: _Lanes,
    tallies: NDArray[np.uint64],
    values: _Lanes,
) -> None:
    groups = bits.size // 64
    for start in range(0, groups, TILE):
        count = min(TILE, groups - start)
        tile = bits[start * 64 : (start + count) * 64]
        none, top = _survey_16(tile)
        if top < np.uint64(0x7C00):
            for i in range(tile.size):
                values[i] = _decode_f16(tile[i])
        else:
            odd, top = _read_odd_tile(tile, np.uint64(0x7FFF), np.uint64(0x7C00), _decode_f16, values)
            tallies[0] += odd
        tallies[1] += none
        tallies[2] = max(tallies[2], top)
        _add_tile(values, count, first_group + np.uint64(start), sketch, sums, squares)


def accumulate_f32(
    bits: Bits,
    first_group: Any,
    sketch: _Lanes,
    sums: _Lanes,
    squares: _Lanes,
    tallies: NDArray[np.uint64],
    values: _Lanes,
) -> None:
    groups = bits.size // 64
    for start in range(0, groups, TILE):
        count = min(TILE, groups - start)
        tile = bits[start * 64 : (start + count) * 64]
        none, top = _survey_32(tile)
        if top < np.uint64(0x7F800000):
            for i in range(tile.size):
                values[i] = _decode_f32(tile[i])
        else:
            odd, top = _read_odd_tile(tile, np.uint64(0x7FFFFFFF), np.uint64(0x7F800000), _decode_f32, values)
            tallies[0] += odd
        tallies[1] += none
        tallies[2] = max(tallies[2], top)
        _add_tile(values, count, first_group + np.uint64(start), sketch, sums, squares)


def accumulate_f64(
    bits: Bits,
    first_group: Any,
    sketch: _Lanes,
    sums: _Lanes,
    squares: _Lanes,
    tallies: NDArray[np.uint64],
    values: _Lanes,
) -> None:
    groups = bits.size // 64
    for start in range(0, groups, TILE):
        count = min(TILE, groups - start)
        tile = bits[start * 64 : (start + count) * 64]
        none, top = _survey_64(tile)
        if top < np.uint64(0x7FF0000000000000):
            for i in range(tile.size):
                values[i] = _decode_f64(tile[i])
        else:
            odd, top = _read_odd_tile(
                tile, np.uint64(0x7FFFFFFFFFFFFFFF), np.uint64(0x7FF0000000000000), _decode_f64, values
            )
            tallies[0] += odd
        tallies[1] += none
        tallies[2] = max(tallies[2], top)
        _add_tile(values, count, first_group + np.uint64(start), sketch, sums, squares)


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
