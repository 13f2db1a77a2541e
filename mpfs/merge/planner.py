"""Choosing what to read: the most of a merge for the bytes, from sketches alone. Pure.

For a column of blocks with weighted deltas d_i, the Gram matrix G (scaled by the weights) gives the loss of leaving a
set R of experts out: |sum over R of d_i|^2 = 1'G_R 1. Columns do not interact, so each has a chain of *moves* (read
one more expert, or several at once where one alone would not help) of falling gain per byte, and the best plan for a
budget takes moves by gain per byte. This goes past MergePipe's planner (arXiv 2602.13273), which ranks whole blocks
by a conflict score, by costing every subset that a chain passes through.

Everything is elementwise float64 in a fixed order with ties broken by tensor, column and chain position: a plan is a
pure function of its inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from mpfs.merge.chains import (
    POLICIES,
    BoolArray,
    Candidates,
    FloatArray,
    IntArray,
    Moves,
    Policy,
    Stack,
    chains,
    concatenated,
    loss,
    scattered,
    stacks_of,
)

__all__ = ["POLICIES", "BoolArray", "Candidates", "FloatArray", "IntArray", "Policy", "Ranked"]


@dataclass(frozen=True, slots=True)
class Choice:
    """What to read of one tensor: `read` (C, E), True where the plan reads; zero-cost blocks are never listed.

    `energy` and `energy_left_out` are the squared norms of what the full merge changes and of what is not read. `cosine` is
    the mean cosine between the experts' weighted deltas, in pairs; None with fewer than two that are not zero.
    """

    read: BoolArray
    energy: float
    energy_left_out: float
    cosine: float | None


@dataclass(frozen=True, slots=True)
class Choices:
    """A plan's choices, tensor by tensor, the bytes they read, and the fidelity that they predict."""

    tensors: tuple[Choice, ...]
    nbytes: int
    fidelity: float


@dataclass(frozen=True, slots=True)
class Ranked:
    """Candidates with everything that could be read of them, in the order in which it is worth its bytes."""

    candidates: Sequence[Candidates]
    moves: Moves
    _stacks: Sequence[Stack]

    def choose(self, *, budget: int | None = None, fidelity: float | None = None) -> Choices:
        """Choose what to read; see `choose`."""
        total, change = self._totals()
        moves = self.moves
        taken = _take(moves, budget, None if fidelity is None else change * (1.0 - fidelity) ** 2, total)
        starts = np.cumsum([0, *(len(item.cost) for item in self.candidates)])
        width = moves.experts.shape[1]
        read: BoolArray = np.zeros((int(starts[-1]), width), bool)
        # No two moves of a column are about the same expert.
        move, expert = np.nonzero(moves.experts[taken])
        rows = starts[moves.tensor[taken]] + moves.column[taken]
        read[rows[move], expert] = True
        return _choices(
            self.candidates,
            self._stacks,
            [
                read[start:stop, : item.cost.shape[1]]
                for item, start, stop in zip(self.candidates, starts[:-1].tolist(), starts[1:].tolist(), strict=True)
            ],
        )

    def curve(self, points: int = 200) -> list[tuple[int, float]]:
        """What every budget would buy: (bytes read, predicted fidelity), from nothing to everything, at most so many
        points and the two ends."""
        total, change = self._totals()
        spent = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.moves.cost)])
        left = np.concatenate([np.full(1, total), total - np.cumsum(self.moves.gain)])
        wanted = np.searchsorted(spent, np.linspace(0.0, float(spent[-1]), max(2, points)))
        places = np.unique(np.concatenate([[0], wanted, [len(spent) - 1]])).tolist()
        return [
            (int(spent[place]), 1.0 if change <= 0.0 else max(0.0, 1.0 - sqrt(max(0.0, float(left[place])) / change)))
            for place in places
        ]

    def _totals(self) -> tuple[float, float]:
        """The energy of the deltas, and that of what the full merge changes."""
        energies = scattered(self._stacks, [stack.energies for stack in self._stacks])
        total = change = 0.0
        for item, energy in zip(self.candidates, energies, strict=True):
            total += energy
            change += max(0.0, energy + item.drift)
        return total, change


def rank(candidates: Sequence[Candidates], *, policy: Policy = "energy", seed: int = 0) -> Ranked:
    """Put everything that could be read in order.

    Args:
        candidates: every tensor that is merged, in plan order.
        policy: "energy" takes what keeps most delta energy per byte, "layerwise" does so within each tensor and gives
            every tensor the same share of its bytes, "uniform" spreads the bytes evenly over every tensor's columns,
            "random" draws blocks at random (a baseline).
        seed: for "random".
    """
    width = max((item.cost.shape[1] for item in candidates), default=0)
    stacks = stacks_of(candidates)
    moves = concatenated([chains(stack, policy, seed, width) for stack in stacks], width)
    place = np.lexsort((moves.position, moves.column, moves.tensor))
    order = place[np.argsort(moves.key[place], kind="stable")]
    return Ranked(candidates, moves.take(order), stacks)


