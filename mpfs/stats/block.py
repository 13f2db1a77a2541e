"""Statistics of one block."""

from __future__ import annotations

import numpy as np

from mpfs.objects import dtypes
from mpfs.stats.accumulators import Accumulators, Backend
from mpfs.stats.backend import backend
from mpfs.stats.decode import FORMATS, INTEGERS, as_bits
from mpfs.stats.hashing import GROUP
from mpfs.stats.record import COUNTS_ONLY, RECORD, Records


def block_stats(
    data: bytes | bytearray | memoryview, dtype: str, first_element: int, *, using: Backend | None = None
) -> Records:
    """Count, sum and sketch one block, in one pass.

    The result is a function of the arguments alone, to the last bit: neither machine, thread nor implementation shows
    in it. `mpfs.stats.record` specifies it. The sketch is a count sketch (Charikar, Chen, Farach-Colton:
    Finding frequent items in data streams, ICALP 2002), used as feature hashing (Weinberger et al., ICML 2009) uses it:
    the dot product of two sketches is an unbiased estimate of the dot product of the blocks, and the squared norm of
    one (Alon, Matias, Szegedy, STOC 1996) has a relative standard error of about sqrt(2/256) = 9%.

    Args:
        data: the block's raw little-endian bytes; any C-contiguous buffer, at any alignment. It is not copied.
        dtype: any dtype of `mpfs.objects.dtypes`. One that is not mergeable gets counts only; the count of a packed
            one is the number of whole elements that fit into the block's bits.
        first_element: index, within its tensor (flat, C order), of the block's first element; a multiple of 64.
            Not looked at for dtypes that get counts only.
        using: the implementation; by default the kernels if numba is there.

    Returns:
        A record: an array of shape () and dtype `RECORD`.

    Raises:
        ValueError: the dtype is unknown, the bytes are not contiguous or not a whole number of elements, or `first_element` is negative
            or not a multiple of 64.
    """
    if dtype not in FORMATS:
        return _counts(data, dtype)
    if first_element < 0 or first_element % GROUP:
        raise ValueError(f"a block must start at a multiple of {GROUP} elements, not at {first_element}")
    bits = as_bits(data, dtype)
    run = using or backend()
    state = Accumulators()
    whole = bits.size - bits.size % GROUP
    padding = 0
    if whole:
        run.accumulate(bits[:whole], dtype, first_element // GROUP, state)
    if whole < bits.size:
        padding = whole + GROUP - bits.size
        last = np.zeros(GROUP, dtype=bits.dtype)
        last[: GROUP - padding] = bits[whole:]
        run.accumulate(last, dtype, (first_element + whole) // GROUP, state)
    return state.record(dtype, bits.size, padding)


def _counts(data: bytes | bytearray | memoryview, dtype: str) -> Records:
    width = dtypes.BITS.get(dtype)
    if width is None:
        raise ValueError(f"unknown dtype {dtype}")
    record = np.zeros((), dtype=RECORD)
    record["flags"] = COUNTS_ONLY
    if dtype in INTEGERS:
        bits = as_bits(data, dtype)
        record["count"] = bits.size
        record["zeros"] = bits.size - np.count_nonzero(bits)
        return record
    size = memoryview(data).nbytes
    if width % 8 == 0 and size % (width // 8):
        raise ValueError(f"{size} bytes are not a whole number of {dtype} elements of {width // 8} bytes")
    record["count"] = size * 8 // width
    return record
