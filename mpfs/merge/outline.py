"""The outline of a merge: the output's tensors, and for each where it comes from, before shapes and dtypes are looked at.

Slices renumber layers here, modules choose parts of the models, and each tensor gets its place among the layers, which
gradients depend on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mpfs.errors import MismatchError
from mpfs.merge.architecture import is_first
from mpfs.merge.models import Model
from mpfs.merge.operators import Operator, Parameters
from mpfs.merge.recipe import Recipe, RecipeModel, RecipeModule, RecipeSlice, Value, depends_on_layer, evaluate
from mpfs.objects.plan import Scalar

DEFAULT_MODULE = "default"
"""mergekit's name for the only module of a model; here: whatever no other module is about."""


@dataclass(frozen=True, slots=True)
class Source:
    """What one model gives: its index, its tensor's name, and the recipe's entry for it (None: a base added to it)."""

    model: int
    name: str
    entry: RecipeModel | None


@dataclass(frozen=True, slots=True)
class Item:
    """One output tensor. `sources` are in listing order, without a base that the method takes as such.

    `levels` are the parameters that hold for all sources, the nearest first: slice, module, recipe. `t` is the place
    among the slice's layers, from 0 to 1. `whole` says that the sources are the recipe's `models`.
    """

    name: str
    sources: tuple[Source, ...]
    base: Source | None
    levels: tuple[Mapping[str, Value], ...]
    t: float
    whole: bool = True


@dataclass(slots=True)
class Outline:
    """The items in the output's order, what cannot be, and notes for a person."""

    items: list[Item] = field(default_factory=list)
    extra: dict[str, list[str]] = field(default_factory=dict)
    lengths: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def parameters_at(operator: Operator, item: Item, sources: Sequence[Source]) -> Parameters:
    """The parameter values in force for one tensor and some of its sources.

    Looked up as mergekit does: the source's own, then the slice's, the module's, the recipe's, then the method's
    default. Filters see the output's name for shared parameters, and the input's for those of a model.
    """
    shared: dict[str, Scalar] = {}
    own: list[dict[str, Scalar]] = [{} for _ in sources]
    for parameter in operator.parameters:
        name = parameter.name
        if not parameter.per_model:
            value = _first(item.levels, name, item.name, item.t, parameter.default)
            if value is not None:
                shared[name] = value
            continue
        for values, source in zip(own, sources, strict=True):
            mine = () if source.entry is None else (source.entry.parameters,)
            value = _first((*mine, *item.levels), name, source.name, item.t, parameter.default)
            if value is not None:
                values[name] = value
    return Parameters(shared, own)


def _first(
    levels: Iterable[Mapping[str, Value]], parameter: str, tensor: str, t: float, default: Scalar | None
) -> Scalar | None:
    for level in levels:
        value = evaluate(level.get(parameter), tensor, t)
        if value is not None:
            return value
    return default


def outline(recipe: Recipe, models: Sequence[Model], operator: Operator) -> Outline:
    """Lay out a merge; pure.

    Args:
        recipe: the checked recipe.
        models: its models, in the order of `recipe.model_names`.
        operator: the method.

    Raises:
        MismatchError: slices or modules ask for layers or parts that the models do not have.
    """
    builder = _Builder(recipe, models, operator)
    if recipe.modules:
        builder.add_modules()
    elif recipe.slices:
        builder.add_slices(recipe.slices, (recipe.parameters,), _Part("", ()))
    else:
        builder.add_models(recipe.models, (recipe.parameters,), _Part("", ()), whole=True)
    builder.note_what_was_recognised()
    if builder.problems:
        raise MismatchError("; ".join(builder.problems), problems=builder.problems)
    return builder.result


@dataclass(frozen=True, slots=True)
class _Part:
    """The tensors of a module: those under `prefix`, less those under prefixes of `others`."""

    prefix: str
    others: tuple[str, ...]

    def holds(self, name: str) -> bool:
        return _under(name, self.prefix) and not any(_under(name, other) for other in self.others)


def _under(name: str, prefix: str) -> bool:
    return not prefix or name == prefix or name.startswith(prefix + ".")


