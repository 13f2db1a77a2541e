"""Weighing a fitted merge: what could be read of each tensor, what it costs, and what it is worth, from statistics.

Many tensors are weighed together, since what takes time is the number of calls and not of numbers; what comes out for one
does not depend on the others. Reads statistics and block sizes, never a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpfs.merge.differing import BlockRuns
from mpfs.merge.election import elected_weights, elects
from mpfs.merge.exactly import exact_gram
from mpfs.merge.inputs import TensorInputs
from mpfs.merge.magnitudes import Histograms
from mpfs.merge.operators import Operator
from mpfs.merge.planner import Candidates
from mpfs.merge.weights import DeltaWeights, delta_weights, normalizes
from mpfs.objects import ObjectId
from mpfs.stats import RECORD, Records, delta_gram
from mpfs.stats.estimate import base_products
from mpfs.stats.norms import with_norms
from mpfs.stats.segments import Segments
from mpfs.stats.shrink import shrink_gram
from mpfs.stats.stored import column_records_of
from mpfs.store import BlockReader
from mpfs.store.pairs import PairTable

_LARGEST = 1e150
"""Products of deltas are cut to this, so that sums of them stay finite whatever the weights are."""

_BATCH_BYTES = 32 << 20
"""About how many bytes of statistics are looked at together. Batches change nothing but time and memory."""


@dataclass(frozen=True, slots=True)
class Priced:
    """A merged tensor of C columns and E experts, and what reading it costs: `cost` (C, E), in bytes. `differing` says, for
    each expert, which blocks are not the base's."""

    inputs: TensorInputs
    differing: tuple[NDArray[np.bool_], ...]
    cost: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Weighed:
    """A merged tensor with the planner's view of it; `differing` and `cost` as above."""

    inputs: TensorInputs
    differing: tuple[NDArray[np.bool_], ...]
    candidates: Candidates

    @property
    def cost(self) -> NDArray[np.int64]:
        return self.candidates.cost


