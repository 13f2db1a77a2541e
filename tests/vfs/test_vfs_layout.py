"""Layouts and shards: arithmetic, checked against the obvious way to do it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpfs.errors import FormatError
from mpfs.formats import safetensors as st_format
from mpfs.formats.safetensors import parse_header
from mpfs.objects import BlobFile, Tensor
from mpfs.vfs import layout as layout_module
from mpfs.vfs.layout import (
    DEFAULT_SHARD_SIZE,
    FileLayout,
    Segment,
    batches,
    ranges,
    shard,
    synthesise_files,
)


def tensor_of(nbytes: int, block_size: int = 8, dtype: str = "U8") -> Tensor:
    """A tensor with made-up block ids."""
    count = -(-nbytes // block_size)
    return Tensor(dtype, (nbytes,), block_size, tuple(bytes([index % 256]) * 16 for index in range(count)))


@given(
    st.lists(st.integers(0, 40), max_size=6), st.sampled_from([4, 8, 64]), st.integers(-5, 200), st.integers(-5, 200)
)
def test_segments_of_a_range_are_those_of_the_file_that_meet_it(
    sizes: list[int], block_size: int, start: int, stop: int
) -> None:
    layout = FileLayout.of_parts("f", [(f"t{i}", tensor_of(size, block_size)) for i, size in enumerate(sizes)])
    every = list(layout.segments())
    assert layout.size == sum(sizes) == sum(segment.size for segment in every)
    offset = 0
    for segment in every:
        assert segment.offset == offset
        assert segment.size > 0
        offset += segment.size
    meet = [
        s for s in every if s.offset < min(stop, layout.size) and s.offset + s.size > max(start, 0) and start < stop
    ]
    assert list(layout.segments_in(start, stop)) == meet


@given(st.lists(st.integers(1, 10), max_size=20), st.integers(1, 25), st.integers(1, 5))
def test_batches_keep_order_and_limits(sizes: list[int], max_bytes: int, max_blocks: int) -> None:
    segments = [Segment(b"", 0, size, None) for size in sizes]
    cut = list(batches(segments, max_bytes, max_blocks))
    assert [segment for batch in cut for segment in batch] == segments
    for batch in cut:
        assert len(batch) == 1 or (sum(s.size for s in batch) <= max_bytes and len(batch) <= max_blocks)


def test_ranges() -> None:
    assert ranges(0, 10) == [(0, 0)]
    assert ranges(10, 10) == [(0, 10)]
    assert ranges(25, 10) == [(0, 10), (10, 20), (20, 25)]


def test_a_layout_that_contradicts_the_snapshot_is_refused() -> None:
    tensor = tensor_of(10)
    with pytest.raises(ValueError, match="10 bytes together, but the snapshot says 11"):
        FileLayout.of_file(BlobFile("f", 11, "id"), {"id": tensor})


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 60))
def test_shards_are_cut_greedily_and_in_order(sizes: list[int], limit: int) -> None:
    tensors = [(f"t{index}", tensor_of(size)) for index, size in enumerate(sizes)]
    shards = shard(tensors, limit)
    assert [item for content in shards for item in content] == tensors
    for number, content in enumerate(shards):
        total = sum(tensor.nbytes for _, tensor in content)
        assert total <= limit or len([t for _, t in content if t.nbytes]) == 1
        if number + 1 < len(shards):
            assert total + shards[number + 1][0][1].nbytes > limit


def test_a_larger_tensor_has_its_own_shard() -> None:
    tensors = [("a", tensor_of(10)), ("b", tensor_of(100)), ("c", tensor_of(10))]
    assert [[name for name, _ in content] for content in shard(tensors, 50)] == [["a"], ["b"], ["c"]]


def test_a_shard_ends_before_its_header_gets_unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    # Case I9, with a smaller limit.
    monkeypatch.setattr(layout_module, "MAX_HEADER_SIZE", (1 << 20) + 20_000)
    monkeypatch.setattr(st_format, "MAX_HEADER_SIZE", 20_000)
    tensors = [("ü" * 100 + str(index), tensor_of(1)) for index in range(200)]
    files = synthesise_files(tensors).files
    assert len(files) > 1
    assert all(len(file.header) <= 20_008 for file in files)
    assert sum(len(file.tensors) for file in files) == 200


def test_one_shard_has_no_index() -> None:
    synthesis = synthesise_files([("b", tensor_of(3)), ("a", tensor_of(4))])
    (file,) = synthesis.files
    assert synthesis.index is None
    assert file.path == "model.safetensors"
    assert file.size == len(file.header) + 7
    header = parse_header(file.header, file.size, source="f")
    assert header.metadata == {"format": "pt"}
    assert tuple(entry.name for entry in header.entries) == file.tensors == ("a", "b")


def test_several_shards_have_an_index() -> None:
    synthesis = synthesise_files([("b", tensor_of(30)), ("a", tensor_of(40)), ("c", tensor_of(1))], 40, {"x": "y"})
    assert [file.path for file in synthesis.files] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert synthesis.index is not None
    assert json.loads(synthesis.index) == {
        "metadata": {"total_size": 71},
        "weight_map": {
            "a": "model-00002-of-00003.safetensors",
            "b": "model-00001-of-00003.safetensors",
            "c": "model-00003-of-00003.safetensors",
        },
    }


def test_no_tensors_make_an_empty_file() -> None:
    (file,) = synthesise_files([]).files
    assert parse_header(file.header, file.size, source="f").entries == ()


def test_bad_arguments_are_refused() -> None:
    assert DEFAULT_SHARD_SIZE == 5_000_000_000
    with pytest.raises(ValueError, match="positive"):
        shard([], 0)
    with pytest.raises(FormatError, match="more than one tensor"):
        synthesise_files([("a", tensor_of(1)), ("a", tensor_of(1))])
    with pytest.raises(ValueError, match="unique"):
        synthesise_files([("a", tensor_of(5)), ("a", tensor_of(5))], 5)
