"""Checking a recipe: mergekit's grammar, strictly.

mergekit ignores keys that it does not know, so that a mis-indented `weight` is lost silently; here every mistake is an
error, and all of them are told at once, each with its key path.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from mpfs.errors import NotFoundError, RecipeError
from mpfs.merge.operators import Operator, get_operator, operator_names, own_parameters
from mpfs.merge.recipe.budget import read_budget
from mpfs.merge.recipe.chat_templates import chat_template_problem
from mpfs.merge.recipe.model import DTYPES, Recipe, RecipeModel, RecipeModule, RecipeSlice
from mpfs.merge.recipe.problems import Problem, kind, near, problem
from mpfs.merge.recipe.reference import ModelPath, ModelReference, Strict, model_name
from mpfs.merge.recipe.tokenizer import read_tokenizer
from mpfs.merge.recipe.values import Value, read_value

_Location: TypeAlias = "tuple[int | str, ...]"

_NAMELESS = "this model"

_CONTENTS = ("models", "slices", "modules")
"""Keys that say what is merged: a recipe has one of them."""

_WANTED = {
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "int_type": "a whole number",
}
"""What pydantic's error types ask for."""


class _Entry(Strict):
    model: str | ModelReference
    parameters: dict[str, Any] | None = None
    budget: Any = None


class _Source(_Entry):
    layer_range: list[int]


class _Slice(Strict):
    sources: list[_Source]
    base_model: str | ModelReference | None = None
    parameters: dict[str, Any] | None = None
    residual_weight: float | None = None


class _Module(Strict):
    models: list[_Entry] | None = None
    slices: list[_Slice] | None = None
    parameters: dict[str, Any] | None = None


class _Document(Strict):
    merge_method: str
    models: list[_Entry] | None = None
    slices: list[_Slice] | None = None
    modules: dict[str, _Module] | None = None
    base_model: str | ModelReference | None = None
    parameters: dict[str, Any] | None = None
    dtype: str | None = None
    out_dtype: str | None = None
    tokenizer_source: Any = None
    tokenizer: Any = None
    chat_template: str | None = None
    name: str | None = None
    budget: Any = None


_UNION_PARTS = ("str", ModelReference.__name__)
"""What pydantic puts into a location where a value may be of either kind."""


def recipe_from_mapping(value: Mapping[str, Any], where: str = "recipe") -> Recipe:
    """Check a recipe that is already a mapping.

    Raises:
        RecipeError: it has mistakes; `problems` lists all of them.
    """
    problems: list[Problem] = []
    recipe: Recipe | None = None
    try:
        recipe = _check(_Document.model_validate(value), problems)
    except ValidationError as error:
        wrong = _shape_problems(error, _parameters_of(value.get("merge_method")))
        problems += [problem(_key_path(at), message) for at, message in wrong]
        # What can be read all the same may have mistakes as well, and they are told together.
        with suppress(ValidationError):
            more: list[Problem] = []
            _check(_Document.model_validate(_patched(value, [at for at, _ in wrong])), more)
            told = tuple(_key_path(at) for at, _ in wrong)
            problems += [item for item in more if not item["path"].startswith(told)]
    if problems or recipe is None:
        lines = "; ".join(f"{item['path']}: {item['message']}" for item in problems)
        raise RecipeError(f"{where}: {lines}", problems=problems)
    return recipe


def _shape_problems(error: ValidationError, parameters: Collection[str]) -> list[tuple[_Location, str]]:
    """What is missing, unknown or of the wrong kind: where, and what to say of it; one for each place."""
    found: dict[_Location, str] = {}
    for item in error.errors():
        location = tuple(part for part in item["loc"] if part not in _UNION_PARTS)
        # A model is text or a mapping: of the two ways to fail only that one is told which was meant.
        other = "str" if isinstance(item["input"], dict) else ModelReference.__name__
        if item["loc"][-1] != other:
            found.setdefault(location, _explain(item, location, parameters))
    return list(found.items())


def _parameters_of(method: object) -> frozenset[str]:
    """What may stand under `parameters:` in a recipe of this method, which there may not be."""
    with suppress(NotFoundError):
        if isinstance(method, str):
            return own_parameters() | {parameter.name for parameter in get_operator(method).parameters}
    return own_parameters()


def _patched(value: Mapping[str, Any], wrong: Iterable[_Location]) -> dict[str, Any]:
    """A recipe without what is wrong at these places; what it cannot do without is made up."""
    made_up = {"model": _NAMELESS, "merge_method": _NAMELESS, "models": [], "sources": [], "layer_range": [0, 1]}
    patched: dict[str, Any] = copy.deepcopy(dict(value))
    for location in wrong:
        holder: Any = patched
        for part in location[:-1]:
            holder = holder.get(part, {}) if isinstance(holder, dict) else holder[int(part)]
        last = location[-1]
        if isinstance(holder, list) and isinstance(last, int):
            made: dict[str, Any] = {"model": _NAMELESS}
            if location[-2] == "sources":
                made["layer_range"] = [0, 1]
            holder[last] = 0 if location[-2] == "layer_range" else {"sources": []} if location[-2] == "slices" else made
        elif isinstance(holder, dict):
            holder.pop(last, None)
            if last in made_up:
                holder[last] = made_up[str(last)]
    return patched


