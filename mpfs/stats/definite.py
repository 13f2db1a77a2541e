"""Gram matrices that cannot be: products of which some are exact and some estimated may contradict each other. Pure.

A Gram matrix is positive semidefinite: no choice of weights gives a negative energy. One that is not would promise the
planner that leaving deltas out gains something. Cosines are put right one by one, as a Cholesky decomposition comes to
them, and only as far as they are impossible given those before; without LAPACK, whose last bits depend on the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

_ZERO: Final = 1e-9
"""Squared lengths, of 1, that are taken for rounding errors."""
_OFF: Final = 1e-4
"""Errors of cosines that are worth putting right."""


def definite_gram(gram: NDArray[np.float64], order: Sequence[int]) -> NDArray[np.float64]:
    """Make matrices positive semidefinite.

    Args:
        gram: shape (C, E, E), symmetric, diagonals not negative.
        order: of the E rows: those first whose products are to be believed; if these fit each other they stay as they are.

    Returns:
        Shape (C, E, E). Matrices that are positive semidefinite already, up to rounding, are the same bits; of the others
        the diagonal is.
    """
    # Where deltas are not finite nothing can be told, and nothing is changed.
    with np.errstate(over="ignore", invalid="ignore"):
        return _definite(gram, np.asarray(order, np.int64))


def _definite(gram: NDArray[np.float64], rows: NDArray[np.int64]) -> NDArray[np.float64]:
    columns, count = gram.shape[:2]
    scale = np.sqrt(np.einsum("cii->ci", gram)[:, rows])
    live = scale > 0.0
    inverse = np.where(live, 1.0 / np.where(live, scale, 1.0), 0.0)
    rest = gram[:, rows[:, None], rows[None, :]] * inverse[:, :, None] * inverse[:, None, :]
    left = np.ones((columns, count))
    """What of a row's squared length is not explained by the rows before."""
    factor = np.zeros((columns, count, count))
    wrong = np.zeros(columns, bool)
    for k in range(count):
        pivot = np.where(left[:, k] > _ZERO, left[:, k], 0.0)
        root = np.sqrt(pivot)
        factor[:, k, k] = root
        if k + 1 == count:
            break
        below = rest[:, k + 1 :, k]
        wanted = below * np.where(pivot > 0.0, 1.0 / np.where(pivot > 0.0, root, 1.0), 0.0)[:, None]
        most = np.sqrt(left[:, k + 1 :])
        taken = np.minimum(np.maximum(wanted, -most), most)
        wrong |= (np.abs(below - taken * root[:, None]) > _OFF).any(axis=1)
        factor[:, k + 1 :, k] = taken
        left[:, k + 1 :] = np.maximum(left[:, k + 1 :] - taken * taken, 0.0)
        rest[:, k + 1 :, k + 1 :] -= taken[:, :, None] * taken[:, None, :]
    if not wrong.any():
        return gram
    lower = factor[wrong]
    cosines = np.zeros_like(lower)
    for k in range(count):
        cosines += lower[:, :, k, None] * lower[:, None, :, k]
    back = np.argsort(rows)
    result = gram.copy()
    values = (cosines * (scale[wrong][:, :, None] * scale[wrong][:, None, :]))[:, back[:, None], back[None, :]]
    diagonal = np.arange(count)
    values[:, diagonal, diagonal] = gram[wrong][:, diagonal, diagonal]
    result[wrong] = values
    return result
