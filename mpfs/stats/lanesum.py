"""Sums over a tensor that do not depend on how it was cut into blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpfs.stats.accumulators import Backend, fold_lanes
from mpfs.stats.backend import backend
from mpfs.stats.hashing import GROUP


class LaneSum:
    """A float64 sum in a fixed order, fed block after block.

    64 lanes: element i of the tensor is added to lane i mod 64, in order of i; the total adds lanes 0 to 63 in that
    order. So the result is the same, to the last bit, for every block size that is a multiple of 64 elements, and on
    every machine. Non-finite values make the total non-finite, as in any sum. Not for use by several threads at once.
    """

    def __init__(self, *, using: Backend | None = None) -> None:
        self._using = using
        self._lanes = np.zeros(GROUP, dtype=np.float64)
        self._next = 0

    def add(self, x: NDArray[np.floating[Any]], first_element: int) -> None:
        """Add a block of values.

        Args:
            x: floating-point values of any shape, in C order; each is converted to float64 before it is added.
            first_element: index in the tensor of the first one; a multiple of 64, not before the end of the last
                block that was added. What is skipped counts as zeros.

        Raises:
            ValueError: `x` is not floating-point (or wider than float64), or `first_element` is not as said.
        """
        if x.dtype.kind != "f" or x.dtype.itemsize > 8:
            raise ValueError(f"only float16, float32 and float64 can be summed, not {x.dtype}")
        if first_element % GROUP or first_element < self._next:
            raise ValueError(
                f"a block must start at a multiple of {GROUP} elements and not before {self._next}, "
                f"not at {first_element}"
            )
        wide: type[np.floating[Any]] = np.float64 if x.dtype.itemsize == 8 else np.float32
        flat = np.ascontiguousarray(x, dtype=wide).reshape(-1)
        self._next = first_element + flat.size
        run = self._using or backend()
        whole = flat.size - flat.size % GROUP
        if whole:
            run.add_lanes(flat[:whole], self._lanes)
        if whole < flat.size:
            last = np.zeros(GROUP, dtype=flat.dtype)
            last[: flat.size - whole] = flat[whole:]
            run.add_lanes(last, self._lanes)

    def total(self) -> float:
        """The sum so far; 0.0 before anything was added."""
        return fold_lanes(self._lanes)
