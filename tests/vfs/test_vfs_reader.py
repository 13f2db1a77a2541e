"""Reading files and tensors out of a store."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vfs_cases import BLOCK_SIZE, Builder, Staged, sample_tensors

from mpfs.errors import BadInputError, IntegrityError, NotFoundError
from mpfs.formats.safetensors import build_header
from mpfs.objects import BlobFile, BlockId, Snapshot, Tensor
from mpfs.store import Store
from mpfs.vfs import FileLayout, FileReader, SnapshotReader, load_tensor
from mpfs.vfs import reader as reader_module

pytest_plugins = ["vfs_fixtures"]

shared_store = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def reader(store: Store, staged: Staged) -> SnapshotReader:
    return SnapshotReader(store, staged.snapshot, "main")


class Watch:
    """Counts what a store is asked for, and whether a read transaction is open."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.verified: list[int] = []
        self.prefetched: list[BlockId] = []
        view, prefetch = store.blocks.view, store.blocks.prefetch

        @contextlib.contextmanager
        def watched(blocks: Sequence[BlockId], where: str) -> Iterator[list[memoryview]]:
            self.verified.append(len(blocks))
            with view(blocks, where) as payloads:
                yield payloads

        def asked(blocks: Sequence[BlockId]) -> None:
            self.prefetched += blocks
            prefetch(blocks)

        monkeypatch.setattr(store.blocks, "view", watched)
        monkeypatch.setattr(store.blocks, "prefetch", asked)


def test_every_file_reads_as_it_was(reader: SnapshotReader, staged: Staged) -> None:
    assert [file.path for file in reader.files()] == sorted(staged.content)
    for path, content in staged.content.items():
        file = reader.open(path)
        assert file.size == reader.size(path) == len(content)
        assert file.read_at(0, file.size + 10) == content
        for batch in (1 << 20, 4096, 1000):
            assert b"".join(file.iter_chunks(batch=batch)) == content
        pieces: list[bytes] = []
        file.copy_to(lambda piece, pieces=pieces: pieces.append(bytes(piece)))  # type: ignore[misc]
        assert b"".join(pieces) == content


@shared_store
@given(data=st.data())
def test_any_range_reads_as_in_the_whole_file(reader: SnapshotReader, staged: Staged, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(staged.content)))
    content = staged.content[path]
    file = reader.open(path)
    near_blocks = st.builds(lambda block, off: max(0, block * BLOCK_SIZE + off), st.integers(0, 20), st.integers(-3, 3))
    for _ in range(data.draw(st.integers(1, 4))):
        offset = data.draw(st.integers(0, len(content) + 5) | near_blocks)
        size = data.draw(st.integers(0, len(content) + 5) | st.integers(0, 3 * BLOCK_SIZE))
        assert file.read_at(offset, size) == content[offset : offset + size]
        buffer = bytearray(b"\xee" * size)
        count = file.read_into(offset, buffer)
        assert count == len(content[offset : offset + size])
        assert buffer == content[offset : offset + size] + b"\xee" * (size - count)
        assert b"".join(file.iter_chunks(offset, offset + size, batch=777)) == content[offset : offset + size]


def test_bad_ranges_are_refused(reader: SnapshotReader) -> None:
    file = reader.open("config.json")
    with pytest.raises(ValueError, match="-1"):
        file.read_at(-1, 5)
    with pytest.raises(ValueError, match="-2"):
        file.read_at(0, -2)
    with pytest.raises(ValueError, match="0 bytes"):
        list(file.iter_chunks(batch=0))


def test_what_is_not_there_is_not_found(reader: SnapshotReader) -> None:
    with pytest.raises(NotFoundError, match='main: no file "nope"'):
        reader.open("nope")
    with pytest.raises(NotFoundError, match='main: no tensor "nope"'):
        reader.tensor_bytes("nope")


