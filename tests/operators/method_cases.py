"""What the tests of the methods beyond the first five share: what to ask of each, and shaped inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import operator_cases as cases
import torch

from mpfs.merge.operators import Column, Parameters, Scalar, TensorContext, get_operator


@dataclass(frozen=True)
class Ask:
    """A method with values to try it with; `own` are each expert's."""

    method: str
    experts: int
    shared: dict[str, Scalar] = field(default_factory=dict)
    own: dict[str, Scalar] = field(default_factory=dict)
    base: bool = True

    def __str__(self) -> str:
        return "-".join([self.method, *map(str, self.shared), *([] if self.base else ["no_base"])])

    def parameters(self, experts: int | None = None) -> Parameters:
        return Parameters(self.shared, [self.own] * (self.experts if experts is None else experts))


ASKS = (
    Ask("passthrough", 1, own={"scale": 0.7}, base=False),
    Ask("nearswap", 1, {"t": 0.002}),
    Ask("slerp", 1, {"t": 0.3}),
    Ask("breadcrumbs", 3, {"lambda": 0.7}, {"weight": 0.5, "density": 0.5, "gamma": 0.1}),
    Ask("breadcrumbs_ties", 3, {"normalize": True}, {"weight": 0.5, "density": 0.3, "gamma": 0.02}),
    Ask("della", 3, {}, {"weight": 0.5, "density": 0.5, "epsilon": 0.2}),
    Ask("della_linear", 3, {"normalize": True}, {"weight": 0.5, "density": 0.4, "epsilon": 0.1}),
    Ask("model_stock", 3),
    Ask("model_stock", 3, {"filter_wise": True}),
    Ask("nuslerp", 2, {}, {"weight": 0.5}),
    Ask("nuslerp", 2, {}, {"weight": 0.5}, base=False),
    Ask("nuslerp", 2, {"nuslerp_flatten": False}, {"weight": 0.5}),
    Ask("nuslerp", 2, {"nuslerp_flatten": False}, {"weight": 0.5}, base=False),
    Ask("nuslerp", 2, {"nuslerp_flatten": False, "nuslerp_row_wise": True}, {"weight": 0.5}),
    Ask("multislerp", 3, {}, {"weight": 0.5}),
    Ask("multislerp", 3, {}, {"weight": 0.5}, base=False),
    Ask("karcher", 3, base=False),
    Ask("sce", 3),
    Ask("sce", 3, {"select_topk": 0.3}),
    Ask("arcee_fusion", 1),
    Ask("ram", 3, {"epsilon": 0.003}),
    Ask("ramplus_tl", 3, {"epsilon": 0.003}),
)
WITH_BASE = tuple(ask for ask in ASKS if ask.base)


def context(
    shape: Sequence[int], experts: int, dtype: torch.dtype, *, seed: int = 0, keys: Sequence[str] | None = None
) -> TensorContext:
    numel = torch.Size(shape).numel()
    return dataclasses.replace(cases.context(numel, experts, dtype, seed=seed, keys=keys), shape=tuple(shape))


def merge(
    ask: Ask,
    base: torch.Tensor,
    models: Sequence[torch.Tensor],
    shape: Sequence[int],
    *,
    cuts: Sequence[int] = (),
    unread: Sequence[tuple[int, int, int]] = (),
    keys: Sequence[str] | None = None,
    parameters: Parameters | None = None,
) -> torch.Tensor:
    """Merge flat tensors of this shape, in columns that end at `cuts`; the base only where the ask has one."""
    values = parameters or ask.parameters(len(models))
    assert get_operator(ask.method).validate(values) == []
    where = context(shape, len(models), base.dtype, keys=keys)
    given = base if ask.base else None
    return cases.merge(ask.method, given, models, values, cuts=cuts, unread=unread, where=where)


def columns_of(values: torch.Tensor, cuts: Sequence[int]) -> Iterator[Column]:
    """One model, cut."""
    start = 0
    for end in [*sorted(cuts), values.numel()]:
        if end > start:
            yield Column(start, values[start:end], [values[start:end] * 2])
        start = end
