"""What kernels work on: columns as bit patterns, as they lie in the store."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

Bits: TypeAlias = NDArray[np.integer[Any]]
"""Elements as bit patterns; shape (elements,). The integer type tells the format: see `BIT_TYPES`."""

BIT_TYPES: Final[dict[str, np.dtype[Any]]] = {
    "BF16": np.dtype(np.uint16),
    "F16": np.dtype(np.int16),
    "F32": np.dtype(np.uint32),
}
"""The dtypes that there are kernels for, as stored, and the integer type that stands for each."""

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class BitsColumn:
    """A `Column` (see `mpfs.merge.operators.base`) as bit patterns; not to be written to.

    `number` is the column's place among the tensor's, `numel` its number of elements. What an array rests on may be gone once the function that was given
    the column has returned.
    """

    number: int
    start: int
    numel: int
    base: Bits | None
    experts: Sequence[Bits | None]


Only: TypeAlias = Mapping[int, Collection[int]]
"""Columns by their numbers, and in each the experts that are wanted; the others are not read, and are None."""


class BitsColumns(Protocol):
    """The columns of one tensor of which something is read."""

    def numbers(self) -> list[int]:
        """Their numbers, in order."""

    def map(self, function: Callable[[BitsColumn], _Result], only: Only | None = None) -> Iterator[tuple[int, _Result]]:
        """`function` of each column, with the column's number, in order; computed on several threads, in any order.

        `only` names what is wanted, if not everything.
        """

    def in_order(self, function: Callable[[BitsColumn], None]) -> None:
        """`function` of each column, one after the other."""


@dataclass(frozen=True, slots=True)
class Whole:
    """The whole delta."""


@dataclass(frozen=True, slots=True)
class Largest:
    """What passes a threshold: float32 patterns of magnitudes above `pattern`, or equal to it at elements before `cutoff`.

    NaN's pattern is `NAN`.
    """

    pattern: int
    cutoff: int


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a draw keeps (see `mpfs.merge.random`: the stream `key`, bits below `limit`), times `factor`."""

    key: int
    limit: int
    factor: float


@dataclass(frozen=True, slots=True)
class Between:
    """What lies between two ends, each a float32 pattern of a magnitude and a cutoff.

    An element is below an end iff its pattern is lower, or equal and its index less than the cutoff; it is kept iff it
    is below the top and not below the bottom. NaN's pattern is `NAN`; below a top of `NAN` + 1 is everything.
    """

    bottom: tuple[int, int]
    top: tuple[int, int]


Rule: TypeAlias = Whole | Largest | Drawn | Between
"""Which part of an expert's delta is merged."""

NAN: Final = 0x7F80_0001
"""The float32 pattern that stands for every NaN."""
