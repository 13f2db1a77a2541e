"""della's random masks, and the pieces that methods by rows are made of."""

from __future__ import annotations

import method_cases as methods
import numpy as np
import operator_cases as cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpfs.merge.operators import Column, Parameters, get_operator
from mpfs.merge.operators.della import keep_chances
from mpfs.merge.operators.order import keys, order_statistics
from mpfs.merge.operators.reductions import RunningSum, row_sums
from mpfs.merge.operators.rows import measure_cut_rows, row_index, row_values, whole_rows
from mpfs.merge.random import stream_key, uniform_bits


def test_chances_follow_the_ranks_within_a_row() -> None:
    magnitudes = np.array([[5, 1, 3, 2, 4], [7, 7, 7, 7, 7], [0, 0, 9, 9, 1]], dtype=np.int32)
    found = keep_chances(magnitudes, 0.5, 0.2)
    expected = [[0.7, 0.3, 0.5, 0.4, 0.6], [0.5] * 5, [0.35, 0.35, 0.65, 0.65, 0.5]]
    np.testing.assert_allclose(found, expected)
    assert keep_chances(np.array([[3], [4]], dtype=np.int16), 0.4, 0.1).tolist() == [[0.4], [0.4]]


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_della_keeps_what_the_formula_says(dtype: torch.dtype) -> None:
    base, [expert] = cases.inputs(600, 1, dtype, 3)
    values = Parameters({"rescale": False}, [{"weight": 1.0, "density": 0.6, "epsilon": 0.3}])
    where = methods.context((20, 30), 1, dtype, seed=11, keys=["k"])
    merged = cases.merge("della_linear", base, [expert], values, where=where, cuts=[64, 192, 256])
    delta = expert - base
    expected = torch.zeros_like(delta)
    for row in range(20):
        part = delta[30 * row : 30 * row + 30].abs().double()
        drawn = uniform_bits(stream_key(11, "t", "k"), 30 * row, 30)
        for i, size in enumerate(part):
            rank = (float((part < size).sum()) + float((part <= size).sum()) - 1) / 2
            if int(drawn[i]) / 2**32 < 0.3 + 0.6 * (rank / 29):
                expected[30 * row + i] = delta[30 * row + i]
    assert torch.equal(merged, torch.where(expected == 0, base, base + expected))


def test_della_keeps_its_density_and_its_norm() -> None:
    base = torch.zeros(200 * 500)
    expert = torch.randn(base.numel(), generator=torch.Generator().manual_seed(0))
    values = Parameters({}, [{"weight": 1.0, "density": 0.3, "epsilon": 0.2}])
    where = methods.context((200, 500), 1, torch.float32)
    merged = cases.merge("della_linear", base, [expert], values, where=where)
    assert float(merged.abs().double().sum()) == pytest.approx(float(expert.abs().double().sum()), rel=1e-5)
    kept = merged != 0
    assert float(kept.double().mean()) == pytest.approx(0.3, abs=4 * (0.3 * 0.7 / base.numel()) ** 0.5)
    ranks = expert.view(200, 500).abs().argsort(1).argsort(1).view(-1)
    for low, chance in ((0, 0.12), (200, 0.28), (400, 0.44)):  # 0.1 + 0.4 · (low + 50) / 500, of 100 ranks
        share = float(kept[(ranks >= low) & (ranks < low + 100)].double().mean())
        assert share == pytest.approx(chance + 0.02, abs=0.02)


def test_della_draws_by_seed_and_expert() -> None:
    base, models = cases.inputs(640, 2, torch.float32)
    values = Parameters({"rescale": False}, [{"weight": 1.0, "density": 0.5, "epsilon": 0.1}])

    def kept(seed: int, key: str, model: torch.Tensor) -> torch.Tensor:
        where = methods.context((20, 32), 1, torch.float32, seed=seed, keys=[key])
        return cases.merge("della_linear", base, [model], values, where=where) != base

    assert torch.equal(kept(0, "a", models[0]), kept(0, "a", models[0]))
    for other in (kept(1, "a", models[0]), kept(0, "b", models[0])):
        assert 0.3 < float((kept(0, "a", models[0]) ^ other).double().mean()) < 0.7


