"""GGUF files and .npz archives in a repository: exact round trips, tensors that merge, damage that changes nothing."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ingest_cases import assert_clean, directory_digests, new_repository, refused

from mpfs.errors import BadInputError, FormatError, MismatchError
from mpfs.formats import gguf, npz
from mpfs.ingest.source import ArrayBytes, SourceFile
from mpfs.repository import Repository
from mpfs.testing.checkpoints import TensorContent, safetensors_bytes, write
from mpfs.testing.containers import (
    GGUF_BF16,
    GGUF_DAMAGES,
    GGUF_F32,
    GGUF_Q4_K,
    NPZ_DAMAGES,
    GGUFTensor,
    gguf_bytes,
    gguf_files,
    npz_arrays,
    npz_bytes,
)
from mpfs.testing.torch_checkpoints import (
    TORCH_DAMAGES,
    TorchContent,
    torch_bytes,
    torch_files,
    torchscript_bytes,
    torchscript_files,
)

numbers = itertools.count()


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    with new_repository(tmp_path / "repo") as made:
        yield made


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repository]:
    """One repository for many examples."""
    with new_repository(tmp_path_factory.mktemp("containers") / "repo") as made:
        yield made


def model(seed: int = 0) -> bytes:
    """A GGUF file: one quantised tensor, the same whatever the seed, and two of numbers."""
    rng = np.random.default_rng(seed)
    return gguf_bytes(
        [
            GGUFTensor("token_embd.weight", GGUF_Q4_K, (512, 40), bytes(range(144)) * 80),
            GGUFTensor("output_norm.weight", GGUF_F32, (5,), rng.standard_normal(5, np.float32).tobytes()),
            GGUFTensor("a.weight", GGUF_F32, (64, 100), rng.standard_normal(6400, np.float32).tobytes()),
            GGUFTensor("b.weight", GGUF_BF16, (3,), b"\x80\x3f" * 3),
        ],
        {"general.architecture": "llama", "tokenizer.ggml.tokens": ["a", "b"]},
    )


@settings(max_examples=40)
@given(content=gguf_files())
def test_any_gguf_file_comes_back(shared: Repository, tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.mktemp("x")
    write(folder, {"m.gguf": content})
    report = shared.import_checkpoint(folder / "m.gguf", f"gguf/{next(numbers)}")
    shared.checkout(report.commit, folder / "out")
    assert (folder / "out/m.gguf").read_bytes() == content
    shutil.rmtree(folder)


def test_tensors_of_a_gguf_file(repository: Repository, tmp_path: Path) -> None:
    write(tmp_path / "in", {"m.gguf": model(), "README.md": b"hello"})
    report = repository.import_checkpoint(tmp_path / "in", "main")
    assert report.tensors == 4
    tensors = repository.tensors("main")
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()} == {
        "token_embd.weight": ("U8", (40, 288)),
        "output_norm.weight": ("F32", (5,)),
        "a.weight": ("F32", (100, 64)),
        "b.weight": ("BF16", (3,)),
    }
    assert torch.equal(repository.tensor("main", "b.weight"), torch.ones(3, dtype=torch.bfloat16))
    repository.checkout("main", tmp_path / "out")
    assert directory_digests(tmp_path / "out") == directory_digests(tmp_path / "in")
    repository.checkout("main", tmp_path / "cut", shard_size=10_000)
    assert (tmp_path / "cut/m.gguf").read_bytes() == model()
    repository.checkout("main", tmp_path / "some", include=["*norm*"])
    assert sorted(path.name for path in (tmp_path / "some").iterdir()) == ["README.md", "m.gguf.safetensors"]
    assert_clean(repository)
    # Its blocks are found again, in another file with other metadata.
    again = model().replace(b"llama", b"gemma")
    write(tmp_path / "again", {"m.gguf": again})
    assert repository.import_checkpoint(tmp_path / "again", "again").new_blocks <= 2
    assert repository.diff("main", "again").summary["identical"] == 4
    repository.gc()
    assert_clean(repository)


def test_a_merge_of_gguf_files(repository: Repository, tmp_path: Path) -> None:
    for seed, name in enumerate("abc"):
        write(tmp_path, {f"{name}.gguf": model(seed)})
        repository.import_checkpoint(tmp_path / f"{name}.gguf", name)
    recipe = {
        "merge_method": "linear",
        "models": [{"model": "a", "parameters": {"weight": 0.5}}, {"model": "b", "parameters": {"weight": 0.5}}],
        "dtype": "float32",
    }
    repository.merge(recipe, into="merged")
    found, left, right = (repository.load(name) for name in ("merged", "a", "b"))
    assert torch.allclose(found["a.weight"], (left["a.weight"] + right["a.weight"]) / 2)
    assert torch.equal(found["token_embd.weight"], left["token_embd.weight"])
    # b.weight is no BF16 any more, so the header would not be true.
    repository.checkout("merged", tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["model.safetensors"]


@pytest.mark.parametrize("split", [False, True])
def test_a_merge_of_gguf_files_is_one_where_it_can(repository: Repository, tmp_path: Path, split: bool) -> None:
    for seed, name in enumerate("ab"):
        folder = write(tmp_path / name, {"m.gguf": model(seed), "README.md": b"x"})
        if split:
            part = gguf_bytes([GGUFTensor("other", GGUF_F32, (4,), bytes([seed]) * 16)], filler=b"\xaa")
            (folder / "m.gguf").rename(folder / "m-00001-of-00002.gguf")
            write(folder, {"m-00002-of-00002.gguf": part})
        repository.import_checkpoint(folder, name)
    recipe = {
        "merge_method": "task_arithmetic",
        "base_model": "a",
        "models": [{"model": "b", "parameters": {"weight": 0.25}}],
    }
    repository.merge(recipe, into="merged")
    repository.checkout("merged", tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        path.name for path in (tmp_path / "a").iterdir()
    )
    for path in sorted((tmp_path / "out").glob("*.gguf")):
        before, after = gguf.read_header(tmp_path / "a" / path.name), gguf.read_header(path)
        assert before == after
        old, new = (tmp_path / "a" / path.name).read_bytes(), path.read_bytes()
        assert len(old) == len(new)
        covered = [range(entry.start, entry.end) for entry in after[0].entries]
        assert all(old[at] == new[at] for at in range(len(old)) if not any(at in run for run in covered))
    found, left, right = (repository.load(name) for name in ("merged", "a", "b"))
    assert torch.allclose(found["a.weight"], left["a.weight"] * 0.75 + right["a.weight"] * 0.25, atol=1e-6)
    assert repository.import_checkpoint(tmp_path / "out", "again").snapshot == repository.show("merged").commit.snapshot
    assert_clean(repository)


def test_a_merge_of_quantised_weights_that_differ(repository: Repository, tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        content = GGUFTensor("blk.0.attn_q.weight", GGUF_Q4_K, (256, 2), bytes([seed]) * 288)
        write(tmp_path, {f"{name}.gguf": gguf_bytes([content])})
        repository.import_checkpoint(tmp_path / f"{name}.gguf", name)
    models = [{"model": name, "parameters": {"weight": 0.5}} for name in "ab"]
    with pytest.raises(MismatchError, match=r"quantised weights cannot be merged: blk\.0\.attn_q\.weight \(GGUF"):
        repository.merge({"merge_method": "linear", "models": models, "dtype": "float32"}, into="merged")


class TestDirectories:
    def test_several_models_have_prefixes(self, repository: Repository, tmp_path: Path) -> None:
        files = {"m-F32.gguf": model(), "mmproj.gguf": model(1), "config.json": b"{}"}
        write(tmp_path / "in", files)
        repository.import_checkpoint(tmp_path / "in", "main")
        assert {name.partition(":")[0] for name in repository.tensors("main")} == {"m-F32.gguf", "mmproj.gguf"}
        repository.checkout("main", tmp_path / "out")
        assert directory_digests(tmp_path / "out") == directory_digests(tmp_path / "in")

    def test_splits_are_one_model(self, repository: Repository, tmp_path: Path) -> None:
        parts = [gguf_bytes([GGUFTensor(name, GGUF_F32, (3,), b"1234" * 3)]) for name in "ab"]
        names = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
        write(tmp_path / "in", dict(zip(names, parts, strict=True)))
        repository.import_checkpoint(tmp_path / "in", "main")
        assert list(repository.tensors("main")) == ["a", "b"]
        (tmp_path / "in" / names[0]).unlink()
        with refused(repository, FormatError, match="has 00002 splits, of which 1 are here"):
            repository.import_checkpoint(tmp_path / "in", "main")

    def test_beside_safetensors_it_is_a_side_file(self, repository: Repository, tmp_path: Path) -> None:
        write(
            tmp_path / "in",
            {"m.gguf": model(), "model.safetensors": safetensors_bytes([TensorContent("w", "F32", (1,), b"1234")])},
        )
        repository.import_checkpoint(tmp_path / "in", "main")
        assert list(repository.tensors("main")) == ["w"]
        repository.checkout("main", tmp_path / "out")
        assert directory_digests(tmp_path / "out") == directory_digests(tmp_path / "in")


@pytest.mark.parametrize("damage", GGUF_DAMAGES)
def test_damaged_gguf_files_change_nothing(repository: Repository, tmp_path: Path, damage: str) -> None:
    write(tmp_path / "in", {"m.gguf": GGUF_DAMAGES[damage](model())})
    with refused(repository, FormatError):
        repository.import_checkpoint(tmp_path / "in/m.gguf", "main")
    with refused(repository, FormatError):
        repository.import_checkpoint(tmp_path / "in", "main")


@settings(max_examples=25)
@given(arrays=npz_arrays())
def test_any_npz_archive(
    shared: Repository, tmp_path_factory: pytest.TempPathFactory, arrays: dict[str, np.ndarray]
) -> None:
    folder = tmp_path_factory.mktemp("x")
    write(folder, {"m.npz": npz_bytes(arrays, compressed=True)})
    report = shared.import_checkpoint(folder / "m.npz", f"npz/{next(numbers)}")
    loaded = shared.load(report.commit)
    assert sorted(loaded) == sorted(arrays)
    for name, array in arrays.items():
        native = array.astype(array.dtype.newbyteorder("="))
        assert loaded[name].shape == native.shape
        assert loaded[name].numpy().tobytes() == native.tobytes("C")
    shutil.rmtree(folder)


def comes_back(repository: Repository, folder: Path, content: TorchContent) -> None:
    """A torch file's tensors are in the repository as they are in the file."""
    write(folder, {"m.pt": content.data})
    report = repository.import_checkpoint(folder / "m.pt", f"torch/{next(numbers)}", key=content.key)
    loaded = repository.load(report.commit)
    assert sorted(loaded) == sorted(content.state)
    for name, tensor in content.state.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(
            loaded[name].contiguous().view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8)
        )
    shutil.rmtree(folder)


