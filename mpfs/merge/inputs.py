"""Fitting the models of a merge together: which tensor meets which, in what dtype, with what parameters.

Pure: models come in as names and tensor objects, problems go out as data. Nothing is dropped silently: whatever does
not take part is either an error or a note in the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Literal, TypeAlias

from mpfs.errors import MismatchError, RecipeError
from mpfs.formats.names import near
from mpfs.merge.aliases import under_one_naming
from mpfs.merge.models import Model, ModelTensor
from mpfs.merge.operators import Operator, Parameters
from mpfs.merge.outline import Item, Source, outline, parameters_at
from mpfs.merge.recipe import Recipe
from mpfs.objects.dtypes import BITS, MERGEABLE, itemsize, promote

OnMismatch: TypeAlias = Literal["error", "crop", "base"]

_SHOWN = 3

_QUANTISED = ("F8_", "F6_", "F4")
"""How the names of dtypes begin that hold quantised weights."""


@dataclass(frozen=True)
class TensorInputs:
    """One output tensor and what goes into it.

    `base` is None where the method has no base or the base has no such tensor. `experts` are (model index, tensor),
    in listing order; there may be none of a tensor that only has to change its dtype. `work_dtype` is what arithmetic
    runs in, `out_dtype` what is stored. A tensor that is not merged (`merged` False) is the base's, as it is, for the
    reason in `note`.
    """

    name: str
    shape: tuple[int, ...]
    base: ModelTensor | None
    experts: tuple[tuple[int, ModelTensor], ...]
    parameters: Parameters
    work_dtype: str
    out_dtype: str
    merged: bool
    note: str | None = None

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @cached_property
    def column_elements(self) -> int:
        """Elements of a column: the most that fit into one block of the narrowest dtype among inputs and output."""
        tensors = [item.tensor for _, item in self.experts] + ([self.base.tensor] if self.base else [])
        narrowest = min(itemsize(dtype) for dtype in (*(tensor.dtype for tensor in tensors), self.out_dtype))
        return tensors[0].block_size // narrowest


@dataclass(frozen=True, slots=True)
class Fit:
    """How the models fit: the output's tensors in order, and notes for a person. `renamed` has, by model, names of its
    tensors that are others in the output."""

    base: int | None
    template: int
    tensors: tuple[TensorInputs, ...]
    notes: tuple[str, ...]
    renamed: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass(slots=True)
class _Report:
    """What does not fit, collected over all tensors."""

    on_mismatch: OnMismatch
    known: Sequence[str] = ()
    doubts: Sequence[str] = ()
    missing: dict[str, list[str]] = field(default_factory=dict)
    tied: dict[str, list[str]] = field(default_factory=dict)
    extra: dict[str, list[str]] = field(default_factory=dict)
    lengths: list[str] = field(default_factory=list)
    reshaped: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    quantised: list[str] = field(default_factory=list)
    opaque: list[str] = field(default_factory=list)
    impossible: list[str] = field(default_factory=list)
    values: dict[str, list[str]] = field(default_factory=dict)

    def raise_or_notes(self, method: str) -> tuple[str, ...]:
        if self.values:
            told = [f"{message} (for {_some(names)})" if names else message for message, names in self.values.items()]
            raise RecipeError(
                f"parameters of {method}: {'; '.join(told)}",
                problems=[{"path": "parameters", "message": item} for item in told],
            )
        errors = list(self.impossible)
        notes: list[str] = []
        lenient = notes if self.on_mismatch == "base" else errors
        lenient.extend(self.doubts)
        lenient.extend(self.lengths)
        if self.reshaped:
            lenient.append(f"shapes differ: {_some(self.reshaped)}")
        if self.differing:
            lenient.append(f"tensors that cannot be averaged differ between models: {_some(self.differing)}")
        if self.quantised:
            lenient.append(
                f"quantised weights cannot be merged: {_some(self.quantised)}; merge the models they were made from, "
                "or dequantise them"
            )
        for name, tensors in self.extra.items():
            told = [self._with_near(item) for item in tensors[:_SHOWN]] + tensors[_SHOWN:]
            lenient.append(f"{name} has {_tensors(tensors)} that the base has not: {_some(told)}")
        if errors:
            crop = (
                "align vocabularies with tokenizer_source in the recipe, or cut them to what all models have with "
                "--on-mismatch crop, "
                if self.reshaped
                else ""
            )
            raise MismatchError(
                f"the models do not fit: {'; '.join(errors)}. Choose models of one architecture, {crop}or take the "
                "base's tensors there with --on-mismatch base",
                problems=errors,
            )
        for name, tensors in self.tied.items():
            notes.append(f"{name} ties {_some(tensors)}: that stands in for what it does not store")
        for name, tensors in self.missing.items():
            notes.append(f"{name} lacks {_tensors(tensors)}, merged without it there: {_some(tensors)}")
        if self.opaque:
            notes.append(f"not floating point, equal in all models, carried over: {_some(self.opaque)}")
        return tuple(notes)

    def _with_near(self, name: str) -> str:
        """A name that the base has not, with one that it has and that is much like it."""
        alike = near(name, self.known, limit=1)
        return f"{name} (like {alike[0]} there?)" if alike else name


def fit(recipe: Recipe, models: Sequence[Model], operator: Operator, on_mismatch: OnMismatch = "error") -> Fit:
    """Fit models together.

    Tensors that a model names in another way than the base (the first model, where there is no base) are known by the base's
    names, also to the recipe's filters.

    Args:
        recipe: the checked recipe.
        models: its models, in the order of `recipe.model_names`.
        operator: the method.
        on_mismatch: what to do about tensors of other shapes, integer tensors that differ, and tensors that only an
            expert has: "error", or "base" for the base's tensor (noted). "crop" is as "error": the models are cut
            before (`mpfs.merge.crop`).

    Raises:
        MismatchError: the models do not fit.
        RecipeError: parameter values that the method cannot work with.
    """
    names = [model.ref.name for model in models]
    base = None if recipe.base is None else names.index(recipe.base)
    template = 0 if base is None else base
    named = under_one_naming(models, template)
    models = named.models
    laid_out = outline(recipe, models, operator)
    report = _Report(
        on_mismatch, tuple(models[template].tensors), named.doubts, extra=laid_out.extra, lengths=laid_out.lengths
    )
    fitter = _Fitter(recipe, models, operator, report)
    tensors = [inputs for item in laid_out.items if (inputs := fitter.tensor(item)) is not None]
    notes = report.raise_or_notes(operator.name)
    own = [note for model in models for note in model.notes]
    return Fit(base, template, tuple(tensors), (*own, *named.notes, *laid_out.notes, *notes), named.renamed)


class _Fitter:
    def __init__(self, recipe: Recipe, models: Sequence[Model], operator: Operator, report: _Report) -> None:
        self._recipe = recipe
        self._models = models
        self._operator = operator
        self._report = report
        self._problems: dict[object, list[str]] = {}

    def tensor(self, item: Item) -> TensorInputs | None:
        base = None if item.base is None else self._find(item.base)
        present: list[tuple[Source, ModelTensor]] = []
        for source in item.sources:
            found = self._find(source)
            if found is None:
                self._report.missing.setdefault(self._name(source), []).append(item.name)
            else:
                present.append((source, found))
        if base is not None and item.base is not None:
            owner, first = item.base, base
        elif present and (self._operator.needs_base or (self._operator.optional_base and item.base is not None)):
            for source, _ in present:
                self._report.extra.setdefault(self._name(source), []).append(item.name)
            return None
        elif present:
            owner, first = present[0]
        else:
            return None
        fitting: list[tuple[Source, ModelTensor]] = []
        for source, found in present:
            if found.tensor.shape != first.tensor.shape:
                self._report.reshaped.append(
                    f"{item.name} is {list(found.tensor.shape)} in {self._name(source)}, {list(first.tensor.shape)} in "
                    f"{self._name(owner)}"
                )
            else:
                fitting.append((source, found))
        return self._fitting(item, base, owner, first, fitting, None if present else "no expert has it")

    def _fitting(
        self,
        item: Item,
        base: ModelTensor | None,
        owner: Source,
        first: ModelTensor,
        experts: list[tuple[Source, ModelTensor]],
        alone: str | None,
    ) -> TensorInputs:
        """A tensor whose experts all have the shape of `first`."""
        dtypes = {found.tensor.dtype for _, found in experts} | {first.tensor.dtype}
        scheme = self._scheme([owner, *(source for source, _ in experts)], dtypes)
        if scheme is not None or not dtypes <= MERGEABLE:
            self._opaque(item, first, experts, scheme)
            return _unmerged(item.name, first, "quantised" if scheme is not None else "not floating point")
        work = self._recipe.dtype or promote(dtypes)
        out = self._recipe.out_dtype or work
        if alone is None and not experts and item.sources:
            alone = "no expert has it in this shape"
        parameters = parameters_at(self._operator, item, [source for source, _ in experts])
        if alone is None:
            first, alone = self._single(item, first, base, experts, parameters)
        if alone is not None:
            if out == first.tensor.dtype and keeps_value(out, work):
                return _unmerged(item.name, first, alone)
            # It only has to change its dtype.
            base, experts, parameters = first, [], Parameters({}, ())
        return TensorInputs(
            name=item.name,
            shape=first.tensor.shape,
            base=base,
            experts=tuple((source.model, found) for source, found in experts),
            parameters=parameters,
            work_dtype=work,
            out_dtype=out,
            merged=True,
            note=alone,
        )

    def _single(
        self,
        item: Item,
        first: ModelTensor,
        base: ModelTensor | None,
        experts: Sequence[tuple[Source, ModelTensor]],
        parameters: Parameters,
    ) -> tuple[ModelTensor, str | None]:
        """The one tensor that comes out as it is, and why; `first` and None if there is work to do."""
        if self._operator.name == "passthrough" and len(experts) == 1:
            source, found = experts[0]
            if parameters.experts[0].get("scale", 1) == 1:
                return found, f"{source.name} of {self._name(source)}, as it is"
        wrong = self._validate(parameters)
        if len(experts) == len(item.sources):
            for message in wrong:
                self._report.values.setdefault(message, []).append(item.name)
        elif self._operator.count_problem(len(experts)) is None:
            # What is right for all models may not be for those that have this tensor.
            self._report.impossible.extend(f"{item.name}: {message}" for message in wrong)
        elif base is not None:
            return base, f"too few models have it for {self._operator.name}"
        elif len(experts) == 1:
            return first, f"only {self._name(experts[0][0])} has it"
        else:
            self._report.impossible.extend(f"{item.name}: {message}" for message in wrong)
        return first, None

    def _validate(self, parameters: Parameters) -> list[str]:
        """What is wrong with these values; many tensors have the same."""
        key = (tuple(parameters.shared.items()), tuple(tuple(values.items()) for values in parameters.experts))
        if key not in self._problems:
            self._problems[key] = self._operator.validate(parameters)
        return self._problems[key]

    def _opaque(
        self, item: Item, first: ModelTensor, experts: Sequence[tuple[Source, ModelTensor]], scheme: str | None
    ) -> None:
        """A tensor that cannot be averaged: it is carried over if it is the same everywhere."""
        dtypes = {found.tensor.dtype for _, found in experts} | {first.tensor.dtype}
        if all(found.identity == first.identity for _, found in experts):
            self._report.opaque.append(f"{item.name} ({first.tensor.dtype})")
        elif scheme is not None:
            self._report.quantised.append(f"{item.name} ({scheme})")
        else:
            self._report.differing.append(f"{item.name} ({', '.join(sorted(dtypes))})")

    def _scheme(self, sources: Iterable[Source], dtypes: Iterable[str]) -> str | None:
        """What is quantised of a tensor's inputs, if anything is."""
        for source in sources:
            found = self._models[source.model].quantised.get(source.name)
            if found is not None:
                return f"{found} in {self._name(source)}"
        return next((dtype for dtype in sorted(dtypes) if dtype.startswith(_QUANTISED)), None)

    def _find(self, source: Source) -> ModelTensor | None:
        model = self._models[source.model]
        if source.name not in model.tensors:
            tied = model.stand_in(source.name)
            if tied is not None and model.tensors.get(tied) is not None:
                told = self._report.tied.setdefault(model.ref.name, [])
                text = f"{source.name} to {tied}"
                if text not in told:
                    told.append(text)
        return model.find(source.name)

    def _name(self, source: Source) -> str:
        return self._models[source.model].ref.name


def _unmerged(name: str, tensor: ModelTensor, note: str) -> TensorInputs:
    dtype = tensor.tensor.dtype
    return TensorInputs(name, tensor.tensor.shape, tensor, (), Parameters({}, ()), dtype, dtype, False, note)


def keeps_value(dtype: str, through: str) -> bool:
    """Whether casting any value of `dtype` to `through` and back gives it back."""
    return dtype == through or BITS[through] > BITS[dtype]


def _tensors(items: Sequence[str]) -> str:
    return "1 tensor" if len(items) == 1 else f"{len(items)} tensors"


def _some(items: Sequence[str]) -> str:
    shown = ", ".join(items[:_SHOWN])
    return shown if len(items) <= _SHOWN else f"{shown} and {len(items) - _SHOWN} more"
