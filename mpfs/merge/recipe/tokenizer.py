"""What a recipe says of the output's vocabulary: `tokenizer_source`, or `tokenizer` with what single tokens are made from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from pydantic import ValidationError

from mpfs.merge.recipe.problems import Problem, kind, near, problem
from mpfs.merge.recipe.reference import ModelReference, model_name
from mpfs.objects.encoding import Json

UNION = "union"
BASE = "base"
_WORDS = (UNION, BASE)

_LARGEST_MULTIPLE = 1 << 16

RuleKind: TypeAlias = Literal["default", "zero", "model", "model_token"]

_SOURCE_HINT = "a model's name, {kind: zero} or {kind: model_token, model: NAME, token: TOKEN}"


@dataclass(frozen=True, slots=True)
class TokenRule:
    """Where a token's rows come from in models that lack it, or in all with `force`.

    `kind` "model": the row that `model` has for the same token; "model_token": the row that it has for `token`, or its
    row number `token_id`; "zero": zeros; "default": as for any other token.
    """

    kind: RuleKind = "default"
    model: str | None = None
    token: str | None = None
    token_id: int | None = None
    force: bool = False

    def as_json(self) -> Json:
        """In mergekit's grammar."""
        value: Json = {}
        if self.kind == "model":
            value["source"] = self.model
        elif self.kind == "zero":
            value["source"] = {"kind": "zero"}
        elif self.kind == "model_token":
            which = {"token": self.token} if self.token_id is None else {"token_id": self.token_id}
            value["source"] = {"kind": "model_token", "model": self.model, **which}
        return {**value, "force": True} if self.force else value


@dataclass(frozen=True, slots=True)
class RecipeTokenizer:
    """The output's vocabulary. With `source` "union" or "base" `named` is None, otherwise it is the model it comes from."""

    named: str | None = None
    union: bool = True
    tokens: Mapping[str, TokenRule] = field(default_factory=dict)
    pad_to_multiple_of: int | None = None

    def models(self) -> Iterator[str]:
        """Every model that is named."""
        if self.named is not None:
            yield self.named
        yield from (rule.model for rule in self.tokens.values() if rule.model is not None)

    def renamed(self, names: Mapping[str, str]) -> RecipeTokenizer:
        """The same with other names for some models."""

        def other(name: str | None) -> str | None:
            return None if name is None else names.get(name, name)

        tokens = {token: replace(rule, model=other(rule.model)) for token, rule in self.tokens.items()}
        return replace(self, named=other(self.named), tokens=tokens)

    def as_json(self) -> Json:
        """In mergekit's grammar."""
        source: object = UNION if self.union else BASE
        if self.named is not None:
            source = {"model": {"path": self.named}} if self.named in _WORDS else self.named
        value: Json = {"source": source}
        if self.tokens:
            value["tokens"] = {token: rule.as_json() for token, rule in self.tokens.items()}
        if self.pad_to_multiple_of is not None:
            value["pad_to_multiple_of"] = self.pad_to_multiple_of
        return value


def read_tokenizer(source: Any, given: Any, problems: list[Problem]) -> RecipeTokenizer | None:
    """What `tokenizer_source` and `tokenizer` say together; None if there is neither."""
    if source is not None and given is not None:
        problems.append(problem("tokenizer", "there is tokenizer_source already: a recipe has one of the two"))
        return None
    if source is not None:
        return _from_source(source, "tokenizer_source", problems)
    if given is None:
        return None
    if not isinstance(given, dict):
        problems.append(problem("tokenizer", f"must be a mapping, not {kind(given)}"))
        return None
    _unknown(given, ("source", "tokens", "pad_to_multiple_of"), "tokenizer", problems)
    found = _from_source(given.get("source", UNION), "tokenizer.source", problems)
    return replace(
        found,
        tokens=_tokens(given.get("tokens"), problems),
        pad_to_multiple_of=_multiple(given.get("pad_to_multiple_of"), problems),
    )


def _from_source(source: Any, path: str, problems: list[Problem]) -> RecipeTokenizer:
    if source in _WORDS:
        return RecipeTokenizer(union=source == UNION)
    name = _model(source, path, problems, "union, base or a model's name")
    return RecipeTokenizer(named=name, union=False)


