"""The numba kernels of merging: one pass over a column, nogil, equal to the torch operators to the last bit.

Importing this module imports numba, and compiles nothing; only `mpfs.merge.kernels.backend` does so, on first use.

A format is told by the integer type of its bit patterns: uint16 is bfloat16, int16 is float16 and uint32 is float32;
so each kernel is written once, and compiled for each of them. Columns come as addresses, since there may be any number
of experts: the caller keeps what they point at alive. Everything is computed in float32, tile by tile; where the
operators round to a 16-bit type, `_rounded` does, without leaving float32. Numba contracts no multiplications and
reorders nothing without `fastmath`.

NaNs come out as the one quiet NaN with no sign and no payload.

All helpers and constants are written in this one file, since numba's cache cannot see a change in another one.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any, TypeVar, cast

import llvmlite.binding as llvm  # type: ignore[import-untyped,unused-ignore]
import numba  # type: ignore[import-untyped,unused-ignore]  # old versions ship no types
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped,unused-ignore]
from numba import carray, types  # type: ignore[import-untyped,attr-defined,unused-ignore]
from numba.extending import (  # type: ignore[import-untyped,unused-ignore]
    intrinsic,
    overload,
)

_F = TypeVar("_F", bound=Callable[..., Any])

TILE = 1024
"""Elements that are worked on together: their float32 values stay in the nearest cache."""

ABSENT, WHOLE, LARGEST, DRAWN, BETWEEN = range(5)
"""What of an expert's delta is merged: nothing, everything, what passes a threshold, what a draw keeps, what two ends do."""

ADDRESS, FIRST, SECOND, THIRD, FOURTH = range(5)
"""Columns of the `experts` table: where the expert's column is, and the numbers that its rule needs."""

_ABOVE_NAN = 0x7F80_0002

_CASCADE = 16


def _inline(function: _F) -> _F:
    """Compile a helper that the kernels below inline."""
    return cast(_F, numba.njit(nogil=True, fastmath=False)(function))


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
def _pointer(typing: Any, address: Any, like: Any) -> Any:
    """An address as a pointer to elements of `like`'s type."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    pointer: Any = types.CPointer
    return pointer(like.dtype)(address, like), generate


@_intrinsic
def _fma(typing: Any, x: Any, y: Any, z: Any) -> Any:
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


@_inline
def _float(bits: Any) -> Any:
    return np.uint32(bits).view(np.float32)


@_inline
def _pattern(x: Any) -> Any:
    return np.float32(x).view(np.uint32)


def _wide(bits: Any) -> Any:
    """A stored element's value as float32."""
    raise NotImplementedError


def _rounded(x: Any, like: Any) -> Any:
    """A float32 rounded to the format of `like` (an array), to nearest even; still as float32."""
    raise NotImplementedError


def _stored(x: Any, like: Any) -> Any:
    """A float32 that the format of `like` can represent, as it is stored."""
    raise NotImplementedError


@_typed(_wide)
def _wide_of(bits: Any) -> Any:
    if bits == types.uint16:
        return lambda bits: _float(np.uint32(bits) << np.uint32(16))
    if bits == types.int16:
        if _CONVERTS:
            return lambda bits: _widened(np.uint16(bits))
        return lambda bits: _wide_f16(bits)
    return lambda bits: _float(bits)


@_inline
def _wide_f16(bits: Any) -> Any:
    b = np.uint32(np.uint16(bits))
    m = np.uint32((b & np.uint32(0x7FFF)) << np.uint32(13))
    # A normal number's exponent is rebiased; that of an infinity or NaN goes all the way up. A subnormal m·2^-24 comes
    # out of (1 + m/1024)·2^-14 - 2^-14, so that no subnormal float32 is ever an operand.
    high = np.uint32(m + (np.uint32(0x70000000) if m >= np.uint32(0x0F800000) else np.uint32(112 << 23)))
    low = _pattern(_float(m + np.uint32(113 << 23)) - _float(np.uint32(113 << 23)))
    value = high if m >= np.uint32(0x00800000) else low
    return _float(value | ((b & np.uint32(0x8000)) << np.uint32(16)))


def _magnitude(x: Any, like: Any) -> Any:
    """The pattern without its sign, in the format of `like`, of a float32 that it can represent; one for all NaNs."""
    raise NotImplementedError


