"""Exact distances out of the pair table, in the place of estimates from sketches: many tensors at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from mpfs.merge.inputs import TensorInputs
from mpfs.merge.models import ModelTensor
from mpfs.objects import ObjectId
from mpfs.stats.exact import in_columns, unpack_distances, with_exact
from mpfs.stats.segments import Segments
from mpfs.stats.stored import blocks_per_column
from mpfs.store.pairs import PairTable

_Which: TypeAlias = "tuple[int, int]"
"""Of a tensor's distances, the one between two experts, the first first; or twice the same: from the base."""

_Ends: TypeAlias = "tuple[ModelTensor, ModelTensor]"


def exact_gram(
    gram: NDArray[np.float64], tensors: Sequence[TensorInputs], columns: Segments, pairs: PairTable
) -> NDArray[np.float64]:
    """Put what is known exactly in the place of estimates.

    Args:
        gram: shape (C, E, E), estimated, the columns of all tensors.
        tensors: each with E experts.
        columns: which columns are whose.
        pairs: where distances are looked up.

    Returns:
        Shape (C, E, E); what comes out for a tensor does not depend on the others.
    """
    known = _payloads(
        {
            (tensor, (expert, expert)): (inputs.base, item)
            for tensor, inputs in enumerate(tensors)
            if inputs.base is not None
            for expert, (_, item) in enumerate(inputs.experts)
        },
        pairs,
    )
    if not known:
        return gram
    experts: list[list[int]] = [[] for _ in tensors]
    for tensor, (expert, _) in known:
        experts[tensor].append(expert)
    known |= _payloads(
        {
            (tensor, (i, j)): (tensors[tensor].experts[i][1], tensors[tensor].experts[j][1])
            for tensor, some in enumerate(experts)
            for place, i in enumerate(some)
            for j in some[place + 1 :]
        },
        pairs,
    )
    patterns: list[list[_Which]] = [[] for _ in tensors]
    for tensor, which in known:
        patterns[tensor].append(which)
    alike: dict[tuple[_Which, ...], list[int]] = {}
    for tensor, pattern in enumerate(patterns):
        if pattern:
            alike.setdefault(tuple(pattern), []).append(tensor)
    result = gram.copy()
    rows_of = columns.slices()
    for together, some in alike.items():
        rows = np.concatenate([np.arange(rows_of[tensor].start, rows_of[tensor].stop) for tensor in some])
        found = {
            which: _in_columns([(tensors[tensor], which[1], known[tensor, which]) for tensor in some])
            for which in together
        }
        from_base = {i: values for (i, j), values in found.items() if i == j}
        between = {(i, j): values for (i, j), values in found.items() if i != j}
        result[rows] = with_exact(gram[rows], from_base, between)
    return result


def _payloads(asked: Mapping[tuple[int, _Which], _Ends], pairs: PairTable) -> dict[tuple[int, _Which], bytes]:
    """The squared distances of blocks, 8 bytes each, as far as they are known."""
    comparable = {
        key: (a, b)
        for key, (a, b) in asked.items()
        if (a.tensor.dtype, a.tensor.shape) == (b.tensor.dtype, b.tensor.shape)
    }
    wanted: dict[tuple[ObjectId, ObjectId], None] = {
        (a.identity, b.identity): None for a, b in comparable.values() if a.identity != b.identity
    }
    stored = pairs.get_many(wanted)
    found: dict[tuple[int, _Which], bytes] = {}
    for key, (a, b) in comparable.items():
        size = 8 * len(a.tensor.blocks)
        payload = bytes(size) if a.identity == b.identity else stored.get((a.identity, b.identity))
        if payload is not None and len(payload) == size:
            found[key] = payload
    if unpack_distances(b"".join(found.values()), sum(map(len, found.values())) // 8) is None:
        # Some are damaged, and as good as none.
        return {key: item for key, item in found.items() if unpack_distances(item, len(item) // 8) is not None}
    return found


def _in_columns(parts: Sequence[tuple[TensorInputs, int, bytes]]) -> NDArray[np.float64]:
    """Squared distances of the columns of some tensors; each comes with the expert whose blocks these are."""
    blocks = np.frombuffer(b"".join(payload for _, _, payload in parts), "<f8").astype(np.float64)
    widths = [
        blocks_per_column(inputs.experts[expert][1].tensor, inputs.column_elements) for inputs, expert, _ in parts
    ]
    if set(widths) == {1}:
        return blocks
    edges = np.cumsum([len(payload) // 8 for _, _, payload in parts])
    return np.concatenate(list(map(in_columns, np.split(blocks, edges[:-1]), widths)))
