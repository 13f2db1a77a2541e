"""A recipe as data, once it is checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from mpfs.merge.recipe.budget import BudgetRule, budget_as_json
from mpfs.merge.recipe.tokenizer import RecipeTokenizer
from mpfs.merge.recipe.values import Value, value_as_json
from mpfs.objects.encoding import Json

DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}
"""Dtypes that a recipe may ask for, and how they are stored."""


@dataclass(frozen=True, slots=True)
class RecipeModel:
    """A model that goes into a merge: what it is called, and the parameters given for it.

    In a slice it is a source, and `layers` are those that are taken of it, as a half-open range. `budget` bounds what is
    read of the model, wherever it is listed.
    """

    name: str
    parameters: Mapping[str, Value] = field(default_factory=dict)
    layers: tuple[int, int] | None = None
    budget: tuple[BudgetRule, ...] = ()

    def as_json(self) -> Json:
        """In mergekit's grammar, but for the budget."""
        value: Json = {"model": self.name}
        if self.layers is not None:
            value["layer_range"] = list(self.layers)
        return value | _parameters(self.parameters) | budget_as_json(self.budget)


@dataclass(frozen=True, slots=True)
class RecipeSlice:
    """Some layers of the output: merged from as many layers of each source. `base` is None for the recipe's."""

    sources: tuple[RecipeModel, ...]
    base: str | None = None
    parameters: Mapping[str, Value] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """How many layers."""
        start, stop = self.sources[0].layers or (0, 0)
        return stop - start

    def as_json(self) -> Json:
        """In mergekit's grammar."""
        value: Json = {"sources": [source.as_json() for source in self.sources]}
        if self.base is not None:
            value["base_model"] = self.base
        return value | _parameters(self.parameters)


@dataclass(frozen=True, slots=True)
class RecipeModule:
    """A part of the models: of `models` or `slices` one is empty."""

    name: str
    models: tuple[RecipeModel, ...]
    slices: tuple[RecipeSlice, ...]
    parameters: Mapping[str, Value] = field(default_factory=dict)

    def as_json(self) -> Json:
        """In mergekit's grammar."""
        return {**_contents(self.models, self.slices), **_parameters(self.parameters)}


@dataclass(frozen=True, slots=True)
class Recipe:
    """A valid recipe. dtypes are named as stored (BF16, …).

    Of `models` (in listing order, the base not added), `slices` and `modules` only one is not empty. `name` is what
    later documents of the same file call the result. `chat_template` is `auto`, a name or jinja text.
    """

    method: str
    models: tuple[RecipeModel, ...]
    base: str | None
    parameters: Mapping[str, Value]
    dtype: str | None
    out_dtype: str | None
    slices: tuple[RecipeSlice, ...] = ()
    modules: tuple[RecipeModule, ...] = ()
    name: str | None = None
    tokenizer: RecipeTokenizer | None = None
    chat_template: str | None = None
    budget: tuple[BudgetRule, ...] = ()

    @property
    def model_names(self) -> tuple[str, ...]:
        """Every model once, in the order in which they are first listed; a base that is not listed comes last."""
        names = dict.fromkeys(source.name for source in self.sources())
        bases = [part.base for part in self.all_slices() if part.base is not None]
        return tuple(names | dict.fromkeys(bases) | dict.fromkeys([] if self.base is None else [self.base]))

    @property
    def tokenizer_models(self) -> tuple[str, ...]:
        """Models that only the tokenizer's settings name: they give tokens or rows, and are not merged."""
        merged = set(self.model_names)
        named = () if self.tokenizer is None else self.tokenizer.models()
        return tuple(dict.fromkeys(name for name in named if name not in merged))

    def all_slices(self) -> Iterator[RecipeSlice]:
        """The slices of the recipe and of its modules."""
        yield from self.slices
        for module in self.modules:
            yield from module.slices

    def sources(self) -> Iterator[RecipeModel]:
        """Every entry that names a model."""
        yield from self.models
        for module in self.modules:
            yield from module.models
        for part in self.all_slices():
            yield from part.sources

    def located_sources(self) -> Iterator[tuple[str, RecipeModel]]:
        """Every entry that names a model, with its key path."""
        parts = [("", self.models, self.slices)]
        parts += [(f"modules.{item.name}.", item.models, item.slices) for item in self.modules]
        for path, models, slices in parts:
            for index, entry in enumerate(models):
                yield f"{path}models[{index}]", entry
            for number, piece in enumerate(slices):
                for index, entry in enumerate(piece.sources):
                    yield f"{path}slices[{number}].sources[{index}]", entry

    @property
    def has_budgets(self) -> bool:
        """Whether it bounds what is read, of anything."""
        return bool(self.budget) or any(source.budget for source in self.sources())

    def without_budgets(self) -> Recipe:
        """The same recipe, with everything read."""
        return replace(self._with_sources(lambda item: replace(item, budget=())), budget=())

    def renamed(self, names: Mapping[str, str]) -> Recipe:
        """The same recipe with other names for some models."""

        def base(name: str | None) -> str | None:
            return None if name is None else names.get(name, name)

        def part(item: RecipeSlice) -> RecipeSlice:
            return replace(item, base=base(item.base))

        same = self._with_sources(lambda item: replace(item, name=names.get(item.name, item.name)))
        return replace(
            same,
            slices=tuple(map(part, same.slices)),
            modules=tuple(replace(item, slices=tuple(map(part, item.slices))) for item in same.modules),
            base=base(self.base),
            tokenizer=None if self.tokenizer is None else self.tokenizer.renamed(names),
        )

    def _with_sources(self, change: Callable[[RecipeModel], RecipeModel]) -> Recipe:
        """The same recipe, with every entry that names a model changed."""

        def part(item: RecipeSlice) -> RecipeSlice:
            return replace(item, sources=tuple(map(change, item.sources)))

        def module(item: RecipeModule) -> RecipeModule:
            return replace(item, models=tuple(map(change, item.models)), slices=tuple(map(part, item.slices)))

        return replace(
            self,
            models=tuple(map(change, self.models)),
            slices=tuple(map(part, self.slices)),
            modules=tuple(map(module, self.modules)),
        )

    def as_json(self) -> Json:
        """A normalised form, in mergekit's grammar."""
        names = {stored: name for name, stored in DTYPES.items()}
        value: Json = {"merge_method": self.method, **_contents(self.models, self.slices)}
        if self.modules:
            value = {"merge_method": self.method, "modules": {item.name: item.as_json() for item in self.modules}}
        if self.name is not None:
            value["name"] = self.name
        if self.base is not None:
            value["base_model"] = self.base
        value |= _parameters(self.parameters)
        if self.dtype is not None:
            value["dtype"] = names[self.dtype]
        if self.out_dtype is not None:
            value["out_dtype"] = names[self.out_dtype]
        if self.tokenizer is not None:
            value["tokenizer"] = self.tokenizer.as_json()
        if self.chat_template is not None:
            value["chat_template"] = self.chat_template
        return value | budget_as_json(self.budget)


def _contents(models: tuple[RecipeModel, ...], slices: tuple[RecipeSlice, ...]) -> Json:
    if slices:
        return {"slices": [item.as_json() for item in slices]}
    return {"models": [item.as_json() for item in models]}


def _parameters(values: Mapping[str, Value]) -> Json:
    return {"parameters": {name: value_as_json(value) for name, value in values.items()}} if values else {}
