"""Files that promise more than they hold are refused before memory or the disk is spent on them."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from mpfs.errors import BadInputError, FormatError, UnsafeInputError
from mpfs.formats.archive import HARMLESS_BYTES, MAX_RATIO
from mpfs.repository import Repository
from mpfs.testing.containers import deflated_zeros, gguf_string, npz_bytes, tar_gz_bomb, zip_bomb

GIBIBYTE = 1 << 30
MOST_MEMORY = 48 << 20
"""Python's and NumPy's memory, in bytes, over what was there before: a refusal's."""


def npy_head(*shape: int) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return stream.getvalue()


def overlapping(inner: bytes, count: int) -> bytes:
    """A zip archive in which many names are for the same bytes."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("0.npy", inner)
        for number in range(1, count):
            other = zipfile.ZipInfo(f"{number}.npy")
            first = archive.infolist()[0]
            other.header_offset, other.CRC = first.header_offset, first.CRC
            other.file_size = other.compress_size = len(inner)
            archive.filelist.append(other)
            archive.NameToInfo[other.filename] = other
        archive._didModify = True  # type: ignore[attr-defined]
    return stream.getvalue()


CODE = ("m/data.pkl", "m/constants.pkl")
SAFE_PICKLE = (b"\x80\x02).", 0)
PIPELINE = "model.safetensors"

BOMBS: dict[str, tuple[str, Callable[[], bytes], type[BadInputError], str]] = {
    "npz": ("m.npz", lambda: zip_bomb({"w.npy": (npy_head(GIBIBYTE), GIBIBYTE)}), UnsafeInputError, "unpack to 1,07"),
    "npz of many": (
        "m.npz",
        lambda: zip_bomb({f"{n}.npy": (npy_head(HARMLESS_BYTES // 4), HARMLESS_BYTES // 4) for n in range(8)}),
        UnsafeInputError,
        "unpack to",
    ),
    "npz whose members overlap": (
        "m.npz",
        lambda: overlapping(npy_head(1 << 20) + bytes(1 << 20), 1000),
        FormatError,
        "lie over each other",
    ),
    "npz whose header claims more than there is": (
        "m.npz",
        lambda: zip_bomb({"w.npy": (npy_head(1 << 50), 1 << 20)}),
        FormatError,
        "has 1,048,576 bytes where",
    ),
    "npz of a thousand dimensions": (
        "m.npz",
        lambda: zip_bomb({"w.npy": (npy_head(*[1 << 40] * 1000), 1 << 20)}),
        FormatError,
        "makes no sense",
    ),
    "torch": (
        "m.pt",
        lambda: zip_bomb({"m/data.pkl": (b"", 10), "m/data/0": (b"", GIBIBYTE)}),
        UnsafeInputError,
        "unpack to",
    ),
    "torch, within bounds, but compressed": (
        "m.pt",
        lambda: zip_bomb({"m/data.pkl": (b"", 10), "m/data/0": (b"", 1 << 27)}),
        FormatError,
        "compressed",
    ),
    "TorchScript code": (
        "m.pt",
        lambda: zip_bomb({"m/code/__torch__.py": (b"", GIBIBYTE), **dict.fromkeys(CODE, SAFE_PICKLE)}),
        UnsafeInputError,
        "unpack to",
    ),
    "zip of a model": (
        "m.zip",
        lambda: zip_bomb({PIPELINE: (b"", 4 * GIBIBYTE - 1)}),
        UnsafeInputError,
        "unpack to 4,29",
    ),
    "wheel of a torch file": ("m.whl", lambda: zip_bomb({"m.pt": (b"", GIBIBYTE)}), UnsafeInputError, "unpack to"),
    "tar.gz": (
        "m.tar.gz",
        lambda: tar_gz_bomb("model.safetensors", 8 * GIBIBYTE - 1),
        UnsafeInputError,
        "unpack to 8,58",
    ),
    "GGUF of a million tensors": (
        "m.gguf",
        lambda: b"GGUF" + struct.pack("<IQQ", 3, 1 << 20, 0) + bytes(1 << 20),
        FormatError,
        "1,048,576 tensors",
    ),
    "GGUF of a million pairs": (
        "m.gguf",
        lambda: b"GGUF" + struct.pack("<IQQ", 3, 1, 1 << 20) + bytes(1 << 20),
        FormatError,
        "1,048,576 metadata pairs",
    ),
    "GGUF with an endless array": (
        "m.gguf",
        lambda: b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + gguf_string("a") + struct.pack("<IIQ", 9, 4, 1 << 61),
        FormatError,
        "the file ends at",
    ),
    "ONNX whose initialiser is longer than the file": (
        "m.onnx",
        lambda: b"\x3a\xff\xff\xff\xff\x0f\x2a\xff\xff\xff\xff\x0e",
        FormatError,
        "damaged",
    ),
    "safetensors whose header is longer than the file": (
        "m.safetensors",
        lambda: struct.pack("<Q", 99_000_000) + b"{}",
        FormatError,
        "cut off",
    ),
}


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    with Repository.create(tmp_path / "repo", block_size=4096, map_size=1 << 30, author="tester") as made:
        yield made


@contextmanager
def little_memory() -> Iterator[None]:
    """The block must allocate little, as far as Python and NumPy know."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        yield
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert peak < MOST_MEMORY


@pytest.mark.parametrize("name", BOMBS)
def test_it_is_refused_and_costs_nothing(repository: Repository, tmp_path: Path, name: str) -> None:
    file, make, error, message = BOMBS[name]
    (tmp_path / file).write_bytes(make())
    with little_memory(), pytest.raises(error, match=message) as caught:
        repository.import_checkpoint(tmp_path / file, "main")
    assert type(caught.value) is error
    assert repository.refs() == []


def test_zip_by_url(repository: Repository, tmp_path: Path) -> None:
    (tmp_path / "m.zip").write_bytes(zip_bomb({"in/model.safetensors": (b"", GIBIBYTE)}))
    with little_memory(), pytest.raises(UnsafeInputError, match="unpack to"):
        repository.import_checkpoint(f"zip://in::file://{tmp_path / 'm.zip'}", "main")


def test_the_bombs_are_real(tmp_path: Path) -> None:
    """They unpack to what they say, or the refusals would show nothing."""
    (tmp_path / "m.zip").write_bytes(zip_bomb({"a": (b"begin", 1 << 25)}))
    with zipfile.ZipFile(tmp_path / "m.zip") as archive, archive.open("a") as stream:
        stream._expected_crc = None  # type: ignore[attr-defined]
        assert stream.read() == b"begin" + bytes(1 << 25)
    assert len(deflated_zeros(b"", GIBIBYTE)) * MAX_RATIO * 4 < GIBIBYTE


def test_arrays_of_zeros_are_no_bomb(repository: Repository, tmp_path: Path) -> None:
    (tmp_path / "m.npz").write_bytes(npz_bytes({"w": np.zeros(1_000_000, np.float32)}, compressed=True))
    assert (tmp_path / "m.npz").stat().st_size * MAX_RATIO < 4_000_000
    repository.import_checkpoint(tmp_path / "m.npz", "main")
    assert repository.tensor("main", "w").count_nonzero() == 0
