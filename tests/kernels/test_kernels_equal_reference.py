"""Every method gives the same bits by kernels as by the torch reference."""

from __future__ import annotations

import kernel_cases as cases
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpfs.merge.kernels.columns import Bits, BitsColumn
from mpfs.merge.operators import LeftOut, Parameters, get_operator

WEIGHTS = [1.0, 0.7, 0.3, 0.11, 1.9, 0.45, -0.6, 3.0] + [0.2] * 9 + [0.35] * 16

KINDS = st.sampled_from(["model", "near", "near", "special", "random"])


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("method", cases.METHODS)
@settings(max_examples=40, deadline=None)
@given(
    numel=st.integers(1, 2600),
    kinds=st.lists(KINDS, min_size=1, max_size=8),
    many=st.sampled_from([0, 0, 0, 15, 16, 17, 33]),
    base_kind=st.sampled_from(["model", "special", "random"]),
    seed=st.integers(0, 2**32),
    densities=st.lists(st.sampled_from([0.0, 1e-9, 0.1, 0.37, 0.5, 0.93, 1.0, 1.5]), min_size=33, max_size=33),
    cuts=st.sets(st.integers(1, 40), max_size=4),
    hidden=st.lists(st.sets(st.integers(0, 8), max_size=3), max_size=4),
    normalize=st.booleans(),
    scale=st.sampled_from([1.0, 1.0, 0.3, -1.7]),
)
def test_same_bits(
    method: str,
    dtype: torch.dtype,
    numel: int,
    kinds: list[str],
    many: int,
    base_kind: str,
    seed: int,
    densities: list[float],
    cuts: set[int],
    hidden: list[set[int]],
    normalize: bool,
    scale: float,
) -> None:
    count = many or len(kinds)
    base = cases.patterns(numel, dtype, seed, base_kind)
    experts = [cases.patterns(numel, dtype, seed + i + 1, kinds[i % len(kinds)], base) for i in range(count)]
    shared = {"normalize": normalize} if method == "linear" else {"normalize": normalize, "lambda": scale}
    values = cases.parameters(WEIGHTS[:count], densities[:count], **shared)
    columns = cases.Columns(base, experts, [64 * cut for cut in cuts if 64 * cut < numel], hidden)
    cases.check(method, cases.context(numel, count, dtype), values, columns)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("method", ["linear", "task_arithmetic", "ties"])
def test_every_pattern_of_a_16_bit_type(method: str, dtype: torch.dtype) -> None:
    everything = np.arange(65_536, dtype=np.uint16).view(cases.patterns(1, dtype, 0, "random").dtype)
    generator = np.random.default_rng(3)
    base, second = generator.permutation(everything), generator.permutation(everything)
    for weight in (1.0, 0.3, -1e-3):
        values = cases.parameters([weight, 0.5], [0.4, 1.0])
        columns = cases.Columns(base, [everything, second], [1024])
        cases.check(method, cases.context(65_536, 2, dtype), values, columns)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("method", ["ties", "dare_ties"])
def test_under_a_budget(method: str, dtype: torch.dtype) -> None:
    base = cases.patterns(2000, dtype, 1, "model")
    experts = [cases.patterns(2000, dtype, i + 2, "near", base) for i in range(3)]
    columns = cases.Columns(base, experts, [640, 1280], [{0}, {1, 2}, ()])
    left_out = [[LeftOut(640, 0.02)], [LeftOut(640, 0.01)], [LeftOut(640, 0.0)]]
    values = cases.parameters([0.5, 0.6, 0.7], [0.2, 0.4, 0.8])
    cases.check(method, cases.context(2000, 3, dtype, left_out), values, columns)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("method", cases.METHODS)
