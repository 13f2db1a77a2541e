"""The kernels that merge a column: one pass, nogil, equal to the torch operators to the last bit.

Importing this module imports numba, and compiles nothing; only `mpfs.merge.kernels.backend` does so, on first use.

Columns come as addresses, since there may be any number of experts: the caller keeps what they point at alive.
Everything is computed in float32, tile by tile; where the operators round to a 16-bit type, `rounded` does, without
leaving float32 (see `mpfs.merge.kernels.formats`). Loops over a tile have no branches and call nothing that is not
inlined, so that LLVM makes vector instructions of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[import-untyped,attr-defined,unused-ignore]

from mpfs.merge.kernels.draws import GROUP, drawn, group_word, signed
from mpfs.merge.kernels.formats import (
    TILE,
    delta_of,
    fma,
    place,
    pointer,
    rounded,
    stored,
    wide,
)
from mpfs.stats.inlined import as_f32, bits_of_f32, inline

ABSENT, WHOLE, LARGEST, DRAWN, BETWEEN = range(5)
"""What of an expert's delta is merged: nothing, everything, what passes a threshold, what a draw keeps, what two ends do."""

ADDRESS, FIRST, SECOND, THIRD, FOURTH = range(5)
"""Columns of the `experts` table: where the expert's column is, and the numbers that its rule needs."""

_NAN = 0x7F80_0001

_CASCADE = 16
"""Terms that are added one by one before the partial sum is set aside (`mpfs.merge.operators.scalars.in_order`)."""

BASE, TOTAL, ASIDE, MIXED, MIXED_ASIDE, SHARES, SHARES_ASIDE, TURNED = (row * TILE for row in range(8))
"""Where the rows of a tile lie in the scratch memory; those of the experts' terms follow.

One pointer to them all, at distances that the compiler knows, is what lets it see that they do not overlap."""

ROWS = 8


@inline
def _widen(bits: Any, s: Any, n: Any) -> None:
    for j in range(n):
        s[BASE + j] = wide(bits[j])
        s[TOTAL + j] = np.float32(0)


@inline
def _add_whole(expert: Any, s: Any, terms: Any, n: Any, weight: Any, like: Any) -> None:
    for j in range(n):
        term = rounded(delta_of(wide(expert[j]), s[BASE + j], like) * weight, like)
        terms[j] = term
        s[TOTAL + j] += term


@inline
def _add_largest(expert: Any, s: Any, terms: Any, i: Any, n: Any, weight: Any, bound: Any, like: Any) -> None:
    for j in range(i, n):
        delta = delta_of(wide(expert[j]), s[BASE + j], like)
        size = np.int32(bits_of_f32(delta) & np.uint32(0x7FFFFFFF))
        term = rounded((delta if size > bound else np.float32(0)) * weight, like)
        terms[j] = term
        s[TOTAL + j] += term


@inline
def _add_sized(expert: Any, s: Any, terms: Any, i: Any, n: Any, weight: Any, least: Any, end: Any, like: Any) -> None:
    width = np.uint32(max(end, least) - least)
    for j in range(i, n):
        delta = delta_of(wide(expert[j]), s[BASE + j], like)
        size = min(np.uint32(bits_of_f32(delta) & np.uint32(0x7FFFFFFF)), np.uint32(0x7F800001))
        inside = np.uint32(size - least) < width
        term = rounded((delta if inside else np.float32(0)) * weight, like)
        terms[j] = term
        s[TOTAL + j] += term


@inline
def _add_between(expert: Any, s: Any, terms: Any, n: Any, weight: Any, rule: Any, low: Any, like: Any) -> None:
    bottom = min(max(np.int64(rule[SECOND]) - low, 0), n)
    top = min(max(np.int64(rule[FOURTH]) - low, 0), n)
    i = np.int64(0)
    for j in (min(bottom, top), max(bottom, top), n):
        least = np.uint32(rule[FIRST] + np.uint64(i < bottom))
        end = np.uint32(rule[THIRD] + np.uint64(i < top))
        _add_sized(expert, s, terms, i, j, weight, least, end, like)
        i = j


