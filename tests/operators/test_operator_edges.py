"""Edge cases of the merge methods."""

from __future__ import annotations

import itertools

import operator_cases as cases
import pytest
import torch

from mpfs.errors import BadInputError
from mpfs.merge.operators import Column, get_operator

TASK_VECTOR = ("task_arithmetic", "ties", "dare_linear", "dare_ties")
SPARSE = ("ties", "dare_linear", "dare_ties")


@pytest.mark.parametrize("method", SPARSE)
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("normalize", [True, False])
def test_density_zero_leaves_the_base(method: str, dtype: torch.dtype, normalize: bool) -> None:
    base, models = cases.inputs(200, 3, dtype)
    values = cases.parameters([1.0] * 3, [0.0, -1.0, 0.0], normalize=normalize)
    assert torch.equal(cases.merge(method, base, models, values), base)


def test_ties_keeps_one_element_of_a_tiny_tensor() -> None:
    base = torch.zeros(4)
    values = cases.parameters([1.0], [0.1])
    merged = cases.merge("ties", base, [torch.tensor([1.0, -3.0, 2.0, 3.0])], values)
    assert merged.tolist() == [0.0, -3.0, 0.0, 0.0]


def test_ties_keeps_the_lowest_indices_among_equals() -> None:
    expert = torch.ones(200, dtype=torch.bfloat16)
    expert[::2] = -1
    merged = cases.merge("ties", torch.zeros_like(expert), [expert], cases.parameters([1.0], [0.5]), cuts=[64, 128])
    assert torch.equal(merged[:100], expert[:100])
    assert not merged[100:].any()


@pytest.mark.parametrize("method", SPARSE)
def test_density_above_one_means_one(method: str) -> None:
    base, models = cases.inputs(200, 2, torch.float32)
    above = cases.merge(method, base, models, cases.parameters([1.0, 0.5], [1.5, 7.0]))
    assert torch.equal(above, cases.merge(method, base, models, cases.parameters([1.0, 0.5], [1.0, 1.0])))


@pytest.mark.parametrize("method", SPARSE)
def test_density_above_one_or_zero_needs_no_pass(method: str) -> None:
    def columns() -> itertools.chain[Column]:
        raise AssertionError("streamed")

    get_operator(method).prepare(cases.context(9, 2, torch.float32), cases.parameters([1, 1], [1.0, 0.0]), columns)


@pytest.mark.parametrize("method", cases.METHODS)
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_experts_equal_to_the_base_give_the_base(method: str, dtype: torch.dtype) -> None:
    base, _ = cases.inputs(500, 0, dtype)
    merged = cases.merge(method, base, [base, base], cases.parameters([0.5, 0.5], [0.3, 0.6]))
    assert torch.equal(merged, base)


@pytest.mark.parametrize("method", cases.METHODS)
@pytest.mark.parametrize("normalize", [True, False])
def test_an_expert_of_weight_zero_has_no_say(method: str, normalize: bool) -> None:
    base, models = cases.inputs(500, 3, torch.float32)
    keys = ["a", "b", "c"]
    with_it = cases.merge(
        method,
        base,
        models,
        cases.parameters([0.5, 0.0, 0.8], [0.3] * 3, normalize=normalize),
        where=cases.context(500, 3, torch.float32, keys=keys),
    )
    without = cases.merge(
        method,
        base,
        [models[0], models[2]],
        cases.parameters([0.5, 0.8], [0.3] * 2, normalize=normalize),
        where=cases.context(500, 2, torch.float32, keys=["a", "c"]),
    )
    assert torch.equal(with_it, without)


@pytest.mark.parametrize("method", TASK_VECTOR)
def test_all_weights_zero_leave_the_base(method: str) -> None:
    base, models = cases.inputs(200, 2, torch.bfloat16)
    merged = cases.merge(method, base, models, cases.parameters([0.0, 0.0], [0.5] * 2, normalize=True))
    assert torch.equal(merged, base)


@pytest.mark.parametrize("method", TASK_VECTOR)
def test_weights_that_cancel_never_give_nan(method: str) -> None:
    base, models = cases.inputs(200, 2, torch.float32)
    merged = cases.merge(method, base, models, cases.parameters([0.5, -0.5], [0.5] * 2, normalize=True))
    assert bool(torch.isfinite(merged).all())


@pytest.mark.parametrize("method", ["ties", "dare_ties", "dare_linear", "task_arithmetic"])
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_order_of_two_experts_does_not_matter(method: str, dtype: torch.dtype) -> None:
    base, models = cases.inputs(640, 2, dtype, coarse=True)
    values = cases.parameters([0.4, 0.4], [0.3, 0.3])
    swapped_where = cases.context(640, 2, dtype, keys=["expert1", "expert0"])
    merged = cases.merge(method, base, models, values)
    swapped = cases.merge(method, base, models[::-1], values, where=swapped_where)
    assert torch.equal(merged, swapped)


@pytest.mark.parametrize("method", ["ties", "dare_ties"])
def test_order_of_experts_does_not_matter_where_sums_are_exact(method: str) -> None:
    base, models = cases.inputs(640, 4, torch.float32, coarse=True)
    results = set()
    for order in itertools.permutations(range(4)):
        where = cases.context(640, 4, torch.float32, keys=[f"expert{i}" for i in order])
        values = cases.parameters([0.5] * 4, [0.3] * 4, rescale=False)
        merged = cases.merge(method, base, [models[i] for i in order], values, where=where)
        results.add(tuple(cases.bits(merged).tolist()))
    assert len(results) == 1


