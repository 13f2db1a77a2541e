"""Weighing a fitted merge: what could be read of each tensor, what it costs, and what it is worth, from statistics.

Reads statistics and block sizes, never a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from mpfs.merge.election import elected_weights, elects
from mpfs.merge.inputs import TensorInputs
from mpfs.merge.magnitudes import Histograms
from mpfs.merge.models import ModelTensor
from mpfs.merge.operators import Operator
from mpfs.merge.planner import Candidates
from mpfs.merge.weights import DeltaWeights, delta_weights, normalizes
from mpfs.objects import BlockId, ObjectId, Tensor
from mpfs.stats import Records, delta_gram
from mpfs.stats.exact import in_columns, unpack_distances, with_exact
from mpfs.stats.norms import with_norms
from mpfs.stats.shrink import shrink_gram
from mpfs.stats.stored import blocks_per_column, column_records
from mpfs.store import BlockReader
from mpfs.store.pairs import PairTable

_LARGEST = 1e150
"""Products of deltas are cut to this, so that sums of them stay finite whatever the weights are."""


@dataclass(frozen=True, slots=True)
class Weighed:
    """A merged tensor with the planner's view of it. `differing` says, for each expert, which blocks are not the base's."""

    inputs: TensorInputs
    differing: tuple[NDArray[np.bool_], ...]
    candidates: Candidates


@dataclass(frozen=True, slots=True)
class _Deltas:
    """The deltas of one tensor, whatever weights they are given; C columns, E experts.

    `gram` (C, E, E) holds the products of deltas, `cost` (C, E) the bytes to read. `products` (C, E) are those of deltas
    with the base, `base` (C,) its own: None where nothing asks for them.
    """

    differing: tuple[NDArray[np.bool_], ...]
    cost: NDArray[np.int64]
    gram: NDArray[np.float64]
    products: NDArray[np.float64] | None
    base: NDArray[np.float64] | None


class Weigher:
    """Weighs the merged tensors of one merge, or of several: with `keep` what they have in common is computed once."""

    def __init__(self, reader: BlockReader, pairs: PairTable | None = None, *, keep: bool = False) -> None:
        self._reader = reader
        self._pairs = pairs
        self._kept: dict[tuple[object, ...], _Deltas] | None = {} if keep else None

    @property
    def histograms(self) -> Histograms | None:
        """Where the thresholds of whole deltas are to be found."""
        return None if self._pairs is None else Histograms(self._reader, self._pairs)

    def weigh(self, inputs: TensorInputs, operator: Operator) -> Weighed:
        """A merged tensor as the planner sees it."""
        weights = delta_weights(operator, inputs.parameters)
        deltas = self._deltas(inputs, surplus=bool(weights.surplus))
        free = inputs.base is None or not deltas.cost.any()
        gram, drift = deltas.gram, 0.0
        if not free:
            if elects(operator):
                whole_tensor = np.cumsum(gram, axis=0)[-1]
                averaged = normalizes(operator, inputs.parameters)
                weights = DeltaWeights(
                    elected_weights(operator, inputs.parameters, weights.experts, whole_tensor, averaged)
                )
            gram = gram.copy()
            with np.errstate(over="ignore", invalid="ignore"):
                for i, first in enumerate(weights.experts):
                    for j, second in enumerate(weights.experts):
                        gram[:, i, j] *= first * second
            if weights.surplus:
                drift = _drift(deltas, weights)
            gram = _cut(gram)
        whole = inputs.base is None or (not free and operator.interaction == "column")
        return Weighed(inputs, deltas.differing, Candidates(inputs.name, gram, deltas.cost, whole, drift))

    def _deltas(self, inputs: TensorInputs, *, surplus: bool) -> _Deltas:
        if self._kept is None:
            return self._find(inputs, surplus)
        key = _key(inputs)
        found = self._kept.get(key)
        if found is None or (surplus and found.products is None):
            found = self._kept[key] = self._find(inputs, surplus)
        return found

    def _find(self, inputs: TensorInputs, surplus: bool) -> _Deltas:
        elements = inputs.column_elements
        experts = [item.tensor for _, item in inputs.experts]
        columns = -(-inputs.numel // elements)
        base = None if inputs.base is None else inputs.base.tensor
        differing = tuple(_differing(expert, base) for expert in experts)
        cost = np.zeros((columns, len(experts)), np.int64)
        for index, (expert, blocks) in enumerate(zip(experts, differing, strict=True)):
            cost[:, index] = _column_cost(expert, blocks, elements)
        if inputs.base is None or not cost.any():
            return _Deltas(differing, cost, np.zeros((columns, len(experts), len(experts))), None, None)
        sources = [inputs.base, *(item for _, item in inputs.experts)]
        found = [column_records(self._reader, item.tensor, elements, item.identity) for item in sources]
        origin, records = found[0], np.stack(found[1:])
        sizes = np.full(columns, elements, np.int64)
        sizes[-1] = inputs.numel - (columns - 1) * elements
        # An equal block has no delta, whatever rounding left in the sketches.
        gram, information = with_norms(origin, records, delta_gram(origin, records))
        gram = shrink_gram(gram, sizes, cost > 0, information)
        if self._pairs is not None:
            gram = _with_pairs(gram, inputs, self._pairs)
        if not surplus:
            return _Deltas(differing, cost, gram, None, None)
        return _Deltas(differing, cost, gram, _products(origin, records), origin["sum_squares"].copy())


def _key(inputs: TensorInputs) -> tuple[object, ...]:
    base: ObjectId | None = None if inputs.base is None else inputs.base.identity
    return (inputs.column_elements, base, *(item.identity for _, item in inputs.experts))


def _with_pairs(gram: NDArray[np.float64], inputs: TensorInputs, pairs: PairTable) -> NDArray[np.float64]:
    """What is known exactly, in the place of estimates."""
    models = [item for _, item in inputs.experts]

    def distance(a: ModelTensor, b: ModelTensor) -> NDArray[np.float64] | None:
        if (a.tensor.dtype, a.tensor.shape) != (b.tensor.dtype, b.tensor.shape):
            return None
        count = len(a.tensor.blocks)
        payload = bytes(8 * count) if a.identity == b.identity else pairs.get(a.identity, b.identity)
        found = None if payload is None else unpack_distances(payload, count)
        return None if found is None else in_columns(found, blocks_per_column(a.tensor, inputs.column_elements))

    from_base = {} if inputs.base is None else {i: distance(inputs.base, item) for i, item in enumerate(models)}
    exact = {i: values for i, values in from_base.items() if values is not None}
    between = {(i, j): distance(models[i], models[j]) for i in exact for j in exact if i < j}
    return with_exact(gram, exact, {pair: values for pair, values in between.items() if values is not None})


def _cut(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.nan_to_num(values, nan=0.0, posinf=_LARGEST, neginf=-_LARGEST).clip(-_LARGEST, _LARGEST)


def _products(base: Records, experts: Records) -> NDArray[np.float64]:
    """(C, E): the products of deltas with the base."""
    # Against nothing, a sketch is that of the model itself: the last of these is the base.
    gram = delta_gram(np.zeros_like(base), np.concatenate([experts, base[None, :]]))
    found: NDArray[np.float64] = gram[:, :-1, -1] - gram[:, -1:, -1]
    return found


def _drift(deltas: _Deltas, weights: DeltaWeights) -> float:
    """|sum of w_i d_i + surplus base|^2 - |sum of w_i d_i|^2; the two products must be there."""
    if deltas.products is None or deltas.base is None:
        return 0.0
    product = np.zeros(len(deltas.base))
    with np.errstate(over="ignore", invalid="ignore"):
        for i, weight in enumerate(weights.experts):
            product += weight * deltas.products[:, i]
        change = 2.0 * weights.surplus * product + weights.surplus**2 * deltas.base
    return float(np.cumsum(_cut(change))[-1])


def _column_cost(expert: Tensor, differing: NDArray[np.bool_], elements: int) -> NDArray[np.int64]:
    width = blocks_per_column(expert, elements)
    sizes = np.where(differing, _block_sizes(expert), 0)
    padded = np.zeros(-(-len(sizes) // width) * width, np.int64)
    padded[: len(sizes)] = sizes
    total: NDArray[np.int64] = padded.reshape(-1, width).sum(axis=1)
    return total


def _block_sizes(tensor: Tensor) -> NDArray[np.int64]:
    sizes = np.full(len(tensor.blocks), tensor.block_size, np.int64)
    if len(sizes):
        sizes[-1] = tensor.block_nbytes(len(sizes) - 1)
    return sizes


def _differing(expert: Tensor, base: Tensor | None) -> NDArray[np.bool_]:
    """Which of an expert's blocks are not the base's at that place; shape (blocks,)."""
    if base is None or base.dtype != expert.dtype:
        return np.ones(len(expert.blocks), bool)
    ids = [np.frombuffer(b"".join(tensor.blocks), np.uint64).reshape(-1, 2) for tensor in (expert, base)]
    return np.asarray((ids[0] != ids[1]).any(axis=1), bool)


def differing_blocks(expert: Tensor, base: Tensor | None) -> Iterator[tuple[BlockId, int]]:
    """An expert's blocks (with sizes) that are not the base's at that place."""
    return compress(expert.sized_blocks(), _differing(expert, base).tolist())


def blocks_in(
    tensor: Tensor, columns: NDArray[np.bool_], column_elements: int, wanted: NDArray[np.bool_] | None = None
) -> Iterator[tuple[BlockId, int]]:
    """The blocks (with sizes) of the marked columns of a tensor, of those that are wanted."""
    inside = np.repeat(columns, blocks_per_column(tensor, column_elements))[: len(tensor.blocks)]
    if wanted is not None:
        inside = inside & wanted
    return compress(zip(tensor.blocks, _block_sizes(tensor).tolist(), strict=True), inside.tolist())
