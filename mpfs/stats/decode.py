"""Raw little-endian bytes as bit patterns, and bit patterns as exact float64 values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mpfs.objects import dtypes

Bits: TypeAlias = NDArray[np.unsignedinteger[Any]]
"""Elements as unsigned integers of their own width, shape (elements,)."""


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """Where the parts of an IEEE-like float are: `exponent` and `magnitude` (all but the sign) are masks."""

    bits: np.dtype[Any]
    exponent: int
    magnitude: int


FORMATS: Final[dict[str, FloatFormat]] = {
    "BF16": FloatFormat(np.dtype("<u2"), 0x7F80, 0x7FFF),
    "F16": FloatFormat(np.dtype("<u2"), 0x7C00, 0x7FFF),
    "F32": FloatFormat(np.dtype("<u4"), 0x7F80_0000, 0x7FFF_FFFF),
    "F64": FloatFormat(np.dtype("<u8"), 0x7FF0_0000_0000_0000, 0x7FFF_FFFF_FFFF_FFFF),
}
"""One for each mergeable dtype."""

INTEGERS: Final = frozenset({"BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64"})
"""The dtypes whose zeros are exactly the elements with no bit set."""


def as_bits(data: bytes | bytearray | memoryview, dtype: str) -> Bits:
    """View a block's bytes as unsigned integers of the dtype's width, without a copy.

    Args:
        data: any C-contiguous buffer, at any alignment.
        dtype: a dtype of 1, 2, 4 or 8 bytes an element.

    Returns:
        Shape (elements,); read-only if the buffer is.

    Raises:
        ValueError: the dtype is packed or unknown, or the buffer is not contiguous or not a whole number of elements.
    """
    size = dtypes.itemsize(dtype)
    view = memoryview(data)
    if not view.c_contiguous:
        raise ValueError("a block's bytes must be contiguous")
    if view.nbytes % size:
        raise ValueError(f"{view.nbytes} bytes are not a whole number of {dtype} elements of {size} bytes")
    if view.nbytes == 0:
        return np.zeros(0, dtype=f"<u{size}")
    return np.frombuffer(view, dtype=f"<u{size}")


def decode(bits: Bits, dtype: str) -> NDArray[np.float64]:
    """The exact values of elements of a mergeable dtype, as float64 of the same shape."""
    with np.errstate(invalid="ignore"):  # widening a signalling NaN
        if dtype == "BF16":
            return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
        return bits.view(FORMATS[dtype].bits.str.replace("u", "f")).astype(np.float64)
