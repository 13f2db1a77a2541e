"""What a model is made of, told from the names and shapes of its tensors and from its config.json.

mergekit has a template for each architecture. Here any checkpoint will do: layers are numbered in tensor names,
embeddings and heads are called so, and config.json says how many layers and words there are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

Config: TypeAlias = Mapping[str, Any]
"""A parsed config.json; empty where there is none."""

LAYER_COUNT_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""What config.json calls the number of layers."""

_OTHER_COUNT_KEYS = ("encoder_layers", "decoder_layers", "num_decoder_layers", "num_encoder_layers", "depth")

_STACK_WORDS = frozenset(["layers", "layer", "h", "block", "blocks", "decoder_layers", "encoder_layers", "resblocks"])
"""What the part of a tensor's name before a layer's number is usually called."""

_HEAD = re.compile(
    r"(^|\.)(lm_head|embed_out|output_projection|generator|score_head)\.(weight|bias)$|^output\.(weight|bias)$"
    r"|(^|\.)cls\.predictions\.(decoder\.(weight|bias)|bias)$"
)
_EMBEDDING = re.compile(
    r"(^|\.)(embed_tokens|wte|word_embeddings|tok_embeddings|embed_in|shared|token_embd|token_embedding)\.weight$"
)
_LIKE_EMBEDDING = re.compile(r"^(?!.*(pos|type|time|patch|segment)).*(^|[._])embed(ding|dings)?[._]")
"""Names of matrices outside the layers that are embeddings if they have as many rows as there are words."""

_FIRST = re.compile(r"emb|(^|\.)(wte|wpe|shared)\.")
"""Names of what comes before the layers; all else that belongs to no layer comes after them."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor is: the stack's prefix, the layer's number, and the name within the layer."""

    stack: str
    layer: int
    rest: str


@dataclass(frozen=True, slots=True)
class Architecture:
    """What was recognised. `stacks` are the numbers of layers by prefix (`model.layers`); `main` the language model's."""

    stacks: Mapping[str, int]
    main: str | None
    embedding: str | None
    head: str | None

    def place(self, name: str) -> Place | None:
        """The layer that a tensor belongs to; None if to none."""
        found = _numbered(name)
        return found if found is not None and found.stack in self.stacks else None

    def describe(self) -> str:
        """In words, for a person."""
        stacks = ", ".join(f"{count} layers at {prefix}" for prefix, count in self.stacks.items())
        parts = [stacks or "no layers", f"embedding {self.embedding or 'none'}", f"head {self.head or 'none'}"]
        return "; ".join(parts)


def recognise(names: Iterable[str], config: Config) -> Architecture:
    """Recognise a model's parts; pure.

    Args:
        names: of its tensors, in order.
        config: its config.json.
    """
    found: dict[str, set[int]] = {}
    tensors: dict[str, int] = {}
    embedding = head = None
    for name in names:
        place = _numbered(name)
        if place is not None:
            found.setdefault(place.stack, set()).add(place.layer)
            tensors[place.stack] = tensors.get(place.stack, 0) + 1
        elif embedding is None and is_embedding(name):
            embedding = name
        elif head is None and is_head(name) and name.endswith("weight"):
            head = name
    expected = set(layer_counts(config, (*LAYER_COUNT_KEYS, *_OTHER_COUNT_KEYS)))
    stacks = {
        prefix: max(layers) + 1
        for prefix, layers in found.items()
        if prefix.rpartition(".")[2].lower() in _STACK_WORDS
        or (len(layers) in expected and max(layers) + 1 == len(layers))
    }
    main = None
    if stacks:
        language = set(layer_counts(config, LAYER_COUNT_KEYS))
        main = max(stacks, key=lambda prefix: (stacks[prefix] in language, tensors[prefix], prefix))
    return Architecture(stacks, main, embedding, head)


@lru_cache(maxsize=1 << 16)
def _numbered(name: str) -> Place | None:
    # The models of a merge have the same names.
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.isascii() and part.isdigit():
            if index == 0:
                return None
            return Place(".".join(parts[:index]), int(part), ".".join(parts[index + 1 :]))
    return None


def is_embedding(name: str) -> bool:
    """Whether a tensor holds a vector for each token."""
    return _EMBEDDING.search(name) is not None


def is_head(name: str) -> bool:
    """Whether a tensor holds a vector (or a bias) for each token that may come out."""
    return _HEAD.search(name) is not None


def is_first(name: str) -> bool:
    """Whether a tensor that belongs to no layer comes before them (embeddings) and not after (last norm, head)."""
    return not is_head(name) and _FIRST.search(name) is not None


def vocabulary_tensors(shapes: Mapping[str, tuple[int, ...]], config: Config) -> list[str]:
    """The tensors that have a row (or an element) for each token: embeddings, heads, biases of heads.

    Told by name, and by the number of rows that the embedding (else the head, else config.json) has.

    Args:
        shapes: of the model's tensors.
        config: its config.json.
    """
    found = recognise(shapes, config)
    named = [name for name in (found.embedding, found.head) if name is not None and len(shapes[name]) == 2]
    counts = {shapes[named[0]][0]} if named else vocabulary_sizes(config)

    def is_one(name: str) -> bool:
        if shapes[name][:1] not in {(count,) for count in counts}:
            return False
        if is_embedding(name) or is_head(name):
            return True
        return len(shapes[name]) == 2 and found.place(name) is None and _LIKE_EMBEDDING.search(name) is not None

    return [name for name in shapes if is_one(name)]


def layer_counts(config: Config, keys: Iterable[str] = LAYER_COUNT_KEYS) -> list[int]:
    """The numbers of layers that config.json names, of the model and of its parts."""
    wanted = tuple(keys)
    return [part[key] for part in config_parts(config) for key in wanted if _is_count(part.get(key))]


def vocabulary_sizes(config: Config) -> set[int]:
    """The vocabulary sizes that config.json names, of the model and of its parts."""
    return {part["vocab_size"] for part in config_parts(config) if _is_count(part.get("vocab_size"))}


def is_tied(config: Config) -> bool | None:
    """Whether config.json says that the head is the embedding; None if it does not say."""
    for part in config_parts(config):
        value = part.get("tie_word_embeddings")
        if isinstance(value, bool):
            return value
    return None


def config_parts(config: Config) -> list[Config]:
    """config.json itself, and the configs in it (text_config and the like)."""
    return [config, *(part for key, part in config.items() if key.endswith("_config") and isinstance(part, dict))]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
