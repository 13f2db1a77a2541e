"""Where a model comes from: what it says itself, whether a base is plausible, and which one is the likeliest.

Nothing is read for it but statistics: the sketches of two models say how far apart they are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mpfs.formats.names import rename
from mpfs.formats.training import DIRECTORY as TRAINING_STATE
from mpfs.objects import Commit, Input, ObjectId, Snapshot, Tensor, object_id
from mpfs.objects.dtypes import MERGEABLE, itemsize
from mpfs.stats.estimate import delta_summary
from mpfs.stats.stored import column_records
from mpfs.store import Store

IMPLAUSIBLE = 0.7
"""The relative delta from which a base is doubted. Two models that were trained apart have about 1.4, fine-tunes some
thousandths to tenths (0.006 to 0.15 among anarcii's, 0.12 for chgnet's)."""

LIKELY = 0.5
"""The relative delta up to which a model may be called a base that nobody has named."""

SHARED = 0.5
"""The share of elements that must have a counterpart of equal shape."""

_CARD_BYTES = 1 << 16
_STATED = ("base_model", "base_model_name_or_path", "_name_or_path")


@dataclass(frozen=True, slots=True)
class Kinship:
    """How far a model is from another. `shared` is the share of its elements with a counterpart of the same shape,
    `delta` ‖model - other‖ / ‖model‖ over the floating-point ones among those, estimated; None if there are none."""

    shared: float
    delta: float | None

    def __str__(self) -> str:
        if self.delta is None:
            return f"{self.shared:.0%} of it have a counterpart, none that can be compared"
        return f"{self.shared:.0%} of it have a counterpart, and differ by {self.delta:.3g} of their norm"


def stated_bases(files: Mapping[str, bytes]) -> tuple[str, ...]:
    """What a model's own files name as its base.

    Args:
        files: the contents of config.json, adapter_config.json and README.md, as far as there are any. In the card it is
            `base_model` of the metadata at its beginning.
    """
    found: list[str] = []
    for name in ("README.md", "adapter_config.json", "config.json"):
        content = files.get(name)
        if content is None:
            continue
        values = _card(content) if name == "README.md" else parsed(content)
        for key in _STATED:
            value = values.get(key)
            for item in value if isinstance(value, list) else [value]:
                # A path of somebody else's disk says nothing.
                if isinstance(item, str) and 0 < len(item) < 200 and not item.startswith((".", "/", "~")):
                    found.append(item)
    return tuple(dict.fromkeys(found))


def compare(store: Store, model: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Kinship:
    """How far a model is from another. Statistics of both must be in the store."""
    names = rename(model, other, lambda ours, theirs: model[ours].shape == other[theirs].shape).names
    total = shared = 0
    delta = norm = 0.0
    for name, tensor in model.items():
        total += tensor.numel
        counterpart = other.get(name) or other.get(names.get(name, ""))
        if counterpart is None or counterpart.shape != tensor.shape:
            continue
        shared += tensor.numel
        if tensor.dtype in MERGEABLE and counterpart.dtype in MERGEABLE:
            elements = tensor.block_size // min(itemsize(tensor.dtype), itemsize(counterpart.dtype))
            ours, theirs = (column_records(store.blocks, item, elements) for item in (tensor, counterpart))
            summary = delta_summary(ours, theirs)
            delta += 0.0 if tensor == counterpart else float(summary.delta_squared.sum())
            norm += float(summary.a_squared.sum())
    return Kinship(
        shared / total if total else 0.0, math.sqrt(delta / norm) if norm > 0 and math.isfinite(delta) else None
    )


def doubts(kinship: Kinship, base: str) -> str | None:
    """Why a base is not plausible, for a person; None if it is."""
    if kinship.shared < SHARED:
        return f"{base} is probably not its base: only {kinship}"
    if kinship.delta is not None and kinship.delta >= IMPLAUSIBLE:
        return (
            f"{base} is probably not its base: {kinship}; fine-tuning changes a few hundredths, and models trained apart "
            "differ by about 1.4"
        )
    return None


def likeliest(
    store: Store, snapshot: Snapshot, tensors: Mapping[str, Tensor], ref: str
) -> tuple[Input, Kinship] | None:
    """The base of a model among the tips of branches and tags: the nearest, if it is near enough.

    Args:
        store: with the statistics of the model's blocks.
        snapshot: the model, which is not its own base.
        tensors: its tensors by name.
        ref: the branch that it goes to, whose older states are not its base either.
    """
    best: tuple[float, str, Input, Kinship] | None = None
    for name, commit, other in _tips(store, ref, object_id(snapshot.encode())):
        kinship = compare(store, tensors, {key: store.objects.get(Tensor, item) for key, item in other.tensors.items()})
        if kinship.shared < SHARED or kinship.delta is None or kinship.delta > LIKELY:
            continue
        if best is None or (kinship.delta, name) < best[:2]:
            best = kinship.delta, name, Input("base", name, commit), kinship
    return None if best is None else best[2:]


def _tips(store: Store, ref: str, own: ObjectId) -> Iterator[tuple[str, ObjectId, Snapshot]]:
    seen = {own}
    for item in sorted(store.refs.all(), key=lambda found: found.name):
        commit = store.objects.get(Commit, item.commit)
        if item.name != ref and commit.snapshot not in seen:
            seen.add(commit.snapshot)
            yield item.name, item.commit, store.objects.get(Snapshot, commit.snapshot).outside(TRAINING_STATE)


def parsed(content: bytes) -> Mapping[str, Any]:
    """A JSON object, such as config.json; an empty one if it is none."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _card(content: bytes) -> Mapping[str, Any]:
    """The metadata of a model card: YAML between two lines of three dashes."""
    text = content[:_CARD_BYTES].decode("utf-8", "replace").replace("\r\n", "\n")
    if not text.startswith("---\n"):
        return {}
    metadata, end, _ = text[4:].partition("\n---")
    # Few models that are imported have a card, and loading it takes longer than reading one.
    import yaml

    try:
        value = yaml.safe_load(metadata) if end else None
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
