"""What the numba kernels of statistics and of merges are made of alike: functions that they inline, and bits as numbers.

Importing this module imports numba; only modules of kernels do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba  # type: ignore[import-untyped,unused-ignore]  # old versions ship no types
import numpy as np

_F = TypeVar("_F", bound=Callable[..., Any])


def inline(function: _F) -> _F:
    """Compile a helper that kernels inline. Nothing is contracted or reordered."""
    return cast(_F, numba.njit(nogil=True, fastmath=False)(function))


@inline
def as_f32(bits: Any) -> Any:
    """A bit pattern as a float32."""
    return np.uint32(bits).view(np.float32)


@inline
def as_f64(bits: Any) -> Any:
    """A bit pattern as a float64."""
    return np.uint64(bits).view(np.float64)


@inline
def bits_of_f32(x: Any) -> Any:
    """A float32's bit pattern."""
    return np.float32(x).view(np.uint32)
