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
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mpfs.merge.random import stream_key, uniform

Policy: TypeAlias = Literal["energy", "layerwise", "uniform", "random"]
POLICIES: tuple[Policy, ...] = ("energy", "layerwise", "uniform", "random")

FloatArray: TypeAlias = NDArray[np.float64]
IntArray: TypeAlias = NDArray[np.int64]
BoolArray: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Candidates:
    """What could be read of one tensor: C columns, E experts.

    `gram` (C, E, E) holds the estimated products of weighted deltas, `cost` (C, E) the bytes to read, 0 where an
    expert equals the base. With `whole_columns` a column is read from all experts or from none. `drift` is by how much
    the squared norm of what the full merge changes exceeds that of the deltas (a sum of models whose weights do not
    sum to 1 also scales the base).
    """

    name: str
    gram: FloatArray
    cost: IntArray
    whole_columns: bool
    drift: float = 0.0

    @property
    def energy(self) -> FloatArray:
        """(C,): the squared norm of each column's full weighted delta."""
        return np.maximum(_loss(self.gram, np.ones(self.cost.shape, bool)), 0.0)


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


@dataclass(slots=True)
class Moves:
    """All tensors' moves, as parallel arrays. `position` is the place in the column's chain, `key` what they are sorted
    by, least first; it does not fall along a chain."""

    tensor: IntArray
    column: IntArray
    position: IntArray
    key: FloatArray
    gain: FloatArray
    cost: IntArray
    experts: BoolArray

    def take(self, order: IntArray) -> Moves:
        return Moves(
            self.tensor[order],
            self.column[order],
            self.position[order],
            self.key[order],
            self.gain[order],
            self.cost[order],
            self.experts[order],
        )


@dataclass(frozen=True, slots=True)
class Ranked:
    """Candidates with everything that could be read of them, in the order in which it is worth its bytes."""

    candidates: Sequence[Candidates]
    energy: list[FloatArray]
    moves: Moves

    def choose(self, *, budget: int | None = None, fidelity: float | None = None) -> Choices:
        """Choose what to read; see `choose`."""
        total, change = self._totals()
        moves = self.moves
        taken = _take(moves, budget, None if fidelity is None else change * (1.0 - fidelity) ** 2, total)
        read: list[BoolArray] = [np.zeros(item.cost.shape, bool) for item in self.candidates]
        for index in np.flatnonzero(taken).tolist():
            chosen = read[int(moves.tensor[index])]
            chosen[int(moves.column[index])] |= moves.experts[index, : chosen.shape[1]]
        return _choices(self.candidates, self.energy, read)

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
        total = change = 0.0
        for item, column in zip(self.candidates, self.energy, strict=True):
            energy = _ordered_sum(column)
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
    moves = _concatenate([_chains(index, item, policy, seed, width) for index, item in enumerate(candidates)], width)
    moves = moves.take(np.lexsort((moves.position, moves.column, moves.tensor, moves.key)))
    return Ranked(candidates, [item.energy for item in candidates], moves)


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
        return _choices(candidates, [item.energy for item in candidates], [item.cost > 0 for item in candidates])
    return rank(candidates, policy=policy, seed=seed).choose(budget=budget, fidelity=fidelity)


def judge(candidates: Sequence[Candidates], read: Sequence[BoolArray]) -> Choices:
    """What a choice comes to that was made elsewhere: `read` (C, E) for each tensor; what costs nothing is not listed."""
    energy = [item.energy for item in candidates]
    return _choices(
        candidates, energy, [chosen & (item.cost > 0) for item, chosen in zip(candidates, read, strict=True)]
    )


def predicted_fidelity(choices: Iterable[Choice]) -> float:
    """1 - sqrt(energy left out / energy) over some tensors; 1 where there is no delta at all."""
    total = left_out = 0.0
    for choice in choices:
        total += choice.energy
        left_out += choice.energy_left_out
    return 1.0 if total <= 0.0 else max(0.0, 1.0 - sqrt(left_out / total))


def _loss(gram: FloatArray, left_out: BoolArray) -> FloatArray:
    """(C,): 1'G1 over the experts left out of each column."""
    inside = left_out.astype(np.float64)
    pull = np.zeros(inside.shape)
    for j in range(inside.shape[1]):
        pull += gram[:, :, j] * inside[:, j, None]
    pull *= inside
    total = np.zeros(len(inside))
    for i in range(inside.shape[1]):
        total += pull[:, i]
    return total


