"""Planning several merges under one budget: what is read for one of them is there for all. Pure but for statistics.

The merges are weighed as one. A block is worth what it keeps of each of them, as a share of that merge's own delta
energy, so that no merge counts for more because its weights are large; the planner then chooses for the sum as it
would for one merge. Where the merges agree on what matters (all weights in proportion) this is the choice that each
would have made alone.

A merge whose recipe has budgets of its own may read what it would read under those alone, and of that what the one budget
chooses: so all of them hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from mpfs.errors import UsageError
from mpfs.merge.bounds import (
    Chosen,
    bounds_of,
    choose_all,
    choose_under,
    choose_within,
    limit_of,
)
from mpfs.merge.commit import Fitting
from mpfs.merge.compile import check_budget, write_plan
from mpfs.merge.differing import differing_blocks
from mpfs.merge.distinct import Merged
from mpfs.merge.inputs import TensorInputs
from mpfs.merge.planner import BoolArray, Candidates, Policy, judge
from mpfs.merge.recipe import Recipe
from mpfs.merge.weighing import Weighed, Weigher
from mpfs.objects import BlockId, Budget, ObjectId, Plan

Allowed: TypeAlias = Mapping[str, BoolArray]
"""What a merge's own budgets let it read, by output tensor: (C, E)."""


@dataclass(frozen=True, slots=True)
class Part:
    """One of the merges."""

    recipe: Recipe
    fitting: Fitting
    policy: Policy
    seed: int


@dataclass(slots=True)
class _Unit:
    """What the merges have in common at one output tensor: the base, the width of columns, and all of their experts.

    `gram` (C, E, E) and `drift` are sums over the merges; `allowed` (C, E) is what any of them may read.
    """

    first: Weighed
    places: dict[ObjectId, int] = field(default_factory=dict)
    experts: list[tuple[int, Weighed]] = field(default_factory=list)
    gram: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0, 0)))
    allowed: BoolArray = field(default_factory=lambda: np.zeros((0, 0), bool))
    drift: float = 0.0
    whole: bool = False

    def places_of(self, inputs: TensorInputs) -> list[int]:
        """Where the experts of one merge are among all."""
        return [self.places[item.identity] for _, item in inputs.experts]

    def weighed(self) -> Weighed:
        """As the planner sees it."""
        inputs = replace(self.first.inputs, experts=tuple(item.inputs.experts[index] for index, item in self.experts))
        cost = np.stack([item.candidates.cost[:, index] for index, item in self.experts], axis=1)
        candidates = Candidates(inputs.name, self.gram, cost, self.whole, self.drift)
        return Weighed(inputs, tuple(item.differing[index] for index, item in self.experts), candidates)

    def narrowed(self, weighed: Weighed) -> Weighed:
        """The same without what no merge may read: that costs nothing, as there is no choice about it."""
        cost = np.where(self.allowed, weighed.candidates.cost, 0)
        return replace(weighed, candidates=replace(weighed.candidates, cost=cost))


def expert_bytes(parts: Sequence[Part]) -> int:
    """The distinct expert bytes that merges read together without a budget."""
    sizes: dict[BlockId, int] = {}
    seen: set[tuple[ObjectId, ObjectId | None]] = set()
    for part in parts:
        for inputs in part.fitting.fit.tensors:
            for _, expert in inputs.experts if inputs.merged else ():
                key = (expert.identity, None if inputs.base is None else inputs.base.identity)
                if key not in seen:
                    seen.add(key)
                    sizes.update(differing_blocks(expert.tensor, None if inputs.base is None else inputs.base.tensor))
    return sum(sizes.values())


def plan_together(parts: Sequence[Part], weigher: Weigher, *, block_size: int, budget: Budget) -> list[Plan]:
    """Plan several merges whose reads, all together, are within one budget.

    Args:
        parts: the merges; policy and seed of the first one choose.
        weigher: weighs their tensors; one that keeps what it finds.
        block_size: the repository's, in bytes.
        budget: in bytes, or in percent of what all of the merges would read without one, each block counted once.

    Raises:
        BudgetInfeasibleError: together they must read more.
        UsageError: a budget that cannot be meant; or a recipe asks for a fidelity, which cannot be promised here.
    """
    check_budget(budget)
    allowed = [_allowed(part, weigher) for part in parts]
    units = _units(parts, allowed, weigher)
    joint = Merged({name: unit.weighed() for name, unit in units.items()})
    limit = limit_of(budget, joint.distinct.nbytes())
    if any(mine is not None for mine in allowed):
        joint = Merged({name: unit.narrowed(joint[name]) for name, unit in units.items()})
    chosen = choose_all(joint)
    if limit is not None and limit < joint.distinct.nbytes():
        methods = ", ".join(dict.fromkeys(part.recipe.method for part in parts))
        chosen = choose_within(joint, methods, budget, limit, parts[0].policy, parts[0].seed)
    return [
        _plan(part, mine, weigher, units, chosen, block_size, budget, limit)
        for part, mine in zip(parts, allowed, strict=True)
    ]


