"""breadcrumbs by kernels: both ends lie where the reference finds them, and the same elements are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import kernel_cases as cases
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpfs.merge.operators import LeftOut, Parameters, TensorContext, get_operator
from mpfs.merge.operators.arithmetic import difference
from mpfs.merge.operators.magnitude import count, patterns
from mpfs.objects import Cut

METHODS = ("breadcrumbs", "breadcrumbs_ties")
KINDS = st.sampled_from(["model", "near", "near", "special", "random"])
SHARES = st.sampled_from([0.0, 1e-9, 0.01, 0.2, 0.37, 0.6, 0.93, 1.0])


def breadcrumbs(densities: Sequence[float], gammas: Sequence[float], **shared: Any) -> Parameters:
    """Parameters from lists."""
    return Parameters(
        shared,
        [
            {"weight": 0.3 + 0.2 * i, "density": density, "gamma": gamma}
            for i, (density, gamma) in enumerate(zip(densities, gammas, strict=True))
        ],
    )


def cuts_of(
    method: str, where: TensorContext, values: Parameters, deltas: Sequence[torch.Tensor], known: Sequence[bool]
) -> list[tuple[Cut, ...]]:
    """What histograms of whole deltas tell, for the experts that are `known`."""
    shift = 16 if where.work == "F32" else 0
    histograms = [
        count(patterns(delta).numpy(), shift, 15, 0) if yes else None for delta, yes in zip(deltas, known, strict=True)
    ]
    return list(map(tuple, get_operator(method).cuts(where.work, where.numel, values, histograms)))


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=60, deadline=None)
@given(
    numel=st.integers(1, 1500),
    kinds=st.lists(KINDS, min_size=1, max_size=5),
    base_kind=st.sampled_from(["model", "special", "random"]),
    seed=st.integers(0, 2**32),
    densities=st.lists(SHARES, min_size=5, max_size=5),
    gammas=st.lists(SHARES, min_size=5, max_size=5),
    cuts=st.sets(st.integers(1, 24), max_size=5),
    unread=st.lists(st.sets(st.integers(0, 4), max_size=3), max_size=4),
    missing=st.sets(st.integers(0, 5), max_size=3),
    known=st.lists(st.booleans(), min_size=5, max_size=5),
    budget=st.booleans(),
)
def test_same_bits(
    method: str,
    dtype: torch.dtype,
    numel: int,
    kinds: list[str],
    base_kind: str,
    seed: int,
    densities: list[float],
    gammas: list[float],
    cuts: set[int],
    unread: list[set[int]],
    missing: set[int],
    known: list[bool],
    budget: bool,
) -> None:
    """Also with columns that are not streamed, experts that are not read in some, and histograms of whole deltas."""
    experts = len(kinds)
    base = cases.patterns(numel, dtype, seed, base_kind)
    models = [cases.patterns(numel, dtype, seed + i + 1, kind, base) for i, kind in enumerate(kinds)]
    columns = cases.Columns(base, models, [64 * cut for cut in cuts if 64 * cut < numel], unread)
    left_out = [
        [LeftOut(column.numel, 0.02) for column in columns.columns if budget and column.experts[i] is None]
        for i in range(experts)
    ]
    deltas = [difference(cases.to_tensor(model, dtype), cases.to_tensor(base, dtype)) for model in models]
    for number, column in enumerate(columns.columns):
        part = slice(column.start, column.start + column.numel)
        old = cases.to_tensor(base[part], dtype)
        for delta, expert in zip(deltas, column.experts, strict=True):
            if number in missing:
                delta[part] = 0
            elif expert is None and not budget:
                delta[part] = difference(old, old)
    columns.columns = [column for i, column in enumerate(columns.columns) if i not in missing]
    values = breadcrumbs(densities[:experts], gammas[:experts])
    where = cases.context(numel, experts, dtype, left_out)
    where = replace(where, cuts=cuts_of(method, where, values, deltas, known[:experts]))
    cases.check(method, where, values, columns)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("missing", [(), (0,), (2,), (4,), (0, 1, 3)])
@pytest.mark.parametrize("known", [False, True])
def test_an_end_among_zeros_counts_what_is_not_streamed(
    dtype: torch.dtype, missing: tuple[int, ...], known: bool
) -> None:
    base = cases.patterns(320, dtype, 1, "model")
    expert = cases.patterns(320, dtype, 2, "model")
    for column in (0, 1, 3):
        expert[64 * column + 5 : 64 * column + 64] = base[64 * column + 5 : 64 * column + 64]
    for column in missing:
        expert[64 * column : 64 * column + 64] = base[64 * column : 64 * column + 64]
    delta = cases.to_tensor(expert, dtype) - cases.to_tensor(base, dtype)
    zeros = int((delta == 0).sum())
    columns = cases.Columns(base, [expert], [64, 128, 192, 256])
    columns.columns = [column for i, column in enumerate(columns.columns) if i not in missing]
    for skipped in (1, zeros // 3, zeros // 2, zeros - 1):
        values = breadcrumbs([(320.5 - skipped) / 320], [0.0])
        where = cases.context(320, 1, dtype)
        where = replace(where, cuts=cuts_of("breadcrumbs", where, values, [delta], [known]))
        path = get_operator("breadcrumbs").fast(where, values, cases.available())
        assert path is not None
        assert path.prepare(columns)["above"] == [[0, int(np.flatnonzero(delta == 0)[skipped - 1]) + 1]]
        cases.check("breadcrumbs", where, values, columns)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_every_pattern_of_a_16_bit_type(method: str, dtype: torch.dtype) -> None:
    everything = np.arange(65_536, dtype=np.uint16).view(cases.patterns(1, dtype, 0, "random").dtype)
    generator = np.random.default_rng(3)
    base, second = generator.permutation(everything), generator.permutation(everything)
    values = breadcrumbs([0.4, 0.8], [0.3, 0.001], **{"lambda": 0.7})
    columns = cases.Columns(base, [everything, second], [1024])
    cases.check(method, cases.context(65_536, 2, dtype), values, columns)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_whole_deltas_are_told_as_the_reference_tells_them(dtype: torch.dtype) -> None:
    base = cases.patterns(900, dtype, 1, "model")
    experts = [cases.patterns(900, dtype, i + 2, "near", base) for i in range(2)]
    columns = cases.Columns(base, experts, [320, 640])
    values = breadcrumbs([0.4, 0.5], [0.1, 0.2])
    told: list[list[tuple[int, bytes]]] = [[], []]

    def hearing(told: list[tuple[int, bytes]]) -> TensorContext:
        return replace(cases.context(900, 2, dtype), counted=lambda i, found: told.append((i, found.tobytes())))

    cases.run_reference("breadcrumbs", hearing(told[0]), values, columns)
    cases.run_fast("breadcrumbs", hearing(told[1]), values, columns)
    assert told[0] == told[1]
    assert {i for i, _ in told[0]} == {0, 1}
