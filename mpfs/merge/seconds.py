"""How long a merge will take, from how long merges took in this repository. Pure, and no part of a plan: a plan's id
must not depend on the machine."""

from __future__ import annotations

from collections.abc import Iterable
from math import log
from statistics import median

from mpfs.objects import Cost, Figures

_NEAREST = 9
"""Past runs that an estimate rests on: those that moved about as many bytes."""


def estimate_seconds(cost: Cost, runs: Iterable[Figures]) -> float | None:
    """The median rate of the past runs that are nearest in size, applied to what a plan reads and writes.

    Args:
        cost: the plan's.
        runs: figures of past runs. Those that reused results, also measured fidelity or ran with others say nothing and
            are left out.

    Returns:
        Seconds; None without a run to go by. 0 for a plan that moves nothing.
    """
    planned = cost.expert_bytes_planned + cost.base_bytes_read + cost.bytes_written
    known = [
        (run.expert_bytes_read + run.base_bytes_read + run.bytes_written, run.seconds)
        for run in runs
        if run.fidelity is None
        and run.variants == 1
        and run.blocks_computed
        and not run.blocks_reused
        and run.seconds > 0.0
    ]
    known = [(nbytes, seconds) for nbytes, seconds in known if nbytes > 0]
    if not known:
        return None
    if planned == 0:
        return 0.0
    nearest = sorted(known, key=lambda run: (abs(log(run[0] / planned)), run))[:_NEAREST]
    return planned * median(seconds / nbytes for nbytes, seconds in nearest)
