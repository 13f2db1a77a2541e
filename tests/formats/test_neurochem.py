"""NeuroChem networks: tensors as torchani reads them, files byte for byte, merges that are networks again."""

from __future__ import annotations

import bz2
import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from mpfs.errors import BadInputError, FormatError, UnsafeInputError
from mpfs.formats.neurochem import read_network
from mpfs.repository import Repository
from mpfs.testing.checkpoints import TensorContent, read, safetensors_bytes, write
from mpfs.testing.containers import (
    NEUROCHEM_DAMAGES,
    neurochem_networks,
    neurochem_packed,
    neurochem_text,
)

numbers = itertools.count()
LAYERS = [(6, "a.nnf-l1.wparam", "a.nnf-l1.bparam"), (6, "a.nnf-l2.wparam", "a.nnf-l2.bparam")]
TEXT = neurochem_text(6, LAYERS)
FILES = {name: bytes(range(4 * size)) for _, weights, biases in LAYERS for name, size in ((weights, 36), (biases, 6))}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repository]:
    with Repository.create(
        tmp_path_factory.mktemp("neurochem") / "repo", block_size=4096, map_size=1 << 33, author="tester"
    ) as made:
        yield made


def test_what_is_found(tmp_path: Path) -> None:
    path = tmp_path / "ANN-H.nnf"
    path.write_bytes(neurochem_packed(neurochem_text(384, [(160, "w1", "b1"), (1, "w2", "b2")])))
    found = read_network(path)
    assert [(item.name, item.file, item.shape) for item in found] == [
        ("ANN-H.l1.weight", "w1", (160, 384)),
        ("ANN-H.l1.bias", "b1", (160,)),
        ("ANN-H.l2.weight", "w2", (1, 160)),
        ("ANN-H.l2.bias", "b2", (1,)),
    ]


@settings(max_examples=15)
@given(files=neurochem_networks())
def test_any_networks_come_back(
    shared: Repository, tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes]
) -> None:
    folder = tmp_path_factory.mktemp("x")
    report = shared.import_checkpoint(write(folder / "in", files), f"n/{next(numbers)}")
    raw = {name: content for name, content in files.items() if name.endswith("param")}
    assert report.tensors == len(raw)
    assert sorted(tensor.numpy().tobytes() for tensor in shared.load(report.commit).values()) == sorted(raw.values())
    shared.checkout(report.commit, folder / "out")
    assert read(folder / "out") == files
    shutil.rmtree(folder)


@pytest.mark.parametrize("damage", NEUROCHEM_DAMAGES)
def test_damage_is_refused(shared: Repository, tmp_path: Path, damage: str) -> None:
    before = shared.refs()
    write(tmp_path / "in", {**FILES, "a.nnf": NEUROCHEM_DAMAGES[damage](TEXT)})
    unsafe = damage in ("outside", "absolute")
    with pytest.raises(BadInputError) as caught:
        shared.import_checkpoint(tmp_path / "in", "broken")
    assert type(caught.value) is (UnsafeInputError if unsafe else FormatError)
    assert shared.refs() == before


@pytest.mark.parametrize(("name", "content"), [("a.nnf-l1.wparam", b"1234"), ("a.nnf-l2.bparam", bytes(28))])
def test_files_of_another_size(shared: Repository, tmp_path: Path, name: str, content: bytes) -> None:
    write(tmp_path / "in", {**FILES, "a.nnf": neurochem_packed(TEXT), name: content})
    with pytest.raises(FormatError, match=f"has {len(content)} bytes, where"):
        shared.import_checkpoint(tmp_path / "in", "broken")


def test_beside_safetensors_they_are_side_files(shared: Repository, tmp_path: Path) -> None:
    files = {
        **FILES,
        "a.nnf": neurochem_packed(TEXT),
        "m.safetensors": safetensors_bytes([TensorContent("w", "F32", (1,), b"1234")]),
    }
    shared.import_checkpoint(write(tmp_path / "in", files), "beside")
    assert list(shared.tensors("beside")) == ["w"]


def independent(networks: Path) -> dict[str, torch.Tensor]:
    """The tensors as torchani's own loader takes them: sizes out of the description, numbers in their files' order."""
    tensors: dict[str, torch.Tensor] = {}
    for description in sorted(networks.glob("*.nnf")):
        content = description.read_bytes()
        text = bz2.decompress(content[content.index(b"=") + 2 :]).decode()
        inputs = int(text.partition("inputsize=")[2].partition(";")[0])
        for number, layer in enumerate(text.split("layer [")[1:], start=1):
            nodes = int(layer.partition("nodes=")[2].partition(";")[0])
            for kind, key, shape in (("weight", "wparam", (nodes, inputs)), ("bias", "bparam", (nodes,))):
                values = np.fromfile(networks / f"{description.name}-l{number}.{key}", "<f4")
                tensors[f"{description.stem}.l{number}.{kind}"] = torch.from_numpy(values.reshape(shape))
            inputs = nodes
    return tensors


def test_published_networks(shared: Repository, real_models: Callable[[str], Path], tmp_path: Path) -> None:
    root = real_models("torchani") / "torchani/resources"
    for member in range(8):
        for family in ("ani-1x_8x", "ani-1ccx_8x"):
            source = root / family / f"train{member}"
            report = shared.import_checkpoint(source / "networks", f"{family}/{member}")
            assert report.tensors == 32
            found, expected = shared.load(f"{family}/{member}"), independent(source / "networks")
            assert sorted(found) == sorted(expected)
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        summary = shared.diff(f"ani-1x_8x/{member}", f"ani-1ccx_8x/{member}").summary
        assert summary["identical"] == summary["changed"] == 16
    whole = shared.import_checkpoint(root / "ani-1x_8x", "ensemble")
    assert whole.tensors == 256
    assert "train3/networks/ANN-H.l1.weight" in shared.tensors("ensemble")
    shared.checkout("ensemble", tmp_path / "out")
    assert read(tmp_path / "out") == read(root / "ani-1x_8x")


def test_a_merge_of_networks_is_a_network(
    shared: Repository, real_models: Callable[[str], Path], tmp_path: Path
) -> None:
    root = real_models("torchani") / "torchani/resources"
    for family in ("ani-1x_8x", "ani-1ccx_8x"):
        shared.import_checkpoint(root / family / "train0", family.partition("_")[0])
    recipe = {
        "merge_method": "task_arithmetic",
        "base_model": "ani-1x",
        "models": [{"model": "ani-1ccx", "parameters": {"weight": 0.5}}],
    }
    report = shared.merge(recipe, "merged")
    assert report.figures.blocks_kept > 0
    shared.checkout("merged", tmp_path / "out")
    base, expert = (independent(root / family / "train0/networks") for family in ("ani-1x_8x", "ani-1ccx_8x"))
    merged = independent(tmp_path / "out/networks")
    assert sorted(read(tmp_path / "out")) == sorted(read(root / "ani-1x_8x/train0"))
    for name, tensor in merged.items():
        assert torch.allclose(tensor, (base[name] + expert[name]) / 2, atol=1e-6), name
