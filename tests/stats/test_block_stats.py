"""One block's record: layout, values, and the kernels against the reference, bit for bit."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpfs.objects import dtypes
from mpfs.stats import COUNTS_ONLY, RECORD, SATURATED, SKETCH_WIDTH, block_stats, kernels_available
from mpfs.stats import reference as numpy_backend
from mpfs.stats.accumulators import Backend
from mpfs.stats.decode import FORMATS, as_bits, decode
from mpfs.stats.hashing import group_hashes

TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
MERGEABLE = sorted(TORCH)

# Written down once: stored records are comparable only as long as these hold.
KNOWN_SIGNS = ["0xe9e0033e3badaf36", "0x2cb0f69f4abea221", "0x9417034723148989"]
KNOWN_ROTATIONS = [223, 59, 64]
KNOWN_SKETCH = [100.0, 99.0, 98.0, 97.0, -132.0, -60.0, 128.0, -126.0]  # buckets 157 to 164


def to_bytes(values: np.ndarray, dtype: str) -> bytes:
    tensor = torch.from_numpy(np.asarray(values, dtype=np.float64)).to(TORCH[dtype])
    return bytes(tensor.view(torch.uint8).numpy()) if len(values) else b""


def python_record(values: list[float], first_element: int) -> dict[str, Any]:
    """The definition in mpfs.stats.record, written down a second time, one element after another."""
    mask = (1 << 64) - 1

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    sums, squares, places = [0.0] * 64, [0.0] * 64, [0.0] * 320
    nonfinite = zeros = 0
    largest = 0.0
    for i, x in enumerate(values):
        group, lane = divmod(first_element + i, 64)
        stepped = group * 0x9E3779B97F4A7C15
        signs = mix((stepped + 0x243F6A8885A308D3) & mask)
        rotation = mix((stepped + 0x13198A2E03707344) & mask) >> 56
        if not math.isfinite(x):
            nonfinite += 1
            continue
        zeros += x == 0
        largest = max(largest, abs(x))
        sums[lane] += x
        squares[lane] += x * x
        places[rotation + lane] += -x if signs >> lane & 1 else x
    total = total_squares = 0.0
    for lane in range(64):
        total += sums[lane]
        total_squares += squares[lane]
    sketch = np.array([places[j] + (places[j + 256] if j < 64 else 0.0) for j in range(256)]).astype(np.float32)
    return {
        "count": len(values),
        "nonfinite": nonfinite,
        "zeros": zeros,
        "sum": total,
        "sum_squares": total_squares,
        "max_abs": largest,
        "flags": 0,
        "sketch": sketch,
    }


def test_layout_is_what_the_format_says() -> None:
    assert RECORD.fields is not None
    offsets = {name: place[1] for name, place in RECORD.fields.items()}
    assert offsets == {
        "count": 0,
        "nonfinite": 8,
        "zeros": 16,
        "sum": 24,
        "sum_squares": 32,
        "max_abs": 40,
        "flags": 48,
        "sketch": 56,
    }
    assert RECORD.itemsize == 1080
    assert SKETCH_WIDTH == 256


def test_hashes_are_pinned() -> None:
    signs, rotations = group_hashes(0, 3)
    assert [hex(word) for word in signs.tolist()] == KNOWN_SIGNS
    assert rotations.tolist() == KNOWN_ROTATIONS
    late, _ = group_hashes(2, 1)
    assert late[0] == signs[2]


@pytest.mark.parametrize("dtype", MERGEABLE)
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 1000])
def test_record_is_the_written_definition(dtype: str, count: int) -> None:
    values = np.random.default_rng(count).standard_normal(count)
    data = to_bytes(values, dtype)
    exact = decode(as_bits(data, dtype), dtype).tolist()
    for using in (None, numpy_backend):
        record = block_stats(data, dtype, 640, using=using)
        assert record.shape == ()
        for name, value in python_record(exact, 640).items():
            assert np.array_equal(record[name], value), name


def test_known_record_never_changes() -> None:
    """A record written today must be readable, and comparable, for ever."""
    data = np.arange(-100, 101, dtype="<f4").tobytes()
    record = block_stats(data, "F32", 64 * 1000)
    assert int(record["count"]) == 201
    assert float(record["sum"]) == 0.0
    assert float(record["sum_squares"]) == 2 * (100 * 101 * 201 // 6)
    assert float(record["max_abs"]) == 100.0
    assert record["sketch"][157:165].tolist() == KNOWN_SKETCH


@pytest.mark.skipif(not kernels_available(), reason="needs numba")
@pytest.mark.parametrize("dtype", MERGEABLE)
@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_kernels_equal_reference(dtype: str, data: st.DataObject) -> None:
    """Any bit patterns at all: subnormals, both zeros, infinities, every NaN."""
    width = dtypes.itemsize(dtype)
    count = data.draw(st.integers(0, 400))
    raw = bytearray(data.draw(st.randoms(use_true_random=False)).randbytes(count * width))
    layout = FORMATS[dtype]
    one = 1 << (width * 8 - 1)
    special = [0, one, 1, one | 1, layout.exponent, one | layout.exponent, layout.exponent | 1, layout.exponent - 1]
    words = np.frombuffer(raw, dtype=layout.bits)
    for _ in range(data.draw(st.integers(0, 20)) if count else 0):
        words[data.draw(st.integers(0, count - 1))] = data.draw(st.sampled_from(special))
    first = 64 * data.draw(st.integers(0, 1 << 50))
    kernel = block_stats(raw, dtype, first)
    assert kernel.tobytes() == block_stats(raw, dtype, first, using=numpy_backend).tobytes()
    values = decode(words, dtype)
    assert int(kernel["nonfinite"]) == np.count_nonzero(~np.isfinite(values))
    assert int(kernel["zeros"]) == np.count_nonzero(values == 0)
    assert float(kernel["max_abs"]) == np.abs(values[np.isfinite(values)]).max(initial=0.0)
    for name in ("sum", "sum_squares", "max_abs"):
        assert np.isfinite(kernel[name])
    assert np.isfinite(kernel["sketch"]).all()


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_every_16_bit_value(dtype: str) -> None:
    bits = np.arange(1 << 16, dtype="<u2")
    ours = decode(bits, dtype)
    theirs = torch.from_numpy(bits.view(np.int16).copy()).view(TORCH[dtype]).to(torch.float64).numpy()
    assert np.array_equal(ours, theirs, equal_nan=True)
    # One value a block, so that the kernel's own decoding shows in max_abs and sum.
    for pattern in range(0, 1 << 16, 97):
        record = block_stats(bits[pattern : pattern + 1].tobytes(), dtype, 0)
        value = theirs[pattern] if np.isfinite(theirs[pattern]) else 0.0
        assert float(record["sum"]) == value
        assert float(record["max_abs"]) == abs(value)
    assert (
        block_stats(bits.tobytes(), dtype, 0).tobytes()
        == block_stats(bits.tobytes(), dtype, 0, using=numpy_backend).tobytes()
    )


@pytest.mark.parametrize("dtype", ["F32", "F64"])
def test_wide_values_decode_as_torch(dtype: str) -> None:
    width = dtypes.itemsize(dtype)
    raw = bytearray(np.random.default_rng(1).bytes(width * 5000))
    theirs = torch.frombuffer(raw, dtype=TORCH[dtype]).to(torch.float64).numpy()
    assert np.array_equal(decode(as_bits(raw, dtype), dtype), theirs, equal_nan=True)


@pytest.mark.parametrize("dtype", MERGEABLE)
def test_large_block_equals_reference(dtype: str) -> None:
    """More groups than one batch of the reference, and a short last group."""
    values = np.random.default_rng(2).standard_normal(64 * 700 + 13)
    values[::50] = 0.0
    values[::501] = np.nan
    values[7::999] = -np.inf
    data = to_bytes(values, dtype)
    assert block_stats(data, dtype, 128).tobytes() == block_stats(data, dtype, 128, using=numpy_backend).tobytes()


@pytest.mark.parametrize("dtype", MERGEABLE)
def test_negative_zero_is_a_zero_and_padding_is_not(dtype: str) -> None:
    record = block_stats(to_bytes(np.array([-0.0, 0.0, 1.0, -2.0, np.nan, np.inf]), dtype), dtype, 0)
    assert int(record["zeros"]) == 2
    assert int(record["nonfinite"]) == 2
    assert int(record["count"]) == 6
    assert float(record["sum"]) == -1.0
    assert float(record["sum_squares"]) == 5.0
    assert float(record["max_abs"]) == 2.0


@pytest.mark.parametrize("dtype", sorted(dtypes.BITS))
def test_empty_block(dtype: str) -> None:
    record = block_stats(b"", dtype, 0)
    expected = np.zeros((), dtype=RECORD)
    expected["flags"] = 0 if dtype in TORCH else COUNTS_ONLY
    assert record.tobytes() == expected.tobytes()


def test_all_values_nonfinite() -> None:
    record = block_stats(np.full(100, np.nan, dtype="<f4").tobytes(), "F32", 0)
    assert int(record["nonfinite"]) == 100
    assert float(record["max_abs"]) == float(record["sum"]) == float(record["sum_squares"]) == 0.0
    assert not record["sketch"].any()


@pytest.mark.parametrize(
    ("dtype", "size", "count", "zeros"),
    [
        ("BOOL", 8, 8, 6),
        ("I8", 8, 8, 6),
        ("U16", 8, 4, 2),
        ("I64", 8, 1, 0),
        ("F8_E4M3", 8, 8, 0),
        ("F4", 8, 16, 0),
        ("F6_E2M3", 8, 10, 0),
        ("C64", 8, 1, 0),
    ],
)
def test_other_dtypes_get_counts_only(dtype: str, size: int, count: int, zeros: int) -> None:
    data = bytes([1, 0, 0, 0, 0, 0, 1, 0])[:size]
    record = block_stats(data, dtype, 7)
    assert int(record["count"]) == count
    assert int(record["zeros"]) == zeros
    assert int(record["flags"]) == COUNTS_ONLY
    assert record.tobytes()[24:48] == bytes(24)
    assert not record["sketch"].any()


@pytest.mark.parametrize("using", [None, numpy_backend])
def test_overflow_saturates(using: Backend | None) -> None:
    big = np.finfo(np.float64).max
    record = block_stats(np.array([big] * 65).tobytes(), "F64", 0, using=using)
    assert int(record["flags"]) == SATURATED
    assert float(record["sum"]) == float(record["sum_squares"]) == float(record["max_abs"]) == big
    assert np.isfinite(record["sketch"]).all()
    both = np.concatenate([np.full(128, big), np.full(128, -big)]).reshape(4, 64)
    both[:, 1::2] *= -1
    record = block_stats(both.tobytes(), "F64", 0, using=using)
    assert int(record["flags"]) == SATURATED
    assert np.isfinite(record["sum"])


@pytest.mark.parametrize(
    ("data", "dtype", "first"),
    [
        (bytes(8), "F32", 32),
        (bytes(8), "F32", -64),
        (bytes(7), "F32", 0),
        (bytes(7), "I16", 0),
        (bytes(7), "C64", 0),
        (bytes(8), "F128", 0),
        (memoryview(bytes(16))[::2], "BF16", 0),
    ],
)
def test_refuses(data: bytes, dtype: str, first: int) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # the messages differ
        block_stats(data, dtype, first)


def test_any_buffer_at_any_alignment() -> None:
    data = to_bytes(np.random.default_rng(3).standard_normal(1000), "F32")
    expected = block_stats(data, "F32", 0).tobytes()
    shifted = b"x" + data
    for buffer in (bytearray(data), memoryview(data), memoryview(shifted)[1:], memoryview(bytearray(shifted))[1:]):
        assert block_stats(buffer, "F32", 0).tobytes() == expected


def run_python(code: str) -> str:
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


SAMPLE = "stats.block_stats(np.arange(300, dtype='<f4').tobytes(), 'F32', 0).tobytes().hex()"


def test_import_does_not_import_numba_and_works_without() -> None:
    expected = block_stats(np.arange(300, dtype="<f4").tobytes(), "F32", 0).tobytes().hex()
    without = run_python(
        "import sys, numpy as np, mpfs.stats as stats\n"
        "assert 'numba' not in sys.modules\n"
        "sys.modules['numba'] = None\n"
        f"stats.warm_up(); assert not stats.kernels_available(); print({SAMPLE})"
    )
    assert without == expected


@pytest.mark.skipif(not kernels_available(), reason="needs numba")
def test_works_where_numba_cannot_cache() -> None:
    """numba raises this when no directory for its cache can be written."""
    code = (
        "import numba.core.dispatcher as dispatcher, numpy as np, mpfs.stats as stats\n"
        "def refuse(self): raise RuntimeError('cannot cache function: no locator available')\n"
        "dispatcher.Dispatcher.enable_caching = refuse\n"
        f"assert stats.kernels_available(); print({SAMPLE})"
    )
    expected = block_stats(np.arange(300, dtype="<f4").tobytes(), "F32", 0).tobytes().hex()
    assert run_python(code) == expected
