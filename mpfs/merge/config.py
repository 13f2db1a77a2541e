"""Keeping config.json true to the tensors beside it: dtype, number of layers, vocabulary, tied head. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mpfs.merge.architecture import LAYER_COUNT_KEYS, config_parts, is_tied, recognise
from mpfs.objects import ObjectId

_CONFIG_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}

_LAYER_LISTS = (
    "layer_types",
    "layers_block_type",
    "block_types",
    "attention_types",
    "no_rope_layers",
    "mlp_layer_types",
)
"""Lists in config.json that have one entry for each layer."""

_CHILDREN_FIRST = ("text_config", "llm_config", "language_config")
"""Where a model of several parts describes its language model."""


def parse_config(config: bytes) -> dict[str, Any] | None:
    """A config.json as a mapping; None if it is no JSON object."""
    try:
        value = json.loads(config)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def config_with(config: bytes, changed: Mapping[str, Any]) -> bytes:
    """A config.json that says `changed`; byte for byte the same if it is that already."""
    return (
        config
        if parse_config(config) == changed
        else json.dumps(changed, indent=2, ensure_ascii=False).encode() + b"\n"
    )


def set_dtype(config: dict[str, Any], dtype: str, *, add: bool = True) -> None:
    """Make the dtype field say `dtype` (as stored: BF16, …).

    transformers before 5 calls the field torch_dtype, later ones dtype: whichever is there is set. `add` says whether
    one that is not there is added.
    """
    for name in [name for name in ("dtype", "torch_dtype") if name in config] or ["torch_dtype"] * add:
        config[name] = _CONFIG_NAMES[dtype]


def config_with_dtype(config: bytes, dtype: str, *, add: bool = True) -> bytes:
    """A config.json whose dtype field says `dtype`; byte for byte the same if it does already, or is no JSON object."""
    value = parse_config(config)
    if value is None:
        return config
    set_dtype(value, dtype, add=add)
    return config_with(config, value)


def set_layers(
    config: dict[str, Any], before: Mapping[str, ObjectId], after: Mapping[str, ObjectId], taken: Sequence[int] | None
) -> None:
    """Make the number of layers, and lists with an entry for each, agree with the output's tensors.

    Args:
        config: the template's, to be changed.
        before: the template's tensors.
        after: the output's.
        taken: which layer of its inputs each layer of the output was, None if as it is.
    """
    stack = recognise(before, config).main
    if stack is None:
        return
    old, new = recognise(before, config).stacks[stack], recognise(after, config).stacks.get(stack, 0)
    for part in _language_first(config):
        names = [name for name in LAYER_COUNT_KEYS if part.get(name) == old]
        if not names:
            continue
        for name in names:
            part[name] = new
        for name in _LAYER_LISTS:
            entries = part.get(name)
            if taken is not None and isinstance(entries, list) and len(entries) == old and max(taken) < old:
                part[name] = [entries[layer] for layer in taken]
        return


def set_vocabulary(config: dict[str, Any], rows: int) -> None:
    """Make vocab_size say `rows`, wherever it is said."""
    for part in _language_first(config):
        if "vocab_size" in part:
            part["vocab_size"] = rows


def set_tied(config: dict[str, Any], before: Mapping[str, ObjectId], after: Mapping[str, ObjectId]) -> None:
    """Make tie_word_embeddings false where the output has a head that is not its embedding.

    Args:
        config: the template's, to be changed.
        before: the template's tensors: if it has a head, and does not say that this is tied, nothing is added.
        after: the output's.
    """
    found = recognise(after, config)
    if found.head is None or found.embedding is None or after[found.head] == after[found.embedding]:
        return
    if is_tied(config) is True or (is_tied(config) is None and found.head not in before):
        holders = [part for part in _language_first(config) if "tie_word_embeddings" in part]
        for part in holders or [config]:
            part["tie_word_embeddings"] = False


def layers_taken(recipe: Mapping[str, Any]) -> list[int] | None:
    """Which layer of its inputs each layer of the output was, by a recipe's slices; None without slices."""
    slices = recipe.get("slices")
    if not slices:
        return None
    taken: list[int] = []
    for piece in slices:
        start, stop = piece["sources"][0]["layer_range"]
        taken.extend(range(start, stop))
    return taken


def _language_first(config: dict[str, Any]) -> list[dict[str, Any]]:
    parts = [part for part in config_parts(config) if isinstance(part, dict)]
    language = [config[key] for key in _CHILDREN_FIRST if isinstance(config.get(key), dict)]
    return [config, *language, *(part for part in parts if part is not config and part not in language)]
