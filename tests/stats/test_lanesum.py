"""Sums that do not depend on where a tensor was cut."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpfs.stats import LaneSum, block_stats
from mpfs.stats import reference as numpy_backend


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
@given(data=st.data())
@settings(deadline=None, max_examples=40)
def test_any_cut_gives_the_same_bits(kind: type[np.floating], data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 3000))
    seed = data.draw(st.integers(0, 1000))
    values = (np.random.default_rng(seed).standard_normal(count) * 10.0 ** (seed % 4)).astype(kind)
    cuts = sorted(64 * c for c in data.draw(st.sets(st.integers(0, count // 64), max_size=8)))
    whole = LaneSum()
    whole.add(values, 0)
    for using in (None, numpy_backend):
        cut = LaneSum(using=using)
        for start, end in zip([0, *cuts], [*cuts, count], strict=True):
            cut.add(values[start:end], start)
        assert cut.total() == whole.total()
    assert whole.total() == pytest.approx(math.fsum(values.tolist()), rel=1e-9, abs=1e-9)


def test_equals_the_sum_in_a_record() -> None:
    values = np.random.default_rng(0).standard_normal(5000).astype("<f4")
    lanes = LaneSum()
    lanes.add(values, 0)
    assert lanes.total() == float(block_stats(values.tobytes(), "F32", 0)["sum"])


def test_skipped_elements_count_as_zeros() -> None:
    values = np.random.default_rng(1).standard_normal(640)
    sparse = values.copy()
    sparse[64:320] = 0.0
    a, b = LaneSum(), LaneSum()
    a.add(sparse, 0)
    b.add(values[:64], 0)
    b.add(values[320:], 320)
    assert a.total() == b.total()


def test_shape_and_strides_do_not_matter() -> None:
    values = np.random.default_rng(2).standard_normal((30, 40)).astype(np.float32)
    a, b = LaneSum(), LaneSum()
    a.add(values.T, 0)
    b.add(values.T.copy().reshape(-1).astype(">f4"), 0)
    assert a.total() == b.total()


def test_nonfinite_values_show() -> None:
    for using in (None, numpy_backend):
        lanes = LaneSum(using=using)
        lanes.add(np.array([1.0, np.inf]), 0)
        assert lanes.total() == math.inf
        lanes.add(np.array([-np.inf, -np.inf]), 64)
        assert math.isnan(lanes.total())


def test_nothing_added_is_zero() -> None:
    assert LaneSum().total() == 0.0


def test_refuses() -> None:
    lanes = LaneSum()
    with pytest.raises(ValueError, match="multiple of 64"):
        lanes.add(np.ones(4), 32)
    with pytest.raises(ValueError, match="multiple of 64"):
        lanes.add(np.ones(4), -64)
    with pytest.raises(ValueError, match="float16"):
        lanes.add(np.ones(4, dtype=np.int64), 0)
    lanes.add(np.ones(65), 0)
    with pytest.raises(ValueError, match="not before 65"):
        lanes.add(np.ones(4), 64)
