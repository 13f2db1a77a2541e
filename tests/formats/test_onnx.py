"""ONNX models: initialisers are found where they are, and nothing damaged is taken for whole."""

from __future__ import annotations

import itertools
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpfs.errors import BadInputError, FormatError
from mpfs.formats.onnx import read_model
from mpfs.repository import Repository
from mpfs.testing.containers import (
    ONNX_DAMAGES,
    onnx_bytes,
    onnx_initialiser,
    onnx_models,
    protobuf_bytes,
    protobuf_number,
)

CUT = 21
numbers = itertools.count()


FLOATS = np.arange(6, dtype="<f4").tobytes()
CONTENT = onnx_bytes(
    onnx_initialiser("w", 1, (2, 3), FLOATS),
    onnx_initialiser("v", 1, (6,), FLOATS, field=4, packed=True),
    onnx_initialiser("i", 7, (), struct.pack("<q", -1)),
    onnx_initialiser("s", 8, (1,), b"text", field=6),
)


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    with Repository.create(tmp_path / "repo", block_size=4096, map_size=1 << 30, author="tester") as made:
        yield made


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repository]:
    """One repository for many examples."""
    root = tmp_path_factory.mktemp("onnx") / "repo"
    with Repository.create(root, block_size=4096, map_size=1 << 33, author="tester") as made:
        yield made


def written(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "m.onnx"
    path.write_bytes(content)
    return path


def test_what_is_found(tmp_path: Path) -> None:
    found = read_model(written(tmp_path, CONTENT))
    assert [(entry.name, entry.dtype, entry.shape) for entry in found.entries] == [
        ("w", "F32", (2, 3)),
        ("v", "F32", (6,)),
        ("i", "I64", ()),
    ]
    assert [CONTENT[entry.start : entry.end] for entry in found.entries[:2]] == [FLOATS, FLOATS]
    assert found.left == ("s",)


@pytest.mark.parametrize("size", range(len(CONTENT) - CUT))
def test_every_cut_is_refused(tmp_path: Path, size: int) -> None:
    with pytest.raises(FormatError):
        read_model(written(tmp_path, CONTENT[:size]))


@given(place=st.integers(0, len(CONTENT) - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_never_crashes(tmp_path_factory: pytest.TempPathFactory, place: int, bit: int) -> None:
    content = bytearray(CONTENT)
    content[place] ^= 1 << bit
    path = written(tmp_path_factory.mktemp("x"), bytes(content))
    try:
        found = read_model(path)
    except BadInputError:
        return
    assert all(0 <= entry.start <= entry.end <= len(CONTENT) for entry in found.entries)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (onnx_bytes(onnx_initialiser("w", 1, (7,), FLOATS)), "takes 28 bytes, but has 24"),
        (
            onnx_bytes(onnx_initialiser("w", 1, (6,), FLOATS), onnx_initialiser("w", 1, (6,), FLOATS)),
            "two initialisers",
        ),
        (onnx_bytes(onnx_initialiser("", 1, (6,), FLOATS)), "has no name"),
        (onnx_bytes(onnx_initialiser("w", 1, (2**63, 2**63), FLOATS)), "cannot be"),
        (onnx_bytes(), "no initialisers"),
        (b"", "empty"),
        (b"\x00" * 100, "zeros"),
        (b"<!DOCTYPE html>", "web page"),
    ],
)
def test_what_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        read_model(written(tmp_path, content))


def test_round_trip(repository: Repository, tmp_path: Path) -> None:
    report = repository.import_checkpoint(written(tmp_path, CONTENT), "main")
    assert report.tensors == 3
    assert repository.tensor("main", "w").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert '"s"' in report.notes[0]
    repository.checkout("main", tmp_path / "out")
    assert (tmp_path / "out/m.onnx").read_bytes() == CONTENT


def test_a_merge_is_a_model_again(repository: Repository, tmp_path: Path) -> None:
    other = CONTENT.replace(FLOATS, np.full(6, 3, "<f4").tobytes(), 1)
    for name, content in (("base", CONTENT), ("e0", other)):
        repository.import_checkpoint(written(tmp_path, content), name)
    models = [{"model": "e0", "parameters": {"weight": 1.0}}]
    repository.merge({"merge_method": "task_arithmetic", "base_model": "base", "models": models}, "merged")
    repository.checkout("merged", tmp_path / "out")
    assert (tmp_path / "out/m.onnx").read_bytes() == other
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["m.onnx"]


def test_data_in_other_files_is_not_looked_for(repository: Repository, tmp_path: Path) -> None:
    """Wherever that would be: the model says `../secret`, and the entry stays bytes of the file."""
    (tmp_path / "secret").write_bytes(FLOATS)
    location = protobuf_bytes(13, protobuf_bytes(1, b"location") + protobuf_bytes(2, b"../secret"))
    outside = protobuf_bytes(
        5,
        protobuf_number(1, 6)
        + protobuf_number(2, 1)
        + protobuf_bytes(8, b"outside")
        + location
        + protobuf_number(14, 1),
    )
    content = onnx_bytes(onnx_initialiser("w", 1, (2, 3), FLOATS), outside)
    (tmp_path / "in").mkdir()
    report = repository.import_checkpoint(written(tmp_path / "in", content), "main")
    assert list(repository.tensors("main")) == ["w"]
    assert '"outside"' in report.notes[0]
    assert "../secret" not in str(repository.ls("main"))


def as_onnx_reads(content: bytes) -> dict[str, np.ndarray]:
    """The initialisers, by the library of the format."""
    graph = onnx.load_model_from_string(content).graph
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}


