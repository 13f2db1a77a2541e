"""The kernels by name and dtype, compiled when they are first asked for.

Importing this module imports numba; only `mpfs.merge.kernels.backend` does so, on first use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba  # type: ignore[import-untyped,unused-ignore]  # old versions ship no types
from numba import types

from mpfs.merge.kernels.compiled import blend, drawn_norms, find_equal, histogram, linear, products, task_vector

_ALL: tuple[Callable[..., Any], ...] = (task_vector, linear, histogram, find_equal, drawn_norms, blend, products)
_FORMATS: dict[str, Any] = {"BF16": types.uint16, "F16": types.int16, "F32": types.uint32}
COMPILED: dict[tuple[str, str], Callable[..., Any]] = {}
"""What is compiled by now, by name and stored dtype."""


def _signature(name: str, dtype: str) -> Any:
    bits = types.Array(_FORMATS[dtype], 1, "C")
    u64, i64, u32, f32 = types.uint64, types.int64, types.uint32, types.float32

    def array(element: Any, dimensions: int = 1) -> Any:
        return types.Array(element, dimensions, "C")

    lanes = array(types.float64)
    return {
        "task_vector": (
            *(bits, u64, array(u64, 2), array(i64), array(f32), array(f32)),
            *(types.boolean, types.boolean, f32, f32),
        ),
        "linear": (bits, array(u64), array(f32), f32),
        "histogram": (bits, i64, u64, array(u64), i64, i64, array(u32), array(i64, 2)),
        "find_equal": (bits, i64, u64, u64, u32, i64),
        "drawn_norms": (bits, i64, u64, u64, u64, u64, lanes, lanes),
        "blend": (bits, u64, u64, array(f32), types.boolean),
        "products": (bits, i64, u64, u64, array(types.float64, 2)),
    }[name]


_FUNCTIONS: dict[str, Callable[..., Any]] = {function.__name__: function for function in _ALL}

NAMES = tuple(_FUNCTIONS)


def kernel(name: str, dtype: str) -> Callable[..., Any]:
    """The kernel of this name for a stored dtype, compiled or out of numba's cache on disk, or without that cache."""
    found = COMPILED.get((name, dtype))
    if found is None:
        function, signature = _FUNCTIONS[name], _signature(name, dtype)
        try:
            found = numba.njit([signature], nogil=True, fastmath=False, cache=True)(function)
        except Exception:  # no writable place, a full disk, a damaged cache: whatever it is, the cache is optional
            found = numba.njit([signature], nogil=True, fastmath=False)(function)
        COMPILED[name, dtype] = found
    return found