def test_tensors_load_as_they_were(store: Store, reader: SnapshotReader, staged: Staged) -> None:
    for name, tensor in sample_tensors().items():
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        assert reader.tensor_bytes(name) == raw
        array = reader.read_tensor(name)
        assert array.dtype == np.uint8
        assert array.tobytes() == raw
        loaded = load_tensor(store, staged.snapshot, name)
        assert loaded.dtype == tensor.dtype
        assert loaded.shape == tensor.shape
        assert loaded.reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("U16", (3,)),
        ("U32", (3,)),
        ("U64", (2, 1)),
        ("C64", (2,)),
        ("F8_E8M0", (5,)),
        ("F8_E5M2FNUZ", (4,)),
        ("I16", ()),
    ],
)
def test_rarer_dtypes_load(builder: Builder, dtype: str, shape: tuple[int, ...]) -> None:
    header, parsed = build_header([("x", dtype, shape)], None)
    data = bytes(range(1, parsed.data_size + 1))
    staged = builder.publish({"model.safetensors": header + data})
    loaded = load_tensor(builder.store, staged.snapshot, "x")
    assert loaded.shape == shape
    assert loaded.reshape(-1).view(torch.uint8).numpy().tobytes() == data


@pytest.mark.parametrize(("dtype", "shape"), [("F4", (4,)), ("F6_E2M3", (4,)), ("F6_E3M2", (0,))])
def test_what_torch_cannot_hold_is_refused(builder: Builder, dtype: str, shape: tuple[int, ...]) -> None:
    header, parsed = build_header([("x", dtype, shape)], None)
    staged = builder.publish({"model.safetensors": header + bytes(parsed.data_size)})
    reader = SnapshotReader(builder.store, staged.snapshot)
    with pytest.raises(BadInputError, match=f'tensor "x" is {dtype}'):
        reader.load_tensor("x")
    assert reader.tensor_bytes("x") == bytes(parsed.data_size)


def test_a_prefix_is_part_of_a_tensors_name(builder: Builder) -> None:
    header, _ = build_header([("x", "U8", (2,))], None)
    files = {"model.safetensors": header + b"ab", "unet/model.safetensors": header + b"cd"}
    staged = builder.publish(files, prefixes={"unet/model.safetensors": "unet/"})
    reader = SnapshotReader(builder.store, staged.snapshot)
    assert reader.tensor_bytes("x") == b"ab"
    assert reader.tensor_bytes("unet/x") == b"cd"


def test_damage_names_block_tensor_file_and_snapshot(
    store: Store, reader: SnapshotReader, damage: Callable[[BlockId], None]
) -> None:
    block = reader.tensor("layer.0.half").blocks[1]
    damage(block)
    with pytest.raises(IntegrityError) as caught:
        reader.open("model.safetensors").read_at(0, 1 << 30)
    assert str(caught.value) == (
        f'snapshot main, file "model.safetensors", tensor "layer.0.half": block {block.hex()} is damaged: '
        "its bytes do not match its id"
    )
    assert caught.value.details == {
        "block": block.hex(),
        "snapshot": "main",
        "path": "model.safetensors",
        "tensor": "layer.0.half",
    }
    with pytest.raises(IntegrityError, match=r"layer\.0\.half"):
        reader.load_tensor("layer.0.half")
    # What is whole can still be read.
    assert reader.load_tensor("mask").tolist() == [True, False, True]


def test_missing_blocks_and_objects_are_integrity_errors(store: Store, staged: Staged) -> None:
    reader = SnapshotReader(store, staged.snapshot, "main")
    (block,) = reader.layout("config.json").parts[0][1].blocks
    with store.environment.write() as txn:
        txn.delete("blocks", block)
    with pytest.raises(IntegrityError, match=r'snapshot main, file "config.json": block .* is missing'):
        reader.open("config.json").read_at(0, 1)
    with store.environment.write() as txn:
        txn.delete("tensors", bytes.fromhex(staged.snapshot.tensors["mask"]))
    reader = SnapshotReader(store, staged.snapshot)
    with pytest.raises(IntegrityError, match=r"snapshot [0-9a-f]{64}: tensor object [0-9a-f]{64} is missing"):
        reader.open("model.safetensors")


