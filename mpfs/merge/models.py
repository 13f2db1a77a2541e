"""The models of a merge as planning sees them: names and tensor objects, never a block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from mpfs.formats.quantised import recognise as quantisation
from mpfs.merge.architecture import Architecture, Config, is_embedding, is_head, is_tied, recognise
from mpfs.objects import ModelRef, ObjectId, Tensor


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A tensor of a model, with its id."""

    identity: ObjectId
    tensor: Tensor


@dataclass(frozen=True)
class Model:
    """A model of the merge: what it is, its tensors by name in snapshot order, and its config.json. `notes` are for a
    person."""

    ref: ModelRef
    tensors: Mapping[str, ModelTensor]
    config: Config = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @cached_property
    def architecture(self) -> Architecture:
        """What was recognised of it."""
        return recognise(self.tensors, self.config)

    @cached_property
    def quantised(self) -> Mapping[str, str]:
        """The tensors of quantised weights, their scales and tables too, with what they are (GPTQ)."""
        shapes = {name: (item.tensor.dtype, item.tensor.shape) for name, item in self.tensors.items()}
        found = quantisation(shapes, self.config)
        return {} if found is None else found.members

    def stand_in(self, name: str) -> str | None:
        """The tensor that is tied to a head (or embedding) which this model does not store; None if there is none."""
        if name in self.tensors or is_tied(self.config) is False or not name.endswith(".weight"):
            return None
        if is_head(name):
            return self.architecture.embedding
        return self.architecture.head if is_embedding(name) else None

    def find(self, name: str) -> ModelTensor | None:
        """The tensor of this name, or the one that is tied to it."""
        stored = self.tensors.get(name)
        if stored is not None:
            return stored
        other = self.stand_in(name)
        return None if other is None else self.tensors[other]


@dataclass(frozen=True, slots=True)
class Aligned:
    """The models to merge, of one vocabulary where the recipe asks for it, and notes for a person."""

    models: tuple[Model, ...]
    notes: tuple[str, ...]
