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
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mpfs.merge.random import stream_key, uniform_bits

Policy: TypeAlias = Literal["energy", "uniform", "random"]
POLICIES: tuple[Policy, ...] = ("energy", "uniform", "random")

FloatArray: TypeAlias = NDArray[np.float64]
IntArray: TypeAlias = NDArray[np.int64]
BoolArray: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Candidates:
    """What could be read of one tensor: C columns, E experts.

    `gram` (C, E, E) holds the estimated products of weighted deltas, `cost` (C, E) the bytes to read, 0 where an
    expert equals the base. With `whole_columns` a column is read from all experts or from none.
    """

    name: str
    gram: FloatArray
    cost: IntArray
    whole_columns: bool

    @property
    def energy(self) -> FloatArray:
        """(C,): the squared norm of each column's full weighted delta."""
        return np.maximum(_loss(self.gram, np.ones(self.cost.shape, bool)), 0.0)


@dataclass(frozen=True, slots=True)
class Choice:
    """What to read of one tensor: `read` (C, E), True where the plan reads; zero-cost blocks are never listed.

    `energy` and `energy_left_out` are the squared norms of the full weighted delta and of what is not read. `cosine` is
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
class _Moves:
    """All tensors' moves, as parallel arrays; `position` is the place in the column's chain."""

    tensor: IntArray
    column: IntArray
    position: IntArray
    gain: FloatArray
    cost: IntArray
    experts: BoolArray

    def take(self, order: IntArray) -> _Moves:
        return _Moves(
            self.tensor[order],
            self.column[order],
            self.position[order],
            self.gain[order],
            self.cost[order],
            self.experts[order],
        )


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
        candidates: every tensor that is merged, in plan order.
        budget: the most bytes to read; None: no limit.
        fidelity: stop as soon as the predicted fidelity reaches this; None: use the budget up.
        policy: "energy" takes what keeps most delta energy per byte, "uniform" spreads the bytes evenly over every
            tensor's columns, "random" draws blocks at random (a baseline).
        seed: for "random".

    Returns:
        The choice. Its predicted fidelity is 1 - sqrt(energy left out / energy): 1 - |M_budget - M_full| /
        |M_full - base| for methods that are linear in the deltas, and an estimate for the others.
    """
    width = max((item.cost.shape[1] for item in candidates), default=0)
    chains = [_chains(index, item, policy, width) for index, item in enumerate(candidates)]
    moves = _concatenate(chains, width)
    moves = moves.take(_order(moves, candidates, policy, seed))
    energy = [item.energy for item in candidates]
    total = float(sum(float(_ordered_sum(column)) for column in energy))
    taken = _take(moves, budget, None if fidelity is None else total * (1.0 - fidelity) ** 2, total)
    return _choices(candidates, energy, moves, taken)


def predicted_fidelity(choices: Iterable[Choice]) -> float:
    """1 - sqrt(energy left out / energy) over some tensors; 1 where there is no delta at all."""
    total = left_out = 0.0
    for choice in choices:
        total += choice.energy
        left_out += choice.energy_left_out
    return 1.0 if total <= 0.0 else max(0.0, 1.0 - (left_out / total) ** 0.5)


def _loss(gram: FloatArray, left_out: BoolArray) -> FloatArray:
    """(C,): 1'G1 over the experts left out of each column."""
    columns, count = left_out.shape
    total = np.zeros(columns)
    for i in range(count):
        for j in range(count):
            total += np.where(left_out[:, i] & left_out[:, j], gram[:, i, j], 0.0)
    return total


def _chains(index: int, item: Candidates, policy: Policy, width: int) -> _Moves:
    """The moves of one tensor, along each column's chain, of falling gain per byte."""
    count = item.cost.shape[1]
    costly = item.cost > 0
    if item.whole_columns:
        chosen = np.flatnonzero(costly.any(axis=1))
        experts = np.zeros((len(chosen), width), bool)
        experts[:, :count] = costly[chosen]
        gain = item.energy[chosen]
        return _Moves(
            np.full(len(chosen), index),
            chosen,
            np.zeros(len(chosen), np.int64),
            gain,
            item.cost[chosen].sum(1),
            experts,
        )
    order, gains, costs = _forward(item)
    if policy == "energy":
        return _hull(index, order, gains, costs, width)
    steps = [
        (np.flatnonzero(costs[:, step] > 0), step) for step in range(count)
    ]  # one move a block; free ones need no move
    parts = []
    for chosen, step in steps:
        experts = np.zeros((len(chosen), width), bool)
        experts[np.arange(len(chosen)), order[chosen, step]] = True
        parts.append(
            _Moves(
                np.full(len(chosen), index),
                chosen,
                np.full(len(chosen), step),
                gains[chosen, step],
                costs[chosen, step],
                experts,
            )
        )
    return _concatenate(parts, width)


