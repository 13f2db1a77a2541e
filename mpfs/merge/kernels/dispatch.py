"""The kernels by name and dtype: what each takes, and the one that is compiled for a dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from mpfs.merge.kernels.columns import BIT_TYPES
from mpfs.stats.native import Argument, Array, kernel

_MERGING: Final = "mpfs.merge.kernels.compiled"
_PASSES: Final = "mpfs.merge.kernels.passes"
_FORMATS: Final = {dtype: f"{bits.kind}{8 * bits.itemsize}" for dtype, bits in BIT_TYPES.items()}
_FLOATS: Final = Array("f32")

_ARGUMENTS: Final[dict[str, tuple[Argument, ...]]] = {
    "task_vector": (
        "i64",
        "u64",
        Array("u64", 2),
        Array("i64"),
        _FLOATS,
        _FLOATS,
        "bool",
        "bool",
        "f32",
        "f32",
        _FLOATS,
    ),
    "linear": (Array("u64"), _FLOATS, "f32", _FLOATS),
    "histogram": (
        "i64",
        "u64",
        Array("u64"),
        "i64",
        "i64",
        Array("u32"),
        Array("i64", 2),
        Array("u32"),
        Array("u32"),
    ),
    "find_equal": ("i64", "u64", "u64", "u32", "i64", Array("i64")),
    "drawn_norms": ("i64", "i64", "u64", Array("u64"), Array("u64"), Array("u32"), Array("f64", 2), _FLOATS),
    "blend": ("u64", "u64", _FLOATS, "bool"),
    "products": ("i64", "u64", "u64", Array("f64", 2)),
}
"""What each kernel takes after its first argument, which is an array of bit patterns."""

NAMES: Final = tuple(_ARGUMENTS)
LOADED: dict[tuple[str, str], Callable[..., None]] = {}
"""What is compiled or loaded by now, by name and stored dtype."""


def load(name: str, dtype: str) -> Callable[..., None]:
    """The kernel of this name for a stored dtype."""
    found = LOADED.get((name, dtype))
    if found is None:
        module = _MERGING if name in ("task_vector", "linear", "blend") else _PASSES
        found = LOADED[name, dtype] = kernel(module, name, (Array(_FORMATS[dtype]), *_ARGUMENTS[name]))
    return found
