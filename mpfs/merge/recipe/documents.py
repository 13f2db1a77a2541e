"""Recipes as text: YAML files of one document or of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from mpfs.errors import NotFoundError, RecipeError
from mpfs.merge.recipe.grammar import recipe_from_mapping
from mpfs.merge.recipe.model import Recipe
from mpfs.merge.recipe.problems import kind, one_line, problem

MAX_RECIPE_BYTES = 1 << 20
MAX_RECIPE_NODES = 1 << 20
"""Values in a document, with aliases written out. Text of the greatest length has fewer without them."""


def load_recipe(path: Path) -> Recipe:
    """Read a recipe from a YAML file of one document.

    Raises:
        NotFoundError: there is no such file.
        RecipeError: it has mistakes, or several documents.
    """
    return _only(load_recipes(path), str(path))


def load_recipes(path: Path) -> tuple[Recipe, ...]:
    """Read a YAML file of one or more documents, in order.

    Raises:
        NotFoundError: there is no such file.
        RecipeError: it has mistakes.
    """
    return parse_recipes(_read(path), where=str(path))


def _read(path: Path) -> str:
    """The text of a recipe's file."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_RECIPE_BYTES + 1)
    except OSError as error:
        raise NotFoundError(f"{path}: {error.strerror or error}", file=str(path)) from error
    if len(data) > MAX_RECIPE_BYTES:
        raise RecipeError(f"{path}: over {MAX_RECIPE_BYTES:,} bytes, too large to be a recipe")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not UTF-8 text: {error}") from error


def parse_recipe(text: str, where: str = "recipe") -> Recipe:
    """Read a recipe from YAML text of one document.

    Raises:
        RecipeError: it has mistakes; `problems` lists all of them.
    """
    return _only(parse_recipes(text, where), where)


def parse_recipes(text: str, where: str = "recipe") -> tuple[Recipe, ...]:
    """Read YAML text of one or more documents. Of several all but the last must have a `name`, which later ones use.

    Raises:
        RecipeError: it has mistakes; `problems` lists all of them (in key paths `#2` is the second document).
    """
    return recipes_from_mappings(_mappings(text, where), where)


def load_mappings(path: Path) -> list[dict[str, Any]]:
    """Read the documents of a YAML file as they are written, unchecked: something is still to be set in them.

    Raises:
        NotFoundError: there is no such file.
        RecipeError: it is not YAML, or a document is no mapping.
    """
    return _mappings(_read(path), str(path))


def recipes_from_mappings(values: Sequence[Mapping[str, Any]], where: str = "recipe") -> tuple[Recipe, ...]:
    """Check the documents of a file; see `parse_recipes`."""
    if len(values) == 1:
        return (recipe_from_mapping(values[0], where),)
    return _parse_all(values, where)


def parse_values(text: str) -> list[Any]:
    """Values as YAML, with commas between: `0.3, 0.5` or `[0, 1], [1, 0]`.

    Raises:
        ValueError: they are none.
    """
    try:
        values = list(yaml.load_all(f"[{text}\n]", _StrictLoader))
    except (yaml.YAMLError, RecursionError, ValueError, TypeError, AttributeError, LookupError, OverflowError) as error:
        told = getattr(error, "problem", None) or one_line(error)
        raise ValueError(f"not valid YAML: {told}") from error
    if len(values) != 1 or not isinstance(values[0], list):
        raise ValueError("not valid YAML: brackets do not match")
    return values[0]


def _mappings(text: str, where: str) -> list[dict[str, Any]]:
    """The documents of a text, as mappings."""
    try:
        values = [_written_out(value) for value in yaml.load_all(text, _StrictLoader) if value is not None]
    except yaml.YAMLError as error:
        raise RecipeError(f"{where}: not valid YAML: {one_line(error)}") from error
    except RecursionError as error:
        raise RecipeError(f"{where}: nested too deeply to be a recipe") from error
    except (ValueError, TypeError, AttributeError, LookupError, OverflowError) as error:
        # PyYAML lets these out for numbers and dates that only look like some, and for odd tags.
        raise RecipeError(f"{where}: not valid YAML: a value is not what it looks like: {one_line(error)}") from error
    for value in values or [None]:
        if not isinstance(value, dict):
            raise RecipeError(f"{where}: a recipe is a mapping with merge_method and models, not {kind(value)}")
    return values


def _parse_all(values: Sequence[Mapping[str, Any]], where: str) -> tuple[Recipe, ...]:
    recipes: list[Recipe] = []
    problems: list[dict[str, str]] = []
    names: set[str] = set()
    for index, value in enumerate(values, start=1):
        name = value.get("name")
        if name is None and index < len(values):
            problems.append(problem(f"#{index}.name", "missing: all documents but the last one need a name"))
        elif isinstance(name, str) and name in names:
            problems.append(problem(f"#{index}.name", f"an earlier document is called {name} already"))
        if isinstance(name, str):
            names.add(name)
        try:
            recipes.append(recipe_from_mapping(value, where))
        except RecipeError as error:
            listed: Any = error.details["problems"]
            problems += [problem(f"#{index}.{item['path']}", item["message"]) for item in listed]
            continue
        later = {str(other.get("name")) for other in values[index - 1 :] if other.get("name") is not None}
        problems += [
            problem(f"#{index}", f"it uses {model}, which is itself or a later document: documents run in order")
            for model in (*recipes[-1].model_names, *recipes[-1].tokenizer_models)
            if model in later
        ]
    if problems:
        lines = "; ".join(f"{item['path']}: {item['message']}" for item in problems)
        raise RecipeError(f"{where}: {lines}", problems=problems)
    return tuple(recipes)


def _only(recipes: tuple[Recipe, ...], where: str) -> Recipe:
    if len(recipes) != 1:
        raise RecipeError(f"{where}: it holds {len(recipes)} documents, and one is wanted here")
    return recipes[0]


class _StrictLoader(yaml.SafeLoader):
    """Plain data only, aliases that stay small when they are written out, no key twice."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._sizes: dict[yaml.Node, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """The next node. What it takes written out is known before anything is built: aliases of aliases grow fast."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]  # untyped in PyYAML's stubs
        mark: Any = event.start_mark
        node = super().compose_node(parent, index)
        if node is None:
            return None
        if isinstance(event, yaml.AliasEvent):
            if node not in self._sizes:
                raise yaml.composer.ComposerError(
                    None, None, f"the alias *{event.anchor} is inside what it stands for", mark
                )
            return node
        size = 1
        if isinstance(node, yaml.SequenceNode):
            size += sum(self._sizes[item] for item in node.value)
        elif isinstance(node, yaml.MappingNode):
            size += sum(self._sizes[key] + self._sizes[value] for key, value in node.value)
        if size > MAX_RECIPE_NODES:
            raise yaml.composer.ComposerError(
                None, None, f"with its aliases written out, it has over {MAX_RECIPE_NODES:,} values", mark
            )
        self._sizes[node] = size
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """A mapping, checked before merge keys (`<<`) put others' keys beside its own."""
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} is there twice", key.start_mark
                    )
                seen.add(key.value)
        return node


def _written_out(value: Any) -> Any:
    """The same with a copy wherever an alias stood: who changes one place must not change another."""
    if isinstance(value, dict):
        return {key: _written_out(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_written_out(item) for item in value]
    return value
