"""The budgets of a recipe, and the one of the command, as bounds on a merge that is weighed. Pure.

Each bounds the expert bytes of some tensors of some models, or says how close they have to come; all of them hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from mpfs.errors import BudgetInfeasibleError, FidelityInfeasibleError
from mpfs.merge.bounded import Limit, choose_bounded
from mpfs.merge.distinct import Merged
from mpfs.merge.planner import BoolArray, Choice, Policy, choose, rank
from mpfs.merge.recipe import Recipe
from mpfs.merge.recipe.budget import BudgetRule
from mpfs.objects import Bound, Budget, ModelRef

_ROUNDS = 8
"""How often a budget is given out again that blocks in several places have left over."""

Chosen: TypeAlias = dict[str, Choice]
"""What is read of each."""

WHOLE = ""
"""The path of the budget that a merge is given from outside its recipe."""


@dataclass(frozen=True, slots=True)
class _Rule:
    """Where a budget stands, the model that it is about (None: all), and the tensors."""

    path: str
    model: int | None
    rule: BudgetRule
    names: frozenset[str]


def choose_under(
    weighed: Merged,
    recipe: Recipe,
    models: Sequence[ModelRef],
    method: str,
    budget: Budget,
    policy: Policy,
    seed: int,
) -> tuple[Chosen, tuple[Bound, ...]]:
    """What is read under all budgets, and what became of those in the recipe.

    Args:
        weighed: the merged tensors by name, in plan order.
        recipe: with its budgets.
        models: of the merge, in the order of the recipe's names.
        method: for messages.
        budget: what the merge is given besides.
        policy, seed: see `rank`.

    Raises:
        BudgetInfeasibleError: a budget is less than what must be read.
        FidelityInfeasibleError: a fidelity cannot be reached within the budgets.
    """
    whole = _Rule(WHOLE, None, BudgetRule(None, budget), frozenset(weighed))
    rules = [*_rules(recipe, models, weighed), whole]
    full = _full(weighed, rules)
    limits = [limit_of(rule.rule.budget, nbytes) for rule, nbytes in zip(rules, full, strict=True)]
    choices = _Choosing(weighed, rules, limits, method, policy, seed).choose()
    return choices, _bounds(weighed, rules[:-1], full[:-1], choices)


def bounds_of(weighed: Merged, recipe: Recipe, models: Sequence[ModelRef], choices: Chosen) -> tuple[Bound, ...]:
    """What a choice makes of the budgets in a recipe; see `choose_under`."""
    rules = list(_rules(recipe, models, weighed))
    return _bounds(weighed, rules, _full(weighed, rules), choices)


def _full(weighed: Merged, rules: Sequence[_Rule]) -> list[int]:
    """What a merge without budgets reads, under each rule."""
    return [weighed.distinct.nbytes(model=rule.model, names=rule.names) for rule in rules]


def _bounds(weighed: Merged, rules: Sequence[_Rule], full: Sequence[int], choices: Chosen) -> tuple[Bound, ...]:
    read = {name: choice.read for name, choice in choices.items()}
    return tuple(
        Bound(
            rule.path,
            rule.model,
            rule.rule.filter,
            rule.rule.budget,
            nbytes,
            limit_of(rule.rule.budget, nbytes),
            weighed.distinct.nbytes(read, model=rule.model, names=rule.names),
        )
        for rule, nbytes in zip(rules, full, strict=True)
    )


def choose_all(weighed: Merged) -> Chosen:
    """Everything."""
    chosen = choose([item.candidates for item in weighed.values()])
    return dict(zip(weighed, chosen.tensors, strict=True))


def choose_within(weighed: Merged, method: str, budget: Budget, limit: int | None, policy: Policy, seed: int) -> Chosen:
    """What is read under one budget for all, whose bytes are known already; see `choose_under`."""
    whole = _Rule(WHOLE, None, BudgetRule(None, budget), frozenset(weighed))
    return _Choosing(weighed, [whole], [limit], method, policy, seed).choose()


def budget_text(budget: Budget) -> str:
    """A budget as a recipe says it."""
    if budget.kind == "fidelity":
        return f"fidelity {budget.value:g}"
    return f"{budget.value:g}%" if budget.kind == "percent" else f"{int(budget.value):,} bytes"


def _rules(recipe: Recipe, models: Sequence[ModelRef], names: Merged) -> Iterator[_Rule]:
    places = {name: index for index, name in enumerate(recipe.model_names)}
    found: list[tuple[str, int | None, tuple[BudgetRule, ...]]] = [("budget", None, recipe.budget)]
    for path, source in recipe.located_sources():
        found.append((f"{path}.budget", places[source.name], source.budget))
    for path, model, rules in found:
        left = list(names)
        several = len(rules) > 1 or (len(rules) == 1 and rules[0].filter is not None)
        for index, rule in enumerate(rules):
            mine = [name for name in left if rule.filter is None or rule.filter in name]
            left = [name for name in left if name not in set(mine)]
            yield _Rule(f"{path}[{index}]" if several else path, model, rule, frozenset(mine))


def limit_of(budget: Budget, full: int) -> int | None:
    """The bytes that a budget allows, of `full`; None where it is none of bytes."""
    if budget.kind == "bytes":
        return int(budget.value)
    return int(full * budget.value / 100.0) if budget.kind == "percent" else None


class _Choosing:
    """The planner's choice under rules; the last rule is the budget of the whole merge."""

    def __init__(
        self,
        weighed: Merged,
        rules: Sequence[_Rule],
        limits: Sequence[int | None],
        method: str,
        policy: Policy,
        seed: int,
    ) -> None:
        self.weighed = weighed
        self.rules = rules
        self.limits = limits
        self.greedy = policy == "energy"
        forced = Merged({name: item for name, item in weighed.items() if item.inputs.base is None})
        self.free = {name: item for name, item in weighed.items() if item.inputs.base is not None}
        self.forced = choose_all(forced)
        self.required = [forced.distinct.nbytes(model=rule.model, names=rule.names) for rule in rules]
        for rule, limit, required in zip(rules, limits, self.required, strict=True):
            if limit is not None and required > limit:
                where = "" if rule.path == WHOLE else f"{_told(rule)}: "
                raise BudgetInfeasibleError(
                    f"{where}a budget of {limit:,} bytes is not enough: {method} must read {required:,} bytes of tensors "
                    "that have no base to stand in for them (name a base_model that has them, or raise the budget)",
                    required=required,
                    budget=limit,
                    bound=rule.path or "budget",
                )
        self.ranked = rank([item.candidates for item in self.free.values()], policy=policy, seed=seed)

    def choose(self) -> Chosen:
        """What is read."""
        counted = [None if limit is None else limit - self.required[i] for i, limit in enumerate(self.limits)]
        best = self._within(counted)
        # Blocks in several places are counted in each, and read once: what that saves is given out too.
        for _ in range(_ROUNDS):
            wider = [
                None if limit is None or room is None else room + limit - used
                for limit, room, used in zip(self.limits, self._counted(best, counted), self._used(best), strict=True)
            ]
            if all(b is None or a is None or b <= a for a, b in zip(counted, wider, strict=True)):
                break
            found = self._within(wider)
            fits = all(
                limit is None or used <= limit for limit, used in zip(self.limits, self._used(found), strict=True)
            )
            if not fits or _left_out(found) >= _left_out(best):
                break
            best, counted = found, wider
        return best

    def _within(self, counted: Sequence[int | None]) -> Chosen:
        if len(self.rules) == 1:
            asked = self.rules[0].rule.budget
            alone = self.ranked.choose(budget=counted[0], fidelity=asked.value if asked.kind == "fidelity" else None)
            return {**self.forced, **dict(zip(self.free, alone.tensors, strict=True))}
        limits = []
        places = []
        for index, (rule, nbytes) in enumerate(zip(self.rules, counted, strict=True)):
            fidelity = rule.rule.budget.value if rule.rule.budget.kind == "fidelity" else None
            if nbytes is not None or fidelity is not None:
                limits.append(Limit([self._cells(rule, name) for name in self.free], nbytes, fidelity))
                places.append(index)
        found = choose_bounded(self.ranked, limits, greedy=self.greedy)
        for target, blocking in found.missed.items():
            rule = self.rules[places[target]]
            told = ", ".join(_told(self.rules[places[index]]) for index in blocking)
            raise FidelityInfeasibleError(
                f"{_told(rule)} cannot be reached: {told} is in the way (raise it, or ask for less)",
                fidelity=rule.rule.budget.value,
                bound=self.rules[places[blocking[0]]].path or "budget",
            )
        return {**self.forced, **dict(zip(self.free, found.choices.tensors, strict=True))}

    def _cells(self, rule: _Rule, name: str) -> BoolArray:
        experts = [model for model, _ in self.free[name].inputs.experts]
        inside = name in rule.names
        return np.array([inside and (rule.model is None or model == rule.model) for model in experts], bool)

    def _used(self, choices: Chosen) -> list[int]:
        read = {name: choice.read for name, choice in choices.items()}
        return [self.weighed.distinct.nbytes(read, model=rule.model, names=rule.names) for rule in self.rules]

    def _counted(self, choices: Chosen, given: Sequence[int | None]) -> list[int | None]:
        """What the planner counts for a choice under each rule."""
        found: list[int | None] = []
        for rule, room in zip(self.rules, given, strict=True):
            if room is None:
                found.append(None)
                continue
            total = 0
            for name, item in self.free.items():
                total += int(item.candidates.cost[choices[name].read & self._cells(rule, name)].sum())
            found.append(total)
        return found


def _told(rule: _Rule) -> str:
    where = "the budget of the merge" if rule.path == WHOLE else rule.path
    name = "" if rule.rule.filter is None else f", for {rule.rule.filter}"
    return f"{where} ({budget_text(rule.rule.budget)}{name})"


def _left_out(choices: Chosen) -> float:
    return sum(choice.energy_left_out for choice in choices.values())
