"""How often magnitudes occur, as stored: a histogram of the 15 leading bits of float patterns without their sign. Pure.

A tensor's deltas have few magnitudes for their number, so only bins that are not empty are kept. The payload is a zlib
stream of, for n such bins in ascending order: n steps from the bin before (from 0 for the first; u16), then n counts
(u64), byte by byte: the lowest bytes of all counts, then the next ones, and so on.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Final

from mpfs.deferred import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

BINS: Final = 1 << 15
"""Values of the 15 bits below the sign. In 16-bit types each is a magnitude of its own; in float32 neighbouring bins are
1/128 apart, in float64 1/16."""

_STEP: Final = "<u2"
_COUNT: Final = "<u8"
_STEP_SIZE: Final = 2
_COUNT_SIZE: Final = 8
_ENTRY: Final = _STEP_SIZE + _COUNT_SIZE
_BYTES_PER_BIN: Final = 32


def is_worth_keeping(counts: NDArray[np.int64], nbytes: int) -> bool:
    """Whether a histogram, shape (BINS,), is small beside its tensor of so many bytes: a bin takes about 2 bytes, so
    that is at most 1/16; of a large model's matrix it is less than a thousandth."""
    return int(np.count_nonzero(counts)) * _BYTES_PER_BIN <= nbytes


def pack_histogram(counts: NDArray[np.int64]) -> bytes:
    """A histogram, shape (BINS,), as stored."""
    bins = np.flatnonzero(counts)
    steps = np.diff(bins, prepend=0).astype(_STEP)
    planes = counts[bins].astype(_COUNT).view(np.uint8).reshape(-1, _COUNT_SIZE).T
    return zlib.compress(steps.tobytes() + planes.tobytes(), 9)


def unpack_histogram(payload: bytes, numel: int) -> NDArray[np.int64] | None:
    """The counts, shape (BINS,), of so many elements; None if the payload is not that of such a tensor."""
    stream = zlib.decompressobj()
    try:
        data = stream.decompress(payload, _ENTRY * BINS + 1)
    except zlib.error:
        return None
    bins = len(data) // _ENTRY
    if len(data) % _ENTRY or not stream.eof or stream.unused_data or bins > BINS:
        return None
    steps = np.frombuffer(data, _STEP, bins).astype(np.int64)
    planes = np.frombuffer(data, np.uint8, offset=bins * _STEP_SIZE).reshape(_COUNT_SIZE, bins)
    found = np.ascontiguousarray(planes.T).view(_COUNT).reshape(-1)
    places = np.cumsum(steps)
    if bool((steps[1:] == 0).any()) or bool((places >= BINS).any()) or bool((found > np.uint64(numel)).any()):
        return None
    counts = np.zeros(BINS, np.int64)
    counts[places] = found.astype(np.int64)
    # No sum overflows: numpy would wrap it, so it is taken in Python.
    return counts if sum(found.tolist()) == numel and not bool((found == 0).any()) else None