def _chains(index: int, item: Candidates, policy: Policy, seed: int, width: int) -> Moves:
    """The moves of one tensor, along each column's chain."""
    if policy == "layerwise":
        return _by_share(_chains(index, item, "energy", seed, width))
    columns, count = item.cost.shape
    drawn = np.zeros((columns, count))
    if policy == "random":
        key = stream_key(seed, item.name, "planner")
        drawn = uniform(key, 0, item.cost.size).reshape(columns, count)
    spread = _van_der_corput(columns)
    costly = item.cost > 0
    if item.whole_columns:
        chosen = np.flatnonzero(costly.any(axis=1))
        experts = np.zeros((len(chosen), width), bool)
        experts[:, :count] = costly[chosen]
        gain, cost = item.energy[chosen], item.cost[chosen].sum(axis=1)
        keys = {"energy": -gain / cost, "uniform": spread[chosen], "random": drawn[chosen, :1].sum(axis=1)}
        return _moves(index, chosen, 0, keys[policy], gain, cost, experts)
    # What is free comes first in every chain, and needs no move.
    given = np.where(costly, drawn, -1.0).argsort(axis=1, kind="stable") if policy == "random" else None
    order, gains, costs = _forward(item, given)
    if policy == "energy":
        return _hull(index, order, gains, costs, width)
    if policy == "random":
        step_keys: FloatArray = np.take_along_axis(drawn, order, axis=1)
    else:
        step_keys = (spread[:, None] + np.arange(count) - (~costly).sum(axis=1)[:, None]) / max(1, count)
    return _concatenate(_steps(index, order, gains, costs, step_keys, width), width)


def _by_share(moves: Moves) -> Moves:
    """A tensor's moves in the order that they have, keyed by the share of the tensor's bytes that they come to."""
    moves = moves.take(np.lexsort((moves.position, moves.column, moves.key)))
    spent = np.cumsum(moves.cost)
    moves.key = spent / spent[-1] if len(spent) else moves.key
    return moves


def _steps(
    index: int, order: IntArray, gains: FloatArray, costs: IntArray, keys: FloatArray, width: int
) -> list[Moves]:
    """A move for each step of a chain that costs something."""
    parts = []
    for step in range(order.shape[1]):
        chosen = np.flatnonzero(costs[:, step] > 0)
        experts = np.zeros((len(chosen), width), bool)
        experts[np.arange(len(chosen)), order[chosen, step]] = True
        parts.append(_moves(index, chosen, step, keys[chosen, step], gains[chosen, step], costs[chosen, step], experts))
    return parts


def _moves(
    index: int,
    columns: IntArray,
    position: int,
    key: FloatArray,
    gain: FloatArray,
    cost: IntArray,
    experts: BoolArray,
) -> Moves:
    count = len(columns)
    return Moves(np.full(count, index), columns, np.full(count, position), key, gain, cost, experts)


def _forward(item: Candidates, given: IntArray | None = None) -> tuple[IntArray, FloatArray, IntArray]:
    """Forward selection in every column at once: at each step, the expert whose reading lowers the loss most per byte.

    Returns (C, E) arrays: the expert taken at each step, the loss that this takes away, and its bytes. Experts that
    cost nothing come first. With `given` that is the order, and only the gains are found.
    """
    columns, count = item.cost.shape
    left = np.ones((columns, count), bool)
    order = np.zeros((columns, count), np.int64)
    gains = np.zeros((columns, count))
    costs = np.zeros((columns, count), np.int64)
    rows = np.arange(columns)
    diagonal = np.einsum("cii->ci", item.gram)
    divisor = np.maximum(item.cost, 1)
    free = item.cost == 0
    # (G_R 1)_i for the set R of experts that are left; taking i out of R lowers 1'G_R 1 by twice that less G_ii.
    pull = np.zeros((columns, count))
    for j in range(count):
        pull += item.gram[:, :, j]
    for step in range(count):
        gain = 2.0 * pull - diagonal
        if given is None:
            rate = np.where(free, np.inf, gain / divisor)
            best = np.where(left, rate, -np.inf).argmax(axis=1)
        else:
            best = given[:, step]
        order[:, step], gains[:, step], costs[:, step] = best, gain[rows, best], item.cost[rows, best]
        left[rows, best] = False
        pull -= item.gram[rows, :, best]
    return order, gains, costs