def choose(
    candidates: Sequence[Candidates],
    *,
    budget: int | None = None,
    fidelity: float | None = None,
    policy: Policy = "energy",
    seed: int = 0,
) -> Choices:
    """Choose what to read.

    Args:
        candidates, policy, seed: see `rank`.
        budget: the most bytes to read; None: no limit.
        fidelity: stop as soon as the predicted fidelity reaches this; None: use the budget up.

    Returns:
        The choice. Its predicted fidelity is 1 - sqrt(energy left out / energy): 1 - |M_budget - M_full| /
        |M_full - base| for methods that are linear in the deltas, and an estimate for the others.
    """
    if budget is None and fidelity is None:
        return _choices(candidates, stacks_of(candidates), [item.cost > 0 for item in candidates])
    return rank(candidates, policy=policy, seed=seed).choose(budget=budget, fidelity=fidelity)


def judge(candidates: Sequence[Candidates], read: Sequence[BoolArray]) -> Choices:
    """What a choice comes to that was made elsewhere: `read` (C, E) for each tensor; what costs nothing is not listed."""
    chosen = [mine & (item.cost > 0) for item, mine in zip(candidates, read, strict=True)]
    return _choices(candidates, stacks_of(candidates), chosen)


def predicted_fidelity(choices: Iterable[Choice]) -> float:
    """1 - sqrt(energy left out / energy) over some tensors; 1 where there is no delta at all."""
    total = left_out = 0.0
    for choice in choices:
        total += choice.energy
        left_out += choice.energy_left_out
    return 1.0 if total <= 0.0 else max(0.0, 1.0 - sqrt(left_out / total))


def _take(moves: Moves, budget: int | None, target: float | None, total: float) -> BoolArray:
    """Which moves are made: in order, those that still fit, until the energy left out is down to `target`."""
    taken = np.zeros(len(moves.tensor), bool)
    limit = len(taken)
    if target is not None:
        left = total - np.cumsum(moves.gain)
        reached = np.flatnonzero(left <= target)
        limit = 0 if total <= target else (int(reached[0]) + 1 if len(reached) else limit)
    if budget is None:
        taken[:limit] = True
        return taken
    spent = np.cumsum(moves.cost[:limit])
    whole = int(np.searchsorted(spent, budget, side="right"))
    taken[:whole] = True
    rest = budget - (int(spent[whole - 1]) if whole else 0)
    # What no longer fits is passed over; later moves of its column build on it and are passed over as well.
    cost = moves.cost[whole:limit]
    smallest = int(cost.min(initial=budget + 1))
    if rest < smallest:
        return taken
    before = _before(moves, whole, limit)
    for index in np.flatnonzero(cost <= rest).tolist():
        if rest < smallest:
            break
        if cost[index] <= rest and (before[index] < 0 or taken[whole + before[index]]):
            taken[whole + index] = True
            rest -= int(cost[index])
    return taken


def _before(moves: Moves, start: int, stop: int) -> IntArray:
    """For each of these moves the one before it in its column, counted from `start`; -1 where there is none."""
    tensor, column = moves.tensor[start:stop], moves.column[start:stop]
    place = tensor * (int(column.max(initial=0)) + 1) + column
    order = np.argsort(place, kind="stable")
    again = place[order[1:]] == place[order[:-1]]
    before = np.full(stop - start, -1)
    before[order[1:][again]] = order[:-1][again]
    return before


def _choices(candidates: Sequence[Candidates], stacks: Sequence[Stack], read: Sequence[BoolArray]) -> Choices:
    left = []
    cosines: list[float | None] = [None] * len(candidates)
    nbytes = 0
    for stack in stacks:
        chosen = np.concatenate([read[place] for place in stack.places])
        missing = (stack.cost > 0) & ~chosen
        lost = np.zeros(len(missing))
        rows = np.flatnonzero(missing.any(axis=1))
        lost[rows] = np.maximum(loss(stack.gram[rows], missing[rows]), 0.0)
        left.append(stack.tensors.sums(lost))
        for place, cosine in zip(stack.places, stack.cosines(), strict=True):
            cosines[place] = cosine
        nbytes += int(stack.cost[chosen].sum())
    energies = scattered(stacks, [stack.energies for stack in stacks])
    tensors = tuple(
        Choice(mine, max(0.0, energy + item.drift), lost, cosine)
        for item, mine, energy, lost, cosine in zip(
            candidates, read, energies, scattered(stacks, left), cosines, strict=True
        )
    )
    return Choices(tensors, nbytes, predicted_fidelity(tensors))