def _allowed(part: Part, weigher: Weigher) -> Allowed | None:
    """What a merge reads under its own budgets alone; None where it has none.

    Raises:
        BudgetInfeasibleError: it must read more.
        UsageError: one of them is a fidelity.
    """
    if not part.recipe.has_budgets:
        return None
    weighed = Merged({item.inputs.name: item for _, item in _weighed(part, weigher)})
    refs = [model.ref for model in part.fitting.models]
    method = part.fitting.operator.name
    choices, bounds = choose_under(weighed, part.recipe, refs, method, Budget(), part.policy, part.seed)
    asked = next((bound for bound in bounds if bound.budget.kind == "fidelity"), None)
    if asked is not None:
        raise UsageError(
            f"{asked.path}: a fidelity of {asked.budget.value:g} cannot be promised under one budget for all, which may leave "
            "less than it takes: give bytes or a share there, or leave out the budget for all"
        )
    return {name: choice.read for name, choice in choices.items()}


def _units(parts: Sequence[Part], allowed: Sequence[Allowed | None], weigher: Weigher) -> dict[str, _Unit]:
    """What is read, by a name for each: the sum of what the merges weigh, each as a share of its own energy."""
    units: dict[str, _Unit] = {}
    for part in parts:
        for name, item in _weighed(part, weigher):
            unit = units.setdefault(name, _Unit(_bare(item)))
            for index, (_, expert) in enumerate(item.inputs.experts):
                if expert.identity not in unit.places:
                    unit.places[expert.identity] = len(unit.places)
                    unit.experts.append((index, _bare(item)))
            unit.whole |= item.candidates.whole_columns
    for unit in units.values():
        columns, count = len(unit.first.candidates.cost), len(unit.places)
        unit.gram = np.zeros((columns, count, count))
        unit.allowed = np.zeros((columns, count), bool)
    for part, mine in zip(parts, allowed, strict=True):
        energy = sum(
            max(0.0, float(np.cumsum(item.candidates.energy)[-1]) + item.candidates.drift)
            for _, item in _weighed(part, weigher)
            if len(item.candidates.cost)
        )
        for name, item in _weighed(part, weigher):
            unit = units[name]
            places = unit.places_of(item.inputs)
            read = np.ones(item.candidates.cost.shape, bool) if mine is None else mine[item.inputs.name]
            unit.allowed[:, places] |= read
            if energy <= 0.0:
                continue
            for i, first in enumerate(places):
                for j, second in enumerate(places):
                    product = np.where(read[:, i] & read[:, j], item.candidates.gram[:, i, j], 0.0)
                    unit.gram[:, first, second] += product / energy
            unit.drift += item.candidates.drift / energy
    return units


def _bare(item: Weighed) -> Weighed:
    """What does not depend on a merge's weights."""
    return replace(item, candidates=replace(item.candidates, gram=np.zeros((0, 0, 0))))


def _weighed(part: Part, weigher: Weigher) -> Iterator[tuple[str, Weighed]]:
    """The merged tensors of a merge, some at a time: all of them at once would take memory for each merge."""
    for item in weigher.weigh(part.fitting.fit.tensors, part.fitting.operator):
        yield _name(item.inputs), item


def _name(inputs: TensorInputs) -> str:
    """What tensors of several merges have in common whose columns and base are the same."""
    base = "" if inputs.base is None else inputs.base.identity
    return f"{inputs.name}\n{inputs.column_elements}\n{inputs.numel}\n{base}"


def _plan(
    part: Part,
    allowed: Allowed | None,
    weigher: Weigher,
    units: dict[str, _Unit],
    chosen: Chosen,
    block_size: int,
    budget: Budget,
    limit: int | None,
) -> Plan:
    """The plan of one merge: of what is read at all, what it has a use for."""
    weighed = Merged()
    reads = []
    for name, item in _weighed(part, weigher):
        weighed[item.inputs.name] = item
        read = chosen[name].read[:, units[name].places_of(item.inputs)]
        reads.append(read if allowed is None else read & allowed[item.inputs.name])
    judged = judge([item.candidates for item in weighed.values()], reads)
    choices: Chosen = dict(zip(weighed, judged.tensors, strict=True))
    full = weighed.distinct.nbytes()
    # In percent of all merges it may be more than the same percentage of this one.
    own = budget if limit is None or limit_of(budget, full) == limit else Budget("bytes", float(limit))
    plan = write_plan(
        part.recipe,
        part.fitting.models,
        part.fitting.fit,
        part.fitting.operator,
        choices,
        full,
        weighed.distinct.nbytes({name: choice.read for name, choice in choices.items()}),
        block_size,
        own,
        part.policy,
        part.seed,
        weigher.histograms,
    )
    if allowed is None:
        return plan
    refs = [model.ref for model in part.fitting.models]
    return replace(plan, bounds=bounds_of(weighed, part.recipe, refs, choices))
