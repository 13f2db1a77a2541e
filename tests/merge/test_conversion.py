"""Conversions between dtypes are torch's, but for NaN, of which there is one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from mpfs.merge.conversion import TYPES, Stored, converted
from mpfs.merge.numeric import torch_dtype

PAIRS = [(a, b) for a in TYPES for b in TYPES]
QUIET = {"BF16": 0x7FC0, "F16": 0x7E00, "F32": 0x7FC00000, "F64": 0x7FF8000000000000}


def by_torch(values: Stored, dtype: str, wanted: str) -> torch.Tensor:
    raw = torch.frombuffer(bytearray(values.tobytes()), dtype=torch_dtype(dtype))
    return raw.to(torch_dtype(wanted))


def check(values: Stored, dtype: str, wanted: str) -> None:
    found = converted(values, dtype, wanted)
    assert found.dtype == TYPES[wanted]
    expected = by_torch(values, dtype, wanted)
    nan = torch.isnan(expected).numpy()
    bits = f"u{found.itemsize}"
    np.testing.assert_array_equal(
        found.view(bits)[~nan], expected.view(torch.uint8).numpy().view(bits)[~nan], f"{dtype} to {wanted}"
    )
    if TYPES[wanted].itemsize <= TYPES[dtype].itemsize and dtype != wanted:
        assert (found.view(bits)[nan] == QUIET[wanted]).all()
    else:
        assert np.isnan(by_torch(found, wanted, "F64").numpy()[nan]).all()


@pytest.mark.parametrize(("dtype", "wanted"), [pair for pair in PAIRS if pair[0] in ("BF16", "F16")])
def test_every_16_bit_number(dtype: str, wanted: str) -> None:
    check(np.arange(65_536, dtype=np.uint16).view(TYPES[dtype]), dtype, wanted)


@pytest.mark.parametrize(("dtype", "wanted"), [pair for pair in PAIRS if pair[0] in ("F32", "F64")])
@given(data=st.data())
def test_any_bits(dtype: str, wanted: str, data: st.DataObject) -> None:
    integer = np.dtype(f"u{TYPES[dtype].itemsize}")
    raw = data.draw(arrays.arrays(integer, st.integers(1, 40)))
    check(raw.view(TYPES[dtype]), dtype, wanted)


@pytest.mark.parametrize("wanted", ["BF16", "F16"])
def test_halfway_between_two_numbers(wanted: str) -> None:
    every = np.arange(65_536, dtype=np.uint16).view(TYPES[wanted])
    wide = converted(every, wanted, "F32")
    finite = wide[np.isfinite(wide)]
    for toward in (-np.inf, 0.0, np.inf):
        halves = finite + (np.nextafter(finite.astype(np.float32), np.float32(toward)) - finite) * np.float32(32768)
        check(np.concatenate([halves, np.nextafter(halves, np.float32(toward))]), "F32", wanted)


def test_many_pieces() -> None:
    values = np.random.default_rng(0).standard_normal(200_001).astype(np.float32)
    check(values, "F32", "BF16")
    assert converted(values, "F32", "F32") is values