def test_a_tied_election_elects_plus() -> None:
    base = torch.zeros(3)
    experts = [torch.tensor([1.0, -1.0, 0.0]), torch.tensor([-1.0, 1.0, 0.0])]
    assert cases.merge("ties", base, experts, cases.parameters([1.0, 1.0])).tolist() == [1.0, 1.0, 0.0]


def test_the_sign_that_counts_is_the_weighted_one() -> None:
    merged = cases.merge("ties", torch.zeros(1), [torch.ones(1), torch.ones(1)], cases.parameters([1.0, -3.0]))
    # -2 is elected, -3 counts, and the divisor is the weight -3.
    assert merged.tolist() == [1.0]


@pytest.mark.parametrize("method", cases.METHODS)
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_values_that_are_not_finite_do_not_crash(method: str, dtype: torch.dtype) -> None:
    base, models = cases.inputs(256, 2, dtype)
    models[0][3], models[0][70], models[1][100] = float("nan"), float("inf"), float("-inf")
    base[7] = float("inf")
    merged = cases.merge(method, base, models, cases.parameters([0.5, 0.5], [0.1, 0.2]), cuts=[64, 192])
    untouched = torch.ones(256, dtype=torch.bool)
    if not method.startswith("dare"):  # there they spoil the norms, and with them the scale
        untouched[[3, 7, 70, 100]] = False
        assert bool(torch.isfinite(merged[untouched]).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dare_norms_of_nothing(dtype: torch.dtype) -> None:
    base = torch.zeros(128, dtype=dtype)
    tiny = torch.full((128,), 1e-12, dtype=dtype)
    merged = cases.merge("dare_linear", base, [tiny, base], cases.parameters([1.0, 1.0], [0.5, 0.5]))
    assert set(merged.tolist()) == {0.0, float(tiny[0])}  # too small to rescale


def test_dare_does_not_overflow_in_float16() -> None:
    base = torch.zeros(160_000, dtype=torch.float16)
    merged = cases.merge("dare_linear", base, [torch.ones_like(base)], cases.parameters([1.0], [0.5]))
    assert bool(torch.isfinite(merged).all())
    assert merged.float().mean() == pytest.approx(1.0, abs=1e-3)


def test_linear_refuses_weights_that_sum_to_zero() -> None:
    base, models = cases.inputs(64, 2, torch.float32)
    values = cases.parameters([0.5, -0.5])
    assert "sum to zero" in get_operator("linear").validate(values)[0]
    with pytest.raises(BadInputError, match="sum to zero"):
        cases.merge("linear", base, models, values)
    assert get_operator("linear").validate(cases.parameters([0.5, -0.5], normalize=False)) == []


def test_linear_without_a_base_must_have_every_expert() -> None:
    operator, where = get_operator("linear"), cases.context(4, 2, torch.float32)
    with pytest.raises(ValueError, match="no base"):
        operator.apply(where, cases.parameters([1, 1]), {}, Column(0, None, [torch.ones(4), None]))


def test_linear_takes_the_base_for_what_is_not_read() -> None:
    base, models = cases.inputs(256, 2, torch.bfloat16)
    values = cases.parameters([0.3, 0.9])
    found = cases.merge("linear", base, models, values, cuts=[128], unread=[(1, 128, 256)])
    stood_in = torch.cat([models[1][:128], base[128:]])
    assert torch.equal(found, cases.merge("linear", base, [models[0], stood_in], values))


@pytest.mark.parametrize("method", TASK_VECTOR)
def test_a_task_vector_method_needs_a_base(method: str) -> None:
    operator, where = get_operator(method), cases.context(4, 1, torch.float32)
    column = Column(0, None, [torch.ones(4)])
    prepared = {"threshold_bits": [0], "cutoff": [4], "factor": [1.0]}
    with pytest.raises(ValueError, match="no base"):
        operator.apply(where, cases.parameters([1.0]), prepared, column)


@pytest.mark.parametrize("method", TASK_VECTOR)
def test_no_experts_leave_the_base(method: str) -> None:
    base = torch.ones(4)
    where = cases.context(4, 0, torch.float32)
    operator = get_operator(method)
    prepared = operator.prepare(where, cases.parameters([]), lambda: iter([Column(0, base, [])]))
    assert torch.equal(operator.apply(where, cases.parameters([]), prepared, Column(0, base, [])), base)


@pytest.mark.parametrize("method", TASK_VECTOR)
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_what_no_expert_changes_keeps_the_bases_bits(method: str, dtype: torch.dtype) -> None:
    base, models = cases.inputs(300, 2, dtype)
    base[::5], base[1::5], base[2::5] = -0.0, float("inf"), float("-inf")
    for model in models:
        for first in (0, 1, 2):
            model[first::5] = base[first::5]
    values = cases.parameters([0.5, 0.7], [0.6, 0.4], normalize=True, lambda_=-0.5)
    merged = cases.merge(method, base, models, values)
    for first in (0, 1, 2):
        assert torch.equal(cases.bits(merged)[first::5], cases.bits(base)[first::5])
    assert bool(torch.isfinite(merged[3::5]).all())
