"""ONNX models: initialisers are found where they are, and nothing damaged is taken for whole."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpfs.errors import BadInputError, FormatError
from mpfs.formats.onnx import read_model
from mpfs.repository import Repository

CUT = 20


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def data(field: int, content: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(content)) + content


def initialiser(
    name: str, code: int, shape: tuple[int, ...], content: bytes, field: int = 9, packed: bool = False
) -> bytes:
    dims = data(1, b"".join(map(varint, shape))) if packed else b"".join(number(1, dim) for dim in shape)
    return data(5, dims + number(2, code) + data(8, name.encode()) + data(field, content))


def model(*initialisers: bytes) -> bytes:
    graph = data(1, data(1, b"x") + data(4, b"Add")) + b"".join(initialisers) + data(2, b"graph")
    return number(1, 8) + data(2, b"producer") + data(7, graph) + data(8, number(2, 17)) + varint(9 << 3 | 5) + b"1234"


FLOATS = np.arange(6, dtype="<f4").tobytes()
CONTENT = model(
    initialiser("w", 1, (2, 3), FLOATS),
    initialiser("v", 1, (6,), FLOATS, field=4, packed=True),
    initialiser("i", 7, (), struct.pack("<q", -1)),
    initialiser("s", 8, (1,), b"text", field=6),
)


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    with Repository.create(tmp_path / "repo", block_size=4096, map_size=1 << 30, author="tester") as made:
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
        (model(initialiser("w", 1, (7,), FLOATS)), "takes 28 bytes, but has 24"),
        (model(initialiser("w", 1, (6,), FLOATS), initialiser("w", 1, (6,), FLOATS)), "two initialisers"),
        (model(initialiser("", 1, (6,), FLOATS)), "has no name"),
        (model(initialiser("w", 1, (2**63, 2**63), FLOATS)), "cannot be"),
        (model(), "no initialisers"),
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


def test_real_models(repository: Repository, real_models: Callable[[str], Path], tmp_path: Path) -> None:
    root = real_models("speechmos") / "speechmos"
    for path in (root / "dnsmos_models/sig_bak_ovr.onnx", root / "pdnsmos_models/sig_bak_ovr.onnx"):
        report = repository.import_checkpoint(path, path.parent.name)
        assert report.tensors > 10
        repository.checkout(path.parent.name, tmp_path / path.parent.name)
        assert (tmp_path / path.parent.name / path.name).read_bytes() == path.read_bytes()
    total = sum(tensor.numel for tensor in repository.tensors("pdnsmos_models").values() if tensor.dtype == "F32")
    assert 280_000 < total < 300_000
    report = repository.import_checkpoint(root / "dnsmos_models/sig_bak_ovr.onnx", "again", base="auto")
    assert repository.fsck(read_data=True).problems == ()
