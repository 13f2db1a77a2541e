"""Cutting models to a common vocabulary: what `--on-mismatch crop` asks for.

The first rows are kept: right where one vocabulary is the beginning of the other, as with tokens added for a
fine-tune or rows padded for speed, and noted in the plan because it is not right elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpfs.merge.architecture import vocabulary_tensors
from mpfs.merge.derived import Derivation, cut_rows, derive
from mpfs.merge.models import Model
from mpfs.objects import Input, ObjectId, Tensor
from mpfs.store import Store, Writer


@dataclass(frozen=True, slots=True)
class Crop:
    """What is cut of one model: the names of the tensors, and the rows before and after."""

    names: tuple[str, ...]
    before: int
    after: int

    def note(self, model: str) -> str:
        """For a person."""
        return (
            f"{model} is cut from {self.before:,} to {self.after:,} words, the first ones, in {', '.join(self.names)}: "
            "right only if the vocabularies begin alike"
        )


def find_crops(models: Sequence[Model]) -> dict[int, Crop]:
    """What is to be cut of which model, so that all have as many words as the one with the fewest; pure."""
    names = [
        vocabulary_tensors({name: item.tensor.shape for name, item in model.tensors.items()}, model.config)
        for model in models
    ]
    rows = {index: models[index].tensors[found[0]].tensor.shape[0] for index, found in enumerate(names) if found}
    fewest = min(rows.values(), default=0)
    return {index: Crop(tuple(names[index]), count, fewest) for index, count in rows.items() if count > fewest > 0}


def cropped(store: Store, model: Model, crop: Crop, author: str) -> ObjectId:
    """The commit of a model that is cut."""
    derivation = Derivation(
        name=f"{model.ref.name}-cut-{crop.after}",
        template=model.ref.commit,
        inputs=(Input("base", model.ref.name, model.ref.commit),),
        what={"crop": 1, "names": list(crop.names), "rows": crop.after},
        message=crop.note(model.ref.name),
    )

    def make(writer: Writer) -> Mapping[str, Tensor]:
        return {
            name: cut_rows(item.tensor, crop.after, store.blocks, writer) if name in crop.names else item.tensor
            for name, item in model.tensors.items()
        }

    return derive(store, derivation, author, make)
