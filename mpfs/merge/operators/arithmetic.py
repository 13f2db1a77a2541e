"""The arithmetic that merge methods share, with every rounding point and every order of summation fixed.

A merge must give the same bits on every machine and for every cut into columns, and, at full budget, the bits that
mergekit 0.1.5 gives on a CPU. Both follow from fixing what torch leaves open:

- 16-bit types are widened to float32, computed on, and rounded once, to nearest even (`scaled`, `quotient`).
- Sums over experts run in float32 for 16-bit types and in the type itself otherwise, in the order of `sum_experts`.
- The sum of a handful of weights has the order of `sum_weights` (`scalars`).
- `fused_multiply_add` rounds once, as the FMA instruction does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from mpfs.merge.deferred import torch
from mpfs.merge.numeric import dtype_name
from mpfs.merge.operators.scalars import dealt, first_dealt, in_order, sum_weights


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums and products of `dtype` are formed in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    """x · factor, rounded once to x's dtype; the factor itself is rounded to the accumulator's dtype first."""
    wide = accumulator(x.dtype)
    return (x.to(wide) * torch.tensor(factor, dtype=wide, device=x.device)).to(x.dtype)


def difference(expert: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """expert - base, rounded once to their dtype; zero wherever they are equal, be it at infinity."""
    delta = expert - base
    if bool(torch.isnan(delta).any()):
        delta = torch.where(expert == base, delta.new_zeros(()), delta)
    return delta


def moved(base: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
    """base + change, rounded once to their dtype; where the change is zero the base's own bits, so also its -0."""
    return torch.where(change == 0, base, one_nan(base + change))


def one_nan(x: torch.Tensor) -> torch.Tensor:
    """x with the quiet NaN, without sign or payload, for every NaN: which one torch gives depends on the machine, and on
    an element's place in the tensor."""
    mask = torch.isnan(x)
    return torch.where(mask, x.new_tensor(torch.nan), x) if bool(mask.any()) else x


def quotient(x: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    """x / divisor (of x's dtype; of x's shape, or a scalar), rounded once to x's dtype."""
    wide = accumulator(x.dtype)
    return (x.to(wide) / divisor.to(wide)).to(x.dtype)


def sum_experts(terms: Sequence[torch.Tensor | None], start: int, numel: int, like: torch.Tensor) -> torch.Tensor:
    """The sum over experts of elements [start, start + n) of a tensor of `numel` elements; 1-D, of `like`'s dtype.

    `terms` are 1-D, of n elements and of `like`'s dtype; None stands for zeros. The order is that of torch's CPU sum
    over the first axis of a stack:

    - elements are summed from zero, expert by expert in listing order; beyond 16 experts, every 16 make a partial
      sum, the partial sums are added in order, and their sum is added to that of the remaining experts;
    - in float32 and float64, the experts of the last numel mod 32 (16) elements, which do not fill four vectors, are
      dealt to four partial sums (`scalars.dealt`), which differs from five experts on; so are those of the last numel
      mod 4 of a tensor of fewer than 8 (4) elements. A tensor of one element is summed as `sum_weights` does.

    So the order depends on the element's place in the tensor, never on the column.
    """
    dtype, wide = like.dtype, accumulator(like.dtype)
    zero = torch.zeros_like(like, dtype=wide)
    name = dtype_name(dtype)
    if numel == 1 and dtype == wide:
        return torch.full_like(like, sum_weights([0.0 if t is None else float(t) for t in terms], name))
    total = in_order([None if term is None else term.to(wide) for term in terms], zero)
    if dtype == wide and len(terms) > 4:
        low = max(first_dealt(numel, name) - start, 0)
        if low < like.numel():
            total = total.clone() if total is zero else total
            total[low:] = dealt([None if term is None else term[low:] for term in terms], zero[low:])
    return total.to(dtype)


def fused_multiply_add(x: torch.Tensor, weight: float, addend: torch.Tensor) -> torch.Tensor:
    """x · weight + addend with a single rounding, as the FMA instruction gives it; of addend's dtype.

    `addend` is float32 or float64; `x` is of its shape and exactly representable in its dtype; `weight` is rounded to
    that dtype first. Where torch's own scaled addition is fused on this machine it is used, elsewhere the exact
    result is built from error-free transformations: the bits are the same (in float64 as long as nothing overflows
    or underflows on the way).
    """
    wide = addend.dtype
    x = x.to(wide)
    if _torch_fuses(wide, addend.device.type):
        return torch.add(addend, x, alpha=weight)
    return exact_multiply_add(x, weight, addend)


def exact_multiply_add(x: torch.Tensor, weight: float, addend: torch.Tensor) -> torch.Tensor:
    """`fused_multiply_add` without the instruction: x and addend of one dtype, float32 or float64.

    Source: S. Boldo and G. Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding
    to odd", IEEE Transactions on Computers 57 (2008).
    """
    factor = torch.tensor(weight, dtype=addend.dtype, device=addend.device)
    if addend.dtype == torch.float32:
        # The product of two float32 is exact in float64, and odd rounding makes the second rounding harmless.
        return _sum_to_odd(x.double() * factor.double(), addend.double()).float()
    high, low = _two_product(x, factor)
    total_high, total_low = _two_sum(addend, low)
    upper, lower = _two_sum(high, total_high)
    exact = upper + _sum_to_odd(total_low, lower)
    return torch.where(torch.isfinite(exact), exact, x * factor + addend)


def _two_sum(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fl(a + b) and its rounding error (Knuth)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _two_product(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fl(a · b) in float64 and its rounding error (Dekker, with Veltkamp's splitting)."""
    a_high, a_low = _split(a)
    b_high, b_low = _split(b)
    total = a * b
    return total, ((a_high * b_high - total) + a_high * b_low + a_low * b_high) + a_low * b_low


def _split(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = a * 134217729.0  # 2^27 + 1
    high = wide - (wide - a)
    return high, a - high


def _sum_to_odd(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a + b in float64 rounded to odd: of the two neighbours of an inexact sum, the one with an odd last bit."""
    total, error = _two_sum(a, b)
    bits = total.view(torch.int64)
    even_and_inexact = (error != 0) & torch.isfinite(error) & (bits & 1 == 0)
    # Away from zero the pattern grows; towards zero it shrinks.
    step = torch.where((error > 0) == (total > 0), 1, -1)
    return torch.where(even_and_inexact, bits + step, bits).view(torch.float64)


@cache
def _torch_fuses(dtype: torch.dtype, device: str) -> bool:
    """Whether torch.add(…, alpha=…) rounds once here: for whole vectors and for every kind of remainder."""
    generator = torch.Generator().manual_seed(2203)
    for n in (1, 3, 7, 8, 15, 16, 31, 33, 63, 127, 4096 + 13):
        x, addend = (torch.randn(n, generator=generator, dtype=torch.float64).to(dtype).to(device) for _ in range(2))
        if not torch.equal(torch.add(addend, x, alpha=0.3), exact_multiply_add(x, 0.3, addend)):
            return False
    return True