@inline
def _add_drawn(
    expert: Any, s: Any, terms: Any, n: Any, weight: Any, factor: Any, word: Any, at: Any, last: Any, like: Any
) -> None:
    first, second = np.uint32(np.uint32(word) + np.uint32(at)), np.uint32(word >> np.uint64(32))
    for j in range(n):
        delta = delta_of(wide(expert[j]), s[BASE + j], like)
        delta = delta if drawn(first, second, last) else np.float32(0)
        first = np.uint32(first + np.uint32(1))
        term = rounded(rounded(delta * factor, like) * weight, like)
        terms[j] = term
        s[TOTAL + j] += term


@inline
def _set_aside(s: Any, n: Any, row: Any, aside: Any) -> None:
    for j in range(n):
        s[aside + j] += s[row + j]
        s[row + j] = np.float32(0)


@inline
def _take_back(s: Any, n: Any, row: Any, aside: Any) -> None:
    for j in range(n):
        s[row + j] += s[aside + j]
        s[aside + j] = np.float32(0)


@inline
def _turn(s: Any, n: Any) -> None:
    """Which sign is elected, as the sign of a zero."""
    for j in range(n):
        s[TURNED + j] = np.float32(0) if s[TOTAL + j] >= np.float32(0) else np.float32(-0.0)
        s[MIXED + j] = np.float32(0)
        s[SHARES + j] = np.float32(0)


@inline
def _agrees(term: Any, turned: Any) -> Any:
    return as_f32(bits_of_f32(term) ^ bits_of_f32(turned)) > np.float32(0)


@inline
def _add_agreeing(terms: Any, s: Any, n: Any, weight: Any) -> None:
    for j in range(n):
        counts = _agrees(terms[j], s[TURNED + j])
        s[MIXED + j] += terms[j] if counts else np.float32(0)
        s[SHARES + j] += weight if counts else np.float32(0)


@inline
def _add_four_agreeing(terms: Any, s: Any, n: Any, w0: Any, w1: Any, w2: Any, w3: Any) -> None:
    """`_add_agreeing` of four experts, without going through memory between them."""
    zero = np.float32(0)
    for j in range(n):
        turned, mixed, shares = s[TURNED + j], s[MIXED + j], s[SHARES + j]
        term = terms[j]
        counts = _agrees(term, turned)
        mixed += term if counts else zero
        shares += w0 if counts else zero
        term = terms[TILE + j]
        counts = _agrees(term, turned)
        mixed += term if counts else zero
        shares += w1 if counts else zero
        term = terms[2 * TILE + j]
        counts = _agrees(term, turned)
        mixed += term if counts else zero
        shares += w2 if counts else zero
        term = terms[3 * TILE + j]
        counts = _agrees(term, turned)
        mixed += term if counts else zero
        shares += w3 if counts else zero
        s[MIXED + j] = mixed
        s[SHARES + j] = shares


@inline
def _divide_by_shares(s: Any, n: Any, like: Any) -> None:
    for j in range(n):
        share = rounded(s[SHARES + j], like)
        share = np.float32(1) if share == np.float32(0) else share
        s[MIXED + j] = rounded(s[MIXED + j], like) / share


@inline
def _divide(s: Any, n: Any, divisor: Any, like: Any) -> None:
    for j in range(n):
        s[TOTAL + j] = rounded(s[TOTAL + j], like) / divisor


@inline
def _move(s: Any, n: Any, row: Any, scale: Any, old: Any, new: Any, like: Any) -> None:
    for j in range(n):
        before = old[j]
        change = rounded(rounded(s[row + j], like) * scale, like)
        moved = stored(rounded(s[BASE + j] + change, like), like)
        new[j] = before if change == np.float32(0) else moved


