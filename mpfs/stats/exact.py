"""Exact distances between tensors, and what they add to estimates from sketches. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mpfs.stats.definite import definite_gram

_PAIRS: Final = np.dtype("<f8")


def pack_distances(distances: NDArray[np.float64]) -> bytes:
    """Squared distances as the store keeps them."""
    return distances.astype(_PAIRS).tobytes()


def unpack_distances(payload: bytes, blocks: int) -> NDArray[np.float64] | None:
    """The squared distances of so many blocks; None if the payload is not that of such a tensor."""
    if len(payload) != 8 * blocks:
        return None
    values = np.frombuffer(payload, _PAIRS).astype(np.float64)
    return values if bool((values >= 0.0).all()) else None


def in_columns(distances: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    """Blocks' squared distances, added up over columns of `width` blocks."""
    columns = -(-len(distances) // width)
    padded = np.zeros(columns * width)
    padded[: len(distances)] = distances
    total = np.zeros(columns)
    for i in range(width):
        total += padded[i::width]
    return total


def with_exact(
    gram: NDArray[np.float64],
    from_base: Mapping[int, NDArray[np.float64]],
    between: Mapping[tuple[int, int], NDArray[np.float64]],
) -> NDArray[np.float64]:
    """Put exact figures in the place of estimates.

    Args:
        gram: shape (C, E, E), estimated.
        from_base: for experts of which it is known, the squared norms of their deltas, shape (C,).
        between: for pairs i < j of experts of which it is known, the squared distances of their models, shape (C,).

    Returns:
        Shape (C, E, E). Where a norm is exact, estimated products keep their cosine; where both norms and the distance
        are exact, so is the product: ⟨x, y⟩ = (‖x‖² + ‖y‖² - ‖x - y‖²) / 2. Estimated products that contradict exact
        ones give way, so that matrices stay positive semidefinite if they were.
    """
    result = gram.copy()
    for i, exact in from_base.items():
        estimated = result[:, i, i].copy()
        known = (estimated > 0.0) & (exact > 0.0)
        factor = np.where(known, np.sqrt(exact) / np.sqrt(np.where(known, estimated, 1.0)), 0.0)
        result[:, i, :] *= factor[:, None]
        result[:, :, i] *= factor[:, None]
        result[:, i, i] = exact
    count = gram.shape[1]
    partners = [0] * count
    for (i, j), distance in between.items():
        if i in from_base and j in from_base:
            product = (from_base[i] + from_base[j] - distance) / 2.0
            limit = np.sqrt(from_base[i]) * np.sqrt(from_base[j])
            result[:, i, j] = result[:, j, i] = np.minimum(np.maximum(product, -limit), limit)
            partners[i] += 1
            partners[j] += 1
    if 0 < sum(partners) < count * (count - 1):
        result = definite_gram(result, sorted(range(count), key=lambda i: (-partners[i], i)))
    return result
