"""The recipe: mergekit's YAML, read strictly.

Grammar: shared facts on mergekit 0.1.5 (docs/mergekit-compatibility.md). mergekit ignores keys that it does not know,
so that a mis-indented `weight` is lost silently; here every mistake is an error, and all of them are told at once,
each with its key path.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, TypeAlias

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from mpfs.errors import NotFoundError, RecipeError
from mpfs.merge.operators import Operator, get_operator, operator_names
from mpfs.objects.encoding import Json
from mpfs.objects.plan import Scalar

MAX_RECIPE_BYTES = 1 << 20

DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"}
"""Dtypes that a recipe may ask for, and how they are stored."""

KNOWN_PARAMETERS = frozenset(
    [
        "alpha",
        "density",
        "eps",
        "epsilon",
        "filter_wise",
        "gamma",
        "int8_mask",
        "lambda",
        "max_iter",
        "normalize",
        "normalize_weights",
        "nuslerp_flatten",
        "nuslerp_row_wise",
        "r",
        "rescale",
        "scale",
        "select_topk",
        "t",
        "tol",
        "weight",
    ]
)
"""Parameters of any mergekit method: one that the chosen method has no use for is ignored, as mergekit does."""

_LATER = {
    "slices": "slices (layer ranges)",
    "modules": "modules",
    "tokenizer_source": "tokenizer_source",
    "tokenizer": "tokenizer",
    "chat_template": "chat_template",
}


_Location: TypeAlias = "tuple[int | str, ...]"

_NAMELESS = "this model"

_EXPONENT = re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+")

_WANTED = {
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}
"""What pydantic's error types ask for."""


class _ModelPath(BaseModel):
    model_config = ConfigDict(extra="forbid")
    path: str


class _ModelReference(BaseModel):
    model_config = ConfigDict(extra="forbid")
    model: _ModelPath


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid")
    model: str | _ModelReference
    parameters: dict[str, Any] | None = None


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid")
    merge_method: str
    models: list[_Entry]
    base_model: str | _ModelReference | None = None
    parameters: dict[str, Any] | None = None
    dtype: str | None = None
    out_dtype: str | None = None


_UNION_PARTS = ("str", _ModelReference.__name__)
"""What pydantic puts into a location where a value may be of either kind."""


