"""Fitting the models of a merge together: which tensor meets which, in what dtype, with what parameters.

Pure: models come in as names and tensor objects, problems go out as data. Nothing is dropped silently: whatever does
not take part is either an error or a note in the plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal, TypeAlias

from mpfs.errors import MismatchError, RecipeError
from mpfs.merge.operators import Operator, Parameters
from mpfs.merge.recipe import Recipe
from mpfs.objects import ModelRef, ObjectId, Tensor
from mpfs.objects.dtypes import BITS, MERGEABLE, itemsize
from mpfs.objects.plan import Scalar

OnMismatch: TypeAlias = Literal["error", "base"]

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A tensor of a model, with its id."""

    identity: ObjectId
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class Model:
    """A model of the merge: what it is, and its tensors by name in snapshot order."""

    ref: ModelRef
    tensors: Mapping[str, ModelTensor]


@dataclass(frozen=True, slots=True)
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

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def column_elements(self) -> int:
        """Elements of a column: the most that fit into one block of the narrowest dtype among inputs and output."""
        tensors = [item.tensor for _, item in self.experts] + ([self.base.tensor] if self.base else [])
        narrowest = min(itemsize(dtype) for dtype in (*(tensor.dtype for tensor in tensors), self.out_dtype))
        return tensors[0].block_size // narrowest


@dataclass(frozen=True, slots=True)
class Fit:
    """How the models fit: the output's tensors in order, and notes for a person."""

    base: int | None
    template: int
    tensors: tuple[TensorInputs, ...]
    notes: tuple[str, ...]


@dataclass(slots=True)
class _Report:
    """What does not fit, collected over all tensors."""

    on_mismatch: OnMismatch
    missing: dict[str, list[str]] = field(default_factory=dict)
    extra: dict[str, list[str]] = field(default_factory=dict)
    reshaped: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    opaque: list[str] = field(default_factory=list)
    impossible: list[str] = field(default_factory=list)

    def raise_or_notes(self) -> tuple[str, ...]:
        errors = list(self.impossible)
        notes: list[str] = []
        lenient = notes if self.on_mismatch == "base" else errors
        if self.reshaped:
            lenient.append(f"shapes differ: {_some(self.reshaped)}")
        if self.differing:
            lenient.append(f"tensors that cannot be averaged differ between models: {_some(self.differing)}")
        for name, tensors in self.extra.items():
            lenient.append(f"{name} has {_tensors(tensors)} that the base has not: {_some(tensors)}")
        if errors:
            raise MismatchError(
                f"the models do not fit: {'; '.join(errors)}. Choose models of one architecture, or take the base's "
                "tensors there with --on-mismatch base",
                problems=errors,
            )
        for name, tensors in self.missing.items():
            notes.append(f"{name} lacks {_tensors(tensors)}, merged without it there: {_some(tensors)}")
        if self.opaque:
            notes.append(f"not floating point, equal in all models, carried over: {_some(self.opaque)}")
        return tuple(notes)


def fit(recipe: Recipe, models: Sequence[Model], operator: Operator, on_mismatch: OnMismatch = "error") -> Fit:
    """Fit models together.

    Args:
        recipe: the checked recipe.
        models: its models in listing order, and the base after them if it is not listed.
        operator: the method.
        on_mismatch: what to do about tensors of other shapes, integer tensors that differ, and tensors that only an
            expert has: "error", or "base" for the base's tensor (noted).

    Raises:
        MismatchError: the models do not fit.
        RecipeError: parameter values that the method cannot work with.
    """
    names = [model.ref.name for model in models]
    base = None if recipe.base is None else names.index(recipe.base)
    template = 0 if base is None else base
    expert_indices = [index for index in range(len(models)) if not (operator.needs_base and index == base)]
    _check_parameters(recipe, operator, expert_indices)
    report = _Report(on_mismatch)
    tensors = []
    for name in _output_names(models, template, operator, expert_indices, report):
        inputs = _fit_tensor(name, recipe, models, operator, base, template, expert_indices, report)
        if inputs is not None:
            tensors.append(inputs)
    return Fit(base, template, tuple(tensors), report.raise_or_notes())


