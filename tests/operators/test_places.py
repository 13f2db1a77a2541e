"""Finding the k-th element with a pattern from the nearer end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from mpfs.merge.operators.places import Place, narrow_all

COUNTS = st.lists(st.integers(0, 5), min_size=1, max_size=30).filter(any)


@given(st.lists(st.tuples(COUNTS, st.floats(0, 1)), min_size=1, max_size=4))
def test_each_is_found_and_no_column_is_counted_twice(searches: list[tuple[list[int], float]]) -> None:
    longest = max(len(counts) for counts, _ in searches)
    padded = [counts + [0] * (longest - len(counts)) for counts, _ in searches]
    wanted = [1 + round(share * (sum(counts) - 1)) for counts, share in searches]
    places = [
        Place(expert, 7, number, sum(counts), range(longest))
        for expert, (counts, number) in enumerate(zip(padded, wanted, strict=True))
    ]

    counted: list[tuple[int, int]] = []

    def count(asked: Mapping[int, Sequence[Place]]) -> dict[int, list[int]]:
        counted.extend((place.expert, column) for column, here in asked.items() for place in here)
        return {column: [padded[place.expert][column] for place in here] for column, here in asked.items()}

    narrow_all(places, count)
    assert len(counted) == len(set(counted))
    for place, counts, number in zip(places, padded, wanted, strict=True):
        [column] = place.columns
        assert sum(counts[:column]) + place.wanted == number
        assert 1 <= place.wanted <= counts[column]


def test_no_more_than_the_nearer_end_is_counted() -> None:
    for wanted, expected in ((1, {0}), (10, {0}), (11, {0, 1}), (500, set(range(50))), (990, {98, 99}), (1000, {99})):
        place = Place(0, 7, wanted, 1000, range(100))
        seen: set[int] = set()

        def count(asked: Mapping[int, Sequence[Place]], seen: set[int] = seen) -> dict[int, list[int]]:
            seen.update(asked)
            return {column: [10] * len(here) for column, here in asked.items()}

        narrow_all([place], count)
        assert seen == expected
        assert place.columns[0] == (wanted - 1) // 10


def test_the_only_column_is_not_counted() -> None:
    place = Place(0, 7, 3, 5, [4])
    narrow_all([place], lambda asked: {})
    assert (place.columns, place.wanted) == ([4], 3)
