"""Sign election among weighted deltas (TIES, arXiv 2306.01708, section 4)."""

from __future__ import annotations

from collections.abc import Sequence

from mpfs.merge.deferred import torch
from mpfs.merge.operators.arithmetic import sum_experts


def counting(
    terms: Sequence[torch.Tensor | None], start: int, numel: int, like: torch.Tensor
) -> list[torch.Tensor | None]:
    """Which entries agree with the elected sign: bool of `like`'s shape an expert, None where its term is.

    The sign elected for an element is that of the experts' sum (`sum_experts`), plus where it is zero. An entry counts
    iff its own sign is the elected one; zeros and NaN never do.
    """
    plus = sum_experts(terms, start, numel, like) >= 0
    return [None if term is None else torch.where(plus, term > 0, term < 0) for term in terms]
