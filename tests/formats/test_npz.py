""".npz archives: arrays come out as NumPy reads them, and nothing damaged is taken for whole."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpfs.errors import FormatError, NotFoundError, UnsafeInputError
from mpfs.formats.npz import read_array, read_arrays
from mpfs.testing.containers import NPZ_DAMAGES, npz_arrays, npz_bytes

ARRAYS = {"w": np.arange(100, dtype="<f4").reshape(10, 10), "b": np.arange(3, dtype=">i2")}


def written(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "m.npz"
    path.write_bytes(content)
    return path


@given(arrays=npz_arrays(), compressed=st.booleans())
def test_arrays_come_out_as_numpy_reads_them(
    tmp_path_factory: pytest.TempPathFactory, arrays: dict[str, np.ndarray], compressed: bool
) -> None:
    path = written(tmp_path_factory.mktemp("x"), npz_bytes(arrays, compressed=compressed))
    found = read_arrays(path)
    with np.load(path, allow_pickle=False) as loaded:
        assert [array.name for array in found] == list(loaded)
        for array in found:
            expected = loaded[array.name]
            assert array.shape == expected.shape
            assert read_array(path, array) == expected.astype(expected.dtype.newbyteorder("<")).tobytes("C")


@pytest.mark.parametrize("damage", NPZ_DAMAGES)
def test_damage_is_refused(tmp_path: Path, damage: str) -> None:
    path = written(tmp_path, NPZ_DAMAGES[damage](npz_bytes(ARRAYS)))
    with pytest.raises(FormatError, match=r"m\.npz: "):
        [read_array(path, array) for array in read_arrays(path)]


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array(["text"]), "no dtype"),
        (np.array([1 + 2j], "c16"), "no dtype"),
        (np.array(["2020-01-01"], "M8[D]"), "no dtype"),
        (np.zeros(2, [("a", "f4"), ("b", "i4")]), "several fields"),
    ],
)
def test_what_has_no_dtype(tmp_path: Path, array: np.ndarray, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        read_arrays(written(tmp_path, npz_bytes({"x": array})))


def test_objects_are_unsafe(tmp_path: Path) -> None:
    stream = io.BytesIO()
    np.savez(stream, x=np.array([{"a": 1}], dtype=object))
    with pytest.raises(UnsafeInputError, match="Python objects"):
        read_arrays(written(tmp_path, stream.getvalue()))


def test_encrypted(tmp_path: Path) -> None:
    content = bytearray(npz_bytes(ARRAYS))
    for magic, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        start = 0
        while (start := content.find(magic, start)) >= 0:
            content[start + at] |= 1
            start += 4
    with pytest.raises(FormatError, match="encrypted"):
        read_arrays(written(tmp_path, bytes(content)))


def test_other_zip_archives_and_no_file(tmp_path: Path) -> None:
    content = npz_bytes({"abc": ARRAYS["w"]}).replace(b"abc.npy", b"abc.txt")
    with pytest.raises(FormatError, match=r'not one of NumPy\'s: "abc\.txt"'):
        read_arrays(written(tmp_path, content))
    with pytest.raises(FormatError, match="no arrays"):
        read_arrays(written(tmp_path, npz_bytes({})))
    with pytest.raises(NotFoundError):
        read_arrays(tmp_path / "none.npz")
