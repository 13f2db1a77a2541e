"""The numba kernel of `mpfs.stats.estimate.delta_gram`: products of many deltas' sketches, nogil, equal to numpy's to the last bit.

Importing this module imports numba; only `mpfs.stats.native` does so, to compile.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def gram(base: Any, experts: Any, first: Any, deltas: Any, terms: Any, result: Any) -> None:
    """Gram matrices of the experts' deltas; see `delta_gram`.

    `base` (C, R) and `experts` (E, C, R) are records as f32, in which the sketch begins at `first`. `deltas` (E, K) and
    `terms` (K / 2,) are scratch, K the width of a sketch. `result` is (C, E, E).
    """
    for c in range(base.shape[0]):
        for i in range(experts.shape[0]):
            for k in range(deltas.shape[1]):
                deltas[i, k] = np.float64(experts[i, c, first + k]) - np.float64(base[c, first + k])
        for i in range(experts.shape[0]):
            for j in range(i, experts.shape[0]):
                half = deltas.shape[1] // 2
                for k in range(half):
                    terms[k] = deltas[i, k] * deltas[j, k] + deltas[i, k + half] * deltas[j, k + half]
                while half > 1:
                    half //= 2
                    for k in range(half):
                        terms[k] += terms[k + half]
                result[c, i, j] = terms[0]
                result[c, j, i] = terms[0]
