"""The planner by itself, on Gram matrices: near the best choice, never over the budget, a pure function."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mpfs.merge.planner import POLICIES, Candidates, Choices, Policy, choose, rank

BLOCK = 4096


def candidates(
    seed: int,
    *,
    columns: Sequence[int] = (4,),
    experts: int = 3,
    whole: bool = False,
    free: float = 0.15,
    odd_costs: bool = True,
) -> list[Candidates]:
    """Tensors of random deltas of random sizes and signs, some of which cost nothing."""
    rng = np.random.default_rng(seed)
    result = []
    for index, count in enumerate(columns):
        deltas = rng.normal(size=(count, experts, 3)) * np.exp(rng.normal(size=(count, experts, 1)))
        cost = np.full((count, experts), BLOCK)
        if odd_costs and count:
            cost[-1] = rng.integers(1, BLOCK)
        cost[rng.random((count, experts)) < free] = 0
        deltas[cost == 0] = 0.0
        result.append(candidate(f"t{index}", deltas, cost, whole))
    return result


def candidate(name: str, deltas: NDArray[np.float64], cost: NDArray[np.int64], whole: bool = False) -> Candidates:
    """A tensor of these deltas (columns, experts, elements)."""
    return Candidates(name, (deltas[:, :, None, :] * deltas[:, None, :, :]).sum(-1), cost.astype(np.int64), whole)


def left_out(items: Sequence[Candidates], choices: Choices) -> float:
    """The energy that a choice loses, from the definition."""
    total = 0.0
    for item, choice in zip(items, choices.tensors, strict=True):
        for gram, missing in zip(item.gram, (item.cost > 0) & ~choice.read, strict=True):
            total += float(gram[np.ix_(missing, missing)].sum())
    return total


def energy(items: Sequence[Candidates]) -> float:
    return float(sum(item.gram.sum() for item in items))


def spent(items: Sequence[Candidates], choices: Choices) -> int:
    return sum(int(item.cost[choice.read].sum()) for item, choice in zip(items, choices.tensors, strict=True))


def total_cost(items: Sequence[Candidates]) -> int:
    return sum(int(item.cost.sum()) for item in items)


def best_kept(item: Candidates, budget: int) -> float:
    """The most energy that any feasible choice keeps, by looking at all of them column by column."""
    best = {0: 0.0}
    count = item.cost.shape[1]
    for gram, cost in zip(item.gram, item.cost, strict=True):
        options: dict[int, float] = {}
        for read in itertools.product((False, True), repeat=count):
            taken = np.array(read)
            if (taken & (cost == 0)).any() or (item.whole_columns and not (taken == (cost > 0)).all() and taken.any()):
                continue
            missing = (cost > 0) & ~taken
            kept = float(gram.sum() - gram[np.ix_(missing, missing)].sum())
            price = int(cost[taken].sum())
            options[price] = max(options.get(price, -np.inf), kept)
        grown: dict[int, float] = {}
        for (a, kept_a), (b, kept_b) in itertools.product(best.items(), options.items()):
            if a + b <= budget:
                grown[a + b] = max(grown.get(a + b, -np.inf), kept_a + kept_b)
        best = grown
    return max(best.values())


@pytest.mark.parametrize("whole", [False, True])
def test_near_the_best_choice(whole: bool) -> None:
    shares = []
    for seed in range(120):
        rng = np.random.default_rng(1000 + seed)
        items = candidates(seed, columns=[int(rng.integers(1, 5))], experts=int(rng.integers(1, 5)), whole=whole)
        budget = int(total_cost(items) * rng.uniform(0.15, 0.95))
        kept = energy(items) - left_out(items, choose(items, budget=budget))
        best = best_kept(items[0], budget)
        assert kept <= best + 1e-9
        if best > 0:
            shares.append(max(kept, 0.0) / best)
    # A handful of columns is the worst case: what no longer fits is a large part of the budget.
    assert np.mean(shares) > 0.97
    assert np.quantile(shares, 0.1) > 0.9


@given(
    seed=st.integers(0, 10_000),
    columns=st.lists(st.integers(0, 6), max_size=4),
    experts=st.integers(1, 6),
    whole=st.booleans(),
    share=st.floats(0, 1.1),
    policy=st.sampled_from(POLICIES),
)
def test_what_always_holds(
    seed: int, columns: list[int], experts: int, whole: bool, share: float, policy: Policy
) -> None:
    items = candidates(seed, columns=columns, experts=experts, whole=whole)
    budget = int(total_cost(items) * share)
    choices = choose(items, budget=budget, policy=policy, seed=seed)
    assert choices.nbytes == spent(items, choices) <= budget
    for item, choice in zip(items, choices.tensors, strict=True):
        assert not choice.read[item.cost == 0].any()
        if whole:
            touched: NDArray[np.bool_] = np.asarray(choice.read.any(axis=1))
            assert (touched[:, None] & (item.cost > 0) == choice.read).all()
    lost, everything = left_out(items, choices), energy(items)
    assert sum(choice.energy_left_out for choice in choices.tensors) == pytest.approx(lost, rel=1e-9, abs=1e-9)
    assert sum(choice.energy for choice in choices.tensors) == pytest.approx(everything, rel=1e-9, abs=1e-9)
    assert 0.0 <= choices.fidelity <= 1.0
    if everything > 1e-6:
        assert choices.fidelity == pytest.approx(max(0.0, 1.0 - (max(lost, 0.0) / everything) ** 0.5), abs=1e-6)
    again = choose(items, budget=budget, policy=policy, seed=seed)
    assert all((a.read == b.read).all() for a, b in zip(choices.tensors, again.tensors, strict=True))
    if share >= 1:
        assert choices.fidelity == 1.0
        assert choices.nbytes == total_cost(items)


@given(seed=st.integers(0, 10_000), experts=st.integers(1, 5), whole=st.booleans())
def test_more_bytes_never_keep_less(seed: int, experts: int, whole: bool) -> None:
    items = candidates(seed, columns=[4, 3], experts=experts, whole=whole)
    ranked = rank(items)
    budgets = np.linspace(0, total_cost(items), 25).astype(int).tolist()
    lost = [left_out(items, ranked.choose(budget=budget)) for budget in budgets]
    assert all(b <= a + 1e-9 for a, b in itertools.pairwise(lost))


def test_uses_the_budget_up() -> None:
    for policy in POLICIES:
        items = candidates(7, columns=[100, 50, 1, 0, 30], experts=4)
        for percent in (5, 10, 20, 50, 90):
            budget = total_cost(items) * percent // 100
            assert choose(items, budget=budget, policy=policy).nbytes >= budget * 0.98


def test_energy_beats_the_baselines() -> None:
    for whole in (False, True):
        items = candidates(3, columns=[80, 60, 40], experts=5, whole=whole)
        for percent in (5, 10, 20, 50):
            budget = total_cost(items) * percent // 100
            lost = {policy: left_out(items, choose(items, budget=budget, policy=policy)) for policy in POLICIES}
            assert lost["energy"] < 0.95 * min(lost["uniform"], lost["random"])


@given(seed=st.integers(0, 10_000), experts=st.integers(1, 6), data=st.data())
def test_a_columns_chain_falls_in_gain_per_byte(seed: int, experts: int, data: st.DataObject) -> None:
    """Raising the budget step by step, what each step adds to a column is worth less per byte than the one before."""
    cost = np.array([data.draw(st.lists(st.integers(0, 5), min_size=experts, max_size=experts))]) * 100
    deltas = np.random.default_rng(seed).normal(size=(1, experts, 2))
    deltas[cost == 0] = 0.0
    items = [candidate("t", deltas, cost)]
    ranked = rank(items)
    points = {0: left_out(items, ranked.choose(budget=0))}
    for budget in range(0, int(cost.sum()) + 1, 100):
        choices = ranked.choose(budget=budget)
        points[choices.nbytes] = left_out(items, choices)
    steps = [(b - a, points[a] - points[b]) for a, b in itertools.pairwise(sorted(points))]
    rates = [gain / size for size, gain in steps]
    assert all(later <= earlier + 1e-9 for earlier, later in itertools.pairwise(rates))


@pytest.mark.parametrize("target", [0.0, 0.3, 0.6, 0.9, 0.99, 1.0])
def test_fidelity_is_reached_with_the_least_moves(target: float) -> None:
    for whole, policy in itertools.product((False, True), POLICIES):
        items = candidates(11, columns=[20, 10], experts=3, whole=whole, odd_costs=False, free=0.0)
        choices = choose(items, fidelity=target, policy=policy, seed=5)
        assert choices.fidelity >= target - 1e-9
        if choices.nbytes and target < 1.0:
            # The last move is a column at most.
            less = choices.nbytes - (1 if whole else 3 * BLOCK)
            assert choose(items, budget=less, policy=policy, seed=5).fidelity < target
    assert choose(items, fidelity=0.0).nbytes == 0


def test_deltas_that_cancel_are_read_together_or_not_at_all() -> None:
    rng = np.random.default_rng(5)
    pair = rng.normal(size=(6, 1, 8)) * 10
    other = rng.normal(size=(6, 1, 8)) * 0.1
    items = [candidate("t", np.concatenate([pair, -pair, other], axis=1), np.full((6, 3), BLOCK))]
    for budget in range(0, 19 * BLOCK, BLOCK):
        read = choose(items, budget=budget).tensors[0].read
        assert (read[:, 0] == read[:, 1]).all()
    # The small ones are all that the result consists of, and come first.
    assert choose(items, budget=6 * BLOCK).fidelity == pytest.approx(1.0)
    assert choose(items, budget=6 * BLOCK).tensors[0].read[:, 2].all()
    assert choose(items, budget=18 * BLOCK).tensors[0].read.all()


def test_the_order_of_tensors_does_not_matter() -> None:
    items = candidates(21, columns=[9, 4, 7, 1], experts=4)
    for policy in POLICIES:
        budget = total_cost(items) // 3
        straight = choose(items, budget=budget, policy=policy)
        reverse = choose(items[::-1], budget=budget, policy=policy)
        if policy == "uniform":  # it is made of ties
            assert abs(straight.nbytes - reverse.nbytes) <= BLOCK
            continue
        for a, b in zip(straight.tensors, reverse.tensors[::-1], strict=True):
            assert (a.read == b.read).all()


def test_equal_columns_are_taken_in_order() -> None:
    deltas, cost = np.ones((8, 2, 4)), np.full((8, 2), BLOCK)
    whole = choose([candidate("t", deltas, cost, whole=True)], budget=6 * BLOCK).tensors[0].read
    assert whole.tolist() == [[True, True]] * 3 + [[False, False]] * 5
    # Of two equal experts the first to be read is worth three times the second.
    single = choose([candidate("t", deltas, cost)], budget=6 * BLOCK).tensors[0].read
    assert single.tolist() == [[True, False]] * 6 + [[False, False]] * 2


def test_random_depends_on_the_seed_and_draws_from_everywhere() -> None:
    items = candidates(2, columns=[400], experts=2, free=0.0)
    budget = total_cost(items) // 4
    a, b = (choose(items, budget=budget, policy="random", seed=seed).tensors[0].read for seed in (1, 2))
    assert (a != b).any()
    assert abs(int(a[:200].sum()) - int(a[200:].sum())) < 60
    assert abs(int(a[:, 0].sum()) - int(a[:, 1].sum())) < 60


def test_uniform_spreads_over_every_tensor() -> None:
    items = candidates(2, columns=[64, 16, 32], experts=2, free=0.0, odd_costs=False)
    choices = choose(items, budget=total_cost(items) // 4, policy="uniform")
    for choice in choices.tensors:
        assert choice.read.mean() == pytest.approx(0.25, abs=0.04)
        halves = np.array_split(choice.read, 2)
        assert halves[0].sum() == pytest.approx(halves[1].sum(), abs=1)


def test_nothing_to_read() -> None:
    empty: list[Candidates] = []
    assert choose(empty, budget=10).fidelity == 1.0
    no_columns = [candidate("t", np.zeros((0, 3, 1)), np.zeros((0, 3), np.int64))]
    no_experts = [candidate("t", np.zeros((3, 0, 1)), np.zeros((3, 0), np.int64))]
    no_deltas = [candidate("t", np.zeros((3, 2, 1)), np.zeros((3, 2), np.int64))]
    unchanged = [candidate("t", np.zeros((3, 2, 1)), np.full((3, 2), BLOCK))]
    for items in (no_columns, no_experts, no_deltas, unchanged, [*no_columns, *no_experts, *unchanged]):
        for policy in POLICIES:
            for budget, fidelity in ((0, None), (None, None), (None, 0.9), (10**9, None)):
                choices = choose(items, budget=budget, fidelity=fidelity, policy=policy)
                assert choices.fidelity == 1.0


def test_cosine_tells_conflict() -> None:
    a = np.ones((2, 1, 4))
    b = np.concatenate([np.ones((2, 1, 2)), -np.ones((2, 1, 2))], axis=2)
    cost = np.full((2, 2), BLOCK)
    for second, cosine in ((a, 1.0), (-a, -1.0), (b, 0.0), (np.zeros_like(a), None)):
        found = choose([candidate("t", np.concatenate([a, second], axis=1), cost)]).tensors[0].cosine
        assert found == (None if cosine is None else pytest.approx(cosine))


def test_twenty_experts() -> None:
    items = candidates(8, columns=[30], experts=20)
    previous = np.inf
    for percent in (0, 5, 20, 60, 100):
        choices = choose(items, budget=total_cost(items) * percent // 100)
        lost = left_out(items, choices)
        assert lost <= previous + 1e-9
        previous = lost
    assert previous == 0.0


def test_layerwise_gives_every_tensor_its_share() -> None:
    items = candidates(4, columns=(40, 80, 20), experts=3, odd_costs=False, free=0.0)
    items[1] = Candidates("t1", items[1].gram * 1e6, items[1].cost, whole_columns=False)
    total = sum(int(item.cost.sum()) for item in items)
    choices = choose(items, budget=total // 4, policy="layerwise")
    for item, choice in zip(items, choices.tensors, strict=True):
        assert item.cost[choice.read].sum() / item.cost.sum() == pytest.approx(0.25, abs=0.02)
    alone = choose(items[2:], budget=int(items[2].cost[choices.tensors[2].read].sum()))
    assert alone.tensors[0].read.tolist() == choices.tensors[2].read.tolist()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("whole", [False, True])
def test_the_curve_is_what_budgets_buy(policy: Policy, whole: bool) -> None:
    items = candidates(8, columns=(20, 30), whole=whole)
    ranked = rank(items, policy=policy)
    curve = ranked.curve()
    assert curve[0] == (0, 0.0)
    assert curve[-1][0] == sum(int(item.cost.sum()) for item in items)
    assert curve[-1][1] == pytest.approx(1.0, abs=1e-6)
    assert [point[0] for point in curve] == sorted({point[0] for point in curve})
    for nbytes, fidelity in curve:
        choices = ranked.choose(budget=nbytes)
        assert choices.nbytes == nbytes
        assert choices.fidelity == pytest.approx(fidelity, abs=1e-6)
    assert len(ranked.curve(points=10)) <= 12
