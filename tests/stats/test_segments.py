"""Many tensors at once: sums over runs of rows are those of each run alone, in order; and so is what is estimated with them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mpfs.stats import RECORD, Records, delta_gram
from mpfs.stats.backend import kernels_available
from mpfs.stats.estimate import base_products
from mpfs.stats.norms import with_norms
from mpfs.stats.segments import Segments, running_sum
from mpfs.stats.shrink import shrink_gram

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=8)


def one_by_one(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Over the first axis, one after the other."""
    total = np.zeros(values.shape[1:])
    for row in values:
        total = total + row
    return total


@given(lengths=LENGTHS, width=st.integers(0, 3), seed=st.integers(0, 1000))
def test_sums_are_in_order(lengths: list[int], width: int, seed: int) -> None:
    runs = Segments(lengths)
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(runs.rows, *(2,) * width)) * 10.0 ** rng.integers(-9, 9, size=(runs.rows, *(1,) * width))
    expected = [one_by_one(values[rows]) for rows in runs.slices()]
    np.testing.assert_array_equal(runs.sums(values), expected)
    assert [runs.of[rows].tolist() for rows in runs.slices()] == [[i] * n for i, n in enumerate(lengths)]
    assert [runs.places[rows].tolist() for rows in runs.slices()] == [list(range(n)) for n in lengths]
    np.testing.assert_array_equal(running_sum(np.moveaxis(values, 0, -1)), one_by_one(values))


def records(rng: np.random.Generator, experts: int, columns: int) -> tuple[Records, Records]:
    """Of a base, (columns,), and of experts, (experts, columns), which are near it or far, grew or shrank."""
    base = rng.normal(size=(columns, 512))
    change = rng.normal(size=(experts, columns, 512)) * np.exp(rng.normal(size=(experts, columns, 1)) - 2)
    change[rng.random((experts, columns)) < 0.2] = 0.0
    values = base * np.where(rng.random((experts, 1, 1)) < 0.5, 1.0, 0.7) + change
    signs = rng.choice([-1.0, 1.0], size=512)
    made = np.zeros((experts + 1, columns), RECORD)
    for row, of in zip(made, [base, *values], strict=True):
        row["sketch"] = (of * signs).reshape(columns, 2, 256).sum(1)
        row["sum_squares"] = (of**2).sum(-1)
    return made[0], made[1:]


@given(lengths=LENGTHS, experts=st.integers(1, 5), seed=st.integers(0, 1000))
def test_what_is_estimated_of_a_tensor_does_not_depend_on_the_others(
    lengths: list[int], experts: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    tensors = Segments(lengths)
    base, others = records(rng, experts, tensors.rows)
    live = (others["sketch"] != base["sketch"]).any(axis=2).T
    elements = rng.integers(1, 600, size=tensors.rows)

    def estimated(rows: slice, columns: Segments | None) -> list[NDArray[np.float64]]:
        gram, information = with_norms(base[rows], others[:, rows], delta_gram(base[rows], others[:, rows]))
        shrunk = shrink_gram(gram, elements[rows], live[rows], information, columns)
        return [shrunk, information, base_products(base[rows], others[:, rows])]

    together = estimated(slice(0, tensors.rows), tensors)
    alone = [estimated(rows, None) for rows in tensors.slices()]
    for whole, parts in zip(together, zip(*alone, strict=True), strict=True):
        np.testing.assert_array_equal(whole, np.concatenate(parts))


def test_products_with_the_base_are_those_of_deltas_from_nothing() -> None:
    base, others = records(np.random.default_rng(2), 3, 300)
    gram = delta_gram(np.zeros_like(base), np.concatenate([others, base[None]]))
    np.testing.assert_array_equal(base_products(base, others), gram[:, :-1, -1] - gram[:, -1:, -1])


@pytest.mark.skipif(not kernels_available(), reason="needs numba")
@pytest.mark.parametrize(("experts", "columns"), [(0, 3), (1, 0), (1, 1), (3, 130), (7, 40)])
def test_the_kernel_does_what_numpy_does(monkeypatch: pytest.MonkeyPatch, experts: int, columns: int) -> None:
    base, others = records(np.random.default_rng(experts), experts, columns)
    if columns and experts:
        others["sketch"][0, 0, :2] = (1e38, -1e-38)
    by_numpy = delta_gram(base, others)
    monkeypatch.setattr("mpfs.stats.estimate._WORTH_A_KERNEL", 0)
    # Neither need its records be contiguous.
    np.testing.assert_array_equal(delta_gram(base, others), by_numpy)
    np.testing.assert_array_equal(delta_gram(base[::2], others[:, ::2]), by_numpy[::2])
