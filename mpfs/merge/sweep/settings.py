"""Settings of a sweep: which key of a recipe takes which values, and the recipes that all combinations make. Pure."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

from mpfs.errors import UsageError
from mpfs.merge.planner import POLICIES
from mpfs.merge.recipe.documents import parse_values
from mpfs.merge.recipe.problems import Problem, kind, near, problem
from mpfs.objects import Budget

OPTIONS = ("budget", "fidelity", "policy", "seed")
"""What can be set besides keys of the recipe: options of the merge."""

_BRACKETS = re.compile(r"\[(\d+|\*)\]")
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Setting:
    """A key path and the values that it takes in turn.

    A path goes down the recipe by keys, and in lists by index, by name (of a model, or of a filter) or by `*` for every
    entry: `parameters.density`, `models.0.parameters.weight`, `models.chat.parameters.weight`, `models.*.parameters.density`.
    `budget` (values of type `Budget`), `fidelity`, `policy` and `seed` are options of each merge.
    """

    path: str
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Variant:
    """One combination: its values by path, the recipe that they make, and the options that they set."""

    values: Mapping[str, Any]
    recipe: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)


def parse_setting(text: str) -> Setting:
    """A setting as it is written, `PATH=VALUE,VALUE,…`. Values are YAML; a list of numbers is a gradient: `[0, 1],[1, 0]`.

    Raises:
        UsageError: it is none.
    """
    path, equals, values = text.partition("=")
    path = path.strip()
    if not equals or not path:
        raise UsageError(f"{text!r} is no setting: write PATH=VALUE,VALUE, such as parameters.density=0.3,0.5")
    try:
        found = parse_values(values)
    except ValueError as error:
        raise UsageError(f"{path}: {values!r} are no values: {error}") from error
    return Setting(path, tuple(found))


def check_settings(settings: Sequence[Setting], limit: int) -> None:
    """Whether a sweep can have these settings, whatever its recipe is.

    Raises:
        UsageError: there are none, one is there twice or has no values or one twice, or they make too many variants.
    """
    if not settings:
        raise UsageError("nothing is set: a sweep needs settings, such as parameters.density=0.3,0.5")
    seen: set[str] = set()
    for setting in settings:
        where = setting.path
        if _canonical(where) in seen:
            raise UsageError(f"{where} is set twice: give all its values at once")
        seen.add(_canonical(where))
        if not setting.values:
            raise UsageError(f"{where}: there are no values")
        # 1, 1.0 and true are three values, though equal.
        texts = [repr(value) for value in setting.values]
        twice = next((index for index, text in enumerate(texts) if text in texts[:index]), None)
        if twice is not None:
            raise UsageError(f"{where}: the value {canonical_value(setting.values[twice])} is there twice")
        for value in setting.values:
            _check_option(where, value)
    if {"budget", "fidelity"} <= seen:
        raise UsageError("budget and fidelity exclude each other: ask for bytes or for a result")
    count = prod(len(setting.values) for setting in settings)
    if count > limit:
        sizes = " x ".join(str(len(setting.values)) for setting in settings)
        sizes = f"{sizes} = " if len(settings) > 1 else ""
        raise UsageError(
            f"{sizes}{count:,} variants are more than {limit}: take fewer values, or raise the limit", variants=count
        )


def _check_option(path: str, value: Any) -> None:
    wanted = None
    if path == "budget" and not isinstance(value, Budget):
        wanted = "an amount, such as 10% or 512MiB"
    elif path == "fidelity" and not _is_number(value):
        wanted = "a share, such as 0.95"
    elif path == "policy" and value not in POLICIES:
        wanted = f"one of {', '.join(POLICIES)}"
    elif path == "seed" and (not isinstance(value, int) or isinstance(value, bool)):
        wanted = "a whole number"
    if wanted is not None:
        raise UsageError(f"{path}: {canonical_value(value)} is not {wanted}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def make_variants(recipe: Mapping[str, Any], settings: Sequence[Setting]) -> tuple[list[Variant], list[Problem]]:
    """All combinations, the last setting changing fastest; and what is wrong with the paths (then there are none)."""
    problems: list[Problem] = []
    for setting in settings:
        if setting.path not in OPTIONS:
            found = _set(copy.deepcopy(dict(recipe)), setting.path, None)
            problems += [item for item in found if item not in problems]
    if problems:
        return [], problems
    variants = []
    for values in product(*(setting.values for setting in settings)):
        chosen = {setting.path: value for setting, value in zip(settings, values, strict=True)}
        made: dict[str, Any] = copy.deepcopy(dict(recipe))
        for path, value in chosen.items():
            if path not in OPTIONS:
                _set(made, path, copy.deepcopy(value))
        variants.append(Variant(chosen, made, {path: value for path, value in chosen.items() if path in OPTIONS}))
    return variants, []


def canonical_value(value: Any) -> str:
    """A value as text, for people: as it is written in YAML."""
    if isinstance(value, Budget):
        return f"{value.value:g}%" if value.kind == "percent" else f"{value.value:,.0f} bytes"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {canonical_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(canonical_value, value)) + "]"
    return str(value)


def _canonical(path: str) -> str:
    return _BRACKETS.sub(r".\1", path)


def _set(recipe: dict[str, Any], path: str, value: Any) -> list[Problem]:
    """Set what a path leads to, made where it is missing; what is wrong with the path, if anything."""
    problems: list[Problem] = []
    _walk(recipe, _canonical(path), "", value, problems)
    return [{**item, "path": path} for item in problems]


def _walk(node: Any, rest: str, done: str, value: Any, problems: list[Problem]) -> None:
    steps = list(_steps(node, rest, done, problems))
    for key, further in steps:
        if not further:
            node[key] = value
            continue
        inner = node[key] if isinstance(node, list) else node.get(key)
        if inner is None:
            inner = node[key] = {}
        _walk(inner, further, f"{done}.{key}" if done else str(key), value, problems)


def _steps(node: Any, rest: str, done: str, problems: list[Problem]) -> Iterator[tuple[Any, str]]:
    """Where the first step of `rest` leads from a node: keys or indices, each with what is left of the path."""
    first, _, further = rest.partition(".")
    if not first or rest.endswith("."):
        problems.append(problem(rest, "the path has an empty part"))
    elif isinstance(node, list):
        named = [(name, index) for index, item in enumerate(node) if (name := _name_of(item)) is not None]
        if first == "*":
            yield from ((index, further) for index in range(len(node)))
            return
        if first.isdecimal() and int(first) < len(node):
            yield int(first), further
            return
        matching = [(name, index) for name, index in named if _leads(rest, name)]
        if matching:
            name, index = max(matching, key=lambda item: len(item[0]))
            yield index, rest[len(name) + 1 :]
            return
        names = [name for name, _ in named]
        listed = ", ".join(_listed(index, item) for index, item in enumerate(node[:_SHOWN]))
        there = f"; its entries are {listed}{', …' if len(node) > _SHOWN else ''}" if node else ", it is empty"
        problems.append(problem(rest, f"{done} has no entry {first}{near(first, names)}{there}"))
    elif isinstance(node, dict):
        matching_keys = [str(key) for key in node if _leads(rest, str(key))]
        key = max(matching_keys, key=len, default=first)
        yield key, rest[len(key) + 1 :]
    else:
        problems.append(problem(rest, f"{done} is {kind(node)}, which has no {first}"))


def _leads(rest: str, name: str) -> bool:
    return rest == name or rest.startswith(f"{name}.")


def _listed(index: int, entry: Any) -> str:
    name = _name_of(entry)
    return str(index) if name is None else f"{index} ({name})"


def _name_of(entry: Any) -> str | None:
    """What an entry of a list is called: a model by its name, a choice by its filter."""
    if not isinstance(entry, Mapping):
        return None
    name = entry.get("model", entry.get("filter"))
    while isinstance(name, Mapping):
        name = name.get("path", name.get("model"))
    return name if isinstance(name, str) else None
