"""Better estimates of many columns' Gram matrices at once, by what the columns of a tensor tell about each other. Pure.

One sketch of 256 buckets knows a column's energy to 9%. Whoever takes the columns that look largest takes those whose
noise is largest too, and then promises too much. The remedy is Stein's: pull each column towards the mean of its
tensor, by as much as the spread between columns is noise. Columns of equal energy come out as equal, columns that
really differ stay as they are, and what is chosen by the estimates keeps what they say.

An estimate of an energy m is m·χ²₂₅₆/256, so its logarithm has the same noise everywhere, of variance 0.0078 (less where
more is known: `mpfs.stats.norms`). Logarithms are pulled towards their mean by the share of their variance that this is,
and the sum of the energies is then restored. A few columns tell little about how much they really differ: to their
spread is added what is usual, as if a few more had been seen.
Cosines are pulled towards the tensor's in the same way, by one factor for all pairs of experts, so that matrices stay
positive semidefinite.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from mpfs.stats.record import SKETCH_WIDTH
from mpfs.stats.segments import Segments, running_sum

_K: Final = float(SKETCH_WIDTH)
_NOISE: Final = 0.00784309
"""Variance of the logarithm of χ²₂₅₆: the trigamma function at 128."""

_USUAL: Final = 0.01
"""How much the logarithms of energies of a tensor's columns differ as a rule (a variance: 10% either way)."""
_USUAL_COLUMNS: Final = 4.0
"""How many columns that rule counts for."""


def shrink_gram(
    gram: NDArray[np.float64],
    elements: NDArray[np.int64],
    live: NDArray[np.bool_],
    information: NDArray[np.float64] | None = None,
    tensors: Segments | None = None,
) -> NDArray[np.float64]:
    """Pull estimates towards their tensor's mean.

    Args:
        gram: shape (C, E, E), what `delta_gram` gives for the columns of one tensor, or of several.
        elements: shape (C,), elements of each column, all at least 1.
        live: shape (C, E), where an expert has a delta; elsewhere the result is 0.
        information: shape (C, E), how much is known of each energy, as `with_norms` tells it; None: 1 everywhere.
        tensors: which columns are whose; None: all are of one tensor.

    Returns:
        Shape (C, E, E), symmetric. An expert's energies keep their sum over each tensor, up to rounding.
    """
    tensors = Segments([len(gram)]) if tensors is None else tensors
    energy = np.where(live, np.maximum(np.einsum("cii->ci", gram), 0.0), 0.0)
    size = np.where(live, elements[:, None].astype(np.float64), 0.0)
    noise = np.full(energy.shape, _NOISE) if information is None else _NOISE / information
    # Where numbers leave the range of float64, what comes of them is replaced.
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        pulled = _energies(energy, size, noise, tensors)
        return _products(gram, live, energy, pulled, tensors)


def _products(
    gram: NDArray[np.float64],
    live: NDArray[np.bool_],
    energy: NDArray[np.float64],
    pulled: NDArray[np.float64],
    tensors: Segments,
) -> NDArray[np.float64]:
    """The matrices whose diagonals are `pulled`; cosines are pulled by one factor for all pairs of a tensor's experts."""
    count = gram.shape[1]
    first, second = np.triu_indices(count, 1)
    roots = np.sqrt(energy)
    norm = roots[:, first] * roots[:, second]
    both = norm > 0.0
    product = np.where(both, gram[:, first, second], 0.0)
    cosine = (product / np.where(both, norm, 1.0)).clip(-1.0, 1.0)
    weight = tensors.sums(norm)
    mean = (tensors.sums(product) / np.where(weight > 0.0, weight, 1.0)).clip(-1.0, 1.0)
    number = tensors.sums(both.astype(np.float64))
    counted = np.where(number > 1.0, number, 0.0)
    middle = mean[tensors.of]
    off = np.where(both, cosine - middle, 0.0)
    scatter = tensors.sums(off * off) * counted / np.maximum(number - 1.0, 1.0)
    chance = counted * (1.0 - mean * mean) ** 2
    spread, noise, seen = np.zeros((3, len(tensors)))
    start = 0
    for i in range(count - 1):
        row = slice(start, start + count - 1 - i)
        spread += running_sum(scatter[:, row])
        noise += running_sum(chance[:, row]) / _K
        seen += running_sum(counted[:, row])
        start = row.stop
    known = (seen > 0.0) & (spread > 0.0)
    keep = np.where(known, np.maximum(1.0 - noise / np.where(known, spread, 1.0), 0.0), 0.0)
    norms = np.sqrt(pulled)
    value = (middle + keep[tensors.of][:, None] * off) * (norms[:, first] * norms[:, second])
    value = np.where(live[:, first] & live[:, second], value, 0.0)
    result = np.zeros_like(gram)
    result[:, first, second] = result[:, second, first] = value
    diagonal = np.arange(count)
    result[:, diagonal, diagonal] = pulled
    return result


def _energies(
    energy: NDArray[np.float64], size: NDArray[np.float64], noise: NDArray[np.float64], tensors: Segments
) -> NDArray[np.float64]:
    """Energies, pulled; all (C, E). `size` is 0 where there is no delta, `noise` the variance of the logarithms' errors."""
    live = size > 0.0
    total = tensors.sums(energy)
    several = (tensors.sums(live.astype(np.float64)) >= 2.0) & (total > 0.0)
    # In units of the mean, so that roots are near 1.
    mean = total / tensors.sums(size)
    relative = np.where(live, energy / np.where(live, size, 1.0), 0.0) / mean[tensors.of]
    known = relative > 0.0
    number = tensors.sums(known.astype(np.float64))
    several &= (number >= 2.0) & (tensors.sums(1.0 - np.isfinite(relative)) == 0.0)
    level = np.where(known, _logarithm(np.where(known, relative, 1.0)), 0.0)
    centre = tensors.sums(level) / number
    off = np.where(known, level - centre[tensors.of], 0.0)
    usual = tensors.sums(np.where(known, noise, 0.0)) / number
    scatter = tensors.sums(off * off)
    spread = (scatter + _USUAL_COLUMNS * (_USUAL + usual)) / (number - 1.0 + _USUAL_COLUMNS) - usual
    spread = np.maximum(spread, 0.0)[tensors.of]
    keep = spread / (spread + noise)
    pulled = np.where(known, _exponential(centre[tensors.of] + keep * off) * size, 0.0)
    pulled = pulled * (total / tensors.sums(pulled))[tensors.of]
    return np.where(several[tensors.of], pulled, energy)


_ROOTS: Final = 6
_ROOT: Final = 2.0**_ROOTS
"""x^(1/64) is near enough to 1 + ln(x) / 64, and, unlike a logarithm, the same on every machine: roots are rounded
correctly."""


def _logarithm(values: NDArray[np.float64]) -> NDArray[np.float64]:
    for _ in range(_ROOTS):
        values = np.sqrt(values)
    result: NDArray[np.float64] = (values - 1.0) * _ROOT
    return result


def _exponential(values: NDArray[np.float64]) -> NDArray[np.float64]:
    values = np.maximum(1.0 + values / _ROOT, 0.0)
    for _ in range(_ROOTS):
        values = values * values
    return values