class _Builder:
    def __init__(self, recipe: Recipe, models: Sequence[Model], operator: Operator) -> None:
        self.recipe = recipe
        self.models = models
        self.operator = operator
        self.names = {model.ref.name: index for index, model in enumerate(models)}
        self.template = 0 if recipe.base is None else self.names[recipe.base]
        self.result = Outline()
        self.problems: list[str] = []
        self.by_layer: dict[tuple[int, str], dict[str, list[str]]] = {}

    # -- modules ------------------------------------------------------------------------------------------------

    def add_modules(self) -> None:
        named = [module.name for module in self.recipe.modules if module.name != DEFAULT_MODULE]
        tensors = self.models[self.template].tensors
        for module in self.recipe.modules:
            part = self._part(module, named)
            if not any(part.holds(name) for name in tensors):
                tops = ", ".join(dict.fromkeys(name.partition(".")[0] for name in tensors))
                self.problems.append(
                    f"no tensor belongs to module {module.name}: a module is named as its tensors begin ({tops}), or "
                    f"{DEFAULT_MODULE} for all that no other module is about"
                )
                continue
            levels = (module.parameters, self.recipe.parameters)
            if module.slices:
                self.add_slices(module.slices, levels, part)
            else:
                self.add_models(module.models, levels, part, whole=False)
        parts = [self._part(module, named) for module in self.recipe.modules]
        left = [name for name in tensors if not any(part.holds(name) for part in parts)]
        if left:
            shown = ", ".join(left[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else "")
            self.problems.append(f"no module is about {shown}: add one named {DEFAULT_MODULE} for what is left over")

    def _part(self, module: RecipeModule, named: Sequence[str]) -> _Part:
        prefix = "" if module.name == DEFAULT_MODULE else module.name
        return _Part(prefix, tuple(name for name in named if name != module.name and _under(name, prefix)))

    # -- whole models -------------------------------------------------------------------------------------------

    def add_models(
        self, entries: Sequence[RecipeModel], levels: tuple[Mapping[str, Value], ...], part: _Part, *, whole: bool
    ) -> None:
        base = None if self.recipe.base is None else self.names[self.recipe.base]
        apart = self._is_apart(base)
        listed = [(self.names[entry.name], entry) for entry in entries]
        sources = [(index, entry) for index, entry in listed if not (apart and index == base)]
        template = base if base is not None else listed[0][0]
        names = self._output_names(template, [index for index, _ in sources], apart, part)
        self._compare_lengths(template, [index for index, _ in sources], part)
        for name in names:
            owner = template
            if self.models[template].find(name) is None:
                owner = next(index for index, _ in sources if name in self.models[index].tensors)
            self.result.items.append(
                Item(
                    name,
                    tuple(Source(index, name, entry) for index, entry in sources),
                    None if base is None else Source(base, name, None),
                    levels,
                    self._t(owner, name),
                    whole,
                )
            )

    def _output_names(self, template: int, sources: Iterable[int], apart: bool, part: _Part) -> list[str]:
        first = self.models[template]
        names = {name: None for name in first.tensors if part.holds(name)}
        for index in sources:
            model = self.models[index]
            new = [name for name in model.tensors if name not in names and part.holds(name)]
            alone = [name for name in new if first.find(name) is None]
            if alone and apart:
                self.result.extra[model.ref.name] = [*self.result.extra.get(model.ref.name, []), *alone]
                new = [name for name in new if name not in alone]
            names.update(dict.fromkeys(new))
        return list(names)

    def _compare_lengths(self, template: int, sources: Iterable[int], part: _Part) -> None:
        first = self.models[template]
        for index in sources:
            model = self.models[index]
            for stack, count in first.architecture.stacks.items():
                other = model.architecture.stacks.get(stack, count)
                if other != count and part.holds(stack):
                    self.result.lengths.append(
                        f"{stack} has {other} layers in {model.ref.name}, {count} in {first.ref.name}"
                    )

    def _t(self, model: int, name: str) -> float:
        architecture = self.models[model].architecture
        place = architecture.place(name)
        return 0.0 if place is None else _share(place.layer, architecture.stacks[place.stack])

    def _is_apart(self, base: int | None) -> bool:
        """Whether the method takes the base as such, and not as a model like the others."""
        return self.operator.needs_base or (self.operator.optional_base and base is not None)

    # -- slices -------------------------------------------------------------------------------------------------

    def add_slices(self, slices: Sequence[RecipeSlice], levels: tuple[Mapping[str, Value], ...], part: _Part) -> None:
        stack = self._stack(part)
        if stack is None or not self._ranges_exist(slices, stack):
            return
        first, last = slices[0], slices[-1]
        for name in self._outside(first, stack, part):
            if is_first(name):
                self.result.items.append(self._outside_item(name, first, levels))
        at = 0
        for piece in slices:
            for step in range(piece.length):
                self._add_layer(piece, stack, step, at, levels)
                at += 1
        for name in self._outside(last, stack, part):
            if not is_first(name):
                self.result.items.append(self._outside_item(name, last, levels))

    def _stack(self, part: _Part) -> str | None:
        """The one stack of layers that slices are about."""
        template = self.models[self.template]
        stacks = [stack for stack in template.architecture.stacks if part.holds(stack)]
        if len(stacks) == 1:
            return stacks[0]
        if not stacks:
            self.problems.append(f"slices need layers, and {template.ref.name} has none that were recognised")
        else:
            self.problems.append(
                f"{template.ref.name} has several stacks of layers ({', '.join(stacks)}): give slices for each under "
                "`modules:`, with the stack's name as the module's"
            )
        return None

    def _ranges_exist(self, slices: Sequence[RecipeSlice], stack: str) -> bool:
        before = len(self.problems)
        for number, piece in enumerate(slices):
            for source in piece.sources:
                count = self.models[self.names[source.name]].architecture.stacks.get(stack, 0)
                start, stop = source.layers or (0, 0)
                if stop > count:
                    self.problems.append(
                        f"slices[{number}] takes layers {start} to {stop - 1} of {source.name}, which has {count}"
                        + (f" (counted from 0, as {stack}.N)" if count else f" at {stack}")
                    )
        return len(self.problems) == before

    def _base_of(self, piece: RecipeSlice) -> int | None:
        name = piece.base if piece.base is not None else self.recipe.base
        return None if name is None else self.names[name]

    def _sources_of(self, piece: RecipeSlice) -> tuple[list[tuple[int, RecipeModel]], tuple[int, RecipeModel] | None]:
        """The sources of a slice, and the base among them (which is no source if the method takes it as such)."""
        base = self._base_of(piece)
        listed = [(self.names[source.name], source) for source in piece.sources]
        found = next((item for item in listed if item[0] == base), None)
        if self._is_apart(base):
            listed = [item for item in listed if item[0] != base]
        return listed, found

    def _add_layer(
        self, piece: RecipeSlice, stack: str, step: int, at: int, levels: tuple[Mapping[str, Value], ...]
    ) -> None:
        sources, base = self._sources_of(piece)

        def prefix(source: RecipeModel) -> str:
            return f"{stack}.{(source.layers or (0, 0))[0] + step}."

        rests: dict[str, None] = {}
        for index, source in [*([] if base is None else [base]), *sources]:
            begin = prefix(source)
            rests.update(dict.fromkeys(name[len(begin) :] for name in self._layers_of(index, stack).get(begin, ())))
        for rest in rests:
            self.result.items.append(
                Item(
                    f"{stack}.{at}.{rest}",
                    tuple(Source(index, prefix(source) + rest, source) for index, source in sources),
                    None if base is None else Source(base[0], prefix(base[1]) + rest, None),
                    (piece.parameters, *levels),
                    _share(step, piece.length),
                    False,
                )
            )

    def _layers_of(self, model: int, stack: str) -> Mapping[str, Sequence[str]]:
        """A model's tensor names by layer."""
        cached = self.by_layer
        if (model, stack) not in cached:
            found: dict[str, list[str]] = {}
            for name in self.models[model].tensors:
                place = self.models[model].architecture.place(name)
                if place is not None and place.stack == stack:
                    found.setdefault(f"{stack}.{place.layer}.", []).append(name)
            cached[model, stack] = found
        return cached[model, stack]

    def _outside(self, piece: RecipeSlice, stack: str, part: _Part) -> list[str]:
        """The names of a slice's models that are in no layer of the stack."""
        sources, base = self._sources_of(piece)
        names: dict[str, None] = {}
        for index, _ in [*([] if base is None else [base]), *sources]:
            for name in self.models[index].tensors:
                place = self.models[index].architecture.place(name)
                if part.holds(name) and (place is None or place.stack != stack):
                    names[name] = None
        return list(names)

    def _outside_item(self, name: str, piece: RecipeSlice, levels: tuple[Mapping[str, Value], ...]) -> Item:
        sources, base = self._sources_of(piece)
        return Item(
            name,
            tuple(Source(index, name, source) for index, source in sources),
            None if base is None else Source(base[0], name, None),
            (piece.parameters, *levels),
            0.0,
            False,
        )

    # -- what was recognised ------------------------------------------------------------------------------------

    def note_what_was_recognised(self) -> None:
        """Where a result depends on it, say what was taken for a layer, an embedding and a head."""
        template = self.models[self.template]
        gradients = any(depends_on_layer(value) for value in self._all_values())
        if gradients and not template.architecture.stacks:
            self.problems.append(
                f"a gradient is over layers, and {template.ref.name} has none that were recognised: give a number"
            )
        if gradients or self.recipe.slices or self.recipe.modules:
            self.result.notes.append(f"recognised in {template.ref.name}: {template.architecture.describe()}")

    def _all_values(self) -> Iterator[Value]:
        yield from self.recipe.parameters.values()
        for source in self.recipe.sources():
            yield from source.parameters.values()
        for module in self.recipe.modules:
            yield from module.parameters.values()
        for piece in self.recipe.all_slices():
            yield from piece.parameters.values()


def _share(layer: int, count: int) -> float:
    """How far through its layers one is, from 0 to 1; the only one is at 1, as in mergekit."""
    return layer / (count - 1) if count > 1 else 1.0
