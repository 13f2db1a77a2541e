"""A batch asks the disk for what it will be compared with, before it looks at a page of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mpfs.objects import block_id
from mpfs.store import StagedBlock, Store
from mpfs.store.environment import Environment

SIZE = 65536


def test_blocks_that_are_there_already_are_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.create(tmp_path / "repo", block_size=SIZE)
    blocks = [os.urandom(SIZE) for _ in range(8)]
    staged = [StagedBlock(block_id(data), data, "U8", 0, b"statistics") for data in blocks]
    with store.writer() as writer:
        for item in staged:
            writer.put_block(item)
        writer.flush()
        # Where blocks lie is known once they are committed; the next transaction notes it.
        writer.put_block(StagedBlock(block_id(b"one more"), b"one more", "U8", 0, b"statistics"))
        writer.flush()
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(Environment, "prefetch", lambda self, offset, size: asked.append((offset, size)))
    with store.writer() as writer:
        for item in staged:
            writer.put_block(item)
        writer.flush()
        assert writer.figures.deduplicated_blocks == len(blocks)
    offsets = [info.offset for info in (store.blocks.info(block_id(data)) for data in blocks) if info is not None]
    assert len(offsets) == len(blocks)
    for offset in offsets:
        assert offset is not None
        assert any(start <= offset and offset + SIZE <= start + size for start, size in asked)
    # Neighbours are asked for together; what lies between them is less than a page more for each.
    assert len(asked) < len(blocks)
    assert sum(size for _, size in asked) <= len(blocks) * (SIZE + 4096)
    store.close()


@pytest.mark.parametrize("size", [1, 4096, 128 << 10, (128 << 10) + 1, 33 << 20])
def test_a_range_is_asked_for_in_pieces_that_the_kernel_reads_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Of a request larger than what the device takes at a time Linux reads the beginning only: the rest came page by page."""
    store = Store.create(tmp_path / "repo", block_size=SIZE)
    os.truncate(store.environment.path / "data.mdb", 64 << 20)
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr("mpfs.store.environment.is_resident", lambda fd, offset, size: False)
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, offset, length, advice: asked.append((offset, length)))
    store.environment.prefetch(12_345, size)
    assert all(0 < length <= 128 << 10 for _, length in asked)
    assert asked[0][0] == 12_345
    ends = [offset + length for offset, length in asked]
    assert [offset for offset, _ in asked[1:]] == ends[:-1]
    assert ends[-1] == 12_345 + size


def test_a_hint_beyond_the_file_asks_for_nothing_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.create(tmp_path / "repo", block_size=SIZE)
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr("mpfs.store.environment.is_resident", lambda fd, offset, size: False)
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, offset, length, advice: asked.append((offset, length)))
    store.environment.prefetch(1 << 60, 1 << 60)
    store.environment.prefetch(-(1 << 60), 1 << 59)
    store.environment.prefetch(0, 1 << 60)
    assert sum(length for _, length in asked) == store.environment.data_size()
