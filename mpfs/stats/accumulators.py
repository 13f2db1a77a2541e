"""The running sums behind a record, which the numpy reference and the numba kernels both advance."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mpfs.stats.decode import FORMATS, Bits, decode
from mpfs.stats.hashing import GROUP
from mpfs.stats.record import RECORD, SATURATED, SKETCH_WIDTH, Records, saturate

NONFINITE, ZEROS, LARGEST = range(3)
"""Places in `Accumulators.tallies`; LARGEST is the greatest finite magnitude as a bit pattern, which orders alike."""


@dataclass(slots=True)
class Accumulators:
    """What one pass over whole groups advances; `mpfs.stats.record` defines the order of every addition."""

    sketch: NDArray[np.float64] = field(default_factory=lambda: np.zeros(SKETCH_WIDTH + GROUP))
    sums: NDArray[np.float64] = field(default_factory=lambda: np.zeros(GROUP))
    squares: NDArray[np.float64] = field(default_factory=lambda: np.zeros(GROUP))
    tallies: NDArray[np.uint64] = field(default_factory=lambda: np.zeros(3, dtype=np.uint64))

    def record(self, dtype: str, count: int, padding: int) -> Records:
        """Fold into a record, shape (), of `count` elements; `padding` zeros were added to fill the last group."""
        largest = self.tallies[LARGEST:].astype(FORMATS[dtype].bits)
        with np.errstate(over="ignore", invalid="ignore"):
            folded = self.sketch[:SKETCH_WIDTH].copy()
            folded[:GROUP] += self.sketch[SKETCH_WIDTH:]
            sums = np.array([fold_lanes(self.sums), fold_lanes(self.squares)])
        sketch, sketch_saturated = saturate(folded, np.float32)
        sums, sums_saturated = saturate(sums, np.float64)
        record = np.zeros((), dtype=RECORD)
        record["count"] = count
        record["nonfinite"] = self.tallies[NONFINITE]
        record["zeros"] = int(self.tallies[ZEROS]) - padding
        record["sum"] = sums[0]
        record["sum_squares"] = sums[1]
        record["max_abs"] = decode(largest, dtype)[0]
        record["sketch"] = sketch
        record["flags"] = SATURATED if sketch_saturated or sums_saturated else 0
        return record


class Backend(Protocol):
    """The two passes over data, implemented by `mpfs.stats.reference` and by `mpfs.stats.fast`, alike to the bit."""

    def accumulate(self, bits: Bits, dtype: str, first_group: int, into: Accumulators) -> None:
        """Advance `into` by whole groups: `bits` has shape (64·groups,), of the mergeable `dtype`."""

    def add_lanes(self, values: NDArray[np.floating[Any]], lanes: NDArray[np.float64]) -> None:
        """Add float32 or float64 `values`, shape (64·groups,), to `lanes`, shape (64,), in group order."""


def fold_lanes(lanes: NDArray[np.float64]) -> float:
    """0.0 + lanes[0] + lanes[1] + …, added in exactly that order."""
    total = 0.0
    for lane in lanes.tolist():
        total += lane
    return total
