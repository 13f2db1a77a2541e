"""What could be read of each column, and the chain of moves in which it is worth its bytes. Pure.

The columns of tensors that are alike are looked at together (`Stack`), since what takes time is the number of calls; what
comes out for one tensor does not depend on the others. `mpfs.merge.planner` chooses among the moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mpfs.merge.random import stream_key, uniform
from mpfs.stats.segments import Segments, running_sum

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
        return np.maximum(loss(self.gram, np.ones(self.cost.shape, bool)), 0.0)


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


class Stack:
    """The columns of tensors that are alike, one below the other: as many experts, and read in whole columns or not.

    What comes out for one tensor does not depend on the others: sums over a tensor go in the order of its columns.
    """

    def __init__(self, candidates: Sequence[Candidates], places: Sequence[int]) -> None:
        own = [candidates[place] for place in places]
        self.places = places
        self.names = [item.name for item in own]
        self.whole = own[0].whole_columns
        self.tensors = Segments([len(item.cost) for item in own])
        self.gram = own[0].gram if len(own) == 1 else np.concatenate([item.gram for item in own])
        self.cost = np.concatenate([item.cost for item in own])
        self.energy = np.maximum(loss(self.gram, np.ones(self.cost.shape, bool)), 0.0)

    @property
    def energies(self) -> FloatArray:
        """Of each tensor."""
        return self.tensors.sums(self.energy)

    @property
    def tensor(self) -> IntArray:
        """Which of the candidates each column is of."""
        tensor: IntArray = np.array(self.places, np.int64)[self.tensors.of]
        return tensor

    def cosines(self) -> list[float | None]:
        """The mean cosine between the experts' deltas in each tensor; see `Choice`."""
        total = self.tensors.sums(self.gram)
        squares = np.einsum("tii->ti", total)
        live = squares > 0.0
        norm = np.sqrt(np.where(live, squares, 1.0))
        first, second = np.triu_indices(total.shape[1], 1)
        both = live[:, first] & live[:, second]
        terms = np.where(both, total[:, first, second] / norm[:, first] / norm[:, second], 0.0)
        count = np.count_nonzero(both, axis=1)
        means = (running_sum(terms) / np.maximum(count, 1)).clip(-1.0, 1.0)
        return [mean if pairs else None for mean, pairs in zip(means.tolist(), count.tolist(), strict=True)]


def stacks_of(candidates: Sequence[Candidates]) -> list[Stack]:
    alike: dict[tuple[int, bool], list[int]] = {}
    for place, item in enumerate(candidates):
        alike.setdefault((item.cost.shape[1], item.whole_columns), []).append(place)
    return [Stack(candidates, places) for places in alike.values()]


def scattered(stacks: Sequence[Stack], values: Sequence[FloatArray]) -> list[float]:
    """Numbers of stacks' tensors, in the order of the candidates."""
    found = np.zeros(sum(len(stack.places) for stack in stacks))
    for stack, numbers in zip(stacks, values, strict=True):
        found[stack.places] = numbers
    result: list[float] = found.tolist()
    return result


def loss(gram: FloatArray, left_out: BoolArray) -> FloatArray:
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


def chains(stack: Stack, policy: Policy, seed: int, width: int) -> Moves:
    """The moves of a stack's tensors, along each column's chain."""
    if policy == "layerwise":
        return _by_share(chains(stack, "energy", seed, width))
    columns, count = stack.cost.shape
    drawn = np.zeros((columns, count))
    if policy == "random":
        for name, rows in zip(stack.names, stack.tensors.slices(), strict=True):
            numbers = uniform(stream_key(seed, name, "planner"), 0, drawn[rows].size)
            drawn[rows] = numbers.reshape(drawn[rows].shape)
    spread = _van_der_corput(stack.tensors.places)
    costly = stack.cost > 0
    if stack.whole:
        chosen = np.flatnonzero(costly.any(axis=1))
        experts = np.zeros((len(chosen), width), bool)
        experts[:, :count] = costly[chosen]
        gain, cost = stack.energy[chosen], stack.cost[chosen].sum(axis=1)
        keys = {"energy": -gain / cost, "uniform": spread[chosen], "random": drawn[chosen, :1].sum(axis=1)}
        return _moves(stack, chosen, 0, keys[policy], gain, cost, experts)
    # What is free comes first in every chain, and needs no move.
    given = np.where(costly, drawn, -1.0).argsort(axis=1, kind="stable") if policy == "random" else None
    order, gains, costs = _forward(stack.gram, stack.cost, given)
    if policy == "energy":
        return _hull(stack, order, gains, costs, width)
    if policy == "random":
        step_keys: FloatArray = np.take_along_axis(drawn, order, axis=1)
    else:
        step_keys = (spread[:, None] + np.arange(count) - (~costly).sum(axis=1)[:, None]) / max(1, count)
    return _steps(stack, order, gains, costs, step_keys, width)


