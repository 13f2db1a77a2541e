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


def uniform_bits(key: int, start: int, n: int) -> NDArray[np.uint64]:
    """The 64 uniform bits of each element in [start, start + n) of the stream `key`; shape (n,).

    Element i's are output i of SplitMix64 with state `key`: z = key + (i + 1) · GAMMA, then z ← (z ⊕ z≫30) · MIX_1,
    z ← (z ⊕ z≫27) · MIX_2, z ⊕ z≫31, all modulo 2^64.

    Source: G. Steele, D. Lea and C. Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.

    Raises:
        ValueError: `n` or `start` is negative.
    """
    if n < 0 or start < 0:
        raise ValueError(f"start and n must not be negative, not {start} and {n}")
    z = np.arange(n, dtype=np.uint64)
    z *= np.uint64(GAMMA)
    z += np.uint64((key + (start + 1) * GAMMA) & _MASK)
    z ^= z >> np.uint64(30)
    z *= np.uint64(MIX_1)
    z ^= z >> np.uint64(27)
    z *= np.uint64(MIX_2)
    z ^= z >> np.uint64(31)
    return z


def keep_limit(density: float) -> int:
    """The number below which an element's 53 leading bits must lie for it to be kept.

    (bits ≫ 11) < density · 2^53, where the product is exact and an integer lies below it iff below its ceiling.
    """
    return min(max(math.ceil(density * 2.0**53), 0), 2**53)


def bernoulli(key: int, start: int, n: int, density: float) -> NDArray[np.bool_]:
    """Which of the elements [start, start + n) are kept, each with probability `density`; shape (n,)."""
    bits = uniform_bits(key, start, n)
    bits >>= np.uint64(11)
    kept: NDArray[np.bool_] = bits < np.uint64(keep_limit(density))
    return kept
