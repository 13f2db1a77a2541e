"""Choosing what to read under several bounds at once: of bytes for some models or tensors, or of how close to come. Pure.

The moves are those of `mpfs.merge.planner`, in their order, and each is made where all bounds that it touches leave room.
Where a bound on some experts is in the way, the others of a move are read all the same if that is worth it: what a
chain promised no longer holds in such a column, so that its later moves are judged by what they gain from there.
First come the moves that a fidelity needs; then, where bytes bound the rest, whatever else is worth most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpfs.merge.planner import BoolArray, Choices, FloatArray, IntArray, Ranked, judge


@dataclass(frozen=True, slots=True)
class Limit:
    """A bound on some cells, which are pairs of a tensor and an expert: of each of the candidates, `cells` says which
    experts are meant (E,), all or some.

    `nbytes` is the most to be read of them, `fidelity` what they must reach; one of the two is None. What is meant by the
    fidelity of single experts is that of their own deltas, whatever the others do.
    """

    cells: Sequence[BoolArray]
    nbytes: int | None = None
    fidelity: float | None = None


@dataclass(frozen=True, slots=True)
class Bounded:
    """What was chosen. `missed` are the limits whose fidelity is not reached, and for each those in the way."""

    choices: Choices
    missed: dict[int, list[int]]


def choose_bounded(ranked: Ranked, limits: Sequence[Limit], *, greedy: bool = True) -> Bounded:
    """Choose under limits.

    Args:
        ranked: the candidates in order.
        limits: all of them hold.
        greedy: only moves that gain something are made where a chain was broken; not so for baselines.
    """
    chooser = _Chooser(ranked, limits, greedy)
    chooser.reach()
    chooser.fill()
    return Bounded(judge(ranked.candidates, chooser.read), chooser.missed())


class _Chooser:
    def __init__(self, ranked: Ranked, limits: Sequence[Limit], greedy: bool) -> None:
        self.candidates = ranked.candidates
        self.moves = ranked.moves
        self.limits = limits
        self.greedy = greedy
        self.read: list[BoolArray] = [np.zeros(item.cost.shape, bool) for item in self.candidates]
        self.tensors: list[int] = self.moves.tensor.tolist()
        self.columns: list[int] = self.moves.column.tolist()
        self.gains: list[float] = self.moves.gain.tolist()
        self.single: list[bool] = (np.count_nonzero(self.moves.experts, axis=1) == 1).tolist()
        self.done = np.zeros(len(self.tensors), bool)
        self.broken: set[tuple[int, int]] = set()
        everything = range(len(limits))
        self.targets = [index for index in everything if limits[index].fidelity is not None]
        # Limits of single experts; the others are about all experts of some tensors.
        self.partial = [any(cells.any() and not cells.all() for cells in limit.cells) for limit in limits]
        # Which limits a tensor's experts fall under.
        self.touching = [
            [index for index in everything if limits[index].cells[tensor].any()]
            for tensor in range(len(self.candidates))
        ]
        self.of_bytes = [[index for index in some if limits[index].nbytes is not None] for some in self.touching]
        self.of_fidelity = [[index for index in some if limits[index].fidelity is not None] for some in self.touching]
        self.room = [0 if limit.nbytes is None else limit.nbytes for limit in limits]
        self.in_the_way: dict[int, set[int]] = {index: set() for index in self.targets}
        costs, own = self._by_limit()
        self.costs: list[list[int]] = [values.tolist() for values in costs]
        self.own: list[list[float]] = [values.tolist() for values in own]
        # Below this, nothing that falls under the limit fits any more.
        self.least = [int(values[values > 0].min(initial=1 << 62)) for values in costs]
        self.left = [self._all(index) for index in everything]
        self.goal = [self._goal(index) for index in everything]

    def _by_limit(self) -> tuple[list[IntArray], list[FloatArray]]:
        """For each limit, what each move reads under it, and what its experts' own deltas there come to."""
        count = len(self.tensors)
        costs = [np.zeros(count, np.int64) for _ in self.limits]
        own = [np.zeros(count) for _ in self.limits]
        order = np.argsort(self.moves.tensor, kind="stable")
        starts = np.searchsorted(self.moves.tensor[order], np.arange(len(self.candidates) + 1))
        for tensor, item in enumerate(self.candidates):
            mine = order[starts[tensor] : starts[tensor + 1]]
            columns = self.moves.column[mine]
            experts = self.moves.experts[mine, : item.cost.shape[1]]
            for index in self.touching[tensor]:
                inside = experts & self.limits[index].cells[tensor]
                costs[index][mine] = np.where(inside, item.cost[columns], 0).sum(axis=1)
                if self.limits[index].fidelity is not None and self.partial[index]:
                    energy = np.einsum("cii->ci", item.gram)[columns]
                    own[index][mine] = np.cumsum(np.where(inside, energy, 0.0), axis=1)[:, -1]
        return costs, own

    def _all(self, index: int) -> float:
        """The energy of all that a fidelity is about."""
        total = 0.0
        if self.limits[index].fidelity is None:
            return total
        for item, cells in zip(self.candidates, self.limits[index].cells, strict=True):
            if not cells.any() or not len(item.cost):
                continue
            if not self.partial[index]:
                total += float(np.cumsum(item.energy)[-1])
                continue
            for expert in np.flatnonzero(cells).tolist():
                total += float(np.cumsum(np.maximum(item.gram[:, expert, expert], 0.0))[-1])
        return total

    def _goal(self, index: int) -> float:
        """What of it may be left out."""
        limit = self.limits[index]
        if limit.fidelity is None:
            return 0.0
        change = self.left[index]
        if not self.partial[index]:
            change += sum(item.drift for item, cells in zip(self.candidates, limit.cells, strict=True) if cells.any())
        return max(0.0, change) * (1.0 - limit.fidelity) ** 2

    def reach(self) -> None:
        """Make moves until all targets are reached, or nothing more can be done for them."""
        wanted = {index for index in self.targets if self.left[index] > self.goal[index]}
        for move in range(len(self.tensors)):
            if not wanted:
                return
            here = [index for index in self.of_fidelity[self.tensors[move]] if index in wanted]
            if any(self.costs[index][move] > 0 for index in here):
                self._make(move, here)
                wanted.difference_update([index for index in here if self.left[index] <= self.goal[index]])

    def fill(self) -> None:
        """Make all other moves that there is room for; what a target was about is left alone."""
        free: list[BoolArray] = []
        for tensor, item in enumerate(self.candidates):
            here = np.ones(item.cost.shape[1], bool)
            for index in self.of_fidelity[tensor]:
                here &= ~self.limits[index].cells[tensor]
            free.append(here)
        for move in np.flatnonzero(~self.done).tolist():
            only = free[self.tensors[move]]
            if only.any():
                self._make(move, (), None if only.all() else only)

    def missed(self) -> dict[int, list[int]]:
        """Targets that are not reached, and which limits are in the way."""
        return {
            index: sorted(self.in_the_way[index])
            for index in self.targets
            if self.left[index] > self.goal[index] and self.in_the_way[index]
        }

    def _make(self, move: int, targets: Sequence[int], only: BoolArray | None = None) -> None:
        """Make a move as far as there is room; `targets` are those that it is made for, `only` the experts that count."""
        tensor, column = self.tensors[move], self.columns[move]
        bounds = self.of_bytes[tensor]
        tight = [index for index in bounds if self.costs[index][move] > self.room[index]]
        if only is None and not tight and (tensor, column) not in self.broken:
            for index in bounds:
                self.room[index] -= self.costs[index][move]
            for index in self.of_fidelity[tensor]:
                self.left[index] -= self.own[index][move] if self.partial[index] else self.gains[move]
            self.read[tensor][column] |= self.moves.experts[move, : self.read[tensor].shape[1]]
            self.done[move] = True
            return
        for target in targets:
            self.in_the_way[target].update(tight)
        closed = [index for index in tight if self.room[index] < self.least[index]]
        if any(not self.partial[index] or self.single[move] for index in closed):
            self.broken.add((tensor, column))
            return
        self._make_part(move, only)

    def _make_part(self, move: int, only: BoolArray | None) -> None:
        """Make a move for those of its experts for which there is room, in a column whose chain is broken."""
        tensor, column = self.tensors[move], self.columns[move]
        item, bounds = self.candidates[tensor], self.of_bytes[tensor]
        self.broken.add((tensor, column))
        experts = self.moves.experts[move, : item.cost.shape[1]].copy()
        if only is not None:
            experts &= only
        cost = item.cost[column]
        for index in bounds:
            cells = self.limits[index].cells[tensor]
            if int(cost[experts & cells].sum()) > self.room[index]:
                experts &= ~cells
        before = (cost > 0) & ~self.read[tensor][column]
        gain = _energy(item.gram[column], before) - _energy(item.gram[column], before & ~experts)
        if not experts.any() or (self.greedy and gain <= 0.0):
            return
        for index in bounds:
            self.room[index] -= int(cost[experts & self.limits[index].cells[tensor]].sum())
        for index in self.of_fidelity[tensor]:
            own = np.diagonal(item.gram[column])[experts & self.limits[index].cells[tensor]]
            mine = float(np.cumsum(own)[-1]) if len(own) else 0.0
            self.left[index] -= mine if self.partial[index] else gain
        self.read[tensor][column] |= experts
        self.done[move] = True


def _energy(gram: FloatArray, inside: BoolArray) -> float:
    """1'G1 over some experts, added up in order."""
    places = np.flatnonzero(inside)
    if not len(places):
        return 0.0
    rows = np.cumsum(gram[places][:, places], axis=1)[:, -1]
    return float(np.cumsum(rows)[-1])
