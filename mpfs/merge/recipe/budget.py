"""Budgets that stand in a recipe: the key `budget`, which mergekit does not know and ignores.

It is given for the whole merge or for one model, as a size, a share or a fidelity, for all tensors or by parts of their
names, as mergekit's parameters have them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpfs.merge.recipe.problems import Problem, kind, problem
from mpfs.objects.amounts import parse_amount
from mpfs.objects.encoding import Json
from mpfs.objects.plan import Budget

_DECIMALS = 12
"""Of a percentage: so many are kept."""

_EXPECTED = "write a size (2GiB), a share (20%), or `fidelity: 0.95`"


@dataclass(frozen=True, slots=True)
class BudgetRule:
    """A budget for the tensors whose name contains `filter`, of those that no rule before has taken; for all that are
    left where that is None."""

    filter: str | None
    budget: Budget


def read_budget(given: Any, path: str, problems: list[Problem]) -> tuple[BudgetRule, ...]:
    """The rules of a budget out of YAML, none if it is not set; mistakes are added to `problems`."""
    if given is None:
        return ()
    if not isinstance(given, list) and not (isinstance(given, Mapping) and "value" in given):
        budget = _read_one(given, path, problems)
        return () if budget is None else (BudgetRule(None, budget),)
    rules: list[BudgetRule] = []
    for index, item in enumerate(given if isinstance(given, list) else [given]):
        where = f"{path}[{index}]" if isinstance(given, list) else path
        if not isinstance(item, Mapping) or "value" not in item or set(item) - {"filter", "value"}:
            problems.append(problem(where, "a rule has `filter:` (part of tensor names) and `value:`"))
            continue
        pattern = item.get("filter")
        if pattern is not None and not isinstance(pattern, str):
            problems.append(problem(f"{where}.filter", f"must be text: a part of tensor names, not {kind(pattern)}"))
            continue
        if rules and rules[-1].filter is None:
            problems.append(problem(where, "a rule before this one is for every tensor: this one never counts"))
        budget = _read_one(item["value"], f"{where}.value", problems)
        if budget is not None:
            rules.append(BudgetRule(None if pattern == "*" else pattern, budget))
    return tuple(rules)


def _read_one(given: Any, path: str, problems: list[Problem]) -> Budget | None:
    if isinstance(given, Mapping) and set(given) == {"fidelity"}:
        value = given["fidelity"]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
            problems.append(problem(f"{path}.fidelity", f"must be a number between 0 and 1, not {value}"))
            return None
        return Budget("fidelity", float(value))
    if isinstance(given, bool) or not isinstance(given, int | str):
        problems.append(problem(path, f"{_EXPECTED}, not {given if isinstance(given, float) else kind(given)}"))
        return None
    try:
        unit, value = parse_amount(str(given))
    except ValueError as error:
        problems.append(problem(path, str(error)))
        return None
    return Budget(unit, round(value, _DECIMALS) if unit == "percent" else value)


def budget_as_json(rules: tuple[BudgetRule, ...]) -> Json:
    """The key `budget` with these rules; nothing where there are none."""
    if not rules:
        return {}
    if len(rules) == 1 and rules[0].filter is None:
        return {"budget": _value(rules[0].budget)}
    return {
        "budget": [
            {**({} if rule.filter is None else {"filter": rule.filter}), "value": _value(rule.budget)} for rule in rules
        ]
    }


def _value(budget: Budget) -> Any:
    if budget.kind == "fidelity":
        return {"fidelity": budget.value}
    if budget.kind == "percent":
        return f"{budget.value:.{_DECIMALS}f}".rstrip("0").rstrip(".") + "%"
    return int(budget.value)
