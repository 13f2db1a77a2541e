"""What exact norms add to sketched deltas. Pure.

Records know the squared norms of a base b and of an expert e exactly; only the angle between them is left to the
sketches. For delta d = e - b that ties ⟨b, d⟩ to ‖d‖²: ⟨b, d⟩ = (‖e‖² - ‖b‖² - ‖d‖²) / 2. The sketched products of b and d
are (nearly) a Wishart matrix of 256 degrees of freedom about the true ones, which have thus one unknown instead of three;
this module finds its maximum-likelihood value by Fisher scoring. Where d is small and perpendicular to b, as in most
fine-tunes, the norms tell nothing; where an expert went far from its base, or shrank or grew along it, they are worth up to
ten times as many buckets.

All arithmetic is elementwise float64: see `mpfs.stats.estimate`.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from mpfs.stats.estimate import tree_sum
from mpfs.stats.record import SATURATED, Records

_WORTH: Final = 1.05
"""Below this much information (1: that of the sketch of the delta alone) an estimate is left as it is."""
_BATCH: Final = 1024
"""Energies that are looked at together, since sketches take room."""
_STEPS: Final = 4
_FARTHEST: Final = 4.0
"""By how much an estimate may be moved; twice as far as the noise of a sketch ever goes."""
_MOST: Final = 20.0
"""How much is said to be known at most: with 256 buckets, larger figures do not come true."""
_FLAT: Final = 1e-9
"""Determinants below this share of ‖b‖²‖d‖² are rounding."""


def with_norms(
    base: Records, experts: Records, gram: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Make estimated energies of deltas agree with the exact norms of base and experts.

    Args:
        base: records of the base's columns, shape (C,).
        experts: records of the experts' columns, shape (E, C).
        gram: what `delta_gram` gives for them, shape (C, E, E).

    Returns:
        Gram matrices, of which energies are improved and cosines kept; and how much is known of each energy, shape (C, E):
        1 is what 256 buckets tell, k is what 256·k would.
    """
    energy = np.maximum(np.einsum("cii->ci", gram), 0.0)
    information = np.ones(energy.shape)
    squares = base["sum_squares"][:, None], experts["sum_squares"].T
    usable = (base["flags"][:, None] | experts["flags"].T) & np.uint64(SATURATED) == 0
    usable &= (energy > 0.0) & (squares[0] > 0.0) & (squares[1] > 0.0)
    first = np.where(usable, _information(np.where(usable, energy, 1.0), *squares), 0.0)
    columns, index = np.nonzero(first > _WORTH)
    if not len(columns):
        return gram, information
    factor = np.ones(energy.shape)
    for start in range(0, len(columns), _BATCH):
        c, i = columns[start : start + _BATCH], index[start : start + _BATCH]
        origin = base["sketch"][c].astype(np.float64).T
        delta = experts["sketch"][i, c].astype(np.float64).T - origin
        value, information[c, i] = _likeliest(
            energy[c, i],
            tree_sum(origin * origin),
            tree_sum(origin * delta),
            base["sum_squares"][c],
            experts["sum_squares"][i, c],
        )
        factor[c, i] = np.sqrt(value / energy[c, i])
    return gram * (factor[:, :, None] * factor[:, None, :]), information


def _information(x: NDArray[np.float64], b: NDArray[np.float64], e: NDArray[np.float64]) -> NDArray[np.float64]:
    """How much is known of ‖d‖² = x, where ‖b‖² and ‖e‖² are."""
    c = (e - b - x) / 2.0
    determinant = b * x - c * c
    possible = determinant > _FLAT * b * x
    m = _Slope(x, b, c, np.where(possible, determinant, 1.0))
    return np.where(possible, np.minimum(x * x * m.square_trace(), _MOST), 1.0)


class _Slope:
    """M = G⁻¹ dG/dx for G = [[b, c], [c, x]], where c falls by half of what x grows."""

    def __init__(
        self,
        x: NDArray[np.float64],
        b: NDArray[np.float64],
        c: NDArray[np.float64],
        determinant: NDArray[np.float64],
    ) -> None:
        self.inverse = x / determinant, -c / determinant, b / determinant
        self.m11 = 0.5 * c / determinant
        self.m12 = -(0.5 * x + c) / determinant
        self.m21 = -0.5 * b / determinant
        self.m22 = (0.5 * c + b) / determinant

    def square_trace(self) -> NDArray[np.float64]:
        return self.m11 * self.m11 + 2.0 * self.m12 * self.m21 + self.m22 * self.m22

    def score(self, bb: NDArray[np.float64], bd: NDArray[np.float64], dd: NDArray[np.float64]) -> NDArray[np.float64]:
        """tr(M G⁻¹ W) - tr M, for sketched products W."""
        i11, i12, i22 = self.inverse
        found = self.m11 * (i11 * bb + i12 * bd) + self.m12 * (i12 * bb + i22 * bd)
        found += self.m21 * (i11 * bd + i12 * dd) + self.m22 * (i12 * bd + i22 * dd)
        return found - (self.m11 + self.m22)


def _likeliest(
    dd: NDArray[np.float64],
    bb: NDArray[np.float64],
    bd: NDArray[np.float64],
    b: NDArray[np.float64],
    e: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The likeliest ‖d‖² and how much is known of it, from sketched products and exact squared norms; all (n,)."""
    roots = np.sqrt(b), np.sqrt(e)
    least = np.maximum((roots[0] - roots[1]) ** 2 * (1.0 + 1e-9), dd / _FARTHEST)
    most = np.minimum((roots[0] + roots[1]) ** 2 * (1.0 - 1e-9), dd * _FARTHEST)
    x = np.minimum(np.maximum(dd, least), most)
    for _ in range(_STEPS):
        c = (e - b - x) / 2.0
        determinant = b * x - c * c
        possible = determinant > _FLAT * b * x
        slope = _Slope(x, b, c, np.where(possible, determinant, 1.0))
        information = slope.square_trace()
        step = slope.score(bb, bd, dd) / np.where(information > 0.0, information, 1.0)
        moved = np.minimum(np.maximum(x + step, np.maximum(least, x / 2.0)), np.minimum(most, x * 2.0))
        x = np.where(possible & np.isfinite(moved), moved, x)
    return x, np.maximum(_information(x, b, e), 1.0)
