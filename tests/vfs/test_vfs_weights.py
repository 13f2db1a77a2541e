"""Weights: safe_open's interface over a whole revision, compared with torch's own indexing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save
from vfs_cases import MAP_SIZE, Builder, Staged, sample_tensors

from mpfs.errors import BadInputError, NotFoundError
from mpfs.formats.safetensors import build_header
from mpfs.repository import Repository
from mpfs.store import Store
from mpfs.store.environment import Transaction
from mpfs.vfs import SnapshotReader
from mpfs.vfs.weights import Weights

pytest_plugins = ["vfs_fixtures"]

SHAPES = [(3000, 3), (3, 3000), (40, 7, 9), (2, 3, 2000), (5,), (), (0, 4), (4, 0)]
"""With blocks of 4 KiB of f32: rows far smaller, larger, and near a block."""


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Weights, dict[str, torch.Tensor]]]:
    """A tensor of each of SHAPES."""
    generator = torch.Generator().manual_seed(1)
    tensors = {str(shape): torch.randn(shape, generator=generator) for shape in SHAPES}
    store = Store.create(tmp_path_factory.mktemp("weights") / "repo", block_size=4096, map_size=MAP_SIZE)
    staged = Builder(store).publish({"model.safetensors": save(tensors)})
    yield Weights(SnapshotReader(store, staged.snapshot)), tensors
    store.close()


@st.composite
def indices(draw: st.DrawFn, shape: Sequence[int]) -> tuple[Any, ...]:
    """Indices of the first and, after an ellipsis, of the last dimensions."""
    first = draw(st.integers(0, len(shape)))
    last = draw(st.integers(first, len(shape)))
    ellipsis = draw(st.booleans())
    parts: list[Any] = []
    for axis in [*range(first), *(range(last, len(shape)) if ellipsis else ())]:
        size = shape[axis]
        edge = st.none() | st.integers(-size - 2, size + 2)
        ranges = st.builds(slice, edge, edge, st.none() | st.integers(1, 5) | st.just(max(1, size // 2)))
        parts.append(draw(ranges | st.integers(-size, size - 1) if size else ranges))
    if ellipsis:
        parts.insert(first, Ellipsis)
    return tuple(parts)


@given(data=st.data(), shape=st.sampled_from(SHAPES))
def test_slices_equal_torchs(
    data: st.DataObject, shape: tuple[int, ...], weights: tuple[Weights, dict[str, torch.Tensor]]
) -> None:
    handle, tensors = weights
    index = data.draw(indices(shape))
    expected = tensors[str(shape)][index]
    found = handle.get_slice(str(shape))[index]
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert found.equal(expected)


def test_like_safe_open(store: Store, staged: Staged, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(staged.content["model.safetensors"])
    handle = Weights(SnapshotReader(store, staged.snapshot))
    with handle as ours, safe_open(tmp_path / "model.safetensors", framework="pt") as theirs:
        assert ours is handle
        assert sorted(ours.keys()) == sorted(theirs.keys())
        assert ours.offset_keys() == theirs.offset_keys()
        assert ours.metadata() == theirs.metadata()
        assert len(ours) == len(sample_tensors())
        for name in theirs.keys():  # noqa: SIM118  # it is no mapping
            assert name in ours
            mine, expected = ours.get_tensor(name), theirs.get_tensor(name)
            assert mine.dtype == expected.dtype
            assert mine.shape == expected.shape
            assert mine.reshape(-1).view(torch.uint8).equal(expected.reshape(-1).view(torch.uint8))
            part, other = ours.get_slice(name), theirs.get_slice(name)
            assert part.get_shape() == other.get_shape()
            assert part.get_dtype() == other.get_dtype()
        with pytest.raises(NotFoundError, match="nope"):
            ours.get_tensor("nope")
        with pytest.raises(NotFoundError, match="nope"):
            ours.get_slice("nope")
        assert "nope" not in ours


def test_only_the_blocks_that_are_needed_are_read(
    store: Store, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.arange(64 * 2048, dtype=torch.float32).reshape(64, 2048)  # a row is two blocks
    staged = builder.publish({"model.safetensors": save({"t": tensor})})
    read: list[bytes] = []
    get = Transaction.get

    def counted(self: Transaction, database: str, key: bytes) -> memoryview | None:
        read.extend([key] if database == "blocks" else [])
        return get(self, database, key)

    monkeypatch.setattr(Transaction, "get", counted)
    blocks = store.objects.get(
        type(SnapshotReader(store, staged.snapshot).tensor("t")), staged.snapshot.tensors["t"]
    ).blocks
    for index, expected in (
        ((slice(3, 5),), blocks[6:10]),
        ((7,), blocks[14:16]),
        ((slice(None), slice(0, 10)), blocks[::2]),
        ((slice(1, None, 4), slice(1024, None)), blocks[3::8]),
        ((0, 0), blocks[:1]),
        ((slice(0, 0),), ()),
    ):
        read.clear()
        found = Weights(SnapshotReader(store, staged.snapshot)).get_slice("t")[index]
        assert found.equal(tensor[index])
        assert sorted(read) == sorted(expected)


def test_indices_that_cannot_be(weights: tuple[Weights, dict[str, torch.Tensor]]) -> None:
    part = weights[0].get_slice("(3000, 3)")
    wrong: list[tuple[Any, type[Exception]]] = [
        (3000, IndexError),
        ((0, -4), IndexError),
        ((0, 0, 0), IndexError),
        ((..., ...), IndexError),
        (slice(None, None, -1), ValueError),
        (slice(None, None, 0), ValueError),
        ([0, 1], TypeError),
        (True, TypeError),
        (None, TypeError),
    ]
    for index, error in wrong:
        with pytest.raises(error):
            part[index]


def test_what_torch_cannot_hold(store: Store, builder: Builder) -> None:
    raw, _ = build_header([("odd", "F6_E2M3", (4,))], {})
    staged = builder.publish({"model.safetensors": raw + b"abc"})
    handle = Weights(SnapshotReader(store, staged.snapshot))
    for call in (handle.get_tensor, handle.get_slice):
        with pytest.raises(BadInputError, match="F6_E2M3"):
            call("odd")
    pieces: list[bytes] = []
    handle.stream("odd", lambda piece: pieces.append(bytes(piece)))
    assert pieces == [b"abc"]


def test_from_the_repository(store: Store, staged: Staged) -> None:
    with Repository.open(store.path) as repository:
        loaded = repository.load("main")
        assert loaded.keys() == sample_tensors().keys()
        assert loaded["embed.weight"].data_ptr() != loaded["lm_head.weight"].data_ptr()
        with repository.open_weights("main") as weights:
            assert weights.get_slice("embed.weight")[:, 5].equal(sample_tensors()["embed.weight"][:, 5])
            assert repository.tensor("main", "steps")[2:4].equal(torch.tensor([2, 3]))
        linear = torch.nn.Linear(130, 100, bias=False)
        linear.load_state_dict({"weight": repository.load("main")["embed.weight"]})
        assert linear.weight.equal(sample_tensors()["embed.weight"])
