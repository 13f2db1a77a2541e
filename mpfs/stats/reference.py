"""The numpy implementation: slower than the kernels, needs nothing but numpy, and defines what they must give."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mpfs.stats.accumulators import LARGEST, NONFINITE, ZEROS, Accumulators
from mpfs.stats.decode import FORMATS, Bits, decode
from mpfs.stats.hashing import GROUP, group_hashes

_BATCH: Final = 256  # groups at a time: small enough for the temporaries to stay in cache


def accumulate(bits: Bits, dtype: str, first_group: int, into: Accumulators) -> None:
    """See `Backend.accumulate`."""
    rows = bits.reshape(-1, GROUP)
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(rows), _BATCH):
            _accumulate_batch(rows[start : start + _BATCH], dtype, first_group + start, into)


def add_lanes(values: NDArray[np.floating[Any]], lanes: NDArray[np.float64]) -> None:
    """See `Backend.add_lanes`."""
    rows = values.reshape(-1, GROUP)
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, len(rows), _BATCH):
            _add_rows(rows[start : start + _BATCH].astype(np.float64), lanes)


def _accumulate_batch(bits: Bits, dtype: str, first_group: int, into: Accumulators) -> None:
    layout = FORMATS[dtype]
    unsigned = layout.bits.type
    magnitude = bits & unsigned(layout.magnitude)
    finite = magnitude < unsigned(layout.exponent)
    into.tallies[NONFINITE] += np.uint64(finite.size - np.count_nonzero(finite))
    into.tallies[ZEROS] += np.uint64(magnitude.size - np.count_nonzero(magnitude))
    into.tallies[LARGEST] = max(into.tallies[LARGEST], np.uint64((magnitude * finite).max(initial=0)))

    values = decode(np.where(finite, bits, unsigned(0)), dtype)
    _add_rows(values, into.sums)
    _add_rows(values * values, into.squares)

    signs, rotations = group_hashes(first_group, len(bits))
    negative = (signs[:, None] >> np.arange(GROUP, dtype=np.uint64)) & np.uint64(1)
    # Adding the zeros around a group's 64 places changes nothing: no accumulator is ever -0.0.
    places = np.zeros((len(bits), len(into.sketch)), dtype=np.float64)
    columns = rotations[:, None] + np.arange(GROUP)
    np.put_along_axis(places, columns, np.where(negative == 1, -values, values), axis=1)
    _add_rows(places, into.sketch)


def _add_rows(rows: NDArray[np.float64], into: NDArray[np.float64]) -> None:
    # `accumulate` is defined element by element, r[i] = r[i-1] + a[i]; `sum` may choose another order.
    into[:] = np.add.accumulate(np.concatenate((into[None, :], rows)), axis=0)[-1]
