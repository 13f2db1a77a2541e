"""What deltas are worth to a method that trims or drops elements and lets the rest elect a sign. Pure.

Such a method is not linear, and where few experts take part, or weights are normalised, it makes another change than the
weighted sum. What it makes on the whole of a tensor is tried out here on normal numbers with the deltas' sizes and
cosines: a table of fixed pseudo-random ones, so that the same inputs give the same figures on every machine, and so that
their sampling error is the same for all tensors and leaves ratios alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mpfs.merge.operators import Operator, Parameters
from mpfs.merge.random import uniform
from mpfs.stats.segments import running_sum

_SAMPLES = 2048
_TERMS = 12
"""Uniform numbers that are added up to a nearly normal one of variance 1."""
_CLOSEST = 0.999
_NEAREST = 1e-6
_CHUNK = 1 << 17
"""Samples that are looked at together: they fit into the cache."""

TRIMMED = frozenset({"ties", "breadcrumbs_ties"})
"""Methods that keep elements by their magnitude; the others that elect draw them."""


def elects(operator: Operator) -> bool:
    """Whether a method elects signs in the way that is tried out here."""
    return bool(getattr(operator, "elects_sign", False))


def elected_weights(
    operator: Operator,
    parameters: Sequence[Parameters],
    weights: NDArray[np.float64],
    gram: NDArray[np.float64],
    normalize: Sequence[bool],
) -> NDArray[np.float64]:
    """Weights with which the sum of deltas changes as much as the method does.

    Args:
        operator: one that elects.
        parameters: of T tensors.
        weights: of their experts, with the method's factor, shape (T, E).
        gram: the products of the deltas over each tensor, shape (T, E, E).
        normalize: for each tensor, whether what agrees is averaged.

    Returns:
        Shape (T, E): a weight for each expert, with the sign of its own. For their sum the squared norm is that of the
        method's change over the whole tensor, and each expert's is in proportion to what it has in that change. What comes
        out for a tensor does not depend on the others.
    """
    size = np.sqrt(np.maximum(np.einsum("tii->ti", gram), 0.0))
    live = (size > 0.0) & (weights != 0.0)
    found = weights.copy()
    alike: dict[tuple[bool, bytes], list[int]] = {}
    for tensor, averaged in enumerate(normalize):
        alike.setdefault((averaged, live[tensor].tobytes()), []).append(tensor)
    for (averaged, _), tensors in alike.items():
        experts = np.flatnonzero(live[tensors[0]])
        if not len(experts):
            continue
        own = [[_Kept.of(operator, parameters[tensor], expert) for expert in experts.tolist()] for tensor in tensors]
        rows = np.array(tensors)
        cells = np.ix_(rows, experts)
        products = gram[np.ix_(rows, experts, experts)]
        found[rows] = 0.0
        # Where deltas are not finite nothing can be told.
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            found[cells] = _elected(own, weights[cells], size[cells], products, averaged)
    return found


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a method keeps of a delta's samples: of those that are left once the `largest` are gone, the largest `count`;
    or, where elements are drawn, the share `density`. What is kept is multiplied by `factor`."""

    trimmed: bool
    count: int
    largest: int
    density: float
    factor: float

    @classmethod
    def of(cls, operator: Operator, parameters: Parameters, expert: int) -> _Kept:
        own = parameters.experts[expert]
        density = min(1.0, max(0.0, float(own.get("density", 1.0))))
        trimmed = operator.name in TRIMMED
        largest = int(_SAMPLES * float(own.get("gamma", 0.0))) if trimmed and operator.name != "ties" else 0
        rescale = not trimmed and density > 0.0 and bool(parameters.shared.get("rescale", True))
        return cls(trimmed, int(_SAMPLES * density), largest, density, 1.0 / density if rescale else 1.0)


