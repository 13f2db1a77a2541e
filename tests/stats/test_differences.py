"""Comparing tensors block by block: kernels and numpy give the same, and it is what merge methods make of the numbers."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from mpfs.merge.operators.arithmetic import difference
from mpfs.merge.operators.magnitude import patterns
from mpfs.stats import differences
from mpfs.stats.backend import kernels_available
from mpfs.stats.decode import as_bits
from mpfs.stats.differences import Comparison, compare_blocks
from mpfs.stats.exact import unpack_distances
from mpfs.store.histogram import BINS, pack_histogram, unpack_histogram

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}


def raw(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes."""
    return bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())


def samples(dtype: torch.dtype, numel: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of tensors: any bits at all, a fine-tune of a weight, and numbers near the smallest of 16 bits."""
    generator = torch.Generator().manual_seed(numel)
    anything = torch.randint(0, 256, (2, numel * dtype.itemsize), generator=generator, dtype=torch.uint8).view(dtype)
    normal = torch.randn(3, numel, generator=generator)
    weight = (normal[0] * 0.02).to(dtype)
    tuned = (weight.float() + normal[1] * 5e-4).to(dtype)
    tuned[::7] = weight[::7]
    weight[3::11] = tuned[3::11] = torch.inf
    small = (normal[1:] * 6e-5).to(dtype)
    return [(anything[0], anything[1]), (weight, tuned), (small[0], small[1])]


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("numel", [1, 64, 1000, 20_011])
def test_kernels_numpy_and_operators_agree(name: str, numel: int) -> None:
    assert kernels_available()
    dtype = DTYPES[name]
    for a, b in samples(dtype, numel):
        counts, plain = (np.zeros(BINS, np.int64) for _ in range(2))
        found = compare_blocks(raw(a), raw(b), name, counts)
        expected = differences._compare(as_bits(raw(a), name), as_bits(raw(b), name), name, plain)
        np.testing.assert_equal(found, expected)
        np.testing.assert_array_equal(counts, plain)
        digits = patterns(difference(b, a)).numpy().astype(np.int64) >> (8 * dtype.itemsize - 16)
        np.testing.assert_array_equal(counts, np.bincount(digits, minlength=BINS))
        # It is the same from the other side, and without counting.
        np.testing.assert_equal(compare_blocks(raw(b), raw(a), name), found)
        finite = torch.isfinite(b.double() - a.double())
        if bool((a.double()[finite].abs() < 1e100).all()):
            np.testing.assert_allclose(found, float(((b.double() - a.double())[finite] ** 2).sum()), rtol=1e-12)


@pytest.mark.parametrize("block_size", [4096, 1 << 16])
def test_a_comparison_does_not_depend_on_the_order(block_size: int) -> None:
    a, b = samples(torch.bfloat16, 200_000)[1]
    b[: block_size // 2] = a[: block_size // 2]
    blocks = -(-len(raw(a)) // block_size)
    whole = np.zeros(BINS, np.int64)
    compare_blocks(raw(a), raw(b), "BF16", whole)
    records = []
    for seed in range(2):
        comparison = Comparison("BF16", a.numel(), block_size)

        def one(index: int, into: Comparison = comparison) -> None:
            piece = slice(index * block_size, (index + 1) * block_size)
            if raw(a)[piece] == raw(b)[piece]:
                into.equal()
            else:
                into.differ(index, raw(a)[piece], raw(b)[piece])

        order = random.Random(seed).sample(range(blocks), blocks)
        with pytest.raises(ValueError, match="were not compared"):
            _ = comparison.record
        with ThreadPoolExecutor(4) as executor:
            list(executor.map(one, order))
        records.append(comparison.record)
    assert records[0] == records[1]
    assert records[0].distances is not None
    assert records[0].histogram
    distances = unpack_distances(records[0].distances, blocks)
    assert distances is not None
    assert distances[0] == 0.0
    assert (distances[1:] > 0).all()
    np.testing.assert_array_equal(unpack_histogram(records[0].histogram, a.numel()), whole)


def test_small_tensors_have_no_histogram() -> None:
    a, b = (raw(x) for x in samples(torch.float32, 3000)[2])
    one = Comparison("F32", 3000, 1 << 16)
    one.differ(0, a, b)
    assert one.record.histogram is None
    several = Comparison("F32", 3000, 4096)
    for index in range(3):
        several.differ(index, a[index * 4096 : (index + 1) * 4096], b[index * 4096 : (index + 1) * 4096])
    assert several.record.histogram == b"", "hundreds of different magnitudes among 3000"


histograms = arrays.arrays(np.int64, 50, elements=st.integers(0, 2**40)).flatmap(
    lambda counts: st.lists(st.integers(0, BINS - 1), min_size=len(counts), max_size=len(counts), unique=True).map(
        lambda places: _at(places, counts)
    )
)


def _at(places: list[int], counts: np.ndarray) -> np.ndarray:
    result = np.zeros(BINS, np.int64)
    result[places] = counts
    return result


@given(histograms)
def test_histograms_come_back(counts: np.ndarray) -> None:
    packed = pack_histogram(counts)
    numel = int(counts.sum())
    np.testing.assert_array_equal(unpack_histogram(packed, numel), counts)
    assert unpack_histogram(packed, numel + 1) is None


@given(histograms, st.data())
def test_damaged_histograms_are_none_or_sound(counts: np.ndarray, data: st.DataObject) -> None:
    packed = bytearray(pack_histogram(counts))
    numel = int(counts.sum())
    place = data.draw(st.integers(0, len(packed) - 1))
    packed[place] ^= data.draw(st.integers(1, 255))
    found = unpack_histogram(bytes(packed[: data.draw(st.integers(0, len(packed)))]), numel)
    assert found is None or int(found.sum()) == numel


def test_a_bomb_is_not_unpacked() -> None:
    import zlib

    assert unpack_histogram(zlib.compress(bytes(1 << 24)), 10) is None