@_typed(_magnitude)
def _magnitude_of(x: Any, like: Any) -> Any:
    if like.dtype == types.uint16:
        return lambda x, like: min(np.uint32((_pattern(x) >> np.uint32(16)) & np.uint32(0x7FFF)), np.uint32(0x7F81))
    if like.dtype == types.int16:
        if _CONVERTS:
            return lambda x, like: min(np.uint32(_narrowed(x) & np.uint16(0x7FFF)), np.uint32(0x7C01))
        return lambda x, like: min(np.uint32(np.uint16(_stored_f16(x)) & np.uint32(0x7FFF)), np.uint32(0x7C01))
    return lambda x, like: min(np.uint32(_pattern(x) & np.uint32(0x7FFFFFFF)), np.uint32(0x7F800001))


@_typed(_rounded)
def _rounded_of(x: Any, like: Any) -> Any:
    if like.dtype == types.uint16:
        return lambda x, like: _rounded_bf16(x)
    if like.dtype == types.int16:
        if _CONVERTS:
            return lambda x, like: _widened(_narrowed(x))
        return lambda x, like: _rounded_f16(x)
    return lambda x, like: x


@_inline
def _rounded_bf16(x: Any) -> Any:
    # A NaN's lower half is zero here, whether it came from a bfloat16 or was made by an operation: it stays a NaN.
    u = _pattern(x)
    odd = np.uint32((u >> np.uint32(16)) & np.uint32(1))
    return _float(np.uint32(u + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000))


@_inline
def _rounded_f16(x: Any) -> Any:
    u = _pattern(x)
    sign = np.uint32(u & np.uint32(0x80000000))
    a = np.uint32(u ^ sign)
    odd = np.uint32((a >> np.uint32(13)) & np.uint32(1))
    r = np.uint32(np.uint32(a + np.uint32(0x0FFF) + odd) & np.uint32(0xFFFFE000))
    r = r if r < np.uint32(0x47800000) else max(a, np.uint32(0x7F800000))
    # One unit in the last place of 0.5 is the smallest subnormal float16.
    tiny = _pattern((_float(a) + np.float32(0.5)) - np.float32(0.5))
    return _float((tiny if a < np.uint32(0x38800000) else r) | sign)


@_typed(_stored)
def _stored_of(x: Any, like: Any) -> Any:
    if like.dtype == types.uint16:
        return lambda x, like: np.uint16(0x7FC0) if x != x else np.uint16(_pattern(x) >> np.uint32(16))
    if like.dtype == types.int16:
        if _CONVERTS:
            return lambda x, like: np.int16(np.uint16(0x7E00) if x != x else _narrowed(x))
        return lambda x, like: _stored_f16(x)
    return lambda x, like: np.uint32(0x7FC00000) if x != x else _pattern(x)


@_inline
def _stored_f16(x: Any) -> Any:
    u = _pattern(x)
    a = np.uint32(u & np.uint32(0x7FFFFFFF))
    normal = np.uint32(np.uint32(a - np.uint32(112 << 23)) >> np.uint32(13))
    subnormal = np.uint32(_pattern(_float(a) + np.float32(0.5)) - np.uint32(0x3F000000))
    m = subnormal if a < np.uint32(0x38800000) else normal
    m = np.uint32(0x7C00) if a == np.uint32(0x7F800000) else m
    m = np.uint32(m | ((u >> np.uint32(16)) & np.uint32(0x8000)))
    m = np.uint32(0x7E00) if a > np.uint32(0x7F800000) else m
    return np.int16(np.uint16(m))


@_inline
def _delta(expert: Any, base: Any, like: Any) -> Any:
    """expert - base, rounded; zero where they are equal, be it at infinity."""
    difference = _rounded(expert - base, like)
    return np.float32(0) if expert == base else difference


@_inline
def _kept(state: Any, i: Any, limit: Any) -> Any:
    """Whether SplitMix64's output at `state` + i · gamma lies below `limit`, in its 53 leading bits."""
    z = np.uint64(state + np.uint64(i) * np.uint64(0x9E3779B97F4A7C15))
    z = np.uint64((z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9))
    z = np.uint64((z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB))
    return np.uint64((z ^ (z >> np.uint64(31))) >> np.uint64(11)) < limit


@_inline
def _add_whole(expert: Any, base: Any, weight: Any, terms: Any, total: Any, like: Any) -> None:
    for j in range(expert.size):
        term = _rounded(_delta(_wide(expert[j]), base[j], like) * weight, like)
        terms[j] = term
        total[j] += term


