"""Whether the kernels can be used here, and how they are called."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mpfs.merge.kernels import dispatch
from mpfs.merge.kernels.columns import BIT_TYPES, Between, Bits, BitsColumn, Drawn, Largest, Rule
from mpfs.store.memory import MEMORY

TILE, WHOLE, LARGEST, DRAWN, BETWEEN, _ROWS = 256, 1, 2, 3, 4, 8
"""As `compiled` has them, which cannot be imported without numba."""
_NO_LIMIT = 2**62

_lock = threading.Lock()
_tried = False
_chosen: Kernels | None = None


class Kernels:
    """The kernels, for callers that have arrays. Safe to use from several threads; none holds the interpreter lock."""

    def compile(self, dtype: str) -> None:
        """Compile everything for one dtype, or load it from disk."""
        for name in dispatch.NAMES:
            dispatch.load(name, dtype)

    def task_vector(
        self,
        dtype: str,
        column: BitsColumn,
        rules: Sequence[Rule],
        weights: Sequence[float],
        *,
        elects: bool,
        divide: bool,
        divisor: float,
        scale: float,
    ) -> Bits:
        """One column of a `TaskVectorOperator`; the arguments are those of the kernel (`compiled.task_vector`).

        `weights` are rounded to the dtype. The column has a base.
        """
        base = _aligned(column.base)
        out = MEMORY.empty(column.numel, BIT_TYPES[dtype])
        kept = [None if expert is None else _aligned(expert) for expert in column.experts]
        table = np.zeros((len(kept), 5), np.uint64)
        kinds = np.zeros(len(kept), np.int64)
        factors = np.ones(len(kept), np.float32)
        for i, (expert, rule) in enumerate(zip(kept, rules, strict=True)):
            if expert is None:
                continue
            first = second = third = fourth = 0
            kind = WHOLE
            if isinstance(rule, Largest):
                kind = LARGEST
                first, second = rule.pattern, _place(rule.cutoff, column)
            elif isinstance(rule, Between):
                kind = BETWEEN
                first, second = rule.bottom[0], _place(rule.bottom[1], column)
                third, fourth = rule.top[0], _place(rule.top[1], column)
            elif isinstance(rule, Drawn):
                if rule.limit == 0:
                    continue
                kind = DRAWN
                first, second = rule.key, rule.limit - 1
                factors[i] = rule.factor
            kinds[i] = kind
            table[i] = (_address(expert), first, second, third, fourth)
        dispatch.load("task_vector", dtype)(
            out,
            column.start,
            _address(base),
            table,
            kinds,
            np.array(weights, np.float32),
            factors,
            elects,
            divide,
            divisor,
            scale,
            np.empty((_ROWS + len(kept)) * TILE, np.float32),
        )
        return out

    def linear(self, dtype: str, models: Sequence[Bits], weights: Sequence[float], divisor: float) -> Bits:
        """The weighted sum of models, accumulated by fused multiplications, over `divisor`."""
        kept = [_aligned(model) for model in models]
        out = MEMORY.empty(kept[0].size, BIT_TYPES[dtype])
        addresses = np.array([_address(model) for model in kept], np.uint64)
        dispatch.load("linear", dtype)(
            out, addresses, np.array(weights, np.float32), divisor, np.empty(TILE, np.float32)
        )
        return out

    def histogram(
        self, dtype: str, column: BitsColumn, shift: int, bits: int, prefixes: dict[int, int]
    ) -> NDArray[np.int64]:
        """For each expert in `prefixes`, in its order, how many magnitude patterns of its deltas have each value of the
        `bits` bits above `shift`, of those whose higher bits equal its prefix; shape (experts, 2^bits)."""
        base = _aligned(column.base)
        kept = [_aligned(expert) for i in prefixes if (expert := column.experts[i]) is not None]
        places = [place for place, i in enumerate(prefixes) if column.experts[i] is not None]
        addresses = np.zeros(len(prefixes), np.uint64)
        addresses[places] = [_address(expert) for expert in kept]
        counts = np.zeros((len(prefixes), 1 << bits), np.int64)
        chosen = np.array(list(prefixes.values()), np.uint32)
        dispatch.load("histogram", dtype)(
            *(_LIKE[dtype], column.numel, _address(base), addresses, shift, bits, chosen, counts),
            *(np.empty(TILE, np.uint32), np.zeros(2 * (counts.shape[1] + 1), np.uint32)),
        )
        return counts

    def find_equal(
        self, dtype: str, column: BitsColumn, expert: int, pattern: int, wanted: int | None = None
    ) -> tuple[int, int]:
        """How many of an expert's deltas have a magnitude pattern; and the place in the column after the `wanted`-th of
        them, -1 if there are fewer."""
        theirs = column.experts[expert]
        if theirs is None:
            return 0, -1
        base, theirs = _aligned(column.base), _aligned(theirs)
        limit = _NO_LIMIT if wanted is None else wanted
        found = np.empty(2, np.int64)
        dispatch.load("find_equal", dtype)(
            *(_LIKE[dtype], column.numel, _address(base), _address(theirs), pattern, limit, found)
        )
        return int(found[0]), int(found[1])

    def drawn_norms(
        self, dtype: str, column: BitsColumn, draws: Mapping[int, tuple[int, int]], lanes: NDArray[np.float64]
    ) -> None:
        """Add the magnitudes of experts' deltas to the first 64 of their lanes, those that a draw keeps to the others.

        `draws` has the experts' streams and the limits below which bits are kept; `lanes`, shape (draws, 128), is in its
        order. The column starts at a multiple of 64 elements; columns must come in order (see `LaneSum`).
        """
        base = _aligned(column.base)
        kept = [None if (expert := column.experts[i]) is None else _aligned(expert) for i in draws]
        dispatch.load("drawn_norms", dtype)(
            *(_LIKE[dtype], column.numel, column.start, _address(base)),
            np.array([0 if expert is None else _address(expert) for expert in kept], np.uint64),
            np.array([key for key, _ in draws.values()], np.uint64),
            np.array([limit - 1 for _, limit in draws.values()], np.uint32),
            *(lanes, np.empty(3 * TILE, np.float32)),
        )

    def blend(self, dtype: str, base: Bits, other: Bits, factors: Sequence[float], *, keep_equal: bool) -> Bits:
        """The sum of two models times their factors; with `keep_equal` where they differ, else the base's bits."""
        base, other = _aligned(base), _aligned(other)
        out = MEMORY.empty(base.size, BIT_TYPES[dtype])
        dispatch.load("blend", dtype)(out, _address(base), _address(other), np.array(factors, np.float32), keep_equal)
        return out

    def products(self, dtype: str, column: BitsColumn, other: Bits | None, lanes: NDArray[np.float64]) -> None:
        """Add the squares of the base's elements, of the other's (None: the base), and their products, to `lanes`.

        `lanes` has shape (3, 64). The column starts at a multiple of 64 elements; columns must come in order (see
        `LaneSum`).
        """
        base = _aligned(column.base)
        theirs = base if other is None else _aligned(other)
        dispatch.load("products", dtype)(_LIKE[dtype], column.numel, _address(base), _address(theirs), lanes)