def _hull(index: int, order: IntArray, gains: FloatArray, costs: IntArray, width: int) -> Moves:
    """Join steps of a chain into moves of falling gain per byte (the upper concave envelope of gain over bytes).

    A step that gains nothing by itself but opens the way to one that does (deltas that cancel) is thus taken together
    with it.
    """
    columns, count = order.shape
    gain_at = np.concatenate([np.zeros((columns, 1)), np.cumsum(gains, axis=1)], axis=1)
    cost_at = np.concatenate([np.zeros((columns, 1), np.int64), np.cumsum(costs, axis=1)], axis=1)
    # Most chains fall by themselves; the others are climbed down from corner to corner.
    step_rate = np.where(costs > 0, gains / np.maximum(costs, 1), np.inf)
    falling: BoolArray = np.asarray((step_rate[:, 1:] <= step_rate[:, :-1]).all(axis=1))
    parts = _steps(index, order, gains, np.where(falling[:, None], costs, 0), -step_rate, width)
    place = (cost_at[:, 1:] == 0).sum(axis=1)
    active = np.flatnonzero(~falling & (place < count))
    ceiling = np.full(columns, np.inf)
    position = 0
    while len(active):
        here = place[active]
        ahead = np.arange(count + 1)[None, :] > here[:, None]
        more_gain = gain_at[active] - gain_at[active, here][:, None]
        more_cost = cost_at[active] - cost_at[active, here][:, None]
        rate = np.where(ahead, more_gain / np.maximum(more_cost, 1), -np.inf)
        # The farthest of equally good points, so that a chain has as few moves as it can.
        goal = count - rate[:, ::-1].argmax(axis=1)
        experts = np.zeros((len(active), width), bool)
        for step in range(count):
            inside = (here <= step) & (step < goal) & (costs[active, step] > 0)
            experts[np.flatnonzero(inside), order[active[inside], step]] = True
        chosen = np.arange(len(active))
        # Rounding must not lift a move above the one before it.
        ceiling[active] = np.minimum(ceiling[active], rate[chosen, goal])
        parts.append(
            _moves(index, active, position, -ceiling[active], more_gain[chosen, goal], more_cost[chosen, goal], experts)
        )
        place[active] = goal
        active = active[goal < count]
        position += 1
    return _concatenate(parts, width)


def _van_der_corput(count: int) -> FloatArray:
    """Numbers in [0, 1) for 0…count-1 such that every prefix, by value, is spread evenly: bits reversed."""
    values = np.zeros(count)
    bits = np.arange(count)
    weight = 0.5
    while bits.any():
        values += weight * (bits & 1)
        bits >>= 1
        weight /= 2.0
    return values


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
    blocked: set[tuple[int, int]] = set()
    smallest = int(moves.cost[whole:limit].min(initial=budget + 1))
    for index in range(whole, limit):
        if rest < smallest:
            break
        place = (int(moves.tensor[index]), int(moves.column[index]))
        if place in blocked:
            continue
        if moves.cost[index] <= rest:
            taken[index] = True
            rest -= int(moves.cost[index])
        else:
            blocked.add(place)
    return taken


def _choices(candidates: Sequence[Candidates], energy: list[FloatArray], read: list[BoolArray]) -> Choices:
    tensors = []
    nbytes = 0
    for item, column_energy, chosen in zip(candidates, energy, read, strict=True):
        missing = (item.cost > 0) & ~chosen
        left = _ordered_sum(np.maximum(_loss(item.gram, missing), 0.0)) if missing.any() else 0.0
        change = max(0.0, _ordered_sum(column_energy) + item.drift)
        tensors.append(Choice(chosen, change, left, _mean_cosine(item.gram)))
        nbytes += int(item.cost[chosen].sum())
    return Choices(tuple(tensors), nbytes, predicted_fidelity(tensors))


def _mean_cosine(gram: FloatArray) -> float | None:
    if not len(gram):
        return None
    total = np.cumsum(gram, axis=0)[-1]
    live = [i for i in range(len(total)) if total[i, i] > 0.0]
    pairs = [(i, j) for i in live for j in live if i < j]
    if not pairs:
        return None
    norm = [sqrt(max(float(total[i, i]), 0.0)) for i in range(len(total))]
    mean = sum(float(total[i, j]) / norm[i] / norm[j] for i, j in pairs) / len(pairs)
    return max(-1.0, min(1.0, mean))


def _ordered_sum(values: FloatArray) -> float:
    """Sum in index order (numpy's own pairwise order may change with its version)."""
    return float(np.cumsum(values)[-1]) if len(values) else 0.0


def _concatenate(parts: Sequence[Moves], width: int) -> Moves:
    none = np.zeros(0, np.int64)
    everything = [*parts, Moves(none, none, none, np.zeros(0), np.zeros(0), none, np.zeros((0, width), bool))]
    return Moves(
        tensor=np.concatenate([part.tensor for part in everything]),
        column=np.concatenate([part.column for part in everything]),
        position=np.concatenate([part.position for part in everything]),
        key=np.concatenate([part.key for part in everything]),
        gain=np.concatenate([part.gain for part in everything]),
        cost=np.concatenate([part.cost for part in everything]),
        experts=np.concatenate([part.experts for part in everything]),
    )