@dataclass(frozen=True, slots=True)
class RecipeModel:
    """One entry of `models`: what it is called, and the parameters given for it."""

    name: str
    parameters: Mapping[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Recipe:
    """A valid recipe. dtypes are named as stored (BF16, …); `models` are in listing order, the base not added."""

    method: str
    models: tuple[RecipeModel, ...]
    base: str | None
    parameters: Mapping[str, Scalar]
    dtype: str | None
    out_dtype: str | None

    def as_json(self) -> Json:
        """A normalised form, in mergekit's grammar."""
        names = {stored: name for name, stored in DTYPES.items()}
        value: Json = {
            "merge_method": self.method,
            "models": [
                {"model": item.name, **({"parameters": dict(item.parameters)} if item.parameters else {})}
                for item in self.models
            ],
        }
        if self.base is not None:
            value["base_model"] = self.base
        if self.parameters:
            value["parameters"] = dict(self.parameters)
        if self.dtype is not None:
            value["dtype"] = names[self.dtype]
        if self.out_dtype is not None:
            value["out_dtype"] = names[self.out_dtype]
        return value


def load_recipe(path: Path) -> Recipe:
    """Read a recipe from a YAML file.

    Raises:
        NotFoundError: there is no such file.
        RecipeError: it has mistakes.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_RECIPE_BYTES + 1)
    except OSError as error:
        raise NotFoundError(f"{path}: {error.strerror or error}", file=str(path)) from error
    if len(data) > MAX_RECIPE_BYTES:
        raise RecipeError(f"{path}: over {MAX_RECIPE_BYTES:,} bytes, too large to be a recipe")
    try:
        return parse_recipe(data.decode("utf-8"), where=str(path))
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not UTF-8 text: {error}") from error


def parse_recipe(text: str, where: str = "recipe") -> Recipe:
    """Read a recipe from YAML text.

    Raises:
        RecipeError: it has mistakes; `problems` lists all of them.
    """
    try:
        value = yaml.load(text, _StrictLoader)
    except yaml.YAMLError as error:
        raise RecipeError(f"{where}: not valid YAML: {_one_line(error)}") from error
    except RecursionError as error:
        raise RecipeError(f"{where}: nested too deeply to be a recipe") from error
    except (ValueError, TypeError, AttributeError, LookupError, OverflowError) as error:
        # PyYAML lets these out for numbers and dates that only look like some, and for odd tags.
        raise RecipeError(f"{where}: not valid YAML: a value is not what it looks like: {_one_line(error)}") from error
    if not isinstance(value, dict):
        raise RecipeError(f"{where}: a recipe is a mapping with merge_method and models, not {_kind(value)}")
    return recipe_from_mapping(value, where)


def recipe_from_mapping(value: Mapping[str, Any], where: str = "recipe") -> Recipe:
    """Check a recipe that is already a mapping.

    Raises:
        RecipeError: it has mistakes; `problems` lists all of them.
    """
    problems: list[dict[str, str]] = []
    for key in value:
        if key in _LATER and value[key] is not None:
            problems.append(_problem(str(key), f"{_LATER[key]} is not supported by this version of MPFS"))
    later = any(value.get(key) is not None for key in ("slices", "modules"))
    known = {key: item for key, item in value.items() if key not in _LATER}
    recipe: Recipe | None = None
    try:
        recipe = _check(_Document.model_validate(known), problems)
    except ValidationError as error:
        wrong = _shape_problems(error)
        problems += [_problem(_key_path(at), message) for at, message in wrong if not (later and at == ("models",))]
        # What can be read all the same may have mistakes as well, and they are told together.
        with suppress(ValidationError):
            more: list[dict[str, str]] = []
            _check(_Document.model_validate(_patched(known, [at for at, _ in wrong])), more)
            told = tuple(_key_path(at) for at, _ in wrong)
            problems += [item for item in more if not item["path"].startswith(told)]
    if problems or recipe is None:
        lines = "; ".join(f"{item['path']}: {item['message']}" for item in problems)
        raise RecipeError(f"{where}: {lines}", problems=problems)
    return recipe


def _shape_problems(error: ValidationError) -> list[tuple[_Location, str]]:
    """What is missing, unknown or of the wrong kind: where, and what to say of it; one for each place."""
    found: dict[_Location, str] = {}
    for item in error.errors():
        location = tuple(part for part in item["loc"] if part not in _UNION_PARTS)
        # A model is text or a mapping: of the two ways to fail only that one is told which was meant.
        other = "str" if isinstance(item["input"], dict) else _ModelReference.__name__
        if item["loc"][-1] != other:
            found.setdefault(location, _explain(item, location))
    return list(found.items())


def _patched(value: Mapping[str, Any], wrong: Iterable[_Location]) -> dict[str, Any]:
    """A recipe without what is wrong at these places; what it cannot do without is made up."""
    made_up = {"model": _NAMELESS, "merge_method": _NAMELESS, "models": []}
    patched: dict[str, Any] = copy.deepcopy(dict(value))
    for location in wrong:
        holder: Any = patched
        for part in location[:-1]:
            holder = holder.get(part, {}) if isinstance(holder, dict) else holder[int(part)]
        last = location[-1]
        if isinstance(holder, list) and isinstance(last, int):
            holder[last] = {"model": _NAMELESS}
        elif isinstance(holder, dict):
            holder.pop(last, None)
            if last in made_up:
                holder[last] = made_up[str(last)]
    return patched


def _check(document: _Document, problems: list[dict[str, str]]) -> Recipe:
    operator: Operator | None = None
    try:
        operator = get_operator(document.merge_method)
    except NotFoundError as error:
        problems.append(_problem("merge_method", error.message))
    base = None if document.base_model is None else _name(document.base_model, "base_model", problems)
    models: list[RecipeModel] = []
    for index, entry in enumerate(document.models):
        path = f"models[{index}]"
        name = _name(entry.model, f"{path}.model", problems)
        parameters = _scalars(entry.parameters or {}, f"{path}.parameters", problems)
        if any(item.name == name for item in models):
            problems.append(_problem(f"{path}.model", f"{name} is listed twice"))
        models.append(RecipeModel(name, parameters))
    shared = _scalars(document.parameters or {}, "parameters", problems)
    if not models:
        problems.append(_problem("models", "the list is empty"))
    elif operator is not None:
        _check_method(operator, models, base, shared, problems)
    return Recipe(
        method=document.merge_method,
        models=tuple(models),
        base=base,
        parameters=shared,
        dtype=_dtype(document.dtype, "dtype", problems),
        out_dtype=_dtype(document.out_dtype, "out_dtype", problems),
    )


def _check_method(
    operator: Operator,
    models: list[RecipeModel],
    base: str | None,
    shared: Mapping[str, Scalar],
    problems: list[dict[str, str]],
) -> None:
    method = operator.name
    if operator.needs_base:
        if base is None:
            problems.append(_problem("base_model", f"{method} needs one: the model that the experts were tuned from"))
        elif all(item.name == base for item in models):
            problems.append(_problem("models", f"{method} needs at least one model besides the base"))
    elif base is not None and all(item.name != base for item in models):
        problems.append(
            _problem("models", f"{method} takes the base as an ordinary model: list {base} with a weight of its own")
        )
    for parameter in operator.parameters:
        if not parameter.required or parameter.name in shared:
            continue
        for index, item in enumerate(models):
            path = f"models[{index}].parameters.{parameter.name}"
            is_base = operator.needs_base and item.name == base
            told = any(problem["path"] == path for problem in problems)
            if not is_base and parameter.name not in item.parameters and not told:
                problems.append(_problem(path, f"missing: {method} needs it for {item.name}"))


def _scalars(values: Mapping[str, Any], path: str, problems: list[dict[str, str]]) -> dict[str, Scalar]:
    known: dict[str, Scalar] = {}
    for name, given in values.items():
        # YAML 1.1 takes 1e-3, without a point, for text.
        value = float(given) if isinstance(given, str) and _EXPONENT.fullmatch(given) else given
        where = f"{path}.{name}"
        if name not in KNOWN_PARAMETERS:
            problems.append(_problem(where, f"no method has this parameter{_near(str(name), KNOWN_PARAMETERS)}"))
        elif isinstance(value, list | dict):
            problems.append(_problem(where, "gradients and filters are not supported by this version of MPFS"))
        elif value is None:
            continue
        elif not isinstance(value, bool | int | float):
            problems.append(_problem(where, f"must be a number or true/false, not {_kind(value)}"))
        elif not _is_finite(value):
            problems.append(_problem(where, f"must be finite, not {given if isinstance(value, float) else 'so large'}"))
        else:
            known[name] = value
    return known


def _is_finite(value: float) -> bool:
    try:
        return isfinite(value)
    except OverflowError:
        return False


def _name(reference: str | _ModelReference, path: str, problems: list[dict[str, str]]) -> str:
    name = reference if isinstance(reference, str) else reference.model.path
    if not name.strip():
        problems.append(_problem(path, "the name is empty"))
    elif "+" in name:
        problems.append(_problem(path, f"{name}: adapters (+) are not supported by this version of MPFS"))
    return name


def _dtype(name: str | None, path: str, problems: list[dict[str, str]]) -> str | None:
    if name is None:
        return None
    stored = DTYPES.get(name.removeprefix("torch."))
    if stored is None:
        problems.append(_problem(path, f"{name} is not one of {', '.join(DTYPES)}{_near(name, DTYPES)}"))
    return stored


def _explain(item: ErrorDetails, location: _Location) -> str:
    if item["type"] == "extra_forbidden":
        last = str(location[-1])
        if last in KNOWN_PARAMETERS:
            return "a parameter belongs under `parameters:`, one level deeper"
        keys = [*_Document.model_fields, *_LATER] if len(location) == 1 else list(_Entry.model_fields)
        return f"unknown key{_near(last, keys)}"
    if item["type"] == "missing":
        return f"missing; one of {', '.join(operator_names())}" if location == ("merge_method",) else "missing"
    if location[-1] in ("model", "base_model"):
        return f"must be a name or `model: {{path: NAME}}`, not {_kind(item['input'])}"
    wanted = _WANTED.get(item["type"])
    if wanted is not None:
        return f"must be {wanted}, not {_kind(item['input'])}"
    return str(item["msg"][:1].lower() + item["msg"][1:])


def _key_path(location: _Location) -> str:
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else part
    return path


def _problem(path: str, message: str) -> dict[str, str]:
    return {"path": path, "message": message}


def _near(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _kind(value: object) -> str:
    names = {type(None): "nothing", dict: "a mapping", list: "a list", str: "text", bool: "true/false"}
    return names.get(type(value), type(value).__name__)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


class _StrictLoader(yaml.SafeLoader):
    """Plain data only, no aliases (they can blow up to gigabytes), no key twice."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]  # untyped in PyYAML's stubs
            raise yaml.composer.ComposerError(None, None, "aliases (*name) are not allowed in a recipe", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} is there twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)
