"""Stored formats as numbers, for the kernels: a bit pattern as a float32, and a float32 rounded and stored.

A format is told by the integer type of its bit patterns: uint16 is bfloat16, int16 is float16 and uint32 is float32;
so each kernel is written once, and compiled for each of them. Numba contracts no multiplications and reorders nothing
without `fastmath`.

NaNs come out as the one quiet NaN with no sign and no payload.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any, TypeVar

import llvmlite.binding as llvm  # type: ignore[import-untyped,unused-ignore]
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped,unused-ignore]
from numba import types
from numba.extending import (  # type: ignore[import-untyped,unused-ignore]
    intrinsic,
    overload,
)

from mpfs.stats.inlined import as_f32, bits_of_f32, inline

_F = TypeVar("_F", bound=Callable[..., Any])

TILE = 256
"""Elements that are worked on together: their float32 values stay in the nearest cache."""


def _typed(stub: Callable[..., Any]) -> Callable[[_F], _F]:
    """Give `stub` a meaning by the types of its arguments."""

    def register(choose: _F) -> _F:
        choose.__annotations__.clear()  # numba wants them to be those of the implementation, which is a lambda
        registered: _F = overload(stub, jit_options={"nogil": True, "fastmath": False})(choose)
        return registered

    return register


def _intrinsic(function: Callable[..., Any]) -> Any:
    """Generate a helper that Python has no words for; the first argument of what is generated is left out."""
    return intrinsic(function)


@_intrinsic
def pointer(typing: Any, address: Any, like: Any) -> Any:
    """An address as a pointer to elements of `like`'s type."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    pointer: Any = types.CPointer
    return pointer(like.dtype)(address, like), generate


@_intrinsic
def place(typing: Any, array: Any, index: Any) -> Any:
    """A pointer to an element of a contiguous array: what lies behind it is not bound to the array's shape."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.gep(data, [arguments[1]])

    pointer: Any = types.CPointer
    return pointer(array.dtype)(array, types.intp), generate


@_intrinsic
def fma(typing: Any, x: Any, y: Any, z: Any) -> Any:
    """x · y + z in float32, rounded once: an instruction, or libm's function where there is none."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


@_intrinsic
def _narrowed(typing: Any, x: Any) -> Any:
    """A float32 as the bits of a float16, by the processor's conversion, to nearest even."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), generate


@_intrinsic
def _widened(typing: Any, bits: Any) -> Any:
    """The inverse of `_narrowed`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate


def _converts_halves() -> bool:
    """Whether the processor has instructions for that; without them LLVM calls functions that may not be there."""
    if platform.machine().lower() in ("aarch64", "arm64"):
        return True
    return bool(llvm.get_host_cpu_features().get("f16c"))


_CONVERTS = _converts_halves()


def wide(bits: Any) -> Any:
    """A stored element's value as float32."""
    raise NotImplementedError


def rounded(x: Any, like: Any) -> Any:
    """A float32 rounded to the format of `like` (an array), to nearest even; still as float32."""
    raise NotImplementedError


def stored(x: Any, like: Any) -> Any:
    """A float32 that the format of `like` can represent, as it is stored."""
    raise NotImplementedError


@_typed(wide)
def _wide_of(bits: Any) -> Any:
    if bits == types.uint16:
        return lambda bits: as_f32(np.uint32(bits) << np.uint32(16))
    if bits == types.int16:
        if _CONVERTS:
            return lambda bits: _widened(np.uint16(bits))
        return lambda bits: _wide_f16(bits)
    return lambda bits: as_f32(bits)


@inline
def _wide_f16(bits: Any) -> Any:
    b = np.uint32(np.uint16(bits))
    m = np.uint32((b & np.uint32(0x7FFF)) << np.uint32(13))
    # A normal number's exponent is rebiased; that of an infinity or NaN goes all the way up. A subnormal m·2^-24 comes
    # out of (1 + m/1024)·2^-14 - 2^-14, so that no subnormal float32 is ever an operand.
    high = np.uint32(m + (np.uint32(0x70000000) if m >= np.uint32(0x0F800000) else np.uint32(112 << 23)))
    low = bits_of_f32(as_f32(m + np.uint32(113 << 23)) - as_f32(np.uint32(113 << 23)))
    value = high if m >= np.uint32(0x00800000) else low
    return as_f32(value | ((b & np.uint32(0x8000)) << np.uint32(16)))


