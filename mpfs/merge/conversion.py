"""Between the mergeable dtypes, on arrays as they are stored: as torch converts, but with one NaN and without torch."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

Stored: TypeAlias = NDArray[Any]
"""Elements of a mergeable dtype in numpy's type for it; bfloat16, which numpy has none for, as uint16."""

TYPES: Final[dict[str, np.dtype[Any]]] = {
    "BF16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
}
"""numpy's types of the mergeable dtypes."""

_PIECE = 1 << 16
"""Elements that are converted together: their temporaries stay in the processor's cache."""


def converted(values: Stored, dtype: str, wanted: str) -> Stored:
    """Elements of `dtype` as elements of `wanted`, rounded to nearest even; 1-D, `values` itself if they are the same.

    As in torch, float64 becomes a 16-bit type by way of float32. Every NaN that is rounded becomes the quiet NaN without
    sign and payload; which one torch gives depends on the machine.
    """
    if dtype == wanted:
        return values
    result = np.empty(values.size, TYPES[wanted])
    for low in range(0, values.size, _PIECE):
        part = slice(low, low + _PIECE)
        _convert(values[part], dtype, result[part], wanted)
    return result


def _convert(values: Stored, dtype: str, out: Stored, wanted: str) -> None:
    if wanted == "F64" and dtype != "BF16":
        out[:] = values
        return
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if dtype == "BF16":
            single = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
        else:
            single = values.astype(np.float32, copy=False)
        if wanted == "BF16":
            bits = single.view(np.uint32)
            odd = bits >> np.uint32(16) & np.uint32(1)
            odd += np.uint32(0x7FFF)
            odd += bits
            odd >>= np.uint32(16)
            out[:] = odd
        else:
            out[:] = single
    if TYPES[wanted].itemsize < TYPES[dtype].itemsize or {dtype, wanted} == {"F16", "BF16"}:
        nan = np.isnan(single)
        if nan.any():
            out[nan] = 0x7FC0 if wanted == "BF16" else np.nan