@settings(max_examples=40)
@given(content=torch_files())
def test_any_torch_file(shared: Repository, tmp_path_factory: pytest.TempPathFactory, content: TorchContent) -> None:
    comes_back(shared, tmp_path_factory.mktemp("x"), content)


@settings(max_examples=25)
@given(content=torchscript_files())
def test_any_torchscript_program(
    shared: Repository, tmp_path_factory: pytest.TempPathFactory, content: TorchContent
) -> None:
    comes_back(shared, tmp_path_factory.mktemp("x"), content)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("damage", TORCH_DAMAGES)
@pytest.mark.parametrize("kind", ["state dict", "program"])
def test_damaged_torch_files_change_nothing(repository: Repository, tmp_path: Path, damage: str, kind: str) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.BatchNorm1d(20))
    content = torch_bytes(module.state_dict()) if kind == "state dict" else torchscript_bytes(module)
    write(tmp_path, {"m.pt": TORCH_DAMAGES[damage](content)})
    with refused(repository, FormatError):
        repository.import_checkpoint(tmp_path / "m.pt", "main")


def test_a_large_array_is_not_in_memory_as_a_whole(tmp_path: Path) -> None:
    size = 1 << 26
    write(tmp_path, {"m.npz": npz_bytes({"w": np.zeros(size, np.uint8)}, compressed=True)})
    (array,) = npz.read_arrays(tmp_path / "m.npz")
    content = ArrayBytes(array, tmp_path / "m.npz", SourceFile(tmp_path / "m.npz"))
    tracemalloc.start()
    try:
        for offset in range(0, size, 1 << 20):
            assert content.read(offset, 1 << 20).count(0) == 1 << 20
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < size // 4