def _model(value: Any, path: str, problems: list[Problem], wanted: str) -> str | None:
    if isinstance(value, dict):
        try:
            value = ModelReference.model_validate(value)
        except ValidationError:
            problems.append(problem(path, f"must be {wanted}, not {kind(value)} without model: {{path: NAME}}"))
            return None
    if not isinstance(value, str | ModelReference):
        problems.append(problem(path, f"must be {wanted}, not {kind(value)}"))
        return None
    return model_name(value, path, problems)


def _tokens(given: Any, problems: list[Problem]) -> dict[str, TokenRule]:
    path = "tokenizer.tokens"
    if given is None:
        return {}
    if not isinstance(given, dict):
        problems.append(problem(path, f"must be a mapping of tokens, not {kind(given)}"))
        return {}
    rules: dict[str, TokenRule] = {}
    for token, value in given.items():
        where = f"{path}.{token}"
        if not isinstance(token, str) or not token:
            problems.append(problem(where, f"a token is text, not {kind(token)}: put it in quotes"))
        elif not isinstance(value, dict | None):
            problems.append(problem(where, f"must be a mapping with source and force, not {kind(value)}"))
        else:
            rules[token] = _rule(value or {}, where, problems)
    return rules


def _rule(given: Mapping[Any, Any], path: str, problems: list[Problem]) -> TokenRule:
    _unknown(given, ("source", "force"), path, problems)
    force = given.get("force", False)
    if not isinstance(force, bool):
        problems.append(problem(f"{path}.force", f"must be true or false, not {kind(force)}"))
    rule = _source(given.get("source"), f"{path}.source", problems)
    if force is True and rule is not None and rule.kind == "default":
        problems.append(problem(f"{path}.force", f"force needs a source: {_SOURCE_HINT}"))
    return replace(rule or TokenRule(), force=force is True)


def _source(given: Any, path: str, problems: list[Problem]) -> TokenRule | None:
    """A token's source; None if there is something wrong with it."""
    if given is None:
        return TokenRule()
    if not isinstance(given, dict) or "kind" not in given:
        if isinstance(given, dict) and ({"token", "token_id"} & set(given)):
            problems.append(problem(f"{path}.kind", "missing: kind: model_token"))
            return None
        name = _model(given, path, problems, _SOURCE_HINT)
        return None if name is None else TokenRule("model", name)
    if given["kind"] == "zero":
        _unknown(given, ("kind",), path, problems)
        return TokenRule("zero")
    if given["kind"] != "model_token":
        told = f"{given['kind']!r} is neither zero nor model_token; a model's own row is `source: NAME`"
        problems.append(problem(f"{path}.kind", told))
        return None
    _unknown(given, ("kind", "model", "token", "token_id"), path, problems)
    token, number = given.get("token"), given.get("token_id")
    if (token is None) == (number is None):
        problems.append(problem(path, "it has one of token and token_id"))
    elif token is not None and not isinstance(token, str):
        problems.append(problem(f"{path}.token", f"must be text, not {kind(token)}: put it in quotes"))
    elif number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 0):
        problems.append(problem(f"{path}.token_id", "must be a row's number, 0 or more"))
    name = _model(given.get("model"), f"{path}.model", problems, "a model's name")
    return None if name is None else TokenRule("model_token", name, token, number)


def _multiple(given: Any, problems: list[Problem]) -> int | None:
    if given is None or (given == 0 and not isinstance(given, bool)):
        return None
    if not isinstance(given, int) or isinstance(given, bool) or not 0 <= given <= _LARGEST_MULTIPLE:
        told = f"must be a whole number from 0 (no padding) to {_LARGEST_MULTIPLE:,}"
        problems.append(problem("tokenizer.pad_to_multiple_of", told))
        return None
    return given


def _unknown(given: Mapping[Any, Any], known: tuple[str, ...], path: str, problems: list[Problem]) -> None:
    for key in given:
        if key not in known:
            problems.append(problem(f"{path}.{key}", f"unknown key{near(str(key), known)}"))
