"""The statistics record of one block: what it holds, byte by byte.

1080 bytes, little-endian, no padding:

| offset | bytes | field         | type     | meaning |
|-------:|------:|---------------|----------|---------|
|      0 |     8 | `count`       | u64      | elements in the block |
|      8 |     8 | `nonfinite`   | u64      | elements that are NaN or infinite |
|     16 |     8 | `zeros`       | u64      | elements that are +0 or -0 |
|     24 |     8 | `sum`         | f64      | sum of the finite elements |
|     32 |     8 | `sum_squares` | f64      | sum of the squares of the finite elements |
|     40 |     8 | `max_abs`     | f64      | largest finite absolute value; 0 if there is none |
|     48 |     8 | `flags`       | u64      | bit 0 `COUNTS_ONLY`, bit 1 `SATURATED`; the others are 0 |
|     56 |  1024 | `sketch`      | 256 f32  | the sign sketch (`mpfs.stats.hashing`) of the finite elements |

Everything after `count` treats a non-finite element as 0, except that `zeros` does not count it.

The sums are defined to the last bit, so a record is the same on every machine. Let the block's elements be taken
in groups of 64 from its start (a short last group is filled up with zeros that are not counted), each converted to
f64, which is exact. Lane j, 0 ≤ j < 64, starts at +0.0 and adds the j-th element of each group in group order (for
`sum_squares` its square, rounded to f64 first; no fused multiply-add). `sum` and `sum_squares` start at +0.0 and add
lanes 0, 1, …, 63 in that order. All additions are f64, rounded to nearest, ties to even. The sketch has 320 f64 places that
start at +0.0; group after group, lane j adds its signed element to place r + j, where r is the group's rotation; bucket j
is then place j, for j < 64 plus place j + 256, rounded to f32.

`SATURATED` says that a sum left its type's range (only f64 and very large f32 values can do that): what overflowed
is then the largest finite value of its type with its sign, or 0 where infinities of both signs met.

`COUNTS_ONLY` says that the block is not of a mergeable dtype. `zeros` is then set for BOOL and whole-byte integers,
and all other fields are 0.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

SKETCH_WIDTH: Final = 256
"""Buckets of a sketch."""

RECORD: Final = np.dtype(
    [
        ("count", "<u8"),
        ("nonfinite", "<u8"),
        ("zeros", "<u8"),
        ("sum", "<f8"),
        ("sum_squares", "<f8"),
        ("max_abs", "<f8"),
        ("flags", "<u8"),
        ("sketch", "<f4", (SKETCH_WIDTH,)),
    ]
)
"""The stored record itself: `record.tobytes()` is what the store keeps, `np.frombuffer(value, RECORD)` reads it."""

COUNTS_ONLY: Final = 1
"""Flag: the dtype is not mergeable, so there are counts and no sums."""

SATURATED: Final = 2
"""Flag: a sum overflowed and was clipped to the largest finite value; estimates from it mean nothing."""

Records: TypeAlias = NDArray[np.void]
"""An array of dtype `RECORD`, of any shape."""


def require_records(name: str, records: Records, ndim: int) -> None:
    """Raise ValueError unless `records` has dtype `RECORD` and `ndim` dimensions."""
    if records.dtype != RECORD or records.ndim != ndim:
        raise ValueError(f"{name} must be a {ndim}-dimensional array of records, not {records.dtype} {records.shape}")


def saturate(
    values: NDArray[np.float64], dtype: type[np.float32] | type[np.float64]
) -> tuple[NDArray[np.float64], bool]:
    """`values`, clipped to what `dtype` can hold (NaN becomes 0), and whether anything had to be changed."""
    largest = float(np.finfo(dtype).max)
    # NaN compares false, so it counts as out of range here.
    if bool((np.abs(values) <= largest).all()):
        return values, False
    return np.nan_to_num(values.clip(-largest, largest), nan=0.0), True
