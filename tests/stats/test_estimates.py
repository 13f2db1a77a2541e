"""What sketches estimate: without bias, with the error that theory gives, and linearly."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpfs.stats import COUNTS_ONLY, RECORD, SATURATED, Records, block_stats, combine, delta_gram, delta_summary


def record(values: np.ndarray, first_element: int = 0) -> Records:
    return block_stats(np.ascontiguousarray(values, dtype="<f4").tobytes(), "F32", first_element)


def squared(one: Records) -> float:
    return float((one["sketch"].astype(np.float64) ** 2).sum())


def test_squared_norm_is_unbiased_with_the_error_of_theory() -> None:
    """400 vectors, each at its own place in a tensor, so under its own signs."""
    rng = np.random.default_rng(0)
    ratios = []
    for trial in range(400):
        x = rng.standard_normal(4096)
        ratios.append(squared(record(x, 4096 * trial)) / (x.astype(np.float32).astype(np.float64) ** 2).sum())
    theory = math.sqrt(2 / 256)
    assert abs(np.mean(ratios) - 1) < 4 * theory / math.sqrt(len(ratios))
    assert 0.85 * theory < np.std(ratios) < 1.15 * theory


def test_one_vector_under_many_signs() -> None:
    """The expectation is over the signs alone: a fixed, lumpy vector at many offsets."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal(2048) ** 3
    exact = (x.astype(np.float32).astype(np.float64) ** 2).sum()
    ratios = [squared(record(x, 64 * offset)) / exact for offset in rng.integers(0, 1 << 40, size=600)]
    assert abs(np.mean(ratios) - 1) < 4 * np.std(ratios) / math.sqrt(len(ratios))
    assert np.std(ratios) < 1.15 * math.sqrt(2 / 256)


def test_dot_product_is_unbiased() -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal(2048)
    y = 0.3 * x + rng.standard_normal(2048)
    dots = []
    for offset in rng.integers(0, 1 << 40, size=600):
        a, b = record(x, 64 * offset), record(y, 64 * offset)
        dots.append(float(a["sketch"].astype(np.float64) @ b["sketch"].astype(np.float64)))
    exact = float(x @ y)
    theory = math.sqrt(((x @ x) * (y @ y) + exact**2) / 256)
    assert abs(np.mean(dots) - exact) < 4 * theory / math.sqrt(len(dots))
    assert np.std(dots) < 1.15 * theory


@pytest.mark.parametrize("width", [64, 256, 4096])
def test_outlier_channels_do_not_spoil_the_estimate(width: int) -> None:
    """A channel that is 100 times larger comes back at the same lane of every row: the rotation spreads it."""
    rng = np.random.default_rng(3)
    rows = 256 if width < 4096 else 32
    ratios = []
    for trial in range(200):
        x = rng.standard_normal((rows, width))
        x[:, [3, 40]] *= 100
        exact = (x.astype(np.float32).astype(np.float64) ** 2).sum()
        ratios.append(squared(record(x, trial * (1 << 20))) / exact)
    assert abs(np.mean(ratios) - 1) < 4 * math.sqrt(2 / 256) / math.sqrt(len(ratios))
    assert np.std(ratios) < 1.2 * math.sqrt(2 / 256)


def test_sketch_is_linear() -> None:
    rng = np.random.default_rng(4)
    a = rng.standard_normal(5000).astype(np.float32)
    b = (a + 1e-3 * rng.standard_normal(5000)).astype(np.float32)
    difference = block_stats((b.astype(np.float64) - a.astype(np.float64)).tobytes(), "F64", 640)
    got = record(b, 640)["sketch"].astype(np.float64) - record(a, 640)["sketch"].astype(np.float64)
    rounding = 2**-23 * np.abs(record(a, 640)["sketch"]).max()
    assert np.abs(got - difference["sketch"]).max() <= rounding


def test_sketch_does_not_depend_on_dtype() -> None:
    x = np.random.default_rng(5).integers(-8, 9, 500).astype(np.float64)
    sketches = [
        block_stats(x.astype(kind).tobytes(), name, 0)["sketch"].tobytes()
        for kind, name in (("<f2", "F16"), ("<f4", "F32"), ("<f8", "F64"))
    ]
    assert len(set(sketches)) == 1


def models(experts: int, columns: int, size: int = 1024) -> tuple[Records, Records, np.ndarray]:
    rng = np.random.default_rng(6)
    base = rng.standard_normal((columns, size))
    deltas = 0.01 * rng.standard_normal((experts, columns, size))
    first = [size * c for c in range(columns)]
    base_records = np.array([record(base[c], first[c]) for c in range(columns)])
    expert_records = np.array(
        [[record(base[c] + deltas[e, c], first[c]) for c in range(columns)] for e in range(experts)]
    )
    return base_records, expert_records, deltas


