"""Planning a sweep: its recipes checked, its models found once, its merges planned; all mistakes told together."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

from mpfs.errors import MPFSError, RecipeError, UsageError
from mpfs.merge.commit import Fitting, fit_models
from mpfs.merge.compile import compile_plan
from mpfs.merge.documents import find_models
from mpfs.merge.inputs import OnMismatch
from mpfs.merge.models import Aligned
from mpfs.merge.naming import ModelFinder
from mpfs.merge.planner import Policy
from mpfs.merge.recipe import Recipe
from mpfs.merge.recipe.documents import recipes_from_mappings
from mpfs.merge.recipe.problems import Problem
from mpfs.merge.sweep.joint import Part, expert_bytes, plan_together
from mpfs.merge.sweep.names import branch_names, describe, short_keys
from mpfs.merge.sweep.settings import Setting, Variant, check_settings, make_variants
from mpfs.merge.weighing import Weigher
from mpfs.objects import Budget, ObjectId, Plan
from mpfs.objects.encoding import encode
from mpfs.store import Store
from mpfs.store.pairs import PairTable

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """What holds for all variants that do not set it themselves; see `Repository.sweep`."""

    budget: Budget
    policy: Policy
    seed: int
    on_mismatch: OnMismatch
    limit: int


@dataclass(frozen=True, slots=True)
class Planned:
    """A planned variant. `tip` is where its branch was."""

    variant: Variant
    title: str
    ref: str
    tip: ObjectId | None
    plan: Plan


@dataclass(frozen=True, slots=True)
class PlannedSweep:
    """The variants in order, the distinct expert bytes that they read together without a budget, and what is to be told."""

    variants: tuple[Planned, ...]
    full: int
    notes: tuple[str, ...] = ()


Earlier: TypeAlias = Callable[[Sequence[Recipe], Sequence[str]], Sequence[str]]
"""Sees to the results of all documents but the last one, given the documents and the branches of the variants; notes."""


def plan_sweep(
    documents: Sequence[Mapping[str, Any]], settings: Sequence[Setting], into: str, finder: ModelFinder,
    options: SweepOptions, earlier: Earlier, where: str = "recipe",
) -> PlannedSweep:  # fmt: skip
    """Plan every combination of settings of the last document; see `Repository.sweep`.

    `earlier` is called once nothing is known to be wrong with any recipe. `where` is what the recipe is called.
    """
    settings = [_of_the_last(setting, len(documents)) for setting in settings]
    check_settings(settings, options.limit)
    if options.budget.kind != "none" and any(setting.path in ("budget", "fidelity") for setting in settings):
        raise UsageError("a budget or fidelity for all and one for each variant exclude each other: give it or set it")
    variants, problems = make_variants(documents[-1], settings)
    if problems:
        raise RecipeError(_lines(where, problems), problems=problems)
    short = short_keys([setting.path for setting in settings])
    titles = [describe(variant.values, short) for variant in variants]
    refs = branch_names([variant.values for variant in variants], into)

    def each(call: Callable[[int], _T]) -> list[_T]:
        """`call` of every variant; what is wrong with any of them is told together."""
        done: list[_T] = []
        failures: list[tuple[str, MPFSError]] = []
        for index, title in enumerate(titles):
            try:
                done.append(call(index))
            except MPFSError as error:
                failures.append((title, error))
        if failures:
            raise _together(failures, len(titles), where)
        return done

    checked = each(lambda index: recipes_from_mappings([*documents[:-1], variants[index].recipe], where))
    recipes = [item[-1] for item in checked]
    tips = each(lambda index: finder.store.refs.branch_tip(refs[index]))
    notes = earlier(checked[0], refs) if len(documents) > 1 else ()
    known: dict[bytes, Aligned] = {}
    models = each(lambda index: _find(recipes[index], finder, known))

    def fitting(index: int) -> Fitting:
        found = fit_models(finder.store, recipes[index], models[index].models, options.on_mismatch, finder.author)
        return replace(found, fit=replace(found.fit, notes=(*models[index].notes, *found.fit.notes)))

    fittings = each(fitting)
    parts = [
        Part(item, fit, variant.options.get("policy", options.policy), variant.options.get("seed", options.seed))
        for item, fit, variant in zip(recipes, fittings, variants, strict=True)
    ]
    plans = _plan(parts, variants, finder.store, options, each)
    made = map(Planned, variants, titles, refs, tips, plans)
    return PlannedSweep(tuple(made), expert_bytes(parts), tuple(notes))


def _of_the_last(setting: Setting, count: int) -> Setting:
    """A setting, without the number of the last document before its path.

    Raises:
        UsageError: it is of another document.
    """
    match = re.match(r"#(\d+)\.", setting.path)
    if match is None:
        return setting
    if int(match[1]) != count:
        raise UsageError(
            f"{setting.path}: settings are of the last document; the ones before it are merged once, for all variants: sweep "
            "them by themselves, and name a result in place of the document"
        )
    return replace(setting, path=setting.path[match.end() :])


def _find(recipe: Recipe, finder: ModelFinder, known: dict[bytes, Aligned]) -> Aligned:
    """The models of a variant; once for all that differ in parameters only."""
    whole = recipe.as_json()
    rest = {name: value for name, value in whole.items() if name not in ("models", "parameters")}
    key = encode({**rest, "kind": "models", "names": list(recipe.model_names)})
    if recipe.slices or recipe.modules or key not in known:
        known[key] = find_models(recipe, finder)
    return known[key]


def _plan(
    parts: Sequence[Part],
    variants: Sequence[Variant],
    store: Store,
    options: SweepOptions,
    each: Callable[[Callable[[int], Plan]], list[Plan]],
) -> list[Plan]:
    """Under one budget together; what each is to come to, or has a budget of its own for, is planned alone."""
    pairs, block_size = PairTable(store.environment), store.info.block_size
    budgets = [_own_budget(variant) for variant in variants]
    if options.budget.kind in ("bytes", "percent"):
        return plan_together(
            parts, Weigher(store.blocks, pairs, keep=True), block_size=block_size, budget=options.budget
        )

    def alone(index: int) -> Plan:
        part = parts[index]
        return compile_plan(
            part.recipe,
            part.fitting.models,
            part.fitting.fit,
            part.fitting.operator,
            store.blocks,
            block_size=block_size,
            budget=budgets[index] or options.budget,
            policy=part.policy,
            seed=part.seed,
            pairs=pairs,
        )

    return each(alone)


def _own_budget(variant: Variant) -> Budget | None:
    budget = variant.options.get("budget")
    if "fidelity" in variant.options:
        return Budget("fidelity", float(variant.options["fidelity"]))
    return budget if isinstance(budget, Budget) else None


def _together(failures: Sequence[tuple[str, MPFSError]], count: int, where: str) -> MPFSError:
    """One error for what is wrong with some of the variants; what is wrong with all of them is said once."""
    if all(isinstance(error, RecipeError) and error.details["problems"] for _, error in failures):
        found: dict[tuple[str, str], list[str]] = {}
        for title, error in failures:
            listed: Any = error.details["problems"]
            for item in listed:
                found.setdefault((item["path"], item["message"]), []).append(title)
        problems: list[Problem] = [
            {"path": path, "message": message if len(titles) == count else f"{message} (with {_some(titles)})"}
            for (path, message), titles in found.items()
        ]
        return RecipeError(_lines(where, problems), problems=problems)
    messages: dict[str, list[str]] = {}
    for title, error in failures:
        messages.setdefault(error.message, []).append(title)
    lines = [text if len(titles) == count else f"{_some(titles)}: {text}" for text, titles in messages.items()]
    first = failures[0][1]
    details = {} if len(messages) > 1 else first.details
    variants = [{**error.as_dict(), "variant": title} for title, error in failures]
    return type(first)("\n".join(lines), **{**details, "variants": variants})


def _lines(where: str, problems: Sequence[Problem]) -> str:
    return f"{where}: " + "; ".join(f"{item['path']}: {item['message']}" for item in problems)


def _some(titles: Sequence[str]) -> str:
    shown = " and ".join(titles[:2])
    return shown if len(titles) <= 2 else f"{shown} and {len(titles) - 2} more"
