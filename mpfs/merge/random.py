"""Random bits that depend on what they are for, never on when they are drawn.

A generator with a state would give an element other bits when blocks are cut, ordered or threaded otherwise. Here the
bits of an element are a function of (seed, tensor, expert, element index) alone.
"""

from __future__ import annotations

import math
import struct

import numpy as np
import xxhash
from numpy.typing import NDArray

_MASK = 2**64 - 1

GAMMA = 0x9E3779B97F4A7C15
"""The step of the counter: 2^64 divided by the golden ratio, made odd."""

MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
"""The multipliers of the finaliser, with right shifts by 30, 27 and 31 bits."""

GROUP = 1024
"""Elements whose bits are made of one output of SplitMix64."""


def stream_key(seed: int, tensor: str, expert: str) -> int:
    """The key of one expert's stream for one tensor, in [0, 2^64).

    It is the XXH3-64 (seed 0) of: `seed` modulo 2^64 as 8 little-endian bytes, then for the tensor's name and for the
    expert's key their length in UTF-8 bytes as 8 little-endian bytes and those bytes. So no two triples share an
    encoding (up to seeds that agree modulo 2^64).
    """
    encoded = struct.pack("<Q", seed & _MASK)
    for text in (tensor, expert):
        data = text.encode()
        encoded += struct.pack("<Q", len(data)) + data
    return xxhash.xxh3_64_intdigest(encoded)


def uniform_bits(key: int, start: int, n: int) -> NDArray[np.uint32]:
    """The 32 uniform bits of each element in [start, start + n) of the stream `key`; shape (n,).

    Each 1,024 elements have a 64-bit word: that of elements 1024·g to 1024·g + 1023 is output g of SplitMix64 with state
    `key`: z = key + (g + 1) · GAMMA, then z ← (z ⊕ z≫30) · MIX_1, z ← (z ⊕ z≫27) · MIX_2, z ⊕ z≫31, all modulo 2^64. The
    bits of the p-th of them are made of the word's lower and upper halves a and b by a 32-bit finaliser that b enters
    halfway: x = a + p, then x ← (x ⊕ x≫16) · 0x7FEB352D, x ← (x ⊕ x≫15 ⊕ b) · 0x846CA68B, x ⊕ x≫16 ⊕ 2^31,
    all modulo 2^32. So vectors of 32-bit integers do nearly all of the work.

    Source: G. Steele, D. Lea and C. Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; the 32-bit
    multipliers and shifts are lowbias32 of C. Wellons' hash prospector.

    Raises:
        ValueError: `n` or `start` is negative.
    """
    if n < 0 or start < 0:
        raise ValueError(f"start and n must not be negative, not {start} and {n}")
    first = start // GROUP
    words = np.arange(-(-(start + n) // GROUP) - first, dtype=np.uint64)
    words *= np.uint64(GAMMA)
    words += np.uint64((key + (first + 1) * GAMMA) & _MASK)
    words ^= words >> np.uint64(30)
    words *= np.uint64(MIX_1)
    words ^= words >> np.uint64(27)
    words *= np.uint64(MIX_2)
    words ^= words >> np.uint64(31)
    x: NDArray[np.uint32] = np.add.outer(words.astype(np.uint32), np.arange(GROUP, dtype=np.uint32))
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x ^= (words >> np.uint64(32)).astype(np.uint32)[:, None]
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16) ^ np.uint32(1 << 31)
    return x.reshape(-1)[start - first * GROUP :][:n]


def uniform(key: int, start: int, n: int) -> NDArray[np.float64]:
    """`uniform_bits` as numbers in [0, 1): multiples of 2^-32."""
    return uniform_bits(key, start, n).astype(np.float64) * 2.0**-32


def keep_limit(density: float) -> int:
    """The number below which an element's 32 bits must lie for it to be kept, in [0, 2^32].

    bits < density · 2^32, where the product is exact and an integer lies below it iff below its ceiling.
    """
    return min(max(math.ceil(density * 2.0**32), 0), 2**32)


def bernoulli(key: int, start: int, n: int, density: float) -> NDArray[np.bool_]:
    """Which of the elements [start, start + n) are kept, each with probability `density`; shape (n,)."""
    kept: NDArray[np.bool_] = uniform_bits(key, start, n) < np.uint64(keep_limit(density))
    return kept
