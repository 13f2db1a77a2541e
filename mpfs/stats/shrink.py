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
) -> NDArray[np.float64]:
    """Pull estimates towards their tensor's mean.

    Args:
        gram: shape (C, E, E), what `delta_gram` gives for one tensor's columns.
        elements: shape (C,), elements of each column, all at least 1.
        live: shape (C, E), where an expert has a delta; elsewhere the result is 0.
        information: shape (C, E), how much is known of each energy, as `with_norms` tells it; None: 1 everywhere.

    Returns:
        Shape (C, E, E), symmetric. An expert's energies keep their sum, up to rounding.
    """
    count = gram.shape[1]
    size = elements.astype(np.float64)
    energy = np.where(live, np.maximum(np.einsum("cii->ci", gram), 0.0), 0.0)
    pulled = np.zeros_like(energy)
    noise_of = np.full(energy.shape, _NOISE) if information is None else _NOISE / information
    for i in range(count):
        pulled[:, i] = _energies(energy[:, i], np.where(live[:, i], size, 0.0), noise_of[:, i])
    result = np.zeros_like(gram)
    for i in range(count):
        result[:, i, i] = pulled[:, i]
    # Cosines: row i has those with the experts after it.
    roots = np.sqrt(energy)
    rows: list[tuple[NDArray[np.float64], NDArray[np.float64]]] = []
    spread = noise = seen = 0.0
    for i in range(count - 1):
        norm = roots[:, i, None] * roots[:, i + 1 :]
        both = norm > 0.0
        product = np.where(both, gram[:, i, i + 1 :], 0.0)
        cosine = (product / np.where(both, norm, 1.0)).clip(-1.0, 1.0)
        weight = _sums(norm)
        mean = (_sums(product) / np.where(weight > 0.0, weight, 1.0)).clip(-1.0, 1.0)
        number = np.count_nonzero(both, axis=0).astype(np.float64)
        counted = np.where(number > 1.0, number, 0.0)
        scatter = _sums(np.where(both, (cosine - mean) ** 2, 0.0))
        spread += _sum(scatter * counted / np.maximum(number - 1.0, 1.0))
        noise += _sum(counted * (1.0 - mean * mean) ** 2) / _K
        seen += _sum(counted)
        rows.append((mean, np.where(both, cosine, mean)))
    keep = max(0.0, 1.0 - noise / spread) if seen and spread > 0.0 else 0.0
    norms = np.sqrt(pulled)
    for i, (mean, cosine) in enumerate(rows):
        value = (mean + keep * (cosine - mean)) * (norms[:, i, None] * norms[:, i + 1 :])
        value = np.where(live[:, i, None] & live[:, i + 1 :], value, 0.0)
        result[:, i, i + 1 :] = result[:, i + 1 :, i] = value
    return result


def _energies(
    energy: NDArray[np.float64], size: NDArray[np.float64], noise: NDArray[np.float64]
) -> NDArray[np.float64]:
    """One expert's energies; `size` is 0 where it has none, `noise` the variance of their logarithms' errors."""
    live = size > 0.0
    number = float(np.count_nonzero(live))
    total = _sum(energy)
    if number < 2.0 or total <= 0.0:
        return energy
    mean = total / _sum(size)
    power = np.where(live, energy / np.where(live, size, 1.0), 0.0)
    # In units of the mean, so that roots are near 1.
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        relative = power / mean
    known = relative > 0.0
    number = float(np.count_nonzero(known))
    if number < 2.0 or not bool(np.isfinite(relative).all()):
        return energy
    level = np.where(known, _logarithm(np.where(known, relative, 1.0)), 0.0)
    centre = _sum(level) / number
    free = number - 1.0
    usual = _sum(np.where(known, noise, 0.0)) / number
    scatter = _sum(np.where(known, (level - centre) ** 2, 0.0))
    spread = max(0.0, (scatter + _USUAL_COLUMNS * (_USUAL + usual)) / (free + _USUAL_COLUMNS) - usual)
    keep = spread / (spread + noise)
    pulled = np.where(known, _exponential(centre + keep * (level - centre)) * size, 0.0)
    result: NDArray[np.float64] = pulled * (total / _sum(pulled))
    return result


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


def _sum(values: NDArray[np.float64]) -> float:
    """In index order, on every machine."""
    return float(np.cumsum(values)[-1]) if len(values) else 0.0


def _sums(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Over the first axis, likewise."""
    return np.asarray(np.cumsum(values, axis=0)[-1]) if len(values) else np.zeros(values.shape[1:])
