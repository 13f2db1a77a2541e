"""Properties of the methods beyond the first five."""

from __future__ import annotations

import math
from collections.abc import Iterator

import method_cases as methods
import operator_cases as cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from method_cases import ASKS, WITH_BASE, Ask, merge

from mpfs.merge.operators import Column, Parameters, get_operator, operator_names

DTYPES = (*cases.DTYPES, torch.float64)
SYMMETRIC = tuple(ask for ask in ASKS if ask.experts > 1)
SHAPES = ((1,), (3, 1), (1, 3), (130,), (7, 19), (40, 16), (5, 64), (3, 200), (6, 5, 7))


def test_every_method_is_tried() -> None:
    assert {ask.method for ask in ASKS} | set(cases.METHODS) == set(operator_names())


@pytest.mark.parametrize("ask", ASKS, ids=str)
@settings(max_examples=10, deadline=None)
@given(
    shape=st.sampled_from(SHAPES),
    dtype=st.sampled_from(DTYPES),
    blocks=st.sets(st.integers(1, 10), max_size=6),
    seed=st.integers(0, 2**32),
    coarse=st.booleans(),
)
def test_any_cut_gives_the_same_bits(
    ask: Ask, shape: tuple[int, ...], dtype: torch.dtype, blocks: set[int], seed: int, coarse: bool
) -> None:
    numel = math.prod(shape)
    base, models = cases.inputs(numel, ask.experts, dtype, seed, coarse=coarse)
    whole = merge(ask, base, models, shape)
    cut = merge(ask, base, models, shape, cuts=[64 * b for b in blocks if 64 * b < numel])
    assert torch.equal(cases.bits(whole), cases.bits(cut))
    assert bool(torch.isfinite(whole).all())
    assert whole.dtype == dtype
    assert whole.shape == (numel,)


@pytest.mark.parametrize("ask", ASKS, ids=str)
def test_pieces_of_a_column_give_the_same_bits(ask: Ask) -> None:
    shape = (150, 900)  # more than two pieces
    base, models = cases.inputs(150 * 900, ask.experts, torch.bfloat16)
    whole = merge(ask, base, models, shape)
    cut = merge(ask, base, models, shape, cuts=range(4096, 150 * 900, 4096))
    assert torch.equal(cases.bits(whole), cases.bits(cut))


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("ask", WITH_BASE, ids=str)
def test_experts_equal_to_the_base_give_the_base(ask: Ask, dtype: torch.dtype) -> None:
    base, _ = cases.inputs(480, 0, dtype)
    base[::9] = -0.0
    merged = merge(ask, base, [base] * ask.experts, (30, 16), cuts=[64, 128])
    assert torch.equal(cases.bits(merged), cases.bits(base))


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("ask", [a for a in ASKS if not a.base and a.experts > 1], ids=str)
def test_equal_models_give_that_model(ask: Ask, dtype: torch.dtype) -> None:
    model, _ = cases.inputs(480, 0, dtype)
    merged = merge(ask, model, [model] * ask.experts, (30, 16), cuts=[64, 128])
    torch.testing.assert_close(
        merged, model, rtol=4 * torch.finfo(dtype).eps, atol=4e-6 if dtype == torch.float16 else 0
    )
    if ask.method == "karcher":
        assert torch.equal(merged, model)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("ask", WITH_BASE, ids=str)
def test_a_column_without_differences_is_the_bases(ask: Ask, dtype: torch.dtype) -> None:
    base, models = cases.inputs(512, ask.experts, dtype)
    base[192:256] = -0.0
    for model in models:
        model[128:320] = base[128:320]
    merged = merge(ask, base, models, (16, 32), cuts=[128, 320])
    if get_operator(ask.method).keeps_base(ask.parameters()):
        assert torch.equal(cases.bits(merged[128:320]), cases.bits(base[128:320]))
    else:
        assert ask.method in ("slerp", "arcee_fusion")
    assert not torch.equal(merged[:128], base[:128])


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("ask", WITH_BASE, ids=str)
def test_columns_without_differences_need_not_be_streamed(ask: Ask, dtype: torch.dtype) -> None:
    """The engine leaves them out, in prepare too, where a method keeps the base."""
    operator = get_operator(ask.method)
    if not operator.keeps_base(ask.parameters()):
        return
    shape, ends = (40, 30), [128, 320, 640, 832, 1200]
    base, models = cases.inputs(1200, ask.experts, dtype, 7)
    for model in models:
        model[128:320], model[832:] = base[128:320], base[832:]
    where = methods.context(shape, ask.experts, dtype)

    def columns() -> Iterator[Column]:
        for low, high in ((0, 128), (320, 640), (640, 832)):
            yield Column(low, base[low:high], [model[low:high] for model in models])

    prepared = operator.prepare(where, ask.parameters(), columns)
    whole = merge(ask, base, models, shape, cuts=ends)
    for column in columns():
        found = operator.apply(where, ask.parameters(), prepared, column)
        assert torch.equal(cases.bits(found), cases.bits(whole[column.start : column.start + found.numel()]))
    for low, high in ((128, 320), (832, 1200)):  # asked for all the same
        idle = Column(low, base[low:high], [None] * ask.experts)
        found = operator.apply(where, ask.parameters(), prepared, idle)
        assert torch.equal(cases.bits(found), cases.bits(whole[low:high]))
    assert torch.equal(whole[832:], base[832:])


