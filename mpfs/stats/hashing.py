"""The fixed pseudo-random signs and rotations of the sketch. They are part of the format: never change them.

Element i of a tensor (flat, C order) is lane j = i mod 64 of group g = i div 64. In arithmetic modulo 2^64, with

    mix(z): z ^= z >> 30; z *= 0xBF58476D1CE4E5B9; z ^= z >> 27; z *= 0x94D049BB133111EB; z ^= z >> 31

    signs(g)    = mix(g * 0x9E3779B97F4A7C15 + 0x243F6A8885A308D3)
    rotation(g) = mix(g * 0x9E3779B97F4A7C15 + 0x13198A2E03707344) >> 56

the element's sign is -1 if bit j of signs(g) is set, else +1, and its bucket is (j + rotation(g)) mod 256.

These are two streams of the SplitMix64 generator (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
Generators, OOPSLA 2014); the two keys are the first 128 bits of the fraction of pi.

Why groups: two elements of one group never share a bucket, so only elements of different groups collide, and their
signs come from different outputs of the generator. Why rotations: a channel with large weights comes back every row, at the
same lane when the row length is a multiple of 64; without rotations all of it would fall into one bucket.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

GROUP: Final = 64
"""Elements that share one sign word and one rotation; also the lanes of a sum."""

TILE: Final = 16
"""Groups that a kernel takes at a time: their values, as f64, are 8 KiB, and stay in the CPU's nearest cache. Nothing depends
on it but speed."""

_STEP: Final = np.uint64(0x9E3779B97F4A7C15)
_SIGN_KEY: Final = np.uint64(0x243F6A8885A308D3)
_ROTATION_KEY: Final = np.uint64(0x13198A2E03707344)


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def group_hashes(first_group: int, groups: int) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Signs and rotations of consecutive groups.

    Args:
        first_group: the index of the first group in its tensor.
        groups: how many.

    Returns:
        The sign words, shape (groups,), bit j for lane j, set for -1; and the rotations, shape (groups,), 0 to 255.
    """
    index = np.arange(groups, dtype=np.uint64) + np.uint64(first_group)
    stepped = index * _STEP
    rotations = _mix(stepped + _ROTATION_KEY) >> np.uint64(56)
    return _mix(stepped + _SIGN_KEY), rotations.astype(np.int64)