@dataclass(frozen=True, slots=True)
class _Deltas:
    """The deltas of one tensor, whatever weights they are given; C columns, E experts.

    `gram` (C, E, E) holds the products of deltas, `cost` (C, E) the bytes to read. `products` (C, E) are those of deltas
    with the base, `base` (C,) its own: None where nothing asks for them. Without a base, or any byte to read, all is 0.
    """

    differing: tuple[NDArray[np.bool_], ...]
    cost: NDArray[np.int64]
    gram: NDArray[np.float64]
    products: NDArray[np.float64] | None = None
    base: NDArray[np.float64] | None = None


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

    def weigh(self, tensors: Iterable[TensorInputs], operator: Operator) -> Iterator[Weighed]:
        """The merged ones among some tensors as the planner sees them, in order; a batch of them is in memory at a time."""
        for batch in _batches(inputs for inputs in tensors if inputs.merged):
            weights = [delta_weights(operator, inputs.parameters) for inputs in batch]
            deltas = self._deltas(batch, [bool(item.surplus) for item in weights])
            found: dict[int, Candidates] = {}
            for some in _of_equal_width(batch):
                bound = [index for index in some if batch[index].base is not None and deltas[index].cost.any()]
                if bound:
                    parts = [(batch[index], deltas[index], weights[index]) for index in bound]
                    found.update(zip(bound, _weighted(parts, operator), strict=True))
            for index, (inputs, item) in enumerate(zip(batch, deltas, strict=True)):
                free = Candidates(inputs.name, item.gram, item.cost, inputs.base is None)
                yield Weighed(inputs, item.differing, found.get(index, free))

    def _deltas(self, batch: Sequence[TensorInputs], surplus: Sequence[bool]) -> list[_Deltas]:
        if self._kept is None:
            return self._find(batch, any(surplus))
        keys = [_key(inputs) for inputs in batch]
        missing: dict[tuple[object, ...], TensorInputs] = {}
        for key, inputs, asked in zip(keys, batch, surplus, strict=True):
            known = self._kept.get(key)
            if known is None or (asked and known.products is None):
                missing[key] = inputs
        self._kept.update(zip(missing, self._find(list(missing.values()), any(surplus)), strict=True))
        return [self._kept[key] for key in keys]

    def _find(self, batch: Sequence[TensorInputs], surplus: bool) -> list[_Deltas]:
        found: dict[int, _Deltas] = {}
        for some in _of_equal_width(batch):
            found.update(zip(some, self._find_alike([batch[index] for index in some], surplus), strict=True))
        return [found[index] for index in range(len(batch))]

    def _find_alike(self, batch: Sequence[TensorInputs], surplus: bool) -> list[_Deltas]:
        """Of tensors with the same number of experts."""
        columns = Segments([_columns(inputs) for inputs in batch])
        rows, differing, cost = _costs(batch, columns)
        bound = [
            index
            for index, (inputs, place) in enumerate(zip(batch, rows, strict=True))
            if inputs.base is not None and cost[place].any()
        ]
        count = cost.shape[1]
        known = dict(
            zip(bound, self._estimate([batch[i] for i in bound], [cost[rows[i]] for i in bound], surplus), strict=True)
        )
        nothing = (np.zeros((0, count, count)), None, None)
        deltas = []
        for index, place in enumerate(rows):
            gram, products, base = known.get(index, nothing)
            if index not in known:
                gram = np.zeros((place.stop - place.start, count, count))
            deltas.append(_Deltas(differing[index], cost[place], gram, products, base))
        return deltas

    def _estimate(
        self, batch: Sequence[TensorInputs], costs: Sequence[NDArray[np.int64]], surplus: bool
    ) -> Iterator[tuple[NDArray[np.float64], NDArray[np.float64] | None, NDArray[np.float64] | None]]:
        """Gram matrices of tensors that have a base and some delta; and, for a `surplus`, products with the base."""
        if not batch:
            return
        columns = Segments([len(cost) for cost in costs])
        cost = np.concatenate(costs)
        origin, records = self._records(batch, columns, cost.shape[1])
        sizes = np.array([inputs.column_elements for inputs in batch], np.int64)[columns.of]
        for inputs, stop in zip(batch, columns.starts[1:].tolist(), strict=True):
            sizes[stop - 1] -= _columns(inputs) * inputs.column_elements - inputs.numel
        # An equal block has no delta, whatever rounding left in the sketches.
        gram, information = with_norms(origin, records, delta_gram(origin, records))
        gram = shrink_gram(gram, sizes, cost > 0, information, columns)
        if self._pairs is not None:
            gram = exact_gram(gram, batch, columns, self._pairs)
        products = base_products(origin, records) if surplus else None
        squares = origin["sum_squares"].copy() if surplus else None
        for rows in columns.slices():
            yield (
                gram[rows],
                None if products is None else products[rows],
                None if squares is None else squares[rows],
            )

    def _records(self, batch: Sequence[TensorInputs], columns: Segments, count: int) -> tuple[Records, Records]:
        """Of the base's columns, (C,), and of the experts', (E, C)."""
        origin = np.empty(columns.rows, RECORD)
        records = np.empty((count, columns.rows), RECORD)
        for inputs, rows in zip(batch, columns.slices(), strict=True):
            if inputs.base is None:
                continue
            base = inputs.base
            own = [item for _, item in inputs.experts if item.identity != base.identity]
            asked = [(item.tensor, item.identity) for item in (base, *own)]
            origin[rows], *found = column_records_of(self._reader, asked, inputs.column_elements)
            rest = iter(found)
            for expert, (_, item) in enumerate(inputs.experts):
                records[expert, rows] = origin[rows] if item.identity == base.identity else next(rest)
        return origin, records


def price(tensors: Iterable[TensorInputs]) -> Iterator[Priced]:
    """The merged ones among some tensors with what reading them costs, in order; nothing is looked up."""
    for batch in _batches(inputs for inputs in tensors if inputs.merged):
        found: dict[int, Priced] = {}
        for some in _of_equal_width(batch):
            alike = [batch[index] for index in some]
            rows, differing, cost = _costs(alike, Segments([_columns(inputs) for inputs in alike]))
            found.update(zip(some, map(Priced, alike, differing, [cost[place] for place in rows]), strict=True))
        for index in range(len(batch)):
            yield found[index]


def _batches(tensors: Iterable[TensorInputs]) -> Iterator[list[TensorInputs]]:
    batch: list[TensorInputs] = []
    size = 0
    for inputs in tensors:
        own = _columns(inputs) * (1 + len(inputs.experts)) * RECORD.itemsize
        if batch and size + own > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(inputs)
        size += own
    if batch:
        yield batch


