"""The counter-based generator."""

from __future__ import annotations

import numpy as np
import pytest

from mpfs.merge.random import bernoulli, keep_limit, stream_key, uniform_bits


def test_known_answers() -> None:
    # SplitMix64 from state 0, as published with the generator.
    expected = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    assert uniform_bits(0, 0, 4).tolist() == expected


def test_streams_are_pinned() -> None:
    """A change here changes the result of every dare merge."""
    key = stream_key(42, "model.norm.weight", "expert")
    assert key == 17842322786970514011
    assert uniform_bits(key, 0, 2).tolist() == [7000084497458901106, 17707943172564661597]


@pytest.mark.parametrize("key", [0, 1, 2**63, 2**64 - 1])
def test_any_piece_is_a_piece_of_the_whole(key: int) -> None:
    whole = uniform_bits(key, 0, 1000)
    assert np.array_equal(uniform_bits(key, 123, 500), whole[123:623])
    assert uniform_bits(key, 5, 0).shape == (0,)
    far = uniform_bits(key, 2**40, 4)
    assert np.array_equal(uniform_bits(key, 2**40 + 2, 2), far[2:])


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
    for place in range(64):
        share = ((bits >> np.uint64(place)) & np.uint64(1)).mean()
        assert abs(share - 0.5) < 4.5 * 0.5 / 100_000**0.5


def test_masks_are_nested_in_density() -> None:
    small, large = (bernoulli(7, 0, 10_000, density) for density in (0.2, 0.6))
    assert not (small & ~large).any()


@pytest.mark.parametrize(
    ("density", "limit"), [(0.0, 0), (1.0, 2**53), (0.5, 2**52), (2.0**-60, 1), (3.0, 2**53), (-1.0, 0)]
)
def test_keep_limit(density: float, limit: int) -> None:
    assert keep_limit(density) == limit


def test_extreme_densities() -> None:
    assert not bernoulli(1, 0, 1000, 0.0).any()
    assert bernoulli(1, 0, 1000, 1.0).all()