def test_delta_gram() -> None:
    base, experts, deltas = models(3, 20)
    gram = delta_gram(base, experts)
    assert gram.shape == (20, 3, 3)
    assert gram.dtype == np.float64
    assert np.array_equal(gram, gram.transpose(0, 2, 1))
    sketches = experts["sketch"].astype(np.float64) - base["sketch"].astype(np.float64)
    assert np.allclose(gram, np.einsum("icw,jcw->cij", sketches, sketches), rtol=1e-12, atol=0)
    assert np.linalg.eigvalsh(gram).min() > -1e-12
    exact = np.einsum("icx,jcx->cij", deltas, deltas)
    assert np.abs(gram.mean(axis=0) / exact.mean(axis=0)[0, 0] - np.eye(3)).max() < 0.25


def test_delta_gram_of_many_columns_equals_that_of_few() -> None:
    rng = np.random.default_rng(7)
    records = np.zeros((3, 1300), dtype=RECORD)
    records["sketch"] = rng.standard_normal((3, 1300, 256))
    whole = delta_gram(records[0], records[1:])
    parts = [delta_gram(records[0, i : i + 7], records[1:, i : i + 7]) for i in range(0, 1300, 7)]
    assert np.array_equal(whole, np.concatenate(parts))


def test_equal_blocks_have_no_delta() -> None:
    base, experts, _ = models(2, 4)
    experts[1] = base
    gram = delta_gram(base, experts)
    assert not gram[:, 1, :].any()
    assert not delta_summary(base, experts[1]).delta_squared.any()


def test_shapes_at_the_edges() -> None:
    none = np.zeros(0, dtype=RECORD)
    assert delta_gram(none, np.zeros((2, 0), dtype=RECORD)).shape == (0, 2, 2)
    assert delta_gram(np.zeros(5, dtype=RECORD), np.zeros((0, 5), dtype=RECORD)).shape == (5, 0, 0)
    assert combine(np.zeros((0, 3), dtype=RECORD)).shape == (0,)
    assert combine(np.zeros((2, 0), dtype=RECORD)).tobytes() == np.zeros(2, dtype=RECORD).tobytes()
    assert delta_summary(none, none).relative_l2() == 0.0
    assert delta_summary(none, none).cosine() is None


def test_refuses_what_does_not_fit() -> None:
    records = np.zeros(4, dtype=RECORD)
    with pytest.raises(ValueError, match="do not fit"):
        delta_gram(records[:3], records.reshape(1, 4))
    with pytest.raises(ValueError, match="1-dimensional"):
        delta_gram(records.reshape(2, 2), records.reshape(2, 2))
    with pytest.raises(ValueError, match="records"):
        combine(np.zeros((2, 2)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="line up"):
        delta_summary(records, records[:2])


@given(cuts=st.lists(st.integers(1, 30), min_size=1, max_size=6))
@settings(deadline=None, max_examples=30)
def test_combine_equals_one_large_block(cuts: list[int]) -> None:
    """Integers, so that every sum is exact and rounding cannot hide a mistake."""
    values = np.random.default_rng(sum(cuts)).integers(-9, 10, 64 * sum(cuts)).astype(np.float32)
    parts, start = [], 0
    for groups in cuts:
        parts.append(record(values[64 * start : 64 * (start + groups)], 64 * start))
        start += groups
    assert combine(np.array(parts)[None, :])[0].tobytes() == record(values).tobytes()


def test_combine_unites_flags_and_saturates() -> None:
    records = np.zeros((2, 2), dtype=RECORD)
    records["sum_squares"][0] = np.finfo(np.float64).max
    records["sketch"][0] = -np.finfo(np.float32).max
    records["flags"][1, 0] = COUNTS_ONLY
    combined = combine(records)
    assert combined["flags"].tolist() == [SATURATED, COUNTS_ONLY]
    assert combined["sum_squares"][0] == np.finfo(np.float64).max
    assert (combined["sketch"][0] == -np.finfo(np.float32).max).all()


def test_delta_summary_over_a_tensor() -> None:
    rng = np.random.default_rng(8)
    size, columns = 4096, 64
    a = rng.standard_normal((columns, size)).astype(np.float32)
    b = (a + 0.02 * rng.standard_normal((columns, size))).astype(np.float32)
    summary = delta_summary(
        np.array([record(a[c], size * c) for c in range(columns)]),
        np.array([record(b[c], size * c) for c in range(columns)]),
    )
    a64, b64 = a.astype(np.float64), b.astype(np.float64)
    assert np.allclose(summary.a_squared, (a64**2).sum(axis=1), rtol=1e-12)
    assert np.allclose(summary.b_squared, (b64**2).sum(axis=1), rtol=1e-12)
    relative = np.linalg.norm(b64 - a64) / np.linalg.norm(a64)
    assert summary.relative_l2() == pytest.approx(relative, rel=0.06)
    cosine = (a64 * b64).sum() / np.linalg.norm(a64) / np.linalg.norm(b64)
    estimate = summary.cosine()
    assert estimate is not None
    assert 1 - estimate == pytest.approx(1 - cosine, rel=0.15)


def test_delta_summary_of_zeros() -> None:
    zero, one = np.zeros(1, dtype=RECORD), np.array([record(np.ones(64))])
    assert delta_summary(zero, one).relative_l2() is None
    assert delta_summary(zero, one).cosine() is None
    assert delta_summary(one, zero).relative_l2() == pytest.approx(1.0)
