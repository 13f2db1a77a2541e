"""Arithmetic on a few numbers, rounded as a tensor's dtype rounds: weights, norms and their quotients. Without torch.

Dtypes go by their stored names here ("BF16", …). Numbers are Python floats that the dtype can represent.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any, Protocol, Self, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from mpfs.objects.dtypes import itemsize

Floating: TypeAlias = NDArray[np.floating[Any]]


class _Adds(Protocol):
    def __add__(self, other: Self, /) -> Self: ...


_Row = TypeVar("_Row", bound=_Adds)
"""A number or an array, of numpy or of torch."""

_VECTOR_BYTES = 32
"""The vector that torch's CPU reductions are written for, on machines with wider ones too."""

_CASCADE = 16
"""Rows that are added one by one before the partial sum is set aside."""

_LARGEST = {"BF16": 255 * 2.0**120, "F16": 65504.0, "F32": (2 - 2.0**-23) * 2.0**127, "F64": sys.float_info.max}
"""The largest number of each dtype."""

_SMALL_NORM = 1e-7
"""An L1 norm below this is not matched."""


def accumulator_name(dtype: str) -> str:
    """The dtype that sums and products of `dtype` are formed in: float64 for float64, else float32."""
    return "F64" if dtype == "F64" else "F32"


def rounded(value: float, dtype: str) -> float:
    """`value` rounded to nearest even in `dtype` (a 16-bit type by way of float32, as torch does)."""
    if dtype == "F64":
        return float(value)
    with np.errstate(over="ignore", under="ignore"):
        single = np.float32(value)
        if dtype == "F16":
            return float(np.float16(single))
    if dtype == "BF16" and math.isfinite(single):
        bits = int(single.view(np.uint32))
        bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
        single = np.uint32(bits).view(np.float32)
    return float(single)


def bounded(value: float, dtype: str) -> float:
    """`value` rounded to `dtype`, but to its largest number where it would become infinite."""
    found = rounded(value, dtype)
    return math.copysign(_LARGEST[dtype], value) if math.isinf(found) else found


def quotient_of(x: float, divisor: float, dtype: str) -> float:
    """x / divisor, formed in the accumulator's dtype and rounded once to `dtype`; infinite or NaN by zero."""
    wide = np.float64 if dtype == "F64" else np.float32
    with np.errstate(all="ignore"):
        return rounded(float(np.divide(wide(x), wide(divisor))), dtype)


def norm_ratio(full: float, masked: float, work: str) -> float:
    """What brings the L1 norm of a delta back that elements were dropped from; 1 where a norm is too small to be matched.

    Both norms, and their quotient, are rounded to bfloat16 where the work dtype is that, else to the accumulator's.
    """
    dtype = "BF16" if work == "BF16" else accumulator_name(work)
    before, after = rounded(full, dtype), rounded(masked, dtype)
    if before < _SMALL_NORM or after < _SMALL_NORM:
        return 1.0
    ratio = quotient_of(before, after, dtype)
    return ratio if math.isfinite(ratio) else 1.0


def sum_weights(weights: Sequence[float], dtype: str) -> float:
    """The sum of a few numbers, each rounded to `dtype`, in the order of torch's sum of a short 1-D CPU tensor.

    With V numbers to a 32-byte vector (8 float32, 4 float64): fewer than V are dealt to four partial sums (`dealt`).
    Otherwise whole vectors are summed in that manner; then, from zero, the numbers past the last whole vector are
    added, then the V lanes. 16-bit types are summed in float32 and rounded at the end.
    """
    wide: np.dtype[np.floating[Any]] = np.dtype(np.float64 if dtype == "F64" else np.float32)
    values: Floating = np.array([rounded(weight, dtype) for weight in weights], wide)
    lanes = _VECTOR_BYTES // wide.itemsize
    whole = len(values) // lanes
    with np.errstate(all="ignore"):
        if whole == 0:
            total = dealt(list(values.reshape(-1, 1)), np.zeros(1, wide))
        else:
            partial = dealt(list(values[: whole * lanes].reshape(whole, lanes)), np.zeros(lanes, wide))
            total = np.zeros(1, wide)
            for value in (*values[whole * lanes :], *partial):
                total = total + value
    return rounded(float(total[0]), dtype)


def first_dealt(numel: int, dtype: str) -> int:
    """The first element of a float32 or float64 tensor from which on experts are dealt to four partial sums."""
    lanes = _VECTOR_BYTES // itemsize(dtype)
    return numel - numel % (4 * lanes if numel >= lanes else 4)


def dealt(rows: Sequence[_Row | None], zero: _Row) -> _Row:
    """The rows' sum by four partial sums: row i goes to sum i mod 4, the rows past a multiple of four all to sum 0."""
    full = len(rows) - len(rows) % 4
    parts = [in_order(rows[lane:full:4], zero) for lane in range(4)]
    for row in rows[full:]:
        if row is not None:
            parts[0] = parts[0] + row
    return parts[0] + parts[1] + parts[2] + parts[3]


def in_order(rows: Sequence[_Row | None], zero: _Row) -> _Row:
    """The rows' sum from first to last, by way of partial sums of 16 rows where there are as many; None is no row."""
    aside: _Row | None = None
    total = zero
    for count, row in enumerate(rows, start=1):
        if row is not None:
            total = total + row
        if count % _CASCADE == 0:
            aside = total if aside is None else aside + total
            total = zero
    return total if aside is None else total + aside