def _of_equal_width(batch: Sequence[TensorInputs]) -> list[list[int]]:
    """The places of those with the same number of experts."""
    found: dict[int, list[int]] = {}
    for index, inputs in enumerate(batch):
        found.setdefault(len(inputs.experts), []).append(index)
    return list(found.values())


def _columns(inputs: TensorInputs) -> int:
    return -(-inputs.numel // inputs.column_elements)


def _key(inputs: TensorInputs) -> tuple[object, ...]:
    base: ObjectId | None = None if inputs.base is None else inputs.base.identity
    return (inputs.column_elements, base, *(item.identity for _, item in inputs.experts))


def _costs(
    batch: Sequence[TensorInputs], columns: Segments
) -> tuple[list[slice], list[tuple[NDArray[np.bool_], ...]], NDArray[np.int64]]:
    """Of tensors with the same number of experts: each one's columns, which of its experts' blocks are not the base's, and
    what the columns cost, (C, E)."""
    count = len(batch[0].experts)
    bases = [None if inputs.base is None else inputs.base.tensor for inputs in batch]
    elements = [inputs.column_elements for inputs in batch]
    cost = np.zeros((columns.rows, count), np.int64)
    differing: list[list[NDArray[np.bool_]]] = [[] for _ in batch]
    for expert in range(count):
        blocks = BlockRuns([inputs.experts[expert][1].tensor for inputs in batch])
        differs = blocks.differing(bases)
        cells = columns.starts[blocks.runs.of] + blocks.columns(elements)
        # Exact: no column has 2^53 bytes.
        cost[:, expert] = np.bincount(cells, np.where(differs, blocks.sizes, 0), columns.rows).astype(np.int64)
        for own, rows in zip(differing, blocks.runs.slices(), strict=True):
            own.append(differs[rows])
    return columns.slices(), [tuple(own) for own in differing], cost


def _weighted(parts: Sequence[tuple[TensorInputs, _Deltas, DeltaWeights]], operator: Operator) -> Iterator[Candidates]:
    """Tensors with the same number of experts, which have a base and some delta, as the planner sees them."""
    columns = Segments([len(deltas.cost) for _, deltas, _ in parts])
    gram = np.concatenate([deltas.gram for _, deltas, _ in parts])
    weights = np.array([item.experts for _, _, item in parts])
    if elects(operator):
        parameters = [inputs.parameters for inputs, _, _ in parts]
        averaged = [normalizes(operator, own) for own in parameters]
        weights = elected_weights(operator, parameters, weights, columns.sums(gram), averaged)
    with np.errstate(over="ignore", invalid="ignore"):
        gram *= (weights[:, :, None] * weights[:, None, :])[columns.of]
    drifts = np.zeros(len(parts)) if elects(operator) else _drifts(parts, weights, columns)
    gram = _cut(gram)
    for (inputs, deltas, _), rows, drift in zip(parts, columns.slices(), drifts.tolist(), strict=True):
        yield Candidates(inputs.name, gram[rows], deltas.cost, operator.interaction == "column", drift)


def _cut(values: NDArray[np.float64]) -> NDArray[np.float64]:
    if not len(values) or float(np.abs(values).max()) <= _LARGEST:  # not where there is a NaN
        return values
    return np.nan_to_num(values, nan=0.0, posinf=_LARGEST, neginf=-_LARGEST).clip(-_LARGEST, _LARGEST)


def _drifts(
    parts: Sequence[tuple[TensorInputs, _Deltas, DeltaWeights]], weights: NDArray[np.float64], columns: Segments
) -> NDArray[np.float64]:
    """|sum of w_i d_i + surplus base|^2 - |sum of w_i d_i|^2 of each tensor; the two products are there where there is a
    surplus."""
    surplus = np.array([item.surplus for _, _, item in parts])
    if not surplus.any():
        return surplus
    own = columns.of
    products = np.concatenate(
        [np.zeros(deltas.cost.shape) if deltas.products is None else deltas.products for _, deltas, _ in parts]
    )
    base = np.concatenate(
        [np.zeros(len(deltas.cost)) if deltas.base is None else deltas.base for _, deltas, _ in parts]
    )
    product = np.zeros(columns.rows)
    with np.errstate(over="ignore", invalid="ignore"):
        for i in range(weights.shape[1]):
            product += weights[own, i] * products[:, i]
        change = (2.0 * surplus)[own] * product + (surplus * surplus)[own] * base
    return columns.sums(_cut(change))