def test_della_stores_a_bit_for_each_element_of_cut_rows() -> None:
    base, models = cases.inputs(4 * 1000, 2, torch.bfloat16)
    where = methods.context((4, 1000), 2, torch.bfloat16)
    values = Parameters({}, [{"weight": 1.0, "density": 0.5}, {"weight": 1.0, "density": 1.0}])
    operator = get_operator("della")

    def columns(cuts: list[int]) -> dict[str, object]:
        ends = [*cuts, 4000]
        parts = [slice(low, high) for low, high in zip([0, *cuts], ends, strict=True)]
        made = [Column(p.start, base[p], [model[p] for model in models]) for p in parts]
        return dict(operator.prepare(where, values, lambda: iter(made)))

    assert columns([])["row_numbers"] == []
    found = columns([1024, 2048, 2240])
    assert found["row_numbers"] == [1, 2]
    assert [len(masks) for masks in found["row_masks"]] == [2, 0]  # type: ignore[attr-defined]
    assert found["factor"] == columns([])["factor"]


@settings(max_examples=60, deadline=None)
@given(
    width=st.integers(1, 300),
    rows=st.integers(1, 12),
    cuts=st.sets(st.integers(1, 3000), max_size=8),
)
def test_rows_are_put_together(width: int, rows: int, cuts: set[int]) -> None:
    values = torch.arange(float(rows * width))
    ends = [cut for cut in cuts if cut < rows * width]
    seen = 0
    for column, was_cut in whole_rows(methods.columns_of(values, ends), width):
        assert column.start == seen
        assert column.base is not None
        assert column.experts[0] is not None
        assert column.base.numel() % width == 0
        assert torch.equal(column.base, values[seen : seen + column.base.numel()])
        assert torch.equal(column.experts[0], 2 * column.base)
        assert was_cut == any(seen < end < seen + width for end in ends) or not was_cut
        seen += column.base.numel()
    assert seen == rows * width

    def measure(column: Column) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        assert column.base is not None
        return row_sums(column.base.double().numpy().reshape(-1, width))[:, None]

    stored = measure_cut_rows(methods.columns_of(values, ends), width, measure)
    sums = values.double().view(rows, width).sum(1)
    for column in methods.columns_of(values, ends):
        found = row_values(column, width, stored, measure)[:, 0]
        assert column.base is not None
        index = row_index(column.start, column.base.numel(), width)
        np.testing.assert_allclose(found[index], sums.repeat_interleave(width)[column.start :][: len(index)])


def test_rows_that_were_not_measured_are_told() -> None:
    column = Column(3, torch.ones(4), [])
    with pytest.raises(ValueError, match="row 0 was not measured"):
        row_values(column, 7, {"row_numbers": [], "row_values": []}, lambda rows: np.zeros((1, 1)))
    with pytest.raises(ValueError, match="ends within a row"):
        list(whole_rows(iter([column]), 8))


@settings(max_examples=40, deadline=None)
@given(parts=st.lists(st.integers(0, 200), max_size=8))
def test_a_running_sum_is_that_of_the_lanes(parts: list[int]) -> None:
    values = np.random.default_rng(1).normal(size=sum(parts))
    whole, cut = RunningSum(), RunningSum()
    whole.add(values)
    start = 0
    for size in parts:
        cut.add(values[start : start + size])
        start += size
    assert whole.total() == cut.total() == pytest.approx(values.sum(), abs=1e-9)


@pytest.mark.parametrize("dtype", [*cases.DTYPES, torch.float64], ids=str)
def test_order_statistics_are_those_of_a_sort(dtype: torch.dtype) -> None:
    values = torch.randn(5000, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)
    values[:100] = 0.0
    values[100:200] = -0.0
    values[200], values[201] = float("inf"), float("-inf")
    ranks = [0, 1, 1249, 2450, 2550, 4999, 4998, 2500]
    found = order_statistics(dtype, ranks, lambda: iter(torch.split(values, 777)))
    assert found == values.sort().values[ranks].tolist()
    assert (np.diff(keys(values.sort().values).astype(np.float64)) >= 0).sum() >= 4900  # zeros of both signs may mix