@_inline
def _add_sized(expert: Any, base: Any, weight: Any, least: Any, end: Any, terms: Any, total: Any, like: Any) -> None:
    width = np.uint32(max(end, least) - least)
    for j in range(expert.size):
        delta = _delta(_wide(expert[j]), base[j], like)
        size = min(np.uint32(_pattern(delta) & np.uint32(0x7FFFFFFF)), np.uint32(0x7F800001))
        inside = np.uint32(size - least) < width
        term = _rounded((delta if inside else np.float32(0)) * weight, like)
        terms[j] = term
        total[j] += term


@_inline
def _add_between(expert: Any, base: Any, weight: Any, rule: Any, low: Any, terms: Any, total: Any, like: Any) -> None:
    bottom = min(max(np.int64(rule[SECOND]) - low, 0), expert.size)
    top = min(max(np.int64(rule[FOURTH]) - low, 0), expert.size)
    i = 0
    for j in (min(bottom, top), max(bottom, top), expert.size):
        least = np.uint32(rule[FIRST] + np.uint64(i < bottom))
        end = np.uint32(rule[THIRD] + np.uint64(i < top))
        _add_sized(expert[i:j], base[i:j], weight, least, end, terms[i:j], total[i:j], like)
        i = j


@_inline
def _add_drawn(
    expert: Any, base: Any, weight: Any, factor: Any, state: Any, limit: Any, terms: Any, total: Any, like: Any
) -> None:
    for j in range(expert.size):
        delta = _delta(_wide(expert[j]), base[j], like)
        delta = delta if _kept(state, j, limit) else np.float32(0)
        term = _rounded(_rounded(delta * factor, like) * weight, like)
        terms[j] = term
        total[j] += term


@_inline
def _add_agreeing(terms: Any, votes: Any, weight: Any, mixed: Any, shares: Any) -> None:
    for j in range(votes.size):
        term = terms[j]
        counts = term > np.float32(0) if votes[j] >= np.float32(0) else term < np.float32(0)
        mixed[j] += term if counts else np.float32(0)
        shares[j] += weight if counts else np.float32(0)


@_inline
def _set_aside(total: Any, aside: Any) -> None:
    for j in range(total.size):
        aside[j] += total[j]
        total[j] = np.float32(0)


@_inline
def _take_back(total: Any, aside: Any) -> None:
    for j in range(total.size):
        total[j] += aside[j]
        aside[j] = np.float32(0)


def task_vector(
    out: Any,
    base_address: Any,
    experts: Any,
    rules: Any,
    weights: Any,
    factors: Any,
    elects: Any,
    divide: Any,
    divisor: Any,
    scale: Any,
    scratch: Any,
) -> None:
    """base + scale · (a sum of weighted, sparsified deltas), see `mpfs.merge.operators.task_vector`.

    Args:
        out: the result's bit patterns; its type tells the format.
        base_address: where the base's column is.
        experts: uint64, shape (experts, 5). Under LARGEST: the float32 pattern of the smallest magnitude that is
            kept, and the number of elements of this column in which one equal to it is, too. Under DRAWN: the
            generator's state at the column's first element, and the limit. Under BETWEEN, of both ends, the bottom
            first: the float32 pattern, and the number of elements of this column in which one equal to it is below.
        rules: int64, shape (experts,); ABSENT, WHOLE, LARGEST, DRAWN or BETWEEN.
        weights, factors: float32, shape (experts,): weights rounded to the format, and scales of drawn deltas.
        elects: whether only entries with the elected sign count.
        divide: whether to divide: by the sum of the weights that count if `elects`, else by `divisor`.
        scale: lambda.
        scratch: float32, shape (7 + experts, TILE), to work in.
    """
    count = rules.size
    zero = np.float32(0)
    for row in range(7):
        for j in range(TILE):
            scratch[row, j] = zero
    base, total, aside = scratch[0], scratch[1], scratch[2]
    mixed, mixed_aside, shares, shares_aside = scratch[3], scratch[4], scratch[5], scratch[6]
    terms = scratch[7:]
    bases = carray(_pointer(base_address, out), out.size)
    for low in range(0, out.size, TILE):
        size = min(TILE, out.size - low)
        old = bases[low : low + size]
        for j in range(size):
            base[j] = _wide(old[j])
            total[j] = zero
        for e in range(count):
            if rules[e] != ABSENT:
                expert = carray(_pointer(experts[e, ADDRESS], out), out.size)[low : low + size]
                if rules[e] == WHOLE:
                    _add_whole(expert, base, weights[e], terms[e], total, out)
                elif rules[e] == DRAWN:
                    state = experts[e, FIRST] + np.uint64(low) * np.uint64(0x9E3779B97F4A7C15)
                    _add_drawn(expert, base, weights[e], factors[e], state, experts[e, SECOND], terms[e], total, out)
                elif rules[e] == BETWEEN:
                    _add_between(expert, base, weights[e], experts[e], low, terms[e], total, out)
                else:
                    least, end = np.uint32(experts[e, FIRST]), np.uint32(_ABOVE_NAN)
                    cut = min(max(np.int64(experts[e, SECOND]) - low, 0), size)
                    _add_sized(expert[:cut], base, weights[e], least, end, terms[e], total, out)
                    least = np.uint32(least + np.uint32(1))
                    _add_sized(expert[cut:], base[cut:], weights[e], least, end, terms[e, cut:], total[cut:], out)
            if e % _CASCADE == _CASCADE - 1:
                _set_aside(total, aside)
        if count >= _CASCADE:
            _take_back(total, aside)
        if elects:
            for j in range(size):
                mixed[j] = zero
                shares[j] = zero
            for e in range(count):
                if rules[e] != ABSENT:
                    _add_agreeing(terms[e], total[:size], weights[e], mixed, shares)
                if e % _CASCADE == _CASCADE - 1:
                    _set_aside(mixed, mixed_aside)
                    _set_aside(shares, shares_aside)
            if count >= _CASCADE:
                _take_back(mixed, mixed_aside)
                _take_back(shares, shares_aside)
            for j in range(size):
                total[j] = mixed[j]
        new = out[low : low + size]
        if divide and elects:
            for j in range(size):
                share = _rounded(shares[j], out)
                share = np.float32(1) if share == zero else share
                total[j] = _rounded(total[j], out) / share
        elif divide:
            for j in range(size):
                total[j] = _rounded(total[j], out) / divisor
        for j in range(size):
            change = _rounded(_rounded(total[j], out) * scale, out)
            moved = _stored(_rounded(base[j] + change, out), out)
            new[j] = old[j] if change == zero else moved