def _check(document: _Document, problems: list[Problem]) -> Recipe:
    operator: Operator | None = None
    try:
        operator = get_operator(document.merge_method)
    except NotFoundError as error:
        problems.append(problem("merge_method", error.message))
    base = None if document.base_model is None else model_name(document.base_model, "base_model", problems)
    shared = _values(document.parameters, "parameters", operator, problems)
    reader = _Reader(operator, base, problems)
    _check_contents(document, "", problems)
    models = reader.models(document.models, "", (shared,))
    slices = reader.slices(document.slices, "", (shared,))
    modules = tuple(
        reader.module(name, module, f"modules.{name}", shared) for name, module in (document.modules or {}).items()
    )
    if document.name is not None and not document.name.strip():
        problems.append(problem("name", "it is empty"))
    if document.chat_template:
        wrong = chat_template_problem(document.chat_template)
        problems += [] if wrong is None else [problem("chat_template", wrong)]
    return Recipe(
        method=document.merge_method,
        models=models,
        base=base,
        parameters=shared,
        dtype=_dtype(document.dtype, "dtype", problems),
        out_dtype=_dtype(document.out_dtype, "out_dtype", problems),
        slices=slices,
        modules=modules,
        name=document.name,
        tokenizer=read_tokenizer(document.tokenizer_source, document.tokenizer, problems),
        chat_template=document.chat_template or None,
        budget=read_budget(document.budget, "budget", problems),
    )


def _check_contents(document: _Document | _Module, path: str, problems: list[Problem]) -> None:
    """Of models, slices and modules one must be there, and not be empty."""
    given = [key for key in _CONTENTS if getattr(document, key, None) is not None]
    possible = _CONTENTS if isinstance(document, _Document) else _CONTENTS[:2]
    if not given:
        problems.append(problem(f"{path}models", f"missing; a recipe has one of {', '.join(possible)}"))
    elif len(given) > 1:
        problems.append(problem(f"{path}{given[1]}", f"there are {given[0]} already: a recipe has one of the two"))
    for key in given:
        if not getattr(document, key):
            what = "mapping" if key == "modules" else "list"
            problems.append(problem(f"{path}{key}", f"the {what} is empty"))


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads what is merged, for a method (None if there is no such method) and a base."""

    operator: Operator | None
    base: str | None
    problems: list[Problem]

    def module(self, name: str, given: _Module, path: str, shared: Mapping[str, Value]) -> RecipeModule:
        own = _values(given.parameters, f"{path}.parameters", self.operator, self.problems)
        _check_contents(given, f"{path}.", self.problems)
        models = self.models(given.models, f"{path}.", (own, shared))
        return RecipeModule(name, models, self.slices(given.slices, f"{path}.", (own, shared)), own)

    def models(
        self, entries: list[_Entry] | None, path: str, levels: tuple[Mapping[str, Value], ...]
    ) -> tuple[RecipeModel, ...]:
        if not entries:
            return ()
        models = self._entries(entries, f"{path}models")
        if self.operator is not None:
            self._check_models(self.operator, models, f"{path}models", self.base, levels, add_base=True)
        return models

    def slices(
        self, given: list[_Slice] | None, path: str, levels: tuple[Mapping[str, Value], ...]
    ) -> tuple[RecipeSlice, ...]:
        return tuple(self._slice(item, f"{path}slices[{index}]", levels) for index, item in enumerate(given or []))

    def _slice(self, given: _Slice, path: str, levels: tuple[Mapping[str, Value], ...]) -> RecipeSlice:
        own = _values(given.parameters, f"{path}.parameters", self.operator, self.problems)
        base = None if given.base_model is None else model_name(given.base_model, f"{path}.base_model", self.problems)
        sources = self._entries(given.sources, f"{path}.sources")
        if not sources:
            self.problems.append(problem(f"{path}.sources", "the list is empty"))
        lengths = {source.layers[1] - source.layers[0] for source in sources if source.layers is not None}
        if len(lengths) > 1:
            self.problems.append(problem(f"{path}.sources", "the layer ranges of a slice must be of one length"))
        if sources and self.operator is not None:
            in_force = base if base is not None else self.base
            self._check_models(self.operator, sources, f"{path}.sources", in_force, (own, *levels), add_base=False)
        return RecipeSlice(sources, base, own)

    def _entries(self, entries: Iterable[_Entry], path: str) -> tuple[RecipeModel, ...]:
        models: list[RecipeModel] = []
        for index, entry in enumerate(entries):
            where = f"{path}[{index}]"
            name = model_name(entry.model, f"{where}.model", self.problems)
            parameters = _values(entry.parameters, f"{where}.parameters", self.operator, self.problems)
            if any(item.name == name for item in models):
                self.problems.append(problem(f"{where}.model", f"{name} is listed twice"))
            layers = None
            if isinstance(entry, _Source):
                layers = _layers(entry.layer_range, f"{where}.layer_range", self.problems)
            budget = read_budget(entry.budget, f"{where}.budget", self.problems)
            models.append(RecipeModel(name, parameters, layers, budget))
        return tuple(models)

    def _check_models(
        self,
        operator: Operator,
        models: tuple[RecipeModel, ...],
        path: str,
        base: str | None,
        levels: tuple[Mapping[str, Value], ...],
        *,
        add_base: bool,
    ) -> None:
        """What the method asks of the models that it is to merge. `add_base`: a base that is not listed is added."""
        method = operator.name
        listed = any(item.name == base for item in models)
        apart = operator.needs_base or (operator.optional_base and base is not None)
        experts = [item for item in models if not (apart and item.name == base)]
        told = None
        if operator.needs_base and base is None:
            told = problem("base_model", f"{method} needs one: the model that the experts were tuned from")
        elif apart and not experts:
            told = problem(path, f"{method} needs at least one model besides the base")
        elif apart and not listed and not add_base:
            told = problem(path, f"{method} needs the base, {base}, among the sources, with the layers to start from")
        elif not apart and base is not None and not listed and add_base:
            told = problem(path, f"{method} takes the base as an ordinary model: list {base} with a weight of its own")
        else:
            wrong = operator.count_problem(len(experts))
            told = None if wrong is None else problem(path, wrong)
        if told is not None and told not in self.problems:
            self.problems.append(told)
        for parameter in operator.parameters:
            if not parameter.required or any(parameter.name in level for level in levels):
                continue
            if not parameter.per_model:
                self._missing(f"parameters.{parameter.name}", f"missing: {method} needs it")
                continue
            for index, item in enumerate(models):
                if item in experts and parameter.name not in item.parameters:
                    where = f"{path}[{index}].parameters.{parameter.name}"
                    self._missing(where, f"missing: {method} needs it for {item.name}")

    def _missing(self, path: str, message: str) -> None:
        if not any(item["path"] == path for item in self.problems):
            self.problems.append(problem(path, message))


def _values(
    given: Mapping[str, Any] | None, path: str, operator: Operator | None, problems: list[Problem]
) -> dict[str, Value]:
    """Parameters that the method has. Those of mergekit's other methods are ignored, as mergekit does."""
    own = [] if operator is None else [parameter.name for parameter in operator.parameters]
    others = own_parameters()
    known: dict[str, Value] = {}
    for name, item in (given or {}).items():
        where = f"{path}.{name}"
        if name not in own and name not in others:
            hint = near(str(name), own) or near(str(name), others)
            what = "no method has this parameter" if operator is None else f"{operator.name} has no such parameter"
            problems.append(problem(where, f"{what}{hint}"))
            continue
        value = read_value(item, where, problems)
        if value is not None:
            known[name] = value
    return known