def test_experts_that_are_the_base(method: str, dtype: torch.dtype) -> None:
    base = cases.patterns(500, dtype, 5, "special")
    other = cases.patterns(500, dtype, 6, "near", base)
    values = cases.parameters([0.5, 0.6, 0.7], [0.2, 0.4, 0.8])
    cases.check(method, cases.context(500, 3, dtype), values, cases.Columns(base, [base, other, base], [128]))


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("method", cases.METHODS)
def test_columns_at_odd_addresses(method: str, dtype: torch.dtype) -> None:
    def moved(bits: Bits) -> Bits:
        buffer = bytearray(bits.nbytes + 1)
        buffer[1:] = bits.tobytes()
        return np.frombuffer(memoryview(buffer).toreadonly(), bits.dtype, offset=1)

    base = cases.patterns(1100, dtype, 5, "model")
    experts = [cases.patterns(1100, dtype, i, "near", base) for i in range(2)]
    values = cases.parameters([0.5, 0.6], [0.2, 0.4])
    where = cases.context(1100, 2, dtype)
    straight = cases.run_fast(method, where, values, cases.Columns(base, experts, []))
    odd = cases.run_fast(method, where, values, cases.Columns(moved(base), [moved(e) for e in experts], []))
    assert straight[0] == odd[0]
    np.testing.assert_array_equal(straight[1][0], odd[1][0])


@pytest.mark.parametrize("method", cases.METHODS)
def test_no_experts(method: str) -> None:
    if method == "linear":
        return
    base = cases.patterns(70, torch.bfloat16, 5, "special")
    path_values = cases.parameters([], [])
    columns = cases.Columns(base, [base], [])
    column = BitsColumn(0, 0, 70, columns.columns[0].base, [])
    columns.columns = [column]
    cases.check(method, cases.context(70, 0, torch.bfloat16), path_values, columns)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@settings(max_examples=40, deadline=None)
@given(
    numel=st.integers(1, 2600),
    kinds=st.tuples(st.sampled_from(["model", "special", "random"]), KINDS),
    seed=st.integers(0, 2**32),
    t=st.sampled_from([0.0, 0.3, 0.5, 1.0, -0.4, 1.7]),
    cuts=st.sets(st.integers(1, 40), max_size=4),
    hidden=st.lists(st.sets(st.just(0), max_size=1), max_size=3),
    turned=st.booleans(),
)
def test_slerp(
    dtype: torch.dtype,
    numel: int,
    kinds: tuple[str, str],
    seed: int,
    t: float,
    cuts: set[int],
    hidden: list[set[int]],
    turned: bool,
) -> None:
    base = cases.patterns(numel, dtype, seed, kinds[0])
    # A model that is close to the base is interpolated linearly, one that has little to do with it along the circle.
    other = cases.patterns(numel, dtype, seed + 1, kinds[1], np.roll(base, 1) if turned else base)
    columns = cases.Columns(base, [other], [64 * cut for cut in cuts if 64 * cut < numel], hidden)
    cases.check("slerp", cases.context(numel, 1, dtype), Parameters({"t": t}, [{}]), columns)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("linear", [False, True])
def test_slerp_of_every_pattern_of_a_16_bit_type(dtype: torch.dtype, linear: bool) -> None:
    everything = np.arange(65_536, dtype=np.uint16).view(cases.patterns(1, dtype, 0, "random").dtype)
    other = np.random.default_rng(3).permutation(everything)
    where = cases.context(65_536, 1, dtype)
    operator = get_operator("slerp")
    path = operator.fast(where, Parameters({"t": 0.3}, [{}]), cases.available())
    assert path is not None
    for low in range(0, 65_536, 1024):
        part = slice(low, low + 1024)
        columns = cases.Columns(everything[part], [other[part]], [])
        prepared = {"factors": [0.7, -0.31], "linear": linear}
        [expected] = [
            cases.to_bits(operator.apply(where, Parameters({"t": 0.3}, [{}]), prepared, column))
            for column in columns.tensors(dtype)
        ]
        np.testing.assert_array_equal(path.apply(prepared, columns.columns[0]), expected)
