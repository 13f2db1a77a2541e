"""A great many safetensors headers, well formed, almost well formed and not at all: read, or refused with a FormatError.

No crash, no hang, no memory that grows; and what is read covers the file exactly, without overlap.
"""

from __future__ import annotations

import json
import random
import resource
import time
from collections import Counter

import pytest
from seeds import exploration_seed

from mpfs.errors import FormatError
from mpfs.formats.safetensors import Header, parse_header
from mpfs.objects.dtypes import BITS

DTYPES = list(BITS)
ODD_NUMBERS: list[object] = [
    -1,
    0,
    1,
    2**31,
    2**32,
    2**53,
    2**63 - 1,
    2**63,
    2**64,
    10**30,
    -(2**63),
    1.5,
    1e300,
    True,
    None,
    "4",
    [],
]
ODD_NAMES = ["", "__metadata__", "a\0b", "\ud800", "../x", "é", "a" * 300, "a", "b", "\U0001f600"]
ODD_TEXT = [
    b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"\\u0000", b"\xff", b"\xc3\x28", b"\0", b"nan", b"NaN", b"-",
    b"1e999", b"Infinity", b" ", b"\t", b"\xef\xbb\xbf", b"[" * 200, b'{"a":' * 200, b"9" * 400, b"null", b"\xed\xa0\x80",
]  # fmt: skip


def table(source: random.Random) -> tuple[dict[str, object], int]:
    """A well-formed header, and how many bytes of data belong to it."""
    made: dict[str, object] = {}
    offset = 0
    for index in range(source.randrange(5)):
        dtype = source.choice(DTYPES)
        shape = [source.choice([0, 1, 2, 3, 8, 64]) for _ in range(source.randrange(4))]
        bits = BITS[dtype]
        for dimension in shape:
            bits *= dimension
        size = bits // 8
        made[f"t{index}"] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    if source.random() < 0.3:
        made["__metadata__"] = {"format": "pt"}
    return made, offset


def spoil(source: random.Random, made: dict[str, object]) -> None:
    """Change something of the table."""
    name = source.choice([*made, source.choice(ODD_NAMES)])
    entry = made.get(name)
    choice = source.randrange(7)
    if not isinstance(entry, dict) or choice == 0:
        made[name] = source.choice([entry, {}, [], None, 7, "x", {"dtype": "F32"}, {"shape": [1]}])
    elif choice == 1:
        entry["dtype"] = source.choice([*DTYPES, "f32", "", 4, None, ["F32"], "F128"])
    elif choice == 2:
        entry["shape"] = source.choice([[source.choice(ODD_NUMBERS) for _ in range(source.randrange(5))], None, 3, {}])
    elif choice == 3:
        entry["data_offsets"] = [source.choice(ODD_NUMBERS) for _ in range(source.choice([2, 2, 2, 0, 1, 3]))]
    elif choice == 4:
        entry.pop(source.choice([*entry, "dtype"]), None)
    elif choice == 5:
        made[source.choice(ODD_NAMES)] = entry
    else:
        entry[source.choice(ODD_NAMES)] = source.choice(ODD_NUMBERS)


def header(source: random.Random) -> tuple[bytes, int]:
    """The first bytes of a file, and the file's size."""
    made, data = table(source)
    for _ in range(source.choice([0, 0, 1, 1, 2, 4])):
        spoil(source, made)
    text = json.dumps(made, ensure_ascii=source.random() < 0.7, allow_nan=True).encode("utf-8", "surrogatepass")
    if source.random() < 0.1:  # a name twice
        text = text.replace(b'"t1"', b'"t0"')
    if source.random() < 0.3:
        raw = bytearray(text)
        for _ in range(source.randrange(1, 4)):
            at = source.randrange(len(raw) + 1)
            if source.random() < 0.5:
                raw[at : at + source.randrange(4)] = source.choice(ODD_TEXT)
            elif raw:
                raw[at % len(raw)] ^= 1 << source.randrange(8)
        text = bytes(raw)
    text += b" " * source.choice([0, 0, 0, 1, 7, 8])
    length = len(text) if source.random() < 0.93 else source.choice([0, 1, len(text) + 1, 2**40, 2**64 - 1, 10**8 + 1])
    raw_header = length.to_bytes(8, "little") + text
    if source.random() < 0.03:
        raw_header = raw_header[: source.randrange(len(raw_header) + 1)]
    return raw_header, len(raw_header) + data + source.choice([0, 0, 0, 0, 0, 1, -1, 8])


def covers(found: Header, raw: bytes, size: int) -> bool:
    """Whether the entries cover the file's data once."""
    at = 0
    for entry in found.entries:
        bits = BITS[entry.dtype]
        for dimension in entry.shape:
            bits *= dimension
        if entry.start != at or entry.end - entry.start != bits // 8 or bits % 8:
            return False
        at = entry.end
    return at + len(raw) == size and len({entry.name for entry in found.entries}) == len(found.entries)


def fuzz(count: int, seed: int) -> Counter[str]:
    """Parse so many headers."""
    source = random.Random(seed)
    outcomes: Counter[str] = Counter()
    slowest, longest = 0.0, 0
    for number in range(count):
        raw, size = header(source)
        started = time.perf_counter()
        try:
            found = parse_header(raw, size, source="f")
        except FormatError as error:
            outcomes["refused"] += 1
            longest = max(longest, len(error.message))
        else:
            outcomes["read"] += 1
            assert covers(found, raw, size), (seed, number, raw)
        slowest = max(slowest, time.perf_counter() - started)
    assert slowest < 5, slowest
    assert longest < 2000, longest
    return outcomes


def test_many_headers() -> None:
    outcomes = fuzz(20_000, 1)
    assert outcomes["read"] > 2000
    assert outcomes["refused"] > 5000


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_million_headers() -> None:
    seed = exploration_seed()
    fuzz(20_000, seed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.monotonic()
    outcomes: Counter[str] = Counter()
    for chunk in range(10):
        outcomes.update(fuzz(100_000, seed + 1 + chunk))
    seconds = time.monotonic() - started
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"{dict(outcomes)} in {seconds:.0f} s, peak memory grew by {grown} KiB")
    assert sum(outcomes.values()) == 1_000_000
    assert grown < 64 << 10
