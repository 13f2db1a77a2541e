"""The kernels of `mpfs.stats.kernels` as a `Backend`: each compiled, or loaded, when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mpfs.stats.accumulators import Accumulators
from mpfs.stats.decode import FORMATS, Bits
from mpfs.stats.hashing import GROUP, TILE
from mpfs.stats.native import Argument, Array, kernel

_MODULE: Final = "mpfs.stats.kernels"
_LANES: Final = Array("f64")

_loaded: dict[tuple[str, str], Callable[..., None]] = {}


def _kernel(name: str, dtype: str) -> Callable[..., None]:
    found = _loaded.get((name, dtype))
    if found is None:
        bits = f"u{8 * FORMATS[dtype].bits.itemsize}"
        arguments: tuple[Argument, ...] = (Array(f"f{bits[1:]}", unaligned=True), _LANES)
        if name == "accumulate":
            arguments = (Array(bits, unaligned=True), "u64", _LANES, _LANES, _LANES, Array("u64"), _LANES)
        found = _loaded[name, dtype] = kernel(_MODULE, f"{name}_{dtype.lower()}", arguments)
    return found


def warm_up(dtype: str) -> None:
    """Compile a dtype's kernel, or load it."""
    _kernel("accumulate", dtype)


def accumulate(bits: Bits, dtype: str, first_group: int, into: Accumulators) -> None:
    """See `Backend.accumulate`."""
    scratch = np.empty(TILE * GROUP, np.float64)
    _kernel("accumulate", dtype)(bits, first_group, into.sketch, into.sums, into.squares, into.tallies, scratch)


def add_lanes(values: NDArray[np.floating[Any]], lanes: NDArray[np.float64]) -> None:
    """See `Backend.add_lanes`."""
    _kernel("lanes", "F32" if values.dtype == np.float32 else "F64")(values, lanes)