def test_a_snapshot_that_contradicts_its_tensors_is_an_integrity_error(store: Store, staged: Staged) -> None:
    file = staged.snapshot.file("config.json")
    assert isinstance(file, BlobFile)
    wrong = Snapshot((BlobFile(file.path, file.size + 1, file.content),))
    with pytest.raises(IntegrityError, match="the snapshot says 24"):
        SnapshotReader(store, wrong).open("config.json")


def test_a_block_of_another_length_is_an_integrity_error(store: Store, builder: Builder, staged: Staged) -> None:
    tensor = builder.tensors(staged.snapshot)[staged.snapshot.tensors["mask"]]
    reader = FileReader(store, FileLayout.of_parts("f", [("t", Tensor("U8", (2,), 4096, tensor.blocks))]), "s")
    with pytest.raises(IntegrityError, match=r'tensor "t": block .* has 3 bytes, not 2'):
        reader.read_at(0, 2)


def test_a_block_is_verified_once_per_open_file(
    store: Store, reader: SnapshotReader, staged: Staged, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(store, monkeypatch)
    content = staged.content["model.safetensors"]
    file = reader.open("model.safetensors")
    for offset in range(0, 3 * BLOCK_SIZE, 100):
        assert file.read_at(offset, 100) == content[offset : offset + 100]
    first = list(file.layout.segments_in(0, 3 * BLOCK_SIZE))
    assert sum(watch.verified) <= len(first) + 4
    before = len(watch.verified)
    assert file.read_at(0, 3 * BLOCK_SIZE) == content[: 3 * BLOCK_SIZE]
    assert len(watch.verified) == before
    reader.open("model.safetensors").read_at(0, 1)
    assert len(watch.verified) == before + 1


def test_a_verified_block_that_vanishes_is_noticed(store: Store, reader: SnapshotReader) -> None:
    file = reader.open("config.json")
    file.read_at(0, 1)
    with store.environment.write() as txn:
        txn.delete("blocks", file.layout.parts[0][1].blocks[0])
    with pytest.raises(IntegrityError, match="missing"):
        file.read_at(0, 1)


def test_batches_are_bounded_and_what_follows_is_asked_for_once(
    store: Store, reader: SnapshotReader, staged: Staged, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "BATCH_BYTES", 3 * BLOCK_SIZE)
    monkeypatch.setattr(reader_module, "AHEAD_BYTES", 8 * BLOCK_SIZE)
    watch = Watch(store, monkeypatch)
    content = staged.content["model.safetensors"]
    file = reader.open("model.safetensors")
    assert b"".join(file.iter_chunks(batch=1000)) == content
    # The tied tensor's blocks come twice, so the second time they are known.
    assert len(watch.prefetched) == len(set(watch.prefetched)) == len({s.block for s in file.layout.segments()})
    watch.verified.clear()
    assert reader.open("model.safetensors").read_at(0, len(content)) == content
    assert max(watch.verified) <= 64
    assert len(watch.verified) >= 7


def test_a_small_read_asks_for_no_more_than_it_needs(
    store: Store, reader: SnapshotReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(store, monkeypatch)
    reader.open("model.safetensors").read_at(3 * BLOCK_SIZE, 10)
    assert len(watch.prefetched) <= 2


def test_no_read_transaction_outlives_a_call(store: Store, reader: SnapshotReader) -> None:
    chunks = reader.open("model.safetensors").iter_chunks(batch=1000)
    next(chunks)
    assert store.environment._active == 0


def test_many_threads_read_one_file(reader: SnapshotReader, staged: Staged) -> None:
    content = staged.content["model.safetensors"]
    file = reader.open("model.safetensors")

    def work(seed: int) -> bool:
        draw = random.Random(seed)
        for _ in range(100):
            offset, size = draw.randrange(len(content)), draw.randrange(3 * BLOCK_SIZE)
            if file.read_at(offset, size) != content[offset : offset + size]:
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(16)))


def test_opening_files_leaks_no_descriptors(reader: SnapshotReader) -> None:
    reader.open("config.json").read_at(0, 1)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(200):
        reader.open("model.safetensors").read_at(0, 100)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
