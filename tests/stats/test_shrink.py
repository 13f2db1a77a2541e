"""Shrinking estimates: what is equal comes out equal, what differs stays, and the chosen keep what they promise."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from mpfs.stats.shrink import shrink_gram


def estimates(energy: NDArray[np.float64], cosine: float, seed: int) -> NDArray[np.float64]:
    """Gram matrices of two experts' deltas as sketches would estimate them; `energy` (C, 2)."""
    rng = np.random.default_rng(seed)
    first = rng.normal(size=(len(energy), 256))
    second = cosine * first + np.sqrt(1 - cosine**2) * rng.normal(size=(len(energy), 256))
    sketches = np.stack([first, second], axis=1) * np.sqrt(energy / 256)[:, :, None]
    result: NDArray[np.float64] = np.einsum("cik,cjk->cij", sketches, sketches)
    return result


def shrunk(gram: NDArray[np.float64], live: NDArray[np.bool_] | None = None) -> NDArray[np.float64]:
    everywhere = np.ones(gram.shape[:2], bool)
    return shrink_gram(gram, np.full(len(gram), 1024, np.int64), everywhere if live is None else live)


def test_columns_of_one_energy_come_out_nearly_equal() -> None:
    result = shrunk(estimates(np.full((500, 2), 3.0), 0.3, seed=1))
    for i in range(2):
        assert np.abs(result[:, i, i] / 3.0 - 1).max() < 0.1
    cosine = result[:, 0, 1] / np.sqrt(result[:, 0, 0] * result[:, 1, 1])
    assert np.abs(cosine - 0.3).max() < 0.1


@pytest.mark.parametrize("spread", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("share", [0.05, 0.2, 0.5])
def test_what_is_chosen_by_estimates_keeps_what_they_say(spread: float, share: float) -> None:
    rng = np.random.default_rng(7)
    energy = np.exp(spread * rng.normal(size=(4000, 2)))
    raw = estimates(energy, 0.0, seed=2)
    result = shrunk(raw)

    def promise(gram: NDArray[np.float64]) -> float:
        best = np.argsort(-gram[:, 0, 0])[: int(share * len(gram))]
        return float(gram[best, 0, 0].sum() / energy[best, 0].sum())

    assert promise(result) == pytest.approx(1.0, abs=0.06)
    assert abs(promise(result) - 1) <= abs(promise(raw) - 1) + 0.01


def test_sums_are_kept_and_matrices_stay_semidefinite() -> None:
    rng = np.random.default_rng(3)
    gram = estimates(np.exp(rng.normal(size=(200, 2))), -0.4, seed=4)
    result = shrunk(gram)
    np.testing.assert_allclose(np.einsum("cii->i", result), np.einsum("cii->i", gram))
    np.testing.assert_array_equal(result, result.swapaxes(1, 2))
    assert np.linalg.eigvalsh(result).min() > -1e-12


def test_experts_without_a_delta_stay_without() -> None:
    gram = estimates(np.ones((10, 2)), 0.5, seed=5)
    live = np.ones((10, 2), bool)
    live[3:, 1] = False
    result = shrunk(gram, live)
    assert not result[3:, 1].any()
    assert not result[3:, :, 1].any()
    assert (result[:3, 1, 1] > 0).all()


def test_edges() -> None:
    assert shrunk(np.zeros((3, 2, 2))).tolist() == np.zeros((3, 2, 2)).tolist()
    assert shrunk(np.zeros((0, 2, 2))).shape == (0, 2, 2)
    one = estimates(np.ones((1, 2)), 0.5, seed=6)
    np.testing.assert_allclose(shrunk(one), one)
    huge = shrunk(estimates(np.ones((5, 2)), 0.0, seed=6) * 1e300)
    assert np.isfinite(huge).all()
    assert np.isfinite(shrunk(np.full((4, 2, 2), 5e-324))).all()