def linear(out: Any, models: Any, weights: Any, divisor: Any, total: Any) -> None:
    """The weighted sum of models, over `divisor`, see `mpfs.merge.operators.linear`.

    Args:
        out: the result's bit patterns; its type tells the format.
        models: uint64, shape (models,): where their columns are.
        weights: float32, shape (models,).
        total: float32, shape (TILE,), to work in.
    """
    for low in range(0, out.size, TILE):
        size = min(TILE, out.size - low)
        for j in range(size):
            total[j] = np.float32(0)
        for m in range(models.size):
            model = carray(_pointer(models[m], out), out.size)[low : low + size]
            weight = weights[m]
            for j in range(size):
                total[j] = _fma(_wide(model[j]), weight, total[j])
        new = out[low : low + size]
        for j in range(size):
            new[j] = _stored(_rounded(total[j] / divisor, out), out)


@_inline
def _sizes(expert: Any, base: Any, sizes: Any, like: Any) -> None:
    """The magnitude patterns of the deltas, every NaN's being the one above infinity's."""
    for j in range(expert.size):
        delta = _delta(_wide(expert[j]), _wide(base[j]), like)
        sizes[j] = _magnitude(delta, like)


def histogram(
    like: Any,
    size: Any,
    base_address: Any,
    experts: Any,
    shift: Any,
    bits: Any,
    prefixes: Any,
    counts: Any,
    sizes: Any,
    tally: Any,
) -> None:
    """Add up how many of the deltas' magnitude patterns have each value of the `bits` bits above `shift`.

    Only those count whose bits above these equal the expert's prefix.

    Args:
        like: any array of the format's type.
        size: elements of the column.
        experts: uint64, shape (experts,): where their columns are; 0 for none.
        prefixes: uint32, shape (experts,).
        counts: int64, shape (experts, 2^bits).
        sizes: uint32, shape (TILE,), to work in.
        tally: uint32, shape (2, 2^bits + 1), zeros, which are left so.
    """
    base = carray(_pointer(base_address, like), size)
    mask = np.uint32((np.int64(1) << bits) - 1)
    # Neighbours often have the same magnitude; so that one need not wait for the other, they are counted apart.
    first, second = tally[0], tally[1]
    nowhere = np.uint32(counts.shape[1])
    # A pattern of a 16-bit type is its own digit.
    everything = shift == 0 and bits == 8 * like.itemsize - 1
    for e in range(experts.size):
        if experts[e] == np.uint64(0):
            continue
        expert = carray(_pointer(experts[e], like), size)
        prefix = prefixes[e]
        for low in range(0, size, TILE):
            n = min(TILE, size - low)
            _sizes(expert[low : low + n], base[low : low + n], sizes, like)
            if not everything:
                for j in range(n):
                    digits = np.uint32(sizes[j] >> np.uint32(shift))
                    inside = np.uint32(digits >> np.uint32(bits)) == prefix
                    sizes[j] = np.uint32(digits & mask) if inside else nowhere
            for j in range(0, n - 1, 2):
                first[sizes[j]] += np.uint32(1)
                second[sizes[j + 1]] += np.uint32(1)
            if n % 2:
                first[sizes[n - 1]] += np.uint32(1)
        into = counts[e]
        for j in range(into.size):
            into[j] += np.int64(first[j]) + np.int64(second[j])
        for j in range(first.size):
            first[j] = np.uint32(0)
            second[j] = np.uint32(0)