@pytest.mark.parametrize("file", ["dnsmos_models/sig_bak_ovr.onnx", "pdnsmos_models/sig_bak_ovr.onnx"])
def test_published_models(
    repository: Repository, real_models: Callable[[str], Path], tmp_path: Path, file: str
) -> None:
    path = real_models("speechmos") / "speechmos" / file
    expected = as_onnx_reads(path.read_bytes())
    report = repository.import_checkpoint(path, "main")
    found = repository.load("main")
    assert report.tensors == len(found) > 10
    # Shapes and axes, as varints, stay bytes of the file.
    assert {expected.pop(name).dtype.kind for name in set(expected) - set(found)} <= {"i"}
    for name, array in expected.items():
        assert (found[name].numpy().dtype, found[name].numpy().shape) == (array.dtype, array.shape), name
        assert found[name].numpy().tobytes() == array.tobytes(), name
    assert 250_000 < sum(array.size for array in expected.values() if array.dtype == np.float32) < 350_000
    repository.checkout("main", tmp_path / "out")
    assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    assert repository.fsck(read_data=True).problems == ()


def test_a_merge_of_published_models_runs_through_the_library(
    repository: Repository, real_models: Callable[[str], Path], tmp_path: Path
) -> None:
    root = real_models("speechmos") / "speechmos"
    for name in ("dnsmos", "pdnsmos"):
        repository.import_checkpoint(root / f"{name}_models/sig_bak_ovr.onnx", name)
    models = [{"model": "pdnsmos", "parameters": {"weight": 0.5}}]
    recipe = {"merge_method": "task_arithmetic", "base_model": "dnsmos", "models": models}
    repository.merge(recipe, "merged", on_mismatch="base")
    repository.checkout("merged", tmp_path / "out")
    merged = (tmp_path / "out/sig_bak_ovr.onnx").read_bytes()
    onnx.checker.check_model(onnx.load_model_from_string(merged))
    base, expert = (
        as_onnx_reads((root / f"{name}_models/sig_bak_ovr.onnx").read_bytes()) for name in ("dnsmos", "pdnsmos")
    )
    common = [name for name, array in base.items() if array.dtype == np.float32 and name in expert]
    assert len(common) > 10
    for name, array in as_onnx_reads(merged).items():
        if name in common:
            assert np.allclose(array, (base[name] + expert[name]) / 2, atol=1e-6), name


@settings(max_examples=25)
@given(content=onnx_models())
def test_any_model_comes_back(tmp_path_factory: pytest.TempPathFactory, shared: Repository, content: bytes) -> None:
    folder = tmp_path_factory.mktemp("x")
    report = shared.import_checkpoint(written(folder, content), f"onnx/{next(numbers)}")
    found, expected = shared.load(report.commit), as_onnx_reads(content)
    for name, tensor in found.items():
        flat = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        assert flat == expected[name].tobytes(), name
        assert tuple(tensor.shape) == expected[name].shape
    assert len(found) == report.tensors >= 1
    shared.checkout(report.commit, folder / "out")
    assert (folder / "out/m.onnx").read_bytes() == content
    shutil.rmtree(folder)


@pytest.mark.parametrize("damage", ONNX_DAMAGES)
def test_damage_changes_nothing(repository: Repository, tmp_path: Path, damage: str) -> None:
    path = written(tmp_path, ONNX_DAMAGES[damage](CONTENT))
    with pytest.raises(FormatError):
        repository.import_checkpoint(path, "main")
    assert repository.refs() == []