def _by_share(moves: Moves) -> Moves:
    """Moves in the order that they have within their tensor, keyed by the share of the tensor's bytes that they come to."""
    moves = moves.take(np.lexsort((moves.position, moves.column, moves.key, moves.tensor)))
    if len(moves.cost):
        spent = np.cumsum(moves.cost)
        first = np.flatnonzero(np.diff(moves.tensor, prepend=-1))
        last = np.append(first[1:], len(spent)) - 1
        before = (spent[first] - moves.cost[first]).repeat(last - first + 1)
        moves.key = (spent - before) / (spent[last].repeat(last - first + 1) - before)
    return moves


def _steps(stack: Stack, order: IntArray, gains: FloatArray, costs: IntArray, keys: FloatArray, width: int) -> Moves:
    """A move for each step of a chain that costs something."""
    rows, step = np.nonzero(costs > 0)
    experts = np.zeros((len(rows), width), bool)
    experts[np.arange(len(rows)), order[rows, step]] = True
    return _moves(stack, rows, step, keys[rows, step], gains[rows, step], costs[rows, step], experts)


def _moves(
    stack: Stack,
    rows: IntArray,
    position: IntArray | int,
    key: FloatArray,
    gain: FloatArray,
    cost: IntArray,
    experts: BoolArray,
) -> Moves:
    positions = np.full(len(rows), position) if isinstance(position, int) else position
    return Moves(stack.tensor[rows], stack.tensors.places[rows], positions, key, gain, cost, experts)


def _forward(gram: FloatArray, cost: IntArray, given: IntArray | None = None) -> tuple[IntArray, FloatArray, IntArray]:
    """Forward selection in every column at once: at each step, the expert whose reading lowers the loss most per byte.

    Returns (C, E) arrays: the expert taken at each step, the loss that this takes away, and its bytes. Experts that
    cost nothing come first. With `given` that is the order, and only the gains are found.
    """
    columns, count = cost.shape
    left = np.ones((columns, count), bool)
    order = np.zeros((columns, count), np.int64)
    gains = np.zeros((columns, count))
    costs = np.zeros((columns, count), np.int64)
    rows = np.arange(columns)
    diagonal = np.einsum("cii->ci", gram)
    divisor = np.maximum(cost, 1)
    free = cost == 0
    # (G_R 1)_i for the set R of experts that are left; taking i out of R lowers 1'G_R 1 by twice that less G_ii.
    pull = np.zeros((columns, count))
    for j in range(count):
        pull += gram[:, :, j]
    for step in range(count):
        gain = 2.0 * pull - diagonal
        if given is None:
            rate = np.where(free, np.inf, gain / divisor)
            best = np.where(left, rate, -np.inf).argmax(axis=1)
        else:
            best = given[:, step]
        order[:, step], gains[:, step], costs[:, step] = best, gain[rows, best], cost[rows, best]
        left[rows, best] = False
        pull -= gram[rows, :, best]
    return order, gains, costs


def _hull(stack: Stack, order: IntArray, gains: FloatArray, costs: IntArray, width: int) -> Moves:
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
    parts = [_steps(stack, order, gains, np.where(falling[:, None], costs, 0), -step_rate, width)]
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
            _moves(stack, active, position, -ceiling[active], more_gain[chosen, goal], more_cost[chosen, goal], experts)
        )
        place[active] = goal
        active = active[goal < count]
        position += 1
    return concatenated(parts, width)


def _van_der_corput(numbers: IntArray) -> FloatArray:
    """Numbers in [0, 1) such that those of 0…n-1 are spread evenly, and every prefix of them by value: bits reversed."""
    values = np.zeros(len(numbers))
    bits = numbers.copy()
    weight = 0.5
    while bits.any():
        values += weight * (bits & 1)
        bits >>= 1
        weight /= 2.0
    return values


def concatenated(parts: Sequence[Moves], width: int) -> Moves:
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
