"""What the operator tests share: inputs with many ties, and a small engine that runs an operator over cut columns."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import torch

from mpfs.merge.numeric import dtype_name
from mpfs.merge.operators import Column, LeftOut, Parameters, Scalar, TensorContext, get_operator

METHODS = ("linear", "task_arithmetic", "ties", "dare_linear", "dare_ties")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bit patterns, in which -0 differs from 0 and NaN equals itself."""
    return tensor.view(INTEGERS[tensor.element_size()])


def inputs(
    numel: int, experts: int, dtype: torch.dtype, seed: int = 0, *, coarse: bool = False
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A base and experts; `coarse` deltas have few distinct magnitudes, so that many tie."""
    generator = torch.Generator().manual_seed(seed)
    base = (torch.randn(numel, generator=generator) * 0.02).to(dtype)
    if coarse:
        base = (base.float() * 64).round().div(64).to(dtype)
    result = []
    for _ in range(experts):
        delta = torch.randn(numel, generator=generator) * 0.004
        if coarse:
            delta = (delta * 250).round() / 64
        result.append((base.float() + delta).to(dtype))
    return base, result


def context(
    numel: int,
    experts: int,
    dtype: torch.dtype,
    *,
    seed: int = 0,
    keys: Sequence[str] | None = None,
    left_out: Sequence[Sequence[LeftOut]] = (),
) -> TensorContext:
    """The context of a tensor named "t"."""
    return TensorContext("t", numel, dtype_name(dtype), seed, keys or [f"expert{i}" for i in range(experts)], left_out)


def parameters(weights: Sequence[float], densities: Sequence[float] | None = None, **shared: Scalar) -> Parameters:
    """Parameters from lists; `lambda_` stands for lambda."""
    if "lambda_" in shared:
        shared["lambda"] = shared.pop("lambda_")
    experts: list[dict[str, Scalar]] = [{"weight": weight} for weight in weights]
    for values, density in zip(experts, densities or [], strict=False):
        values["density"] = density
    return Parameters(shared, experts)


def merge(
    method: str,
    base: torch.Tensor | None,
    experts: Sequence[torch.Tensor],
    values: Parameters,
    *,
    cuts: Sequence[int] = (),
    unread: Sequence[tuple[int, int, int]] = (),
    where: TensorContext | None = None,
) -> torch.Tensor:
    """Merge whole 1-D tensors in columns that end at `cuts`.

    `unread` lists (expert, start, end) of what is not read; each must be made of whole columns.
    """
    numel, dtype = experts[0].numel(), experts[0].dtype
    operator = get_operator(method)
    where = where or context(numel, len(experts), dtype)

    def columns() -> Iterator[Column]:
        start = 0
        for end in sorted({*cuts, numel}):
            if end > start:
                hidden = {i for i, low, high in unread if low <= start and end <= high}
                yield Column(
                    start,
                    None if base is None else base[start:end].clone(),
                    [None if i in hidden else expert[start:end].clone() for i, expert in enumerate(experts)],
                )
            start = end

    prepared = operator.prepare(where, values, columns)
    assert json.loads(json.dumps(prepared, allow_nan=False)) == prepared
    results = [operator.apply(where, values, prepared, column) for column in columns()]
    assert all(result.dtype == dtype and result.dim() == 1 for result in results)
    return torch.cat(results)
