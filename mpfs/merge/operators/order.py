"""Order statistics of a tensor that is never held whole, for signed values.

The bit pattern of a float, with its sign bit flipped or, where that is set, all bits, is an unsigned integer that
orders as the numbers do (-0 before 0; NaN beyond infinity). So the value of a rank is found by counting patterns, 16
bits a pass, from the top: one pass for 16-bit types, two for float32, four for float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mpfs.merge.deferred import torch

Keys: TypeAlias = NDArray[np.unsignedinteger[Any]]

_DIGIT = 16


def keys(values: torch.Tensor) -> Keys:
    """The integers that order as the values do; of the values' shape and width."""
    size = values.element_size()
    bits = values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
    top = 8 * size - 1
    # An arithmetic shift makes a mask of the sign: all ones where it is set.
    ordered = bits ^ ((bits >> top) | torch.tensor(-(2**top), dtype=bits.dtype, device=bits.device))
    found: Keys = ordered.cpu().numpy().view(f"u{size}")
    return found


def value(key: int, dtype: torch.dtype) -> float:
    """The number that a key stands for."""
    size = dtype.itemsize
    sign = 1 << (8 * size - 1)
    bits = key ^ sign if key & sign else key ^ (2 * sign - 1)
    pattern = torch.from_numpy(np.array([bits], dtype=f"u{size}").view(f"i{size}"))
    return float(pattern.view(dtype))


def order_statistics(
    dtype: torch.dtype, ranks: Sequence[int], stream: Callable[[], Iterator[torch.Tensor]]
) -> list[float]:
    """The values at these ranks in ascending order, counted from 0.

    Args:
        dtype: the values' float dtype.
        ranks: each below the number of values.
        stream: streams the values, 1-D tensors of `dtype`; called once a pass.
    """
    bits = 8 * dtype.itemsize
    prefixes = [0] * len(ranks)
    below = [0] * len(ranks)
    for shift in range(bits - _DIGIT, -1, -_DIGIT):
        counts = {prefix: np.zeros(2**_DIGIT, dtype=np.int64) for prefix in prefixes}
        for values in stream():
            digits = keys(values)
            heads = digits >> np.array(shift, dtype=digits.dtype)
            for prefix, histogram in counts.items():
                chosen = heads if shift + _DIGIT == bits else heads[heads >> np.array(_DIGIT, digits.dtype) == prefix]
                tails = (chosen & np.array(2**_DIGIT - 1, digits.dtype)).astype(np.int64)
                histogram += np.bincount(tails, minlength=2**_DIGIT)
        for i, rank in enumerate(ranks):
            upto = np.cumsum(counts[prefixes[i]])
            digit = int(np.searchsorted(upto, rank - below[i], side="right"))
            below[i] += int(upto[digit - 1]) if digit else 0
            prefixes[i] = prefixes[i] << _DIGIT | digit
    return [value(prefix, dtype) for prefix in prefixes]
