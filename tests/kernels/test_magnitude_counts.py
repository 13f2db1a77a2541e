"""Thresholds by kernels: cut-offs are found in groups of columns of any size."""

from __future__ import annotations

import kernel_cases as cases
import pytest
import torch

from mpfs.merge.operators.fast import KernelCounts
from mpfs.merge.operators.magnitude import Streamed, patterns, search_thresholds


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("remembered", [0, 5 << 20, 9 << 20, 1 << 30])
@pytest.mark.parametrize("cuts", [[], list(range(64, 4000, 64)), [64, 1024, 1088]])
def test_cutoffs(dtype: torch.dtype, remembered: int, cuts: list[int]) -> None:
    numel = 4011
    base = cases.patterns(numel, dtype, 0, "model")
    experts = [cases.patterns(numel, dtype, i + 1, "near", base) for i in range(3)]
    columns = cases.Columns(base, experts, cuts)
    where = cases.context(numel, 3, dtype)
    keep = [1000, 2001, 3900]
    deltas = [cases.to_tensor(expert, dtype) - cases.to_tensor(base, dtype) for expert in experts]

    expected = search_thresholds(
        where.work,
        numel,
        keep,
        [()] * 3,
        Streamed(lambda wanted: iter([(0, [patterns(delta).numpy() for delta in deltas])])),
    )
    assert any(0 < threshold.cutoff < numel for threshold in expected)
    counts = KernelCounts(cases.available(), where, columns, remembered=remembered)
    assert search_thresholds(where.work, numel, keep, [()] * 3, counts) == expected