def _elected(
    kept: Sequence[Sequence[_Kept]],
    weights: NDArray[np.float64],
    size: NDArray[np.float64],
    gram: NDArray[np.float64],
    normalize: bool,
) -> NDArray[np.float64]:
    """The same for tensors of which all experts take part: (T, E)."""
    count = weights.shape[1]
    factor = _cholesky(_cosines(gram, size))
    parts = np.zeros(weights.shape)
    step = max(1, _CHUNK // (count * _SAMPLES))
    room = np.empty((2, min(step, len(weights)), count, _SAMPLES))
    for start in range(0, len(weights), step):
        some = slice(start, start + step)
        terms, other = room[:, : len(weights[some])]
        _correlate(factor[some], terms, other)
        np.multiply(terms, terms, out=other)
        scale = weights[some] * size[some] / np.sqrt(_tree_sum(other) / _SAMPLES)
        scale *= [[item.factor for item in row] for row in kept[some]]
        _sparsify(terms, kept[some], other)
        terms *= scale[:, :, None]
        parts[some] = _parts(terms, other, weights[some], normalize)
    found = np.where(weights > 0.0, 1.0, -1.0) * np.sqrt(parts) / size
    wanted = running_sum(parts)
    linear = running_sum((found[:, :, None] * found[:, None, :] * gram).reshape(len(gram), -1))
    # Deltas that nearly cancel as a sum do not cancel where signs are elected.
    far = linear > _NEAREST * wanted
    result: NDArray[np.float64] = found * np.where(far, np.sqrt(wanted / np.where(far, linear, 1.0)), 1.0)[:, None]
    return result


def _parts(
    terms: NDArray[np.float64], other: NDArray[np.float64], weights: NDArray[np.float64], normalize: bool
) -> NDArray[np.float64]:
    """What each expert has in the change, (T, E), of samples of weighted deltas, (T, E, samples), which are used up."""
    sign = np.where(_added_up(terms) >= 0.0, 1.0, -1.0)
    np.multiply(terms, sign[:, None], out=other)
    agreeing = other > 0.0
    terms *= agreeing
    change = _added_up(terms)
    if normalize:
        np.multiply(agreeing, weights[:, :, None], out=other)
        shares = _added_up(other)
        divisor = np.where(shares != 0.0, shares, 1.0)
        change /= divisor * divisor
    terms *= change[:, None]
    return np.maximum(_tree_sum(terms) / _SAMPLES, 0.0)


def _added_up(terms: NDArray[np.float64]) -> NDArray[np.float64]:
    """Over the experts, in order: (T, E, samples) to (T, samples)."""
    total = terms[:, 0].copy()
    for i in range(1, terms.shape[1]):
        total += terms[:, i]
    return total


def _sparsify(values: NDArray[np.float64], kept: Sequence[Sequence[_Kept]], other: NDArray[np.float64]) -> None:
    """Trim or drop, in place, of the experts' samples, (T, E, samples)."""
    alike: dict[_Kept, list[tuple[int, int]]] = {}
    for tensor, row in enumerate(kept):
        for place, item in enumerate(row):
            alike.setdefault(item, []).append((tensor, place))
    if not all(item.trimmed for item in alike):
        for item, cells in alike.items():
            for tensor, place in cells:
                values[tensor, place] *= _uniform(place) < item.density
        return
    np.abs(values, out=other)
    np.negative(other, out=other)
    for item, cells in alike.items():
        tensors, places = np.transpose(cells)
        everything = len(alike) == 1
        least = other.reshape(-1, _SAMPLES) if everything else other[tensors, places]
        stay = _among_least(least, item.largest + item.count)
        if item.largest:
            stay &= ~_among_least(least, item.largest)
        if everything:
            values *= stay.reshape(values.shape)
        else:
            values[tensors, places] *= stay


def _among_least(values: NDArray[np.float64], count: int) -> NDArray[np.bool_]:
    """Which samples are among so many least ones of their row."""
    if not 0 < count < _SAMPLES:
        return np.full(values.shape, count > 0)
    last = np.partition(values, count - 1, axis=1)[:, count - 1]
    return np.asarray(values <= last[:, None], bool)


def _tree_sum(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Over the samples, (T, E, samples), by halves: in an order that no machine changes. The values are used up."""
    width = _SAMPLES
    while width > 1:
        width //= 2
        values[..., :width] += values[..., width : 2 * width]
    return values[..., 0].copy()


@lru_cache(maxsize=64)
def _uniform(place: int) -> NDArray[np.float64]:
    """Numbers between 0 and 1, shape (samples,), of another stream for each place."""
    return uniform(place, 0, _SAMPLES)


@lru_cache(maxsize=64)
def _normal(place: int) -> NDArray[np.float64]:
    """Nearly normal numbers, shape (samples,), of another stream for each place."""
    total = np.zeros(_SAMPLES)
    for row in (uniform(place + 1000, 0, _SAMPLES * _TERMS) - 0.5).reshape(_TERMS, _SAMPLES):
        total += row
    return total


def _correlate(factor: NDArray[np.float64], values: NDArray[np.float64], other: NDArray[np.float64]) -> None:
    """Fill in normal numbers, (T, E, samples), with the cosines of these factors, (T, E, E)."""
    np.multiply(factor[:, :, 0, None], _normal(0), out=values)
    for j in range(1, factor.shape[1]):
        np.multiply(factor[:, j:, j, None], _normal(j), out=other[:, j:])
        values[:, j:] += other[:, j:]


def _cosines(gram: NDArray[np.float64], size: NDArray[np.float64]) -> NDArray[np.float64]:
    """(T, E, E)."""
    found = (gram / (size[:, :, None] * size[:, None, :])).clip(-_CLOSEST, _CLOSEST)
    places = np.arange(gram.shape[1])
    found[:, places, places] = 1.0
    result: NDArray[np.float64] = found
    return result


def _cholesky(cosines: NDArray[np.float64]) -> NDArray[np.float64]:
    """Cholesky's factors of the matrices, (T, E, E), kept away from being singular."""
    factor = np.zeros(cosines.shape)
    for i in range(cosines.shape[1]):
        for j in range(i + 1):
            rest = cosines[:, i, j].copy()
            for k in range(j):
                rest -= factor[:, i, k] * factor[:, j, k]
            factor[:, i, j] = np.sqrt(np.maximum(rest, 1.0 - _CLOSEST)) if i == j else rest / factor[:, j, j]
    return factor
