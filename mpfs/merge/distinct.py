"""The distinct blocks that a weighed merge could read: how many bytes a choice comes to, each block counted once. Pure."""

from __future__ import annotations

from collections.abc import Container, Mapping
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mpfs.merge.differing import BlockRuns, BoolArray, IntArray, numbered
from mpfs.merge.weighing import Priced, Weighed


class Merged(dict[str, Weighed]):
    """What is merged, by the output's names, in order."""

    @cached_property
    def distinct(self) -> Distinct:
        """What could be read of it, once nothing is added any more."""
        return Distinct(self)


class Distinct:
    """The experts' blocks that could be read, of all tensors of a merge: those that are not the base's, and cost something.

    They are told apart by numbers; a block in several places has one number and several entries. An entry lies in a cell of
    the choices: a column and an expert of a tensor.
    """

    def __init__(self, weighed: Mapping[str, Priced | Weighed]) -> None:
        self._names = list(weighed)
        items = list(weighed.values())
        widths = [len(item.inputs.experts) for item in items]
        starts = np.cumsum([0, *(item.cost.size for item in items)])
        costly = np.concatenate([np.zeros(0, bool), *(item.cost.reshape(-1) > 0 for item in items)])
        ids, sizes, cells, tensors, models = [], [], [], [], []
        for expert in range(max(widths, default=0)):
            some = [index for index, width in enumerate(widths) if expert < width]
            blocks = BlockRuns([items[index].inputs.experts[expert][1].tensor for index in some])
            entries = np.flatnonzero(np.concatenate([items[index].differing[expert] for index in some]))
            columns = blocks.columns([items[index].inputs.column_elements for index in some])[entries]
            own = np.array(some, np.int64)[blocks.runs.of[entries]]
            cell = starts[own] + columns * np.array(widths, np.int64)[own] + expert
            worth = costly[cell]
            entries, own, cell = entries[worth], own[worth], cell[worth]
            ids.append(blocks.ids[entries])
            sizes.append(blocks.sizes[entries])
            cells.append(cell)
            tensors.append(own)
            model_of = np.array([items[index].inputs.experts[expert][0] for index in some], np.int64)
            models.append(model_of[blocks.runs.of[entries]])
        none: IntArray = np.zeros(0, np.int64)
        self._numbers, count = numbered(np.concatenate([np.zeros((0, 2), np.uint64), *ids]))
        self._cells = np.concatenate([none, *cells])
        self._tensors = np.concatenate([none, *tensors])
        self._models = np.concatenate([none, *models])
        self._sizes = np.zeros(count, np.int64)
        self._sizes[self._numbers] = np.concatenate([none, *sizes])

    def nbytes(
        self,
        read: Mapping[str, NDArray[np.bool_]] | None = None,
        *,
        model: int | None = None,
        names: Container[str] | None = None,
    ) -> int:
        """Bytes of the distinct blocks that a choice reads.

        Args:
            read: for each tensor the cells that are read, (C, E); None: all.
            model: of this model only; None: of all experts.
            names: of these tensors only; None: of all.
        """
        chosen: BoolArray = np.ones(len(self._cells), bool)
        if read is not None:
            nothing = np.zeros(0, bool)
            chosen = np.concatenate([nothing, *(read[name].reshape(-1) for name in self._names)])[self._cells]
        if model is not None:
            chosen = chosen & (self._models == model)
        if names is not None:
            chosen = chosen & np.array([name in names for name in self._names], bool)[self._tensors]
        found = np.zeros(len(self._sizes), bool)
        found[self._numbers[chosen]] = True
        return int(self._sizes[found].sum())
