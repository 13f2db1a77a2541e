"""Models of a merge whose tensors are named differently, put under one naming: that of the base, or of the first model.

Pure. What libraries have renamed is known (`mpfs.formats.names`); whatever is taken for another name is told, and kept
with the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mpfs.formats.names import Renaming, rename
from mpfs.merge.models import Model

_SHOWN = 2


@dataclass(frozen=True, slots=True)
class OneNaming:
    """The models under one naming. `renamed` has, by model, its own names and what they are called there; `notes` say so to
    a person, and `doubts` what could be several of the template's tensors."""

    models: tuple[Model, ...]
    renamed: Mapping[str, Mapping[str, str]]
    notes: tuple[str, ...]
    doubts: tuple[str, ...]


def under_one_naming(models: Sequence[Model], template: int) -> OneNaming:
    """Put models under the naming of the one at `template`. Order and ids of tensors stay as they are."""
    first = models[template]
    result: list[Model] = []
    renamed: dict[str, Mapping[str, str]] = {}
    notes: list[str] = []
    doubts: list[str] = []
    for index, model in enumerate(models):
        found = Renaming({}, ()) if index == template else _renaming(model, first)
        if found.names:
            tensors = {found.names.get(name, name): item for name, item in model.tensors.items()}
            model = replace(model, tensors=tensors)
            renamed[model.ref.name] = dict(found.names)
            notes.append(_note(model.ref.name, first.ref.name, found))
        doubts += [
            f"{name} of {model.ref.name} could be {' or '.join(targets)} of {first.ref.name}: rename it, or take off what "
            "stands before it with mpfs import --strip-prefix"
            for name, targets in found.ambiguous.items()
        ]
        result.append(model)
    return OneNaming(tuple(result), renamed, tuple(notes), tuple(doubts))


def _renaming(model: Model, first: Model) -> Renaming:
    def alike(ours: str, theirs: str) -> bool:
        return model.tensors[ours].tensor.shape == first.tensors[theirs].tensor.shape

    return rename(model.tensors, first.tensors, alike)


def _note(model: str, first: str, found: Renaming) -> str:
    pairs = [f"{old} is {new}" for old, new in list(found.names.items())[:_SHOWN]]
    more = f" and {len(found.names) - _SHOWN} more" if len(found.names) > _SHOWN else ""
    return f"{model} names tensors in another way than {first} ({', '.join(found.rules)}): {', '.join(pairs)}{more}"