def _layers(given: list[int], path: str, problems: list[Problem]) -> tuple[int, int]:
    if len(given) != 2:
        problems.append(problem(path, f"must be [first, end), two numbers, not {len(given)}"))
        return (0, 1)
    start, stop = given
    if not 0 <= start < stop:
        what = "holds no layer" if start == stop else "is not a range"
        problems.append(
            problem(path, f"[{start}, {stop}] {what}: the first layer is counted from 0, the end is left out")
        )
        return (0, 1)
    return (start, stop)


def _dtype(name: str | None, path: str, problems: list[Problem]) -> str | None:
    if name is None:
        return None
    stored = DTYPES.get(name.removeprefix("torch."))
    if stored is None:
        problems.append(problem(path, f"{name} is not one of {', '.join(DTYPES)}{near(name, DTYPES)}"))
    return stored


def _keys_at(location: _Location) -> list[str]:
    """The keys that may stand where an unknown one was found."""
    holders: dict[str, type[BaseModel]] = {
        "models": _Entry,
        "sources": _Source,
        "slices": _Slice,
        "modules": _Module,
        "base_model": ModelReference,
        "model": ModelReference,
        "lora": ModelPath,
    }
    for part in reversed(location[:-1]):
        if part in holders:
            return list(holders[str(part)].model_fields)
    return list(_Document.model_fields)


def _explain(item: ErrorDetails, location: _Location, parameters: Collection[str]) -> str:
    if item["type"] == "extra_forbidden":
        last = str(location[-1])
        if last in parameters:
            return "a parameter belongs under `parameters:`, one level deeper"
        return f"unknown key{near(last, _keys_at(location))}"
    if item["type"] == "missing":
        return f"missing; one of {', '.join(operator_names())}" if location == ("merge_method",) else "missing"
    if location[-1] in ("model", "base_model"):
        return f"must be a name or `model: {{path: NAME}}`, not {kind(item['input'])}"
    wanted = _WANTED.get(item["type"])
    if wanted is not None:
        return f"must be {wanted}, not {kind(item['input'])}"
    return str(item["msg"][:1].lower() + item["msg"][1:])


def _key_path(location: _Location) -> str:
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else part
    return path
