"""Sizes and angles of deltas, estimated from records without reading a block.

A sketch is linear: the difference of two blocks' sketches is the sketch of their difference, up to the rounding of
each to float32 (so a delta below about 1e-7 of the weights' norm cannot be seen, while that of equal blocks is exactly
0). Dot products of sketches estimate dot products of blocks without bias. The variance of an estimate of ⟨x, y⟩ is about
(‖x‖²‖y‖² + ⟨x, y⟩²) / 256: count sketch (Charikar, Chen, Farach-Colton 2002), AMS (Alon, Matias, Szegedy 1996),
feature hashing (Weinberger et al. 2009).

All arithmetic is float64, elementwise and in a fixed order, never BLAS: a plan is made from these numbers, and its id
must not depend on the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mpfs.stats.backend import kernels_available
from mpfs.stats.native import Array, kernel
from mpfs.stats.record import RECORD, SATURATED, SKETCH_WIDTH, Records, require_records, saturate

_BATCH: Final = 128  # columns at a time: the products of an expert's delta with the others' then fit into the cache
_WORTH_A_KERNEL: Final = 50_000_000
"""Products of numbers, above which the kernel saves more than loading it takes."""


def delta_gram(base: Records, experts: Records) -> NDArray[np.float64]:
    """Estimated Gram matrices of the experts' deltas, one for each block column.

    Args:
        base: records of the base's blocks, shape (C,).
        experts: records of the experts' blocks, shape (E, C); E may be 0.

    Returns:
        G of shape (C, E, E), exactly symmetric and positive semidefinite up to rounding: G[c, i, j] estimates
        ⟨expert_i - base, expert_j - base⟩ over column c. 0 where records hold counts only.

    Raises:
        ValueError: not records, or shapes that do not fit.
    """
    require_records("base", base, 1)
    require_records("experts", experts, 2)
    count, columns = experts.shape
    if base.shape != (columns,):
        raise ValueError(f"{columns} columns of experts do not fit {base.size} columns of the base")
    gram = np.empty((columns, count, count), dtype=np.float64)
    if columns * count * (count + 1) // 2 * SKETCH_WIDTH >= _WORTH_A_KERNEL and kernels_available():
        _gram_by_kernel(base, experts, gram)
    else:
        _gram(base, experts, gram)
    return gram


def _gram(base: Records, experts: Records, gram: NDArray[np.float64]) -> None:
    """What `delta_gram` gives, by numpy: this defines it."""
    shape = (len(experts), SKETCH_WIDTH, min(_BATCH, len(base)))
    room = np.empty((2, *shape))
    for start in range(0, len(base), _BATCH):
        batch = slice(start, start + _BATCH)
        origin = _sketches(base[batch])
        deltas, terms = room[..., : origin.shape[1]]
        for i, records in enumerate(experts):
            np.subtract(_sketches(records[batch]), origin, out=deltas[i])
        for i in range(len(experts)):
            products = np.multiply(deltas[i], deltas[i:], out=terms[i:])
            width = SKETCH_WIDTH
            while width > 1:  # as `tree_sum` does
                width //= 2
                products[:, :width] += products[:, width : 2 * width]
            gram[batch, i, i:] = gram[batch, i:, i] = products[:, 0].T


def _gram_by_kernel(base: Records, experts: Records, gram: NDArray[np.float64]) -> None:
    """The same by a kernel."""
    # As f32, a record ends with its sketch.
    width, first = RECORD.itemsize // 4, RECORD.itemsize // 4 - SKETCH_WIDTH
    rows = [np.ascontiguousarray(item).view(np.float32).reshape(*item.shape, width) for item in (base, experts)]
    _kernel()(*rows, first, np.empty((len(experts), SKETCH_WIDTH)), np.empty(SKETCH_WIDTH // 2), gram)


@cache
def _kernel() -> Callable[..., None]:
    arguments = (Array("f32", 2, True), Array("f32", 3, True), "i64", Array("f64", 2), Array("f64"), Array("f64", 3))
    return kernel("mpfs.stats.gram_kernels", "gram", arguments)


def base_products(base: Records, experts: Records) -> NDArray[np.float64]:
    """Estimated products of the experts' deltas with the base.

    Args:
        base: records of the base's blocks, shape (C,).
        experts: records of the experts' blocks, shape (E, C).

    Returns:
        Shape (C, E): ⟨expert_i - base, base⟩ over each column.
    """
    found = np.empty(experts.shape[::-1])
    for start in range(0, len(base), _BATCH):
        batch = slice(start, start + _BATCH)
        origin = _sketches(base[batch])
        square = tree_sum(origin * origin)
        for i, records in enumerate(experts):
            found[batch, i] = tree_sum(_sketches(records[batch]) * origin) - square
    return found


def combine(records: Records) -> Records:
    """The records of runs of k blocks each.

    Args:
        records: shape (C, k), the blocks of a run in order.

    Returns:
        Shape (C,): counts, sums and sketches added in order, maxima taken, flags united. Sketches are added in float64
        and rounded once. k = 0 gives records of nothing.

    Raises:
        ValueError: not records of two dimensions.
    """
    require_records("records", records, 2)
    columns, blocks = records.shape
    combined = np.zeros(columns, dtype=RECORD)
    for name in ("count", "nonfinite", "zeros"):
        combined[name] = records[name].sum(axis=1, dtype=np.uint64)
    combined["max_abs"] = records["max_abs"].max(axis=1, initial=0.0)
    combined["flags"] = np.bitwise_or.reduce(records["flags"], axis=1)
    for name, dtype in (("sum", np.float64), ("sum_squares", np.float64), ("sketch", np.float32)):
        total = np.zeros(combined[name].shape, dtype=np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            for i in range(blocks):
                total += records[name][:, i]
        combined[name], _ = saturate(total, dtype)
        over = ~(np.abs(total) <= np.finfo(dtype).max)
        combined["flags"][over.any(axis=1) if over.ndim > 1 else over] |= np.uint64(SATURATED)
    return combined


@dataclass(frozen=True, slots=True)
class DeltaSummary:
    """How two tensors differ, column by column; every array is float64 of shape (C,)."""

    delta_squared: NDArray[np.float64]
    """‖b - a‖², estimated; exactly 0 for equal blocks."""
    a_squared: NDArray[np.float64]
    """‖a‖², exact."""
    b_squared: NDArray[np.float64]
    """‖b‖², exact."""

    def relative_l2(self) -> float | None:
        """‖b - a‖ / ‖a‖ over all columns; None if a is all zero and b is not."""
        delta, a = _total(self.delta_squared), _total(self.a_squared)
        if a == 0.0:
            return 0.0 if _total(self.b_squared) == 0.0 else None
        return float(np.sqrt(delta / a))

    def cosine(self) -> float | None:
        """The cosine of a and b over all columns, from ⟨a, b⟩ = (‖a‖² + ‖b‖² - ‖b - a‖²) / 2, which for a small delta
        is far closer than the dot product of the two sketches; None if a or b is all zero."""
        a, b = _total(self.a_squared), _total(self.b_squared)
        if a == 0.0 or b == 0.0:
            return None
        dot = (a + b - _total(self.delta_squared)) / 2.0
        return float(np.clip(dot / (np.sqrt(a) * np.sqrt(b)), -1.0, 1.0))


def delta_summary(a: Records, b: Records) -> DeltaSummary:
    """Compare two tensors of equal shape by their blocks' records.

    Args:
        a: records of the first tensor's blocks, shape (C,).
        b: records of the second's, shape (C,).

    Returns:
        Estimates and exact norms for each column, over finite elements; a relative error of about sqrt(2/256) in each
        column's `delta_squared`, and less over many columns, as the errors are independent.

    Raises:
        ValueError: not records, or shapes that do not fit.
    """
    require_records("a", a, 1)
    require_records("b", b, 1)
    if a.shape != b.shape:
        raise ValueError(f"{a.size} and {b.size} blocks do not line up")
    squared = np.empty(a.shape, dtype=np.float64)
    for start in range(0, a.size, _BATCH):
        batch = slice(start, start + _BATCH)
        delta = _sketches(b[batch]) - _sketches(a[batch])
        squared[batch] = tree_sum(delta * delta)
    return DeltaSummary(squared, a["sum_squares"].astype(np.float64), b["sum_squares"].astype(np.float64))


def _sketches(records: Records) -> NDArray[np.float64]:
    """Shape (C,) → (256, C), contiguous: sums over buckets then run along columns."""
    return np.ascontiguousarray(records["sketch"].T, dtype=np.float64)


def tree_sum(terms: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sum over the first axis, of length 256, by halves: an order that no library version or machine changes."""
    width = SKETCH_WIDTH
    while width > 1:
        width //= 2
        terms = terms[:width] + terms[width:]
    return np.asarray(terms[0])


def _total(values: NDArray[np.float64]) -> float:
    total = 0.0
    for value in values.tolist():
        total += value
    return total