def task_vector(
    out: Any,
    start: Any,
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
        start: the index of the column's first element in its tensor.
        base_address: where the base's column is.
        experts: uint64, shape (experts, 5). Under LARGEST: the float32 pattern of the smallest magnitude that is
            kept, and the number of elements of this column in which one equal to it is, too. Under DRAWN: the
            stream's key, and the last bits that are kept. Under BETWEEN, of both ends, the bottom
            first: the float32 pattern, and the number of elements of this column in which one equal to it is below.
        rules: int64, shape (experts,); ABSENT, WHOLE, LARGEST, DRAWN or BETWEEN.
        weights, factors: float32, shape (experts,): weights rounded to the format, and scales of drawn deltas.
        elects: whether only entries with the elected sign count.
        divide: whether to divide: by the sum of the weights that count if `elects`, else by `divisor`.
        scale: lambda.
        scratch: float32, shape ((ROWS + experts) · TILE,), to work in.
    """
    count = rules.size
    for j in range(ROWS * TILE):
        scratch[j] = np.float32(0)
    for e in range(count):
        if rules[e] == ABSENT:
            for j in range(TILE):
                scratch[(ROWS + e) * TILE + j] = np.float32(0)
    s = place(scratch, 0)
    width = np.uint64(out.itemsize)
    low = np.int64(0)
    while low < out.size:
        at = (start + low) % GROUP
        n = min(TILE - at % TILE, out.size - low)
        old = pointer(base_address + np.uint64(low) * width, out)
        _widen(old, s, n)
        for e in range(count):
            if rules[e] != ABSENT:
                expert = pointer(experts[e, ADDRESS] + np.uint64(low) * width, out)
                terms = place(scratch, (ROWS + (e if elects else 0)) * TILE)
                weight = weights[e]
                if rules[e] == WHOLE:
                    _add_whole(expert, s, terms, n, weight, out)
                elif rules[e] == DRAWN:
                    word, last = group_word(experts[e, FIRST], (start + low) // GROUP), signed(experts[e, SECOND])
                    _add_drawn(expert, s, terms, n, weight, factors[e], word, at, last, out)
                elif rules[e] == BETWEEN:
                    _add_between(expert, s, terms, n, weight, experts[e], low, out)
                else:
                    least = np.int32(experts[e, FIRST])
                    cut = min(max(np.int64(experts[e, SECOND]) - low, 0), n)
                    _add_largest(expert, s, terms, 0, cut, weight, np.int32(least - 1), out)
                    # All NaNs are equal: none is larger.
                    above = least if least < np.int32(_NAN) else np.int32(0x7FFFFFFF)
                    _add_largest(expert, s, terms, cut, n, weight, above, out)
            if e % _CASCADE == _CASCADE - 1:
                _set_aside(s, n, TOTAL, ASIDE)
        if count >= _CASCADE:
            _take_back(s, n, TOTAL, ASIDE)
        if elects:
            _turn(s, n)
            for e in range(0, count - 3, 4):
                terms = place(scratch, (ROWS + e) * TILE)
                _add_four_agreeing(terms, s, n, weights[e], weights[e + 1], weights[e + 2], weights[e + 3])
                if e % _CASCADE == _CASCADE - 4:
                    _set_aside(s, n, MIXED, MIXED_ASIDE)
                    _set_aside(s, n, SHARES, SHARES_ASIDE)
            for e in range(count - count % 4, count):
                _add_agreeing(place(scratch, (ROWS + e) * TILE), s, n, weights[e])
            if count >= _CASCADE:
                _take_back(s, n, MIXED, MIXED_ASIDE)
                _take_back(s, n, SHARES, SHARES_ASIDE)
            if divide:
                _divide_by_shares(s, n, out)
        elif divide:
            _divide(s, n, divisor, out)
        _move(s, n, MIXED if elects else TOTAL, scale, old, place(out, low), out)
        low += n


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
            model = carray(pointer(models[m], out), out.size)[low : low + size]
            weight = weights[m]
            for j in range(size):
                total[j] = fma(wide(model[j]), weight, total[j])
        new = out[low : low + size]
        for j in range(size):
            new[j] = stored(rounded(total[j] / divisor, out), out)


def blend(out: Any, base_address: Any, other_address: Any, factors: Any, keep_equal: Any) -> None:
    """factors[0] · base + factors[1] · other, see `mpfs.merge.operators.slerp`.

    Args:
        out: the result's bit patterns; its type tells the format.
        base_address, other_address: where the columns are.
        factors: float32, shape (2,).
        keep_equal: whether an element in which both agree keeps the base's bits.
    """
    base = carray(pointer(base_address, out), out.size)
    other = carray(pointer(other_address, out), out.size)
    first, second = factors[0], factors[1]
    for j in range(out.size):
        a, b = wide(base[j]), wide(other[j])
        mixed = stored(rounded(a * first + b * second, out), out)
        out[j] = base[j] if keep_equal and a == b else mixed