@given(seed=st.integers(0, 1000), pieces=st.integers(1, 12), fortran=st.booleans())
def test_an_array_is_read_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, seed: int, pieces: int, fortran: bool
) -> None:
    rng = random.Random(seed)
    values = np.frombuffer(rng.randbytes(30 * 40 * 2), ">i2").reshape(30, 40)
    folder = tmp_path_factory.mktemp("x")
    arrays = {"w": np.asfortranarray(values) if fortran else values.astype("<i2")}
    write(folder, {"m.npz": npz_bytes(arrays, compressed=rng.random() < 0.5)})
    (array,) = npz.read_arrays(folder / "m.npz")
    content = ArrayBytes(array, folder / "m.npz", SourceFile(folder / "m.npz"))
    expected = values.astype("<i2").tobytes()
    edges = sorted({0, len(expected), *(rng.randrange(len(expected)) for _ in range(pieces))})
    ranges = list(itertools.pairwise(edges))
    rng.shuffle(ranges)
    for start, end in ranges:
        assert content.read(start, end - start) == expected[start:end]
    shutil.rmtree(folder)


@pytest.mark.parametrize("damage", NPZ_DAMAGES)
def test_damaged_archives_change_nothing(repository: Repository, tmp_path: Path, damage: str) -> None:
    content = npz_bytes({"w": np.arange(5000, dtype=np.float32), "b": np.ones(3)})
    write(tmp_path, {"m.npz": NPZ_DAMAGES[damage](content)})
    with refused(repository, FormatError):
        repository.import_checkpoint(tmp_path / "m.npz", "main")