def kernels() -> Kernels | None:
    """The kernels, None where they cannot be used. The first call of all compiles, which takes seconds."""
    global _tried, _chosen
    if not _tried:
        with _lock:
            if not _tried:
                _chosen = _choose()
                _tried = True
    return _chosen


def warm_up(dtypes: Sequence[str] = tuple(BIT_TYPES)) -> bool:
    """Compile the kernels now, so that the first merge does not have to wait (about 7 seconds a dtype, once per
    installation: they are kept on disk where they can be). False where there are none."""
    found = kernels()
    if found is not None:
        for dtype in dtypes:
            found.compile(dtype)
    return found is not None


def _choose() -> Kernels | None:
    if sys.byteorder != "little":
        return None
    try:
        dispatch.load("task_vector", "BF16")
    except ImportError:
        return None
    except Exception as error:  # a numba that does not fit numpy or the machine must not stop a merge
        warnings.warn(f"numba cannot compile the merge kernels, torch is used: {error}", RuntimeWarning, stacklevel=4)
        return None
    return Kernels()


def _place(cutoff: int, column: BitsColumn) -> int:
    """How many of a column's elements are before an element of the tensor."""
    return min(max(cutoff - column.start, 0), column.numel)


def _address(array: Bits) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _aligned(array: Bits | None) -> Bits:
    """The array, or a copy where it does not lie at a multiple of its elements' size (LMDB promises 2 bytes)."""
    if array is None:
        raise ValueError("the column has no base")
    return array if array.flags.aligned and array.flags.c_contiguous else array.copy()


_LIKE: Final = {dtype: np.zeros(1, bits) for dtype, bits in BIT_TYPES.items()}
"""For a kernel to tell the format from; never read."""
