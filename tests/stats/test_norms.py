"""Exact norms make sketched energies of deltas better where they can, and leave them alone where they cannot."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from mpfs.stats import RECORD, SATURATED, Records, block_stats, delta_gram
from mpfs.stats.norms import with_norms

N = 1024


def records(rows: NDArray[np.float32]) -> Records:
    """(C, N) → (C,): each row as a block of a tensor of its own place."""
    found = [block_stats(row.tobytes(), "F32", index * N) for index, row in enumerate(rows)]
    return np.frombuffer(b"".join(item.tobytes() for item in found), RECORD)


def family(cosine: float, size: float, columns: int = 300) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Base and expert whose delta is `size` times the base and has that cosine with it."""
    rng = np.random.default_rng(5)
    base = rng.normal(size=(columns, N))
    other = rng.normal(size=(columns, N))
    delta = size * (cosine * base + np.sqrt(1 - cosine**2) * other)
    return base.astype(np.float32), (base + delta).astype(np.float32)


def errors(base: NDArray[np.float32], expert: NDArray[np.float32]) -> tuple[float, float, float]:
    """RMS relative errors of energies, before and after, and how much is said to be known."""
    a, b = records(base), records(expert)[None, :]
    gram = delta_gram(a, b)
    better, information = with_norms(a, b, gram)
    truth = ((expert.astype(np.float64) - base) ** 2).sum(axis=1)

    def rms(values: NDArray[np.float64]) -> float:
        return float(np.sqrt((((values - truth) / truth) ** 2).mean()))

    return rms(gram[:, 0, 0]), rms(better[:, 0, 0]), float(np.median(information))


@pytest.mark.parametrize(("cosine", "size"), [(-0.7, 0.7), (-0.9, 0.5), (0.8, 0.3), (0.0, 1.5), (-0.5, 0.05)])
def test_what_is_said_to_be_known_is_known(cosine: float, size: float) -> None:
    before, after, information = errors(*family(cosine, size))
    assert information > 1.2
    assert after == pytest.approx(before / np.sqrt(information), rel=0.15)


def test_a_small_delta_across_the_base_is_left_as_it_is() -> None:
    base, expert = family(0.0, 0.01)
    a, b = records(base), records(expert)[None, :]
    gram = delta_gram(a, b)
    better, information = with_norms(a, b, gram)
    np.testing.assert_array_equal(better, gram)
    np.testing.assert_array_equal(information, 1.0)


def test_cosines_between_experts_are_kept() -> None:
    base, first = family(-0.7, 0.7, 40)
    second = (base + np.roll(first - base, 1, axis=0)).astype(np.float32)
    a, b = records(base), np.stack([records(first), records(second)])
    gram = delta_gram(a, b)
    better, _ = with_norms(a, b, gram)
    assert not np.array_equal(better, gram)

    def cosines(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return values[:, 0, 1] / np.sqrt(values[:, 0, 0] * values[:, 1, 1])

    np.testing.assert_allclose(cosines(better), cosines(gram))
    np.testing.assert_array_equal(better, better.swapaxes(1, 2))


def test_odd_records_change_nothing() -> None:
    base, expert = family(-0.7, 0.7, 8)
    base[1] = 0.0
    expert[2] = base[2]
    expert[3] = 0.0
    expert[4] = base[4] * np.float32(0.5)
    a, b = records(base).copy(), records(expert)[None, :].copy()
    b[0, 5]["flags"] |= np.uint64(SATURATED)
    gram = delta_gram(a, b)
    better, information = with_norms(a, b, gram)
    assert np.isfinite(better).all()
    assert (information >= 1.0).all()
    for column in (1, 2, 3, 5):
        assert better[column, 0, 0] == gram[column, 0, 0]
        assert information[column, 0] == 1.0
    # A multiple of the base: the sketch of the delta has the base's own error, so nothing is gained, and nothing lost.
    assert better[4, 0, 0] == pytest.approx(0.25 * float(a["sum_squares"][4]), rel=0.6)


def test_nothing_to_do() -> None:
    empty = np.zeros(0, RECORD)
    gram, information = with_norms(empty, np.zeros((3, 0), RECORD), np.zeros((0, 3, 3)))
    assert gram.shape == (0, 3, 3)
    assert information.shape == (0, 3)
