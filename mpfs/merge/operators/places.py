"""Finding, in a tensor, the k-th of the elements that have a pattern, from whichever end is nearer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
    places: Sequence[Place], count: Callable[[Mapping[int, Sequence[Place]]], Mapping[int, Sequence[int]]]
) -> None:
    """Narrow each down to one column.

    `count` is told columns, and for each the places that may lie there, and tells how many elements in it have their
    patterns.
    """
    while left := [place for place in places if len(place.columns) > 1]:
        wanted: dict[int, list[Place]] = {}
        for place in left:
            for column in place.near():
                wanted.setdefault(column, []).append(place)
        counts: dict[int, dict[int, int]] = {id(place): {} for place in left}
        for column, found in count(wanted).items():
            for place, number in zip(wanted[column], found, strict=True):
                counts[id(place)][column] = number
        for place in left:
            place.narrow(counts[id(place)])
