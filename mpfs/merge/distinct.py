"""The distinct blocks that a weighed merge could read: how many bytes a choice comes to, each block counted once. Pure."""

from __future__ import annotations

from collections.abc import Container, Mapping

import numpy as np
from numpy.typing import NDArray

from mpfs.merge.differing import BlockRuns, BoolArray, IntArray, numbered
from mpfs.merge.weighing import Weighed


class Distinct:
    """The experts' blocks that are not the base's, of all tensors of a merge.

    They are told apart by numbers; a block in several places has one number and several entries. An entry lies in a cell of
    the choices: a column and an expert of a tensor.
    """

    def __init__(self, weighed: Mapping[str, Weighed]) -> None:
        self._names = list(weighed)
        items = list(weighed.values())
        widths = [len(item.inputs.experts) for item in items]
        starts = np.cumsum([0, *(item.candidates.cost.size for item in items)])
        ids, sizes, cells, tensors, models = [], [], [], [], []
        for expert in range(max(widths, default=0)):
            some = [index for index, width in enumerate(widths) if expert < width]
            blocks = BlockRuns([items[index].inputs.experts[expert][1].tensor for index in some])
            entries = np.flatnonzero(np.concatenate([items[index].differing[expert] for index in some]))
            own = np.array(some, np.int64)[blocks.runs.of[entries]]
            columns = blocks.columns([items[index].inputs.column_elements for index in some])[entries]
            ids.append(blocks.ids[entries])
            sizes.append(blocks.sizes[entries])
            cells.append(starts[own] + columns * np.array(widths, np.int64)[own] + expert)
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
