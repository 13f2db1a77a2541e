"""Gram matrices of exact and of estimated products together: possible ones, whatever the estimates say."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mpfs.merge.planner import Candidates, choose, rank
from mpfs.stats.definite import definite_gram
from mpfs.stats.exact import with_exact

SEEDS = st.integers(0, 2**32 - 1)


def deltas(seed: int, columns: int, experts: int, width: int) -> NDArray[np.float64]:
    """(C, E, K): few dimensions, so that they depend on each other; some are zero, some alike."""
    rng = np.random.default_rng(seed)
    found = rng.normal(size=(columns, experts, width)) * np.exp(2.0 * rng.normal(size=(columns, experts, 1)))
    if experts > 1:
        found[rng.random(columns) < 0.2, 1] = 0.0
        found[rng.random(columns) < 0.2, -1] = found[:, 0][0]
    return found


def gram_of(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.einsum("cik,cjk->cij", vectors, vectors))


def least(gram: NDArray[np.float64]) -> float:
    """The least eigenvalue, of cosines."""
    scale = np.sqrt(np.maximum(np.einsum("cii->ci", gram), 1e-300))
    return float(np.linalg.eigvalsh(gram / scale[:, :, None] / scale[:, None, :]).min(initial=0.0))


def mixed(seed: int, experts: int, known: set[int], width: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Estimates with what is exact of the `known` experts put in; and the truth."""
    truth = deltas(seed, 5, experts, width)
    noise = np.random.default_rng(seed + 1).normal(size=truth.shape) * np.abs(truth).mean()
    exact, estimate = gram_of(truth), gram_of(truth + noise)
    distances = {(i, j): ((truth[:, i] - truth[:, j]) ** 2).sum(-1) for i, j in combinations(sorted(known), 2)}
    return with_exact(estimate, {i: exact[:, i, i] for i in known}, distances), exact


@given(seed=SEEDS, experts=st.integers(1, 7), known=st.sets(st.integers(0, 6)), width=st.integers(1, 5))
def test_exact_products_among_estimated_ones(seed: int, experts: int, known: set[int], width: int) -> None:
    known = {i for i in known if i < experts}
    gram, exact = mixed(seed, experts, known, width)
    assert np.array_equal(gram, gram.swapaxes(1, 2))
    assert least(gram) > -1e-3
    scale = np.sqrt(np.einsum("cii->ci", exact))
    for i in known:
        assert np.array_equal(gram[:, i, i], exact[:, i, i])
        for j in known:
            off = np.abs(gram[:, i, j] - exact[:, i, j])
            assert (off <= 1e-3 * scale[:, i] * scale[:, j] + 1e-12).all(), "what is exact stays"


@given(seed=SEEDS, experts=st.integers(2, 6), known=st.sets(st.integers(0, 5), min_size=2), share=st.floats(0, 1))
def test_plans_of_mixed_figures_keep_their_promises(seed: int, experts: int, known: set[int], share: float) -> None:
    """Reading more never keeps less, and a fidelity that is reached is predicted."""
    gram, _ = mixed(seed, experts, {i for i in known if i < experts}, 2)
    cost = np.where(np.einsum("cii->ci", gram) > 0.0, 4096, 0)
    items = [Candidates("t", gram, cost, whole_columns=False)]
    assume(float(items[0].energy.sum()) > 0.0)
    points = [fidelity for _, fidelity in rank(items).curve()]
    assert all(b >= a - 0.01 for a, b in pairwise(points))
    assert choose(items, fidelity=share).fidelity >= share - 0.01


@given(seed=SEEDS, experts=st.integers(1, 6), width=st.integers(1, 8))
def test_what_is_possible_stays_as_it_is(seed: int, experts: int, width: int) -> None:
    gram = gram_of(deltas(seed, 4, experts, width))
    order = np.random.default_rng(seed).permutation(experts).tolist()
    assert definite_gram(gram, order) is gram


@given(seed=SEEDS, experts=st.integers(2, 7))
def test_any_matrix_becomes_possible(seed: int, experts: int) -> None:
    rng = np.random.default_rng(seed)
    cosines = rng.uniform(-1.0, 1.0, size=(6, experts, experts))
    cosines = np.triu(cosines, 1) + np.triu(cosines, 1).swapaxes(1, 2) + np.eye(experts)
    scale = np.exp(3.0 * rng.normal(size=(6, experts)))
    gram = cosines * scale[:, :, None] * scale[:, None, :]
    fixed = definite_gram(gram, range(experts))
    assert least(fixed) > -1e-3
    assert np.array_equal(np.einsum("cii->ci", fixed), np.einsum("cii->ci", gram))
    assert np.allclose(fixed[:, 0, 1], gram[:, 0, 1]), "two alone cannot contradict each other"


def test_a_contradiction() -> None:
    """Two that are each other's opposite cannot both be close to a third."""
    gram = np.array([[[1.0, -1.0, 0.9], [-1.0, 1.0, 0.9], [0.9, 0.9, 1.0]]])
    assert np.linalg.eigvalsh(gram[0]).min() < -0.5
    fixed = definite_gram(gram, [0, 1, 2])[0]
    assert fixed == pytest.approx(np.array([[1.0, -1.0, 0.9], [-1.0, 1.0, -0.9], [0.9, -0.9, 1.0]]))
