"""The counter-based generator."""

from __future__ import annotations

import numpy as np
import pytest

from mpfs.merge.random import bernoulli, keep_limit, stream_key, uniform, uniform_bits


def finalised(word: int, place: int) -> int:
    """The bits at a place of a group, in plain integers."""
    x = (word + place) % 2**32
    x = ((x ^ x >> 16) * 0x7FEB352D) % 2**32
    x = ((x ^ x >> 15 ^ word >> 32) * 0x846CA68B) % 2**32
    return x ^ x >> 16 ^ 2**31


def test_known_answers() -> None:
    # SplitMix64 from state 0, as published with the generator, gives the groups' words.
    words = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    expected = [finalised(word, place) for word in words for place in range(1024)]
    assert uniform_bits(0, 0, 4096).tolist() == expected


def test_streams_are_pinned() -> None:
    """A change here changes the result of every dare merge."""
    key = stream_key(42, "model.norm.weight", "expert")
    assert key == 17842322786970514011
    assert uniform_bits(key, 0, 2).tolist() == [2884975646, 1916825245]
    assert uniform_bits(0, 2**40 + 5, 1).tolist() == [0x59F10E1E]


@pytest.mark.parametrize("key", [0, 1, 2**63, 2**64 - 1])
def test_any_piece_is_a_piece_of_the_whole(key: int) -> None:
    whole = uniform_bits(key, 0, 5000)
    assert np.array_equal(uniform_bits(key, 123, 500), whole[123:623])
    assert np.array_equal(uniform_bits(key, 1000, 3500), whole[1000:4500])
    assert uniform_bits(key, 5, 0).shape == (0,)
    far = uniform_bits(key, 2**40 - 2, 4)
    assert np.array_equal(uniform_bits(key, 2**40, 2), far[2:])


def test_negative_ranges_are_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        uniform_bits(0, -1, 3)


def test_keys_tell_their_parts_apart() -> None:
    triples = [
        (0, "a", "bc"),
        (0, "ab", "c"),
        (0, "", "abc"),
        (0, "bc", "a"),
        (1, "a", "bc"),
        (-1, "a", "bc"),
        (0, "é", ""),
    ]
    assert len({stream_key(*triple) for triple in triples}) == len(triples)
    assert stream_key(-1, "a", "b") == stream_key(2**64 - 1, "a", "b")


@pytest.mark.parametrize("density", [0.01, 0.1, 0.5, 0.9])
def test_mean_and_independence(density: float) -> None:
    n = 200_000
    one, other = (bernoulli(stream_key(0, "t", name), 0, n, density) for name in ("one", "other"))
    sigma = (density * (1 - density) / n) ** 0.5
    for mask in (one, other):
        assert abs(mask.mean() - density) < 4.5 * sigma
        # The number kept in runs of 100 varies as a binomial's does.
        counts = mask.reshape(-1, 100).sum(axis=1)
        assert counts.var() == pytest.approx(100 * density * (1 - density), rel=0.12)
        assert abs(np.corrcoef(mask[1:], mask[:-1])[0, 1]) < 4.5 / n**0.5
    assert abs(np.corrcoef(one, other)[0, 1]) < 4.5 / n**0.5


def test_every_bit_is_fair() -> None:
    bits = uniform_bits(stream_key(0, "t", "e"), 0, 100_000)
    assert bits.dtype == np.uint32
    for place in range(32):
        share = ((bits >> np.uint32(place)) & np.uint32(1)).mean()
        assert abs(share - 0.5) < 4.5 * 0.5 / 100_000**0.5


@pytest.mark.parametrize("lag", [1, 2, 31, 64, 1023, 1024, 1025])
def test_elements_are_independent_within_groups_and_across_them(lag: int) -> None:
    n = 400_000
    numbers = uniform(stream_key(5, "t", "e"), 0, n) - 0.5
    assert abs(np.corrcoef(numbers[lag:], numbers[:-lag])[0, 1]) < 4.5 / n**0.5
    # Together they fill the square: all of its 256 cells are as likely.
    cells = ((numbers[lag:] + 0.5) * 16).astype(int) * 16 + ((numbers[:-lag] + 0.5) * 16).astype(int)
    expected = (n - lag) / 256
    chi_square = ((np.bincount(cells, minlength=256) - expected) ** 2 / expected).sum()
    assert 255 - 5 * 510**0.5 < chi_square < 255 + 5 * 510**0.5


def test_numbers_of_experts_are_independent() -> None:
    numbers = [uniform(stream_key(0, "t", f"expert{i}"), 0, 200_000) for i in range(8)]
    correlations = np.corrcoef(numbers) - np.eye(8)
    assert np.abs(correlations).max() < 5 / 200_000**0.5
    # The number of experts that keep an element is binomial.
    kept = np.bincount(np.sum([number < 0.5 for number in numbers], axis=0), minlength=9)
    expected = 200_000 * np.array([1, 8, 28, 56, 70, 56, 28, 8, 1]) / 256
    assert ((kept - expected) ** 2 / expected).sum() < 8 + 5 * 4


def test_masks_are_nested_in_density() -> None:
    small, large = (bernoulli(7, 0, 10_000, density) for density in (0.2, 0.6))
    assert not (small & ~large).any()


@pytest.mark.parametrize(
    ("density", "limit"), [(0.0, 0), (1.0, 2**32), (0.5, 2**31), (2.0**-60, 1), (3.0, 2**32), (-1.0, 0)]
)
def test_keep_limit(density: float, limit: int) -> None:
    assert keep_limit(density) == limit


def test_extreme_densities() -> None:
    assert not bernoulli(1, 0, 1000, 0.0).any()
    assert bernoulli(1, 0, 1000, 1.0).all()
    assert bernoulli(1, 0, 1000, 1.0 - 2.0**-50).all()