@pytest.mark.parametrize("ask", WITH_BASE, ids=str)
def test_what_is_not_read_counts_as_the_base(ask: Ask) -> None:
    base, models = cases.inputs(512, ask.experts, torch.bfloat16)
    stood_in = [model.clone() for model in models]
    stood_in[0][128:320] = base[128:320]
    unread = [(0, 128, 320)]
    merged = merge(ask, base, models, (16, 32), cuts=[128, 320], unread=unread)
    expected = merge(ask, base, stood_in, (16, 32), cuts=[128, 320])
    assert torch.equal(cases.bits(merged), cases.bits(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ask", SYMMETRIC, ids=str)
def test_the_order_of_experts_does_not_matter(ask: Ask, dtype: torch.dtype) -> None:
    base, models = cases.inputs(480, ask.experts, dtype)
    keys = [f"model{i}" for i in range(ask.experts)]
    merged = merge(ask, base, models, (30, 16), keys=keys)
    turned = merge(ask, base, models[::-1], (30, 16), keys=keys[::-1])
    # Sums in another order: a few roundings of a delta, or of a model.
    scale = float(max(model.abs().max() for model in models))
    off = (merged.double() - turned.double()).abs()
    assert float(off.max()) <= 6 * torch.finfo(dtype).eps * scale
    if ask.experts == 2 or ask.method == "karcher":
        assert float(off.max()) <= torch.finfo(dtype).eps * scale


@pytest.mark.parametrize("ask", ASKS, ids=str)
def test_inputs_are_left_alone(ask: Ask) -> None:
    base, models = cases.inputs(640, ask.experts, torch.float32)
    copies = [tensor.clone() for tensor in (base, *models)]
    merge(ask, base, models, (20, 32), cuts=[64, 256])
    assert all(torch.equal(x, y) for x, y in zip((base, *models), copies, strict=True))


def awkward(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Finite tensors of 96 elements that methods may stumble over."""
    info = torch.finfo(dtype)
    normal = cases.inputs(96, 0, dtype, 5)[0]
    one = torch.zeros(96, dtype=dtype)
    one[17] = 1
    return {
        "zeros": torch.zeros(96, dtype=dtype),
        "minus zeros": torch.full((96,), -0.0, dtype=dtype),
        "ones": torch.ones(96, dtype=dtype),
        "one": one,
        "smallest": torch.full((96,), info.smallest_normal, dtype=dtype),
        "denormal": torch.full((96,), info.smallest_normal, dtype=dtype) / 8,
        "normal": normal,
        "opposite": -normal,
        "more": normal * 1.5,
        "large": torch.full((96,), 200.0, dtype=dtype) * normal.sign(),
    }


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("ask", ASKS, ids=str)
def test_finite_input_never_gives_nan(ask: Ask, dtype: torch.dtype) -> None:
    found = awkward(dtype)
    names = list(found)
    for i, name in enumerate(names):
        for step in range(len(names)):
            others = [found[names[(i + (k + 1) * step) % len(names)]] for k in range(ask.experts)]
            merged = merge(ask, found[name], others, (6, 16))
            assert bool(torch.isfinite(merged).all()), (name, step)


@pytest.mark.parametrize("ask", ASKS, ids=str)
def test_values_that_are_not_finite_do_not_crash(ask: Ask) -> None:
    base, models = cases.inputs(480, ask.experts, torch.float32)
    models[0][3], models[0][70], models[-1][100] = float("nan"), float("inf"), float("-inf")
    base[7] = float("inf")
    merge(ask, base, models, (30, 16), cuts=[64, 192])


@pytest.mark.parametrize("method", ["breadcrumbs", "breadcrumbs_ties", "della", "della_linear"])
@pytest.mark.parametrize("density", [0.0, -1.0])
def test_density_zero_leaves_the_base(method: str, density: float) -> None:
    base, models = cases.inputs(200, 2, torch.bfloat16)
    values = cases.parameters([1.0, 1.0], [density] * 2)
    assert torch.equal(cases.merge(method, base, models, values), base)


@pytest.mark.parametrize("method", ["breadcrumbs", "breadcrumbs_ties", "della", "della_linear"])
def test_density_one_keeps_everything(method: str) -> None:
    base, models = cases.inputs(200, 2, torch.float32)
    whole = "ties" if method in ("della", "breadcrumbs_ties") else "task_arithmetic"
    values = cases.parameters([0.4, 0.8], [1.0, 1.5], normalize=True)
    plain = cases.parameters([0.4, 0.8], normalize=True)
    assert torch.equal(cases.merge(method, base, models, values), cases.merge(whole, base, models, plain))


@pytest.mark.parametrize("method", ["breadcrumbs", "breadcrumbs_ties", "della", "della_linear"])
@pytest.mark.parametrize("normalize", [True, False])
def test_an_expert_of_weight_zero_has_no_say(method: str, normalize: bool) -> None:
    base, models = cases.inputs(500, 3, torch.float32)
    with_it = cases.merge(
        method,
        base,
        models,
        cases.parameters([0.5, 0.0, 0.8], [0.3] * 3, normalize=normalize),
        where=cases.context(500, 3, torch.float32, keys=["a", "b", "c"]),
    )
    without = cases.merge(
        method,
        base,
        [models[0], models[2]],
        cases.parameters([0.5, 0.8], [0.3] * 2, normalize=normalize),
        where=cases.context(500, 2, torch.float32, keys=["a", "c"]),
    )
    assert torch.equal(with_it, without)


@pytest.mark.parametrize(("t", "which"), [(0.0, 0), (1.0, 1)])
def test_slerp_ends_at_the_models(t: float, which: int) -> None:
    base, [other] = cases.inputs(480, 1, torch.bfloat16)
    found = merge(Ask("slerp", 1, {"t": t}), base, [other], (480,))
    assert torch.equal(found, (base, other)[which])


@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize(("weights", "which"), [((1.0, 0.0), 0), ((0.0, 2.0), 1)])
def test_nuslerp_ends_at_the_models(flatten: bool, weights: tuple[float, float], which: int) -> None:
    base, models = cases.inputs(480, 2, torch.float32)
    values = Parameters({"nuslerp_flatten": flatten}, [{"weight": weight} for weight in weights])
    found = merge(Ask("nuslerp", 2, base=False), base, models, (30, 16), parameters=values)
    torch.testing.assert_close(found, models[which], rtol=3e-7, atol=0)


def test_scaling_the_models_scales_the_mean() -> None:
    base, models = cases.inputs(480, 3, torch.float32)
    for ask in ASKS:
        if ask.method in ("karcher", "multislerp", "passthrough") or (ask.method == "nuslerp" and not ask.base):
            used = models[: ask.experts]
            plain = merge(ask, base, used, (30, 16))
            doubled = merge(ask, base * 4, [model * 4 for model in used], (30, 16))
            torch.testing.assert_close(doubled, plain * 4, rtol=1e-6, atol=1e-9)


def test_opposite_models_are_averaged_in_proportion() -> None:
    model, _ = cases.inputs(480, 0, torch.float32)
    for ask in (a for a in ASKS if a.method == "nuslerp"):
        base = torch.zeros_like(model)
        found = merge(ask, base, [model, -0.5 * model], (30, 16))
        torch.testing.assert_close(found, 0.25 * model)


def test_multislerp_of_unchanged_models_is_the_base() -> None:
    base, _ = cases.inputs(480, 0, torch.float16)
    assert torch.equal(merge(Ask("multislerp", 3, {}, {"weight": 1.0}), base, [base] * 3, (480,)), base)


def test_a_single_model_of_multislerp_is_itself() -> None:
    base, [model] = cases.inputs(480, 1, torch.bfloat16)
    assert torch.equal(merge(Ask("multislerp", 1, {}, {"weight": 0.3}), base, [model], (480,)), model)


def test_breadcrumbs_keeps_as_many_as_it_says() -> None:
    base = torch.zeros(99)
    expert = torch.arange(1.0, 100.0)
    for method in ("breadcrumbs", "breadcrumbs_ties"):
        values = Parameters({}, [{"weight": 1.0, "density": 0.9, "gamma": 0.01}])
        assert int((cases.merge(method, base, [expert], values) != 0).sum()) == 89
        values = Parameters({}, [{"weight": 1.0, "density": 0.9, "gamma": 0.05}])
        kept = cases.merge(method, base, [expert], values).nonzero().flatten().tolist()
        assert kept == list(range(6, 95))
        values = Parameters({}, [{"weight": 1.0, "density": 0.9, "gamma": 0.5}])  # the top gives way
        assert cases.merge(method, base, [expert], values).nonzero().flatten().tolist() == list(range(89))


def test_breadcrumbs_among_equals_keeps_the_middle() -> None:
    expert = torch.ones(200, dtype=torch.bfloat16)
    values = Parameters({}, [{"weight": 1.0, "density": 0.5, "gamma": 0.2}])
    merged = cases.merge("breadcrumbs", torch.zeros_like(expert), [expert], values, cuts=[64, 128])
    assert merged.nonzero().flatten().tolist() == list(range(60, 160))


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_sce_with_nothing_to_keep_is_the_base(share: float) -> None:
    base, models = cases.inputs(6, 2, torch.float32)
    merged = merge(Ask("sce", 2, {"select_topk": share}), base, models, (2, 3))
    assert torch.equal(cases.bits(merged), cases.bits(base))


def test_arcee_fusion_takes_over_outliers_only() -> None:
    base, [other] = cases.inputs(4096, 1, torch.bfloat16)
    merged = merge(Ask("arcee_fusion", 1), base, [other], (64, 64))
    taken = merged != base
    assert merged.dtype == torch.bfloat16
    assert 0.01 < float(taken.float().mean()) < 0.25
    torch.testing.assert_close(merged[taken], other[taken], rtol=0, atol=2.0**-13)


def test_ram_by_hand() -> None:
    base = torch.zeros(5)
    experts = [torch.tensor([1.0, 0.0, 2.0, 0.0, 8.0]), torch.tensor([0.0, 3.0, 4.0, 0.0, 0.0])]
    merged = merge(Ask("ram", 2), base, experts, (5,))
    assert merged.tolist() == [1.0, 3.0, 3.0, 0.0, 8.0]
    values = Parameters({"r": 1.0, "alpha": 0.75}, [{}, {}])
    merged = merge(Ask("ramplus_tl", 2), base, experts, (5,), parameters=values)
    # The first has two elements of its own and shares one, the second has one and shares one.
    assert merged.tolist() == [1.5, 3 * 1.75, 3.0, 0.0, 12.0]


def test_karcher_is_the_middle_of_two_directions() -> None:
    models = [torch.tensor([2.0, 0.0]), torch.tensor([0.0, 4.0])]
    found = merge(Ask("karcher", 2, base=False), models[0], models, (2,))
    torch.testing.assert_close(found, torch.full((2,), 3 * math.sqrt(0.5)))


def test_model_stock_by_hand() -> None:
    base = torch.zeros(2)
    experts = [torch.tensor([1.0, 0.0]), torch.tensor([0.5, math.sqrt(0.75)])]
    # The cosine is 1/2, so t = 2 · 1/2 / (1 + 1/2).
    found = merge(Ask("model_stock", 2), base, experts, (2,))
    torch.testing.assert_close(found, (experts[0] + experts[1]) / 2 * (2 / 3))


def test_problems_are_told() -> None:
    def told(method: str, shared: dict[str, float], *own: dict[str, float]) -> str:
        return "; ".join(get_operator(method).validate(Parameters(shared, own)))

    assert told("slerp", {"t": 0.5}, {}, {}) == "slerp takes 1 model besides the base, not 2"
    assert told("slerp", {}, {}) == "t is required"
    assert told("model_stock", {}, {}) == "model_stock takes 2 or more models besides the base, not 1"
    assert told("nuslerp", {}, *[{"weight": 1.0}] * 3) == "nuslerp takes 2 models, not 3"
    assert told("passthrough", {}, {}, {}) == "passthrough takes 1 model, not 2"
    assert "between 0 and 1" in told("della", {}, {"weight": 1.0, "density": 0.1})
    assert "gamma" in told("breadcrumbs", {}, {"weight": 1.0, "gamma": 2.0})
    assert "sum to zero" in told("multislerp", {}, {"weight": 1.0}, {"weight": -1.0})
    assert "select_topk" in told("sce", {"select_topk": -0.1}, {}, {})
    assert "epsilon" in told("ram", {"epsilon": -1.0}, {})
    assert "max_iter" in told("karcher", {"max_iter": -1}, {})
    for ask in ASKS:
        assert get_operator(ask.method).validate(ask.parameters()) == []


def test_shapes_are_vectors_where_the_context_does_not_say() -> None:
    base, models = cases.inputs(480, 3, torch.float32)
    ask = Ask("model_stock", 3, {"filter_wise": True})
    found = cases.merge(ask.method, base, models, ask.parameters())
    assert torch.equal(found, merge(ask, base, models, (480,)))
    assert methods.context((480,), 3, torch.float32).shape == (480,)
