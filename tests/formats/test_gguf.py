"""GGUF headers: what they say, and that nothing damaged is taken for whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given

from mpfs.errors import BadInputError, FormatError, NotFoundError
from mpfs.formats.gguf import TYPES, read_header
from mpfs.testing.containers import (
    GGUF_BF16,
    GGUF_DAMAGES,
    GGUF_F32,
    GGUF_Q4_K,
    GGUFTensor,
    gguf_bytes,
    gguf_files,
    gguf_nbytes,
)

TENSORS = [
    GGUFTensor("token_embd.weight", GGUF_Q4_K, (512, 3), bytes(range(144)) * 6),
    GGUFTensor("output_norm.weight", GGUF_F32, (5,), b"\x01\x02\x03\x04" * 5),
    GGUFTensor("blk.0.attn_q.weight", GGUF_BF16, (3, 2), b"\x05\x06" * 6),
]
METADATA = {"general.architecture": "llama", "llama.block_count": 2, "tokenizer.ggml.tokens": ["a", "bc"], "x": True}
CONTENT = gguf_bytes(TENSORS, METADATA)


def written(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    return path


def test_what_a_header_says(tmp_path: Path) -> None:
    header, raw = read_header(written(tmp_path, CONTENT))
    assert CONTENT.startswith(raw)
    assert len(raw) == header.size
    assert header.size % 32 == 0
    assert (header.version, header.alignment) == (3, 32)
    assert header.metadata == {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "tokenizer.ggml.tokens": None,
        "x": True,
    }
    assert [(e.name, e.type.name, e.type.dtype, e.shape) for e in header.entries] == [
        ("token_embd.weight", "Q4_K", "U8", (3, 288)),
        ("output_norm.weight", "F32", "F32", (5,)),
        ("blk.0.attn_q.weight", "BF16", "BF16", (2, 3)),
    ]
    for entry, tensor in zip(header.entries, TENSORS, strict=True):
        assert CONTENT[entry.start : entry.end] == tensor.data
    assert header.quantised == {"token_embd.weight": "Q4_K"}


def test_it_agrees_with_the_reference_reader(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    for code, kind in TYPES.items():
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(code)]
        assert (kind.name, kind.block, kind.size) == (gguf.GGMLQuantizationType(code).name, block, size)
    reader = gguf.GGUFReader(written(tmp_path, CONTENT))
    header, _ = read_header(tmp_path / "m.gguf")
    assert [(t.name, t.data_offset, int(t.n_bytes)) for t in reader.tensors] == [
        (e.name, e.start, e.nbytes) for e in header.entries
    ]


@given(content=gguf_files())
def test_any_file(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    header, raw = read_header(written(tmp_path_factory.mktemp("x"), content))
    assert raw == content[: len(raw)]
    assert header.file_size == len(content)


@pytest.mark.parametrize("damage", GGUF_DAMAGES)
def test_damage_is_refused(tmp_path: Path, damage: str) -> None:
    with pytest.raises(FormatError) as caught:
        read_header(written(tmp_path, GGUF_DAMAGES[damage](CONTENT)))
    assert "m.gguf: " in caught.value.message
    assert len(caught.value.message) < 500


@pytest.mark.parametrize("cut", range(0, len(CONTENT) - 32, 7))
def test_every_cut_is_refused(tmp_path: Path, cut: int) -> None:
    with pytest.raises(FormatError):
        read_header(written(tmp_path, CONTENT[:cut]))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([GGUFTensor("a", GGUF_F32, (1,), b"1234"), GGUFTensor("a", GGUF_F32, (1,), b"1234")], "two tensors"),
        ([GGUFTensor("a", GGUF_F32, (1, 1, 1, 1, 1), b"1234")], "5 dimensions"),
        ([GGUFTensor("a", 99, (1,), b"1234")], "type 99"),
        ([GGUFTensor("a", GGUF_Q4_K, (100,), bytes(144))], "whole blocks of 256"),
        ([GGUFTensor("a", GGUF_F32, (2**40, 2**40), b"1234")], "overflows"),
        ([GGUFTensor("a", GGUF_F32, (100,), b"1234")], "missing"),
    ],
)
def test_tensors_that_cannot_be(tmp_path: Path, tensors: list[GGUFTensor], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        read_header(written(tmp_path, gguf_bytes(tensors)))


def test_alignment_must_be_a_power_of_two(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="power of two"):
        read_header(written(tmp_path, gguf_bytes(TENSORS, {"general.alignment": 12})))


def test_a_key_twice(tmp_path: Path) -> None:
    content = gguf_bytes([], {"abc": 1, "abd": 2}).replace(b"abd", b"abc")
    with pytest.raises(FormatError, match='"abc" occurs twice'):
        read_header(written(tmp_path, content))


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        read_header(tmp_path / "m.gguf")
    with pytest.raises(BadInputError, match="not a regular file"):
        read_header(tmp_path)


def test_sizes_of_types() -> None:
    assert gguf_nbytes(GGUF_Q4_K, (512, 3)) == 6 * 144
