"""Parameter values: a number, a gradient over the layers, or choices by parts of the tensor's name; nested."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor, isfinite
from typing import Any, TypeAlias

from mpfs.merge.recipe.problems import Problem, kind, problem
from mpfs.objects.plan import Scalar

_EXPONENT = re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+")

_DEEPEST = 20
"""How deep filters may be nested."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A value for the tensors whose name contains `filter`; for all where that is None or "*"."""

    filter: str | None
    value: Value


Value: TypeAlias = "Scalar | tuple[Scalar, ...] | tuple[Choice, ...]"
"""A number or truth value; a gradient over the layers; or choices, of which the first that hits counts."""


def evaluate(value: Value | None, name: str, t: float) -> Scalar | None:
    """A parameter's value for one tensor; None if it has none there.

    Args:
        value: as in the recipe.
        name: the tensor's, which filters are matched with.
        t: how far through its slice's layers the tensor is, from 0 to 1.
    """
    if not isinstance(value, tuple):
        return value
    if not value:
        return None
    if isinstance(value[0], Choice):
        for choice in value:
            assert isinstance(choice, Choice)  # a list holds values of one kind
            if choice.filter in (None, "*") or str(choice.filter) in name:
                return evaluate(choice.value, name, t)
        return None
    numbers = [item for item in value if not isinstance(item, Choice)]
    place = t * (len(numbers) - 1)
    first = floor(place)
    if any(isinstance(item, bool) for item in numbers):
        return numbers[first]
    part = place - first
    return (1 - part) * numbers[first] + part * numbers[min(first + 1, len(numbers) - 1)]


def depends_on_layer(value: Value | None) -> bool:
    """Whether a value is, or holds, a gradient that is not the same everywhere."""
    if not isinstance(value, tuple):
        return False
    numbers = {item for item in value if not isinstance(item, Choice)}
    return len(numbers) > 1 or any(depends_on_layer(item.value) for item in value if isinstance(item, Choice))


def read_value(given: Any, path: str, problems: list[Problem], depth: int = 0) -> Value | None:
    """A value out of YAML, None if it is not set; mistakes are added to `problems`."""
    if depth > _DEEPEST:
        problems.append(problem(path, "filters are nested too deeply"))
        return None
    if isinstance(given, dict):
        given = [given]
    if isinstance(given, list):
        return _read_list(given, path, problems, depth)
    # YAML 1.1 takes 1e-3, without a point, for text.
    value = float(given) if isinstance(given, str) and _EXPONENT.fullmatch(given) else given
    if value is None:
        return None
    if not isinstance(value, bool | int | float):
        problems.append(
            problem(path, f"must be a number, true/false, a list of numbers, or a list of filters, not {kind(value)}")
        )
    elif not _is_finite(value):
        problems.append(problem(path, f"must be finite, not {given if isinstance(value, float) else 'so large'}"))
    else:
        return value
    return None


def _read_list(given: Sequence[Any], path: str, problems: list[Problem], depth: int) -> Value | None:
    """A gradient or choices; an empty list is not set."""
    choices: list[Choice] = []
    numbers: list[Scalar] = []
    before = len(problems)
    for index, item in enumerate(given):
        where = f"{path}[{index}]"
        if isinstance(item, dict):
            choice = _read_choice(item, where, problems, depth)
            if choice is not None:
                choices.append(choice)
        elif item is None or isinstance(item, list):
            problems.append(problem(where, f"must be a number, or `filter:` and `value:`, not {kind(item)}"))
        else:
            number = read_value(item, where, problems, depth)
            if number is not None and not isinstance(number, tuple):
                numbers.append(number)
    if len(problems) > before:
        return None
    if choices and numbers:
        problems.append(problem(path, "numbers and filters cannot be mixed in one list"))
    elif len({isinstance(number, bool) for number in numbers}) > 1:
        problems.append(problem(path, "numbers and true/false cannot be mixed in one list"))
    elif choices:
        return tuple(choices)
    return tuple(numbers) or None


def _read_choice(given: Mapping[Any, Any], path: str, problems: list[Problem], depth: int) -> Choice | None:
    unknown = [str(key) for key in given if key not in ("filter", "value")]
    if unknown or "value" not in given:
        what = f"unknown key {unknown[0]}" if unknown else "`value:` is missing"
        problems.append(problem(path, f"{what}: a choice has `filter:` (part of tensor names) and `value:`"))
        return None
    pattern = given.get("filter")
    if pattern is not None and not isinstance(pattern, str):
        problems.append(problem(f"{path}.filter", f"must be text: a part of tensor names, not {kind(pattern)}"))
        return None
    value = read_value(given["value"], f"{path}.value", problems, depth + 1)
    return None if value is None else Choice(pattern, value)


def _is_finite(value: float) -> bool:
    try:
        return isfinite(value)
    except OverflowError:
        return False


def value_as_json(value: Value) -> Any:
    """The value in mergekit's grammar."""
    if not isinstance(value, tuple):
        return value
    return [
        {**({} if item.filter is None else {"filter": item.filter}), "value": value_as_json(item.value)}
        if isinstance(item, Choice)
        else item
        for item in value
    ]
