"""What deltas are worth to a method that trims or drops elements and lets the rest elect a sign. Pure.

Such a method is not linear, and where few experts take part, or weights are normalised, it makes another change than the
weighted sum. What it makes on the whole of a tensor is tried out here on normal numbers with the deltas' sizes and
cosines: a table of fixed pseudo-random ones, so that the same inputs give the same figures on every machine, and so that
their sampling error is the same for all tensors and leaves ratios alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from mpfs.merge.operators import Operator, Parameters
from mpfs.merge.random import uniform_bits

_SAMPLES = 2048
_TERMS = 12
"""Uniform numbers that are added up to a nearly normal one of variance 1."""
_CLOSEST = 0.999
_NEAREST = 1e-6

TRIMMED = frozenset({"ties", "breadcrumbs_ties"})
"""Methods that keep elements by their magnitude; the others that elect draw them."""


def elects(operator: Operator) -> bool:
    """Whether a method elects signs in the way that is tried out here."""
    return bool(getattr(operator, "elects_sign", False))


def elected_weights(
    operator: Operator, parameters: Parameters, weights: Sequence[float], gram: NDArray[np.float64], normalize: bool
) -> tuple[float, ...]:
    """Weights with which the sum of deltas changes as much as the method does.

    Args:
        operator: one that elects.
        parameters: of one tensor.
        weights: of its experts, with the method's factor.
        gram: the products of the deltas over the tensor, shape (E, E).
        normalize: whether what agrees is averaged.

    Returns:
        A weight for each expert, with the sign of its own: for their sum the squared norm is that of the method's change
        over the whole tensor, and each expert's is in proportion to what it has in that change.
    """
    size = [sqrt(max(0.0, float(gram[i, i]))) for i in range(len(gram))]
    live = [i for i, value in enumerate(size) if value > 0.0 and weights[i] != 0.0]
    if not live:
        return tuple(weights)
    deltas = _correlated([[_cosine(gram, size, i, j) for j in live] for i in live])
    terms = []
    for place, i in enumerate(live):
        kept = _sparse(operator, parameters.experts[i], parameters.shared, deltas[place], place)
        terms.append(kept * (weights[i] * size[i]))
    total = np.zeros(_SAMPLES)
    for term in terms:
        total += term
    elected = np.where(total >= 0.0, 1.0, -1.0)
    agreeing = [np.where(term * elected > 0.0, term, 0.0) for term in terms]
    divisor = np.ones(_SAMPLES)
    if normalize:
        shares = np.zeros(_SAMPLES)
        for i, term in zip(live, agreeing, strict=True):
            shares += np.where(term != 0.0, weights[i], 0.0)
        divisor = np.where(shares != 0.0, shares, 1.0)
    change = np.zeros(_SAMPLES)
    for term in agreeing:
        change += term
    change /= divisor
    parts = [max(0.0, _sum(change * term / divisor) / _SAMPLES) for term in agreeing]
    found = [0.0] * len(weights)
    for i, part in zip(live, parts, strict=True):
        found[i] = (1.0 if weights[i] > 0.0 else -1.0) * sqrt(part) / size[i]
    wanted, linear = 0.0, 0.0
    for part in parts:
        wanted += part
    for i in live:
        for j in live:
            linear += found[i] * found[j] * float(gram[i, j])
    # Deltas that nearly cancel as a sum do not cancel where signs are elected.
    factor = sqrt(wanted / linear) if linear > _NEAREST * wanted else 1.0
    return tuple(value * factor for value in found)


def _sparse(
    operator: Operator,
    own: Mapping[str, float | int | bool],
    shared: Mapping[str, float | int | bool],
    values: NDArray[np.float64],
    place: int,
) -> NDArray[np.float64]:
    """What trimming or dropping leaves of an expert's samples."""
    density = min(1.0, max(0.0, float(own.get("density", 1.0))))
    if operator.name in TRIMMED:
        largest = int(_SAMPLES * float(own.get("gamma", 0.0))) if operator.name != "ties" else 0
        count = int(_SAMPLES * density)
        size = -np.abs(values)
        kept = _among_least(size, largest + count) & ~_among_least(size, largest)
        return np.where(kept, values, 0.0)
    drawn = (uniform_bits(place, 0, _SAMPLES) >> np.uint64(11)).astype(np.float64) * 2.0**-53 < density
    rescale = bool(shared.get("rescale", True)) and density > 0.0
    return np.where(drawn, values / density if rescale else values, 0.0)


def _among_least(values: NDArray[np.float64], count: int) -> NDArray[np.bool_]:
    """Which of the samples are among so many least ones."""
    if not 0 < count < _SAMPLES:
        return np.full(_SAMPLES, count > 0)
    last = np.partition(values, count - 1)[count - 1]
    return np.asarray(values <= last, bool)


@lru_cache(maxsize=64)
def _normal(place: int) -> NDArray[np.float64]:
    """Nearly normal numbers, shape (samples,), of another stream for each place."""
    bits = uniform_bits(place + 1000, 0, _SAMPLES * _TERMS) >> np.uint64(11)
    uniform = (bits.astype(np.float64) * 2.0**-53 - 0.5).reshape(_TERMS, _SAMPLES)
    total = np.zeros(_SAMPLES)
    for row in uniform:
        total += row
    return total


def _correlated(cosines: Sequence[Sequence[float]]) -> list[NDArray[np.float64]]:
    """Normal numbers with these cosines, by Cholesky's factors of the matrix."""
    count = len(cosines)
    factor = [[0.0] * count for _ in range(count)]
    for i in range(count):
        for j in range(i + 1):
            rest = cosines[i][j]
            for k in range(j):
                rest -= factor[i][k] * factor[j][k]
            factor[i][j] = sqrt(max(rest, 1.0 - _CLOSEST)) if i == j else rest / factor[j][j]
    found = []
    for i in range(count):
        values = np.zeros(_SAMPLES)
        for j in range(i + 1):
            values += factor[i][j] * _normal(j)
        found.append(values / sqrt(_sum(values * values) / _SAMPLES))
    return found


def _cosine(gram: NDArray[np.float64], size: Sequence[float], i: int, j: int) -> float:
    if i == j:
        return 1.0
    return min(_CLOSEST, max(-_CLOSEST, float(gram[i, j]) / (size[i] * size[j])))


def _sum(values: NDArray[np.float64]) -> float:
    return float(np.cumsum(values)[-1])