def _forward(item: Candidates) -> tuple[IntArray, FloatArray, IntArray]:
    """Forward selection in every column at once: at each step, the expert whose reading lowers the loss most per byte.

    Returns (C, E) arrays: the expert taken at each step, the loss that this takes away, and its bytes. Experts that
    cost nothing come first.
    """
    columns, count = item.cost.shape
    left = np.ones((columns, count), bool)
    order = np.zeros((columns, count), np.int64)
    gains = np.zeros((columns, count))
    costs = np.zeros((columns, count), np.int64)
    rows = np.arange(columns)
    diagonal = np.stack([item.gram[:, i, i] for i in range(count)], axis=1)
    for step in range(count):
        # Taking i out of R lowers 1'G_R 1 by 2 (G_R 1)_i - G_ii.
        pull = np.zeros((columns, count))
        for j in range(count):
            pull += np.where(left[:, j, None], item.gram[:, :, j], 0.0)
        gain = 2.0 * pull - diagonal
        rate = np.where(item.cost > 0, gain / np.maximum(item.cost, 1), np.inf)
        best = np.where(left, rate, -np.inf).argmax(axis=1)
        order[:, step], gains[:, step], costs[:, step] = best, gain[rows, best], item.cost[rows, best]
        left[rows, best] = False
    return order, gains, costs


def _hull(index: int, order: IntArray, gains: FloatArray, costs: IntArray, width: int) -> _Moves:
    """Join steps of a chain into moves of falling gain per byte (the upper concave envelope of gain over bytes).

    A step that gains nothing by itself but opens the way to one that does (deltas that cancel) is thus taken together
    with it.
    """
    columns, count = order.shape
    gain_at = np.concatenate([np.zeros((columns, 1)), np.cumsum(gains, axis=1)], axis=1)
    cost_at = np.concatenate([np.zeros((columns, 1), np.int64), np.cumsum(costs, axis=1)], axis=1)
    place = np.zeros(columns, np.int64)
    free = cost_at[:, 1:] == 0
    place += free.sum(axis=1)
    parts: list[_Moves] = []
    active = np.flatnonzero(place < count)
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
        parts.append(
            _Moves(
                np.full(len(active), index),
                active,
                np.full(len(active), position),
                more_gain[chosen, goal],
                more_cost[chosen, goal],
                experts,
            )
        )
        place[active] = goal
        active = active[goal < count]
        position += 1
    return _concatenate(parts, width)


def _order(moves: _Moves, candidates: Sequence[Candidates], policy: Policy, seed: int) -> IntArray:
    """The order in which moves are considered."""
    if policy == "energy":
        rate = moves.gain / np.maximum(moves.cost, 1)
        return np.lexsort((moves.position, moves.column, moves.tensor, -rate))
    priority = np.zeros(len(moves.tensor))
    for index, item in enumerate(candidates):
        inside = np.flatnonzero(moves.tensor == index)
        if policy == "random":
            key = stream_key(seed, item.name, "planner")
            drawn = uniform_bits(key, 0, item.cost.size).astype(np.float64)
            flat = moves.column[inside] * item.cost.shape[1] + moves.position[inside]
            priority[inside] = drawn[flat]
        else:
            share = (_van_der_corput(item.cost.shape[0])[moves.column[inside]] + moves.position[inside]) / max(
                1, item.cost.shape[1]
            )
            priority[inside] = share
    return np.lexsort((moves.position, moves.column, moves.tensor, priority))


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


def _take(moves: _Moves, budget: int | None, target: float | None, total: float) -> BoolArray:
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


def _choices(candidates: Sequence[Candidates], energy: list[FloatArray], moves: _Moves, taken: BoolArray) -> Choices:
    read: list[BoolArray] = [np.zeros(item.cost.shape, bool) for item in candidates]
    for index in np.flatnonzero(taken).tolist():
        tensor = int(moves.tensor[index])
        count = read[tensor].shape[1]
        read[tensor][int(moves.column[index])] |= moves.experts[index, :count]
    tensors = []
    nbytes = 0
    for item, column_energy, chosen in zip(candidates, energy, read, strict=True):
        missing = (item.cost > 0) & ~chosen
        left = float(_ordered_sum(np.maximum(_loss(item.gram, missing), 0.0)))
        tensors.append(Choice(chosen, _ordered_sum(column_energy), left, _mean_cosine(item.gram)))
        nbytes += int(item.cost[chosen].sum())
    return Choices(tuple(tensors), nbytes, predicted_fidelity(tensors))


def _mean_cosine(gram: FloatArray) -> float | None:
    count = gram.shape[1]
    total = np.array([[_ordered_sum(gram[:, i, j]) for j in range(count)] for i in range(count)]).reshape(count, count)
    live = [i for i in range(count) if total[i, i] > 0.0]
    pairs = [(i, j) for i in live for j in live if i < j]
    if not pairs:
        return None
    cosines = [float(total[i, j] / (total[i, i] * total[j, j]) ** 0.5) for i, j in pairs]
    return max(-1.0, min(1.0, sum(cosines) / len(cosines)))


def _ordered_sum(values: FloatArray) -> float:
    """Sum in index order (numpy's own pairwise order may change with its version)."""
    return float(np.cumsum(values)[-1]) if len(values) else 0.0


def _concatenate(parts: Sequence[_Moves], width: int) -> _Moves:
    none = np.zeros(0, np.int64)
    everything = [*parts, _Moves(none, none, none, np.zeros(0), none, np.zeros((0, width), bool))]
    return _Moves(
        tensor=np.concatenate([part.tensor for part in everything]),
        column=np.concatenate([part.column for part in everything]),
        position=np.concatenate([part.position for part in everything]),
        gain=np.concatenate([part.gain for part in everything]),
        cost=np.concatenate([part.cost for part in everything]),
        experts=np.concatenate([part.experts for part in everything]),
    )