class TestStripPrefix:
    def test_it_goes(self, repository: Repository, tmp_path: Path) -> None:
        torch.save(
            {"module.a": torch.ones(3), "module.b.module.c": torch.zeros(2), "d": torch.ones(1)}, tmp_path / "x.pt"
        )
        report = repository.import_checkpoint(tmp_path / "x.pt", "main", strip_prefix="module.")
        assert sorted(repository.tensors("main")) == ["a", "b.module.c", "d"]
        assert report.notes == ()

    @pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
    def test_a_wrapper_is_noted(self, repository: Repository, tmp_path: Path, prefix: str) -> None:
        torch.save({"model": {f"{prefix}a": torch.ones(3)}, "epoch": 3}, tmp_path / "x.pt")
        report = repository.import_checkpoint(tmp_path / "x.pt", "main")
        assert list(repository.tensors("main")) == [f"{prefix}a"]
        assert "--strip-prefix" in report.notes[0]
        assert json.loads(json.dumps(report.as_json()))["notes"] == list(report.notes)

    def test_shards_with_an_index(self, repository: Repository, tmp_path: Path) -> None:
        names = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
        for name, tensor in zip(names, ["module.a", "module.b"], strict=True):
            (tmp_path / "in").mkdir(exist_ok=True)
            torch.save({tensor: torch.ones(2)}, tmp_path / "in" / name)
        index = {"weight_map": {"module.a": names[0], "module.b": names[1]}}
        (tmp_path / "in/pytorch_model.bin.index.json").write_text(json.dumps(index))
        repository.import_checkpoint(tmp_path / "in", "main", strip_prefix="module.")
        assert sorted(repository.tensors("main")) == ["a", "b"]

    def test_what_it_cannot_do(self, repository: Repository, tmp_path: Path) -> None:
        torch.save({"module.a": torch.ones(3), "a": torch.ones(3)}, tmp_path / "x.pt")
        with refused(repository, BadInputError, match='two tensors would be called "a"'):
            repository.import_checkpoint(tmp_path / "x.pt", "main", strip_prefix="module.")
        with refused(repository, BadInputError, match="no tensor's name begins"):
            repository.import_checkpoint(tmp_path / "x.pt", "main", strip_prefix="net.")
        write(tmp_path, {"m.gguf": model()})
        with refused(repository, BadInputError, match="--strip-prefix is for torch files"):
            repository.import_checkpoint(tmp_path / "m.gguf", "main", strip_prefix="net.")
        write(tmp_path, {"m.npz": npz_bytes({"w": np.ones(3)})})
        with refused(repository, BadInputError, match="--key"):
            repository.import_checkpoint(tmp_path / "m.npz", "main", key="model")
