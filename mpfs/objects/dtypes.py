"""Element types, named as safetensors names them.

Source: safetensors 0.8 (`Dtype` in the format's reference implementation). MPFS stores every type as bytes;
only the `MERGEABLE` ones are ever decoded into numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

BITS: dict[str, int] = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E8M0": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}
"""Bits of one element, for every dtype that MPFS stores."""

MERGEABLE: frozenset[str] = frozenset({"F16", "BF16", "F32", "F64"})
"""The floating-point dtypes that merges compute with and that statistics are taken of."""

CODES: dict[str, int] = {name: code for code, name in enumerate(BITS)}
"""A stable one-byte code per dtype, used in store keys. The order of `BITS` is part of the format: append only."""


def itemsize(dtype: str) -> int:
    """Bytes of one element of a whole-byte dtype.

    Raises:
        ValueError: the dtype is packed (its elements are not whole bytes) or unknown.
    """
    bits = BITS.get(dtype)
    if bits is None or bits % 8:
        raise ValueError(f"{dtype} has no whole number of bytes an element")
    return bits // 8


def nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a dense tensor.

    Raises:
        ValueError: the dtype is unknown, or a packed tensor does not fill whole bytes.
    """
    bits = BITS.get(dtype)
    if bits is None:
        raise ValueError(f"unknown dtype {dtype}")
    total = bits * prod(shape)
    if total % 8:
        raise ValueError(f"{dtype} {list(shape)} is {total} bits, not a whole number of bytes")
    return total // 8


def promote(dtypes: Iterable[str]) -> str:
    """The floating-point dtype that torch promotes these to: the widest; F32 where F16 meets BF16."""
    found = set(dtypes)
    if found == {"F16", "BF16"}:
        return "F32"
    return max(found, key=lambda dtype: (BITS[dtype], dtype))
