"""Finding, in a tensor, the k-th of the elements that have a pattern, from whichever end is nearer."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Place:
    """The `wanted`-th (from 1) of `total` elements of an expert's delta that have `pattern`; it lies in one of `columns`,
    which are in order, and which have them all."""

    expert: int
    pattern: int
    wanted: int
    total: int
    columns: Sequence[int]

    @property
    def backwards(self) -> bool:
        """Whether it is nearer to the end."""
        return 2 * self.wanted > self.total

    def near(self) -> Sequence[int]:
        """The columns to count next: as many from the nearer end as it is likely to be found in."""
        distance = self.total - self.wanted + 1 if self.backwards else self.wanted
        likely = math.ceil(len(self.columns) * distance / max(self.total, 1))
        # Where it is in none of the others it is in the last one, uncounted.
        count = min(max(likely, 1), len(self.columns) - 1)
        return self.columns[len(self.columns) - count :] if self.backwards else self.columns[:count]

    def narrow(self, counts: Mapping[int, int]) -> None:
        """Leave out columns that were counted, from the nearer end, up to the one where it is."""
        backwards = self.backwards
        while len(self.columns) > 1 and (column := self.columns[-1 if backwards else 0]) in counts:
            count = counts[column]
            distance = self.total - self.wanted + 1 if backwards else self.wanted
            if distance <= count:
                self.columns, self.total = [column], count
                self.wanted = count - distance + 1 if backwards else distance
                return
            self.columns = self.columns[:-1] if backwards else self.columns[1:]
            self.wanted -= 0 if backwards else count
            self.total -= count


def narrow_all(
    places: Sequence[Place], count: Callable[[Sequence[Place], Collection[int]], Mapping[int, Sequence[int]]]
) -> None:
    """Narrow each down to one column.

    `count` tells, of each of some columns, how many elements have the patterns of some places.
    """
    while any(len(place.columns) > 1 for place in places):
        for backwards in (False, True):
            chosen = [place for place in places if len(place.columns) > 1 and place.backwards == backwards]
            if chosen:
                counts = count(chosen, {column for place in chosen for column in place.near()})
                for index, place in enumerate(chosen):
                    place.narrow({column: found[index] for column, found in counts.items()})