def magnitude(x: Any, like: Any) -> Any:
    """The pattern without its sign, in the format of `like`, of a float32 that it can represent; one for all NaNs."""
    raise NotImplementedError


@_typed(magnitude)
def _magnitude_of(x: Any, like: Any) -> Any:
    if like.dtype == types.uint16:
        return lambda x, like: min(np.uint32((bits_of_f32(x) >> np.uint32(16)) & np.uint32(0x7FFF)), np.uint32(0x7F81))
    if like.dtype == types.int16:
        if _CONVERTS:
            return lambda x, like: min(np.uint32(_narrowed(x) & np.uint16(0x7FFF)), np.uint32(0x7C01))
        return lambda x, like: min(np.uint32(np.uint16(_stored_f16(x)) & np.uint32(0x7FFF)), np.uint32(0x7C01))
    return lambda x, like: min(np.uint32(bits_of_f32(x) & np.uint32(0x7FFFFFFF)), np.uint32(0x7F800001))


@_typed(rounded)
def _rounded_of(x: Any, like: Any) -> Any:
    if like.dtype == types.uint16:
        return lambda x, like: _rounded_bf16(x)
    if like.dtype == types.int16:
        if _CONVERTS:
            return lambda x, like: _widened(_narrowed(x))
        return lambda x, like: _rounded_f16(x)
    return lambda x, like: x


@inline
def _rounded_bf16(x: Any) -> Any:
    # A NaN's lower half is zero here, whether it came from a bfloat16 or was made by an operation: it stays a NaN.
    u = bits_of_f32(x)
    odd = np.uint32((u >> np.uint32(16)) & np.uint32(1))
    return as_f32(np.uint32(u + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000))


@inline
def _rounded_f16(x: Any) -> Any:
    u = bits_of_f32(x)
    sign = np.uint32(u & np.uint32(0x80000000))
    a = np.uint32(u ^ sign)
    odd = np.uint32((a >> np.uint32(13)) & np.uint32(1))
    r = np.uint32(np.uint32(a + np.uint32(0x0FFF) + odd) & np.uint32(0xFFFFE000))
    r = r if r < np.uint32(0x47800000) else max(a, np.uint32(0x7F800000))
    # One unit in the last place of 0.5 is the smallest subnormal float16.
    tiny = bits_of_f32((as_f32(a) + np.float32(0.5)) - np.float32(0.5))
    return as_f32((tiny if a < np.uint32(0x38800000) else r) | sign)


@_typed(stored)
def _stored_of(x: Any, like: Any) -> Any:
    if like.dtype == types.uint16:
        return lambda x, like: np.uint16(0x7FC0) if x != x else np.uint16(bits_of_f32(x) >> np.uint32(16))
    if like.dtype == types.int16:
        if _CONVERTS:
            return lambda x, like: np.int16(np.uint16(0x7E00) if x != x else _narrowed(x))
        return lambda x, like: _stored_f16(x)
    return lambda x, like: np.uint32(0x7FC00000) if x != x else bits_of_f32(x)


@inline
def _stored_f16(x: Any) -> Any:
    u = bits_of_f32(x)
    a = np.uint32(u & np.uint32(0x7FFFFFFF))
    normal = np.uint32(np.uint32(a - np.uint32(112 << 23)) >> np.uint32(13))
    subnormal = np.uint32(bits_of_f32(as_f32(a) + np.float32(0.5)) - np.uint32(0x3F000000))
    m = subnormal if a < np.uint32(0x38800000) else normal
    m = np.uint32(0x7C00) if a == np.uint32(0x7F800000) else m
    m = np.uint32(m | ((u >> np.uint32(16)) & np.uint32(0x8000)))
    m = np.uint32(0x7E00) if a > np.uint32(0x7F800000) else m
    return np.int16(np.uint16(m))


@inline
def delta_of(expert: Any, base: Any, like: Any) -> Any:
    """expert - base, rounded; zero where they are equal, be it at infinity."""
    difference = rounded(expert - base, like)
    return np.float32(0) if expert == base else difference