def find_equal(
    like: Any, size: Any, base_address: Any, expert_address: Any, pattern: Any, wanted: Any, sizes: Any, found: Any
) -> None:
    """How many deltas of a column have a magnitude pattern, and the place after the `wanted`-th (-1: there are fewer).

    Args:
        sizes: uint32, shape (TILE,), to work in.
        found: int64, shape (2,): takes the two.
    """
    base = carray(_pointer(base_address, like), size)
    expert = carray(_pointer(expert_address, like), size)
    count, place = np.int64(0), np.int64(-1)
    for low in range(0, size, TILE):
        n = min(TILE, size - low)
        _sizes(expert[low : low + n], base[low : low + n], sizes, like)
        here = np.uint32(0)
        for j in range(n):
            here += np.uint32(sizes[j] == pattern)
        if count < wanted <= count + np.int64(here):
            seen = count
            for j in range(n):
                seen += np.int64(sizes[j] == pattern)
                if seen == wanted:
                    place = np.int64(low + j + 1)
                    break
        count += np.int64(here)
    found[0], found[1] = count, place


def drawn_norms(
    like: Any, size: Any, base_address: Any, expert_address: Any, state: Any, limit: Any, full: Any, masked: Any
) -> None:
    """Add the magnitudes of a column's deltas to `full`, those that the draw keeps to `masked`; see `LaneSum`.

    Args:
        state, limit: as for `task_vector`.
        full, masked: float64, shape (64,). The column starts at a multiple of 64 elements.
    """
    base = carray(_pointer(base_address, like), size)
    expert = carray(_pointer(expert_address, like), size)
    for low in range(0, size, 64):
        n = min(64, size - low)
        old, new = base[low : low + n], expert[low : low + n]
        at = state + np.uint64(low) * np.uint64(0x9E3779B97F4A7C15)
        for j in range(n):
            magnitude = np.float64(abs(_delta(_wide(new[j]), _wide(old[j]), like)))
            full[j] += magnitude
            masked[j] += magnitude if _kept(at, j, limit) else np.float64(0)


def blend(out: Any, base_address: Any, other_address: Any, factors: Any, keep_equal: Any) -> None:
    """factors[0] · base + factors[1] · other, see `mpfs.merge.operators.slerp`.

    Args:
        out: the result's bit patterns; its type tells the format.
        base_address, other_address: where the columns are.
        factors: float32, shape (2,).
        keep_equal: whether an element in which both agree keeps the base's bits.
    """
    base = carray(_pointer(base_address, out), out.size)
    other = carray(_pointer(other_address, out), out.size)
    first, second = factors[0], factors[1]
    for j in range(out.size):
        a, b = _wide(base[j]), _wide(other[j])
        mixed = _stored(_rounded(a * first + b * second, out), out)
        out[j] = base[j] if keep_equal and a == b else mixed


def products(like: Any, size: Any, base_address: Any, other_address: Any, lanes: Any) -> None:
    """Add the squares of a column's base and of the other model, and their products, to the lanes; see `LaneSum`.

    Args:
        like: any array of the format's type.
        size: elements of the column, which starts at a multiple of 64.
        lanes: float64, shape (3, 64).
    """
    base = carray(_pointer(base_address, like), size)
    other = carray(_pointer(other_address, like), size)
    ours, theirs, both = lanes[0], lanes[1], lanes[2]
    for low in range(0, size, 64):
        n = min(64, size - low)
        old, new = base[low : low + n], other[low : low + n]
        for j in range(n):
            a, b = np.float64(_wide(old[j])), np.float64(_wide(new[j]))
            ours[j] += a * a
            theirs[j] += b * b
            both[j] += a * b
