"""Blocks counted by arrays of their ids: the bytes are those of the set of blocks that a choice names."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpfs.merge.differing import BlockRuns, differing_blocks, numbered
from mpfs.merge.distinct import Merged
from mpfs.merge.inputs import TensorInputs
from mpfs.merge.models import ModelTensor
from mpfs.merge.operators import Parameters
from mpfs.merge.planner import Candidates
from mpfs.merge.weighing import Weighed
from mpfs.objects import Tensor, object_id

BLOCK = 64
NAMES = [bytes([index]) * 8 + bytes(8) for index in range(6)] + [bytes([5]) * 8 + bytes([1]) * 8]
"""A few block ids, so that many are the same, and two that share their first half."""


@st.composite
def tensors(draw: st.DrawFn, shape: tuple[int, ...]) -> Tensor:
    dtype = draw(st.sampled_from(["BF16", "F32"]))
    count = -(-prod(shape) * {"BF16": 2, "F32": 4}[dtype] // BLOCK)
    return Tensor(dtype, shape, BLOCK, tuple(draw(st.lists(st.sampled_from(NAMES), min_size=count, max_size=count))))


@st.composite
def merges(draw: st.DrawFn) -> Merged:
    merged = Merged()
    for number in range(draw(st.integers(0, 3))):
        shape = (draw(st.integers(0, 90)),)
        base, *experts = (
            ModelTensor(object_id(made.encode()), made)
            for made in [draw(tensors(shape)) for _ in range(draw(st.integers(1, 4)))]
        )
        given_base = draw(st.sampled_from([base, None])) if experts else base
        inputs = TensorInputs(
            f"t{number}", shape, given_base, tuple(enumerate(experts)), Parameters({}, ()), "BF16", "BF16", True
        )
        differing = tuple(
            BlockRuns([item.tensor]).differing([None if given_base is None else given_base.tensor]) for item in experts
        )
        columns = -(-inputs.numel // inputs.column_elements)
        cost = np.zeros((columns, len(experts)), np.int64)
        for index, (item, own) in enumerate(zip(experts, differing, strict=True)):
            runs = BlockRuns([item.tensor])
            np.add.at(cost[:, index], runs.columns([inputs.column_elements]), np.where(own, runs.sizes, 0))
        gram = np.zeros((columns, len(experts), len(experts)))
        merged[inputs.name] = Weighed(inputs, differing, Candidates(inputs.name, gram, cost, False))
    return merged


@given(merged=merges(), seed=st.integers(0, 99), model=st.sampled_from([None, 0, 1]), some=st.booleans())
def test_the_bytes_of_a_choice_are_those_of_its_blocks(
    merged: Merged, seed: int, model: int | None, some: bool
) -> None:
    rng = np.random.default_rng(seed)
    read = {name: rng.random(item.candidates.cost.shape) < 0.6 for name, item in merged.items()}
    names = {name for name in merged if name != "t1"} if some else set(merged)
    expected: dict[bytes, int] = {}
    everything: dict[bytes, int] = {}
    for name, item in merged.items():
        base = None if item.inputs.base is None else item.inputs.base.tensor
        for index, (expert, source) in enumerate(item.inputs.experts):
            everything.update(differing_blocks(source.tensor, base))
            if name not in names or model not in (None, expert):
                continue
            columns = BlockRuns([source.tensor]).columns([item.inputs.column_elements])
            for (block, size), column, own in zip(
                source.tensor.sized_blocks(), columns.tolist(), item.differing[index].tolist(), strict=True
            ):
                if own and read[name][column, index]:
                    expected[block] = size
    found = merged.distinct.nbytes(read, model=model, names=names)
    # Blocks of one name but of two sizes cannot be; here they are where a tensor's last one is short.
    assert found <= sum(max(BLOCK, size) for size in expected.values())
    assert merged.distinct.nbytes({name: np.zeros_like(own) for name, own in read.items()}) == 0
    assert (found > 0) == bool(expected)
    if all(size == BLOCK for size in everything.values()):
        assert found == sum(expected.values())
        assert merged.distinct.nbytes() == sum(everything.values())


@given(st.lists(st.sampled_from(NAMES)))
def test_equal_ids_have_equal_numbers(names: list[bytes]) -> None:
    numbers, count = numbered(np.frombuffer(b"".join(names), np.uint64).reshape(-1, 2))
    assert count == len(set(names))
    assert set(numbers.tolist()) == set(range(count))
    assert len(set(zip(names, numbers.tolist(), strict=True))) == count


def test_what_costs_nothing_is_not_counted() -> None:
    tensor = Tensor("BF16", (64,), BLOCK, (NAMES[0], NAMES[1]))
    item = ModelTensor(object_id(tensor.encode()), tensor)
    inputs = TensorInputs("t", (64,), None, ((0, item),), Parameters({}, ()), "BF16", "BF16", True)
    cost = np.array([[BLOCK], [0]], np.int64)
    weighed = Weighed(inputs, (np.ones(2, bool),), Candidates("t", np.zeros((2, 1, 1)), cost, True))
    assert Merged({"t": weighed}).distinct.nbytes() == BLOCK


@pytest.mark.parametrize("count", [0, 1, 5])
def test_sizes_and_places_of_runs(count: int) -> None:
    shapes = [0, 1, 31, 32, 33, 200][: count + 1]
    made = [Tensor("BF16", (n,), BLOCK, tuple([NAMES[0]] * -(-2 * n // BLOCK))) for n in shapes]
    runs = BlockRuns(made)
    assert runs.sizes.tolist() == [size for tensor in made for _, size in tensor.sized_blocks()]
    assert runs.columns([64] * len(made)).tolist() == [i // 2 for tensor in made for i in range(len(tensor.blocks))]
