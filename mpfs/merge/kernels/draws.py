"""The draws of `mpfs.merge.random`, for the kernels: bits of 32, made by 32-bit arithmetic, which vectors have."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpfs.stats.inlined import inline

GROUP = 1024
"""Elements whose bits are made of one output of SplitMix64."""


@inline
def group_word(key: Any, group: Any) -> Any:
    """SplitMix64's output for a group of elements of the stream `key`."""
    z = np.uint64(key + (np.uint64(group) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    z = np.uint64((z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9))
    z = np.uint64((z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB))
    return np.uint64(z ^ (z >> np.uint64(31)))


@inline
def drawn(first: Any, second: Any, last: Any) -> Any:
    """Whether an element's bits are at most `last`.

    `second` is the upper half of its group's word, `first` the lower one plus its place. Both sides of the comparison
    have their first bit flipped, so that they are compared as signed numbers: vectors have no other comparison.
    """
    x = np.uint32((first ^ (first >> np.uint32(16))) * np.uint32(0x7FEB352D))
    x = np.uint32((x ^ (x >> np.uint32(15)) ^ second) * np.uint32(0x846CA68B))
    return np.int32(x ^ (x >> np.uint32(16))) <= last


@inline
def signed(last: Any) -> Any:
    """The last bits that are kept, as `drawn` takes them."""
    return np.int32(np.uint32(last) ^ np.uint32(0x80000000))
