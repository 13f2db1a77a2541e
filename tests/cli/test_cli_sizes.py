"""Sizes and shares as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpfs_cli.sizes import (
    Amount,
    format_count,
    format_seconds,
    format_size,
    parse_amount,
    parse_share,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("1MiB", 1 << 20),
        ("1 mib", 1 << 20),
        ("2GB", 2 * 10**9),
        ("1.5KiB", 1536),
        (".5kB", 500),
        ("0.1MB", 100_000),
        ("3 TiB ", 3 << 40),
        ("7B", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size
    assert parse_amount(text) == Amount("bytes", size)


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1e9", "1,5GB", "nan", "inf", "1 2", "٣MB", "9" * 50, "9999999TiB"])
def test_what_is_no_size(text: str) -> None:
    for parse in (parse_size, parse_amount):
        with pytest.raises(ValueError, match=r"\S") as failure:
            parse(text)
        assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    ("text", "hint"),
    [("2G", "2G: is that 1000s or 1024s\\? Write GB or GiB"), ("5XB", "unknown unit"), ("3%", "of what")],
)
def test_a_wrong_unit_is_explained(text: str, hint: str) -> None:
    with pytest.raises(ValueError, match=hint):
        parse_size(text)


def test_shares() -> None:
    assert parse_amount("12.5%") == Amount("percent", 12.5)
    assert parse_share("95%") == parse_share("0.95") == 0.95
    assert parse_share("0") == 0.0
    for text in ("101%", "1.5", "0.5GB", "x"):
        with pytest.raises(ValueError, match="share"):
            parse_share(text)
    with pytest.raises(ValueError, match="at most 100%"):
        parse_amount("100.1%")


@given(st.integers(0, (1 << 63) - 1))
def test_plain_bytes_are_exact(size: int) -> None:
    assert parse_size(str(size)) == size


@given(st.integers(0, (1 << 60)))
def test_a_shown_size_reads_back_as_about_the_same(size: int) -> None:
    assert parse_size(format_size(size)) == pytest.approx(size, rel=0.06, abs=1)


def test_formats() -> None:
    assert [format_size(size) for size in (0, 1023, 1024, 1_572_864, 1 << 40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 MiB",
        "1.0 TiB",
    ]
    assert [format_count(number, "block") for number in (0, 1, 4000)] == ["0 blocks", "1 block", "4,000 blocks"]
    assert [format_seconds(seconds) for seconds in (0.314, 42.0, 125.0, 7321.0)] == [
        "0.31 s",
        "42.0 s",
        "2 min 5 s",
        "2 h 2 min",
    ]
