"""The branches of a sweep: a legal ref name for each variant, out of its settings. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mpfs.errors import UsageError
from mpfs.merge.recipe.problems import near
from mpfs.merge.sweep.settings import canonical_value
from mpfs.objects import Budget
from mpfs.store import check_ref_name

_STRUCTURE = frozenset(["parameters", "models", "slices", "sources", "modules", "value", "*"])
"""Parts of key paths that say nothing about what is set."""

_LONGEST_VALUE = 40
_LONGEST_NAME = 160
_DIGITS = 8
_ILLEGAL = re.compile(r"[^A-Za-z0-9._-]+")
_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")


def short_keys(paths: Sequence[str]) -> dict[str, str]:
    """A short name for each key path: as many of its last telling parts as tell it from the others.

    `parameters.density` is `density`; of `models.a.parameters.weight` and `models.b.parameters.weight` each is
    `a.weight` and `b.weight`.
    """
    parts = {path: _telling(path) for path in paths}
    short: dict[str, str] = {}
    for path, mine in parts.items():
        others = [other for name, other in parts.items() if name != path]
        length = next(
            (n for n in range(1, len(mine) + 1) if all(other[-n:] != mine[-n:] for other in others)), len(mine)
        )
        short[path] = ".".join(mine[-length:])
    if len(set(short.values())) < len(short):
        return {path: path for path in paths}
    return short


def _telling(path: str) -> list[str]:
    parts = [part for part in re.split(r"[.\[\]]+", path) if part]
    return [part for part in parts if part not in _STRUCTURE] or parts or [path]


def branch_names(values: Sequence[Mapping[str, Any]], into: str) -> list[str]:
    """The branch of each variant, given its values by key path.

    Args:
        values: of each variant; all have the same paths.
        into: a prefix, to which `/KEY=VALUE,KEY=VALUE` is added; or a template, in which `{KEY}` stands for a value. KEY is
            a path, or as much of its end as tells it from the others.

    Raises:
        UsageError: the template has a placeholder that is no setting, or gives variants the same name; or the result can
            be no ref's name.
    """
    short = short_keys(list(values[0])) if values else {}
    if "{" in into or "}" in into:
        names = [_filled(into, item, short) for item in values]
        twice = next((name for index, name in enumerate(names) if name in names[:index]), None)
        if twice is not None:
            keys = ", ".join(f"{{{key}}}" for key in short.values())
            raise UsageError(f"two variants would be called {twice}: use all of {keys} in {into}")
    else:
        prefix = into.rstrip("/")
        names = [f"{prefix}/{_settings(item, short)}" for item in values]
        # Cleaned, values may be the same that are not.
        names = [
            f"{name}-{_digest(item)}" if names.count(name) > 1 else name
            for name, item in zip(names, values, strict=True)
        ]
    return [check_ref_name(name) for name in names]


def describe(values: Mapping[str, Any], short: Mapping[str, str]) -> str:
    """The settings of a variant, for people: `density=0.3, merge_method=ties`."""
    return ", ".join(f"{short[path]}={canonical_value(value)}" for path, value in values.items())


def _settings(values: Mapping[str, Any], short: Mapping[str, str]) -> str:
    name = ",".join(f"{_clean(short[path])}={_text(value)}" for path, value in values.items())
    # A part of a ref's name begins with a letter, a digit or '_'.
    name = name.lstrip("-.=,")
    return name if 0 < len(name) <= _LONGEST_NAME else _digest(values)


def _filled(template: str, values: Mapping[str, Any], short: Mapping[str, str]) -> str:
    texts = {name: _text(value) for path, value in values.items() for name in (path, short[path])}

    def fill(match: re.Match[str]) -> str:
        if match[1] not in texts:
            keys = ", ".join(f"{{{key}}}" for key in short.values())
            raise UsageError(f"{template}: {match[0]} is not set here{near(match[1], texts)}; there is {keys}")
        return texts[match[1]]

    return _PLACEHOLDER.sub(fill, template)


def _text(value: Any) -> str:
    """A value as a part of a ref's name."""
    if isinstance(value, Budget):
        return f"{value.value:g}pct" if value.kind == "percent" else f"{value.value:.0f}"
    text = _clean(canonical_value(value))
    if len(text) > _LONGEST_VALUE:
        return f"{text[: _LONGEST_VALUE - _DIGITS - 1]}-{_digest({'': value})}"
    return text


def _clean(text: str) -> str:
    clean = re.sub(r"\.{2,}", ".", _ILLEGAL.sub("-", text)).strip(".")
    return (clean[1:-1] if text.startswith("[") and text.endswith("]") else clean).strip(".") or "-"


def _digest(values: Mapping[str, Any]) -> str:
    text = "\n".join(f"{path!r}={value!r}" for path, value in values.items())
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGITS]