def parameters_of(recipe: Recipe, operator: Operator, experts: Sequence[int]) -> Parameters:
    """The parameter values in force, for experts given by their index in the recipe's list of models.

    Looked up as mergekit does: the model's own, then the recipe's, then the method's default.
    """
    shared: dict[str, Scalar] = {}
    own: list[dict[str, Scalar]] = [{} for _ in experts]
    for parameter in operator.parameters:
        name = parameter.name
        common = recipe.parameters.get(name, parameter.default)
        if not parameter.per_model:
            if common is not None:
                shared[name] = common
            continue
        for values, index in zip(own, experts, strict=True):
            given = recipe.models[index].parameters if index < len(recipe.models) else {}
            value = given.get(name, common)
            if value is not None:
                values[name] = value
    return Parameters(shared, own)


def _check_parameters(recipe: Recipe, operator: Operator, experts: Sequence[int]) -> None:
    problems = operator.validate(parameters_of(recipe, operator, experts))
    if problems:
        raise RecipeError(
            f"parameters of {operator.name}: {'; '.join(problems)}",
            problems=[{"path": "parameters", "message": item} for item in problems],
        )


def _output_names(
    models: Sequence[Model], template: int, operator: Operator, experts: Iterable[int], report: _Report
) -> list[str]:
    names = dict.fromkeys(models[template].tensors)
    for index in experts:
        extra = [name for name in models[index].tensors if name not in models[template].tensors]
        if extra and operator.needs_base:
            report.extra[models[index].ref.name] = extra
        else:
            names.update(dict.fromkeys(extra))
    return list(names)


def _fit_tensor(
    name: str,
    recipe: Recipe,
    models: Sequence[Model],
    operator: Operator,
    base_index: int | None,
    template: int,
    expert_indices: Sequence[int],
    report: _Report,
) -> TensorInputs | None:
    base = None if base_index is None else models[base_index].tensors.get(name)
    present = [(index, models[index].tensors[name]) for index in expert_indices if name in models[index].tensors]
    for index in expert_indices:
        if name not in models[index].tensors:
            report.missing.setdefault(models[index].ref.name, []).append(name)
    owner = template if name in models[template].tensors else present[0][0]
    first = models[owner].tensors[name]
    experts: list[tuple[int, ModelTensor]] = []
    for index, item in present:
        if item.tensor.shape != first.tensor.shape:
            report.reshaped.append(
                f"{name} is {list(item.tensor.shape)} in {models[index].ref.name}, {list(first.tensor.shape)} in "
                f"{models[owner].ref.name}"
            )
        else:
            experts.append((index, item))

    def unmerged(note: str) -> TensorInputs:
        dtype = first.tensor.dtype
        return TensorInputs(name, first.tensor.shape, first, (), Parameters({}, ()), dtype, dtype, False, note)

    dtypes = {item.tensor.dtype for _, item in experts} | {first.tensor.dtype}
    if not dtypes <= MERGEABLE:
        if any(item.identity != first.identity for _, item in experts):
            report.differing.append(f"{name} ({', '.join(sorted(dtypes))})")
        else:
            report.opaque.append(f"{name} ({first.tensor.dtype})")
        return unmerged("not floating point")
    work = recipe.dtype or promote(dtypes)
    alone = None if experts else "no expert has it" if not present else "no expert has it in this shape"
    if alone is not None and (recipe.out_dtype or work) == first.tensor.dtype:
        return unmerged(alone)
    parameters = parameters_of(recipe, operator, [index for index, _ in experts])
    if 0 < len(experts) < len(expert_indices):
        # What is right for all models may not be for those that have this tensor.
        report.impossible.extend(f"{name}: {problem}" for problem in operator.validate(parameters))
    return TensorInputs(
        name=name,
        shape=first.tensor.shape,
        base=base,
        experts=tuple(experts),
        parameters=parameters,
        work_dtype=work,
        out_dtype=recipe.out_dtype or work,
        merged=True,
        note=alone,
    )


def promote(dtypes: Iterable[str]) -> str:
    """The floating-point dtype that torch promotes these to: the widest; F32 where F16 meets BF16."""
    found = set(dtypes)
    if found == {"F16", "BF16"}:
        return "F32"
    return max(found, key=lambda dtype: (BITS[dtype], dtype))


def keeps_value(dtype: str, through: str) -> bool:
    """Whether casting any value of `dtype` to `through` and back gives it back."""
    return dtype == through or BITS[through] > BITS[dtype]


def _tensors(items: Sequence[str]) -> str:
    return "1 tensor" if len(items) == 1 else f"{len(items)} tensors"


def _some(items: Sequence[str]) -> str:
    shown = ", ".join(items[:_SHOWN])
    return shown if len(items) <= _SHOWN else f"{shown} and {len(items) - _SHOWN} more"
