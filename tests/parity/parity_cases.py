"""What the comparisons with mergekit share: differences in ulp, scores that select, and results in exact arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
DIGITS = {torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}


def differing(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Which elements differ in their bits, but for a zero's sign: MPFS keeps that of an untouched base."""
    integer = {2: torch.int16, 4: torch.int32}[found.element_size()]
    return (found.view(integer) != expected.view(integer)) & ((found != 0) | (expected != 0))


def ulps(found: torch.Tensor, expected: torch.Tensor, operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """By how many units in the last place of `found`'s dtype they differ, at the size of the largest operand."""
    largest = torch.stack([operand.double().abs() for operand in operands]).max(0).values
    lowest = torch.finfo(found.dtype).smallest_normal
    unit = 2.0 ** (torch.floor(torch.log2(largest.clamp(min=lowest))) - DIGITS[found.dtype])
    return (found.double() - expected.double()).abs() / unit


def scores(
    recipe: dict[str, Any], base: torch.Tensor, experts: Sequence[torch.Tensor], shape: Sequence[int]
) -> tuple[torch.Tensor, float]:
    """What sce and arcee_fusion select by, in plain torch in the dtype, and the threshold."""
    if recipe["merge_method"] == "sce":
        variance = torch.stack([expert - base for expert in experts]).var(0, unbiased=False)
        keep = int(recipe["parameters"]["select_topk"] * int((variance != 0).sum()))
        return variance, float(variance.float().sort(descending=True).values[keep - 1]) if keep else float("inf")
    rows = [values.reshape(tuple(shape)) for values in (base, experts[0])]
    q, p = (torch.softmax(values, -1) for values in rows)
    divergence = (p * torch.log((p + 1e-8) / (q + 1e-8))).sum(-1, keepdim=True)
    score = ((rows[1] - rows[0]).abs() * divergence).reshape(-1)
    low, middle, high = (score.float().sort().values[int(part * (len(score) - 1))] for part in (0.25, 0.5, 0.75))
    return score, float(middle + 1.5 * (high - low))


def exact(
    recipe: dict[str, Any], base: torch.Tensor, experts: Sequence[torch.Tensor], shape: Sequence[int]
) -> torch.Tensor:
    """What nuslerp, multislerp, model_stock or karcher are by their formulas, all of it in float64; flat.

    `base` counts where the recipe names one; `experts` are the recipe's models without it, but for karcher, to which a
    base is a model like the others.
    """
    method, shared = recipe["merge_method"], recipe["parameters"]
    models = [expert.double() for expert in experts]
    origin = base.double() if "base_model" in recipe and method != "karcher" else torch.zeros_like(models[0])
    deltas = [model - origin for model in models]
    names = [item for item in recipe["models"] if item["model"] != "base" or method == "karcher"]
    weights = [item.get("parameters", {}).get("weight", 1.0) for item in names]
    if method == "nuslerp":
        return origin + _between(deltas, weights, shared, shape)
    if method == "multislerp":
        if shared.get("normalize_weights", True):
            weights = [weight / sum(weights) for weight in weights]
        lengths = [float(delta.norm()) for delta in deltas]
        parts = [w / (n + 1e-8) * x for w, n, x in zip(weights, lengths, deltas, strict=True)]
        mean = torch.stack(parts).sum(0)
        result: torch.Tensor = origin + mean / mean.norm() * sum(w * n for w, n in zip(weights, lengths, strict=True))
        return result
    if method == "model_stock":
        return _stock(origin, deltas, tuple(shape) if shared.get("filter_wise") else (1, len(origin)))
    return _middle(models, shared.get("max_iter", 10), shared.get("tol", 1e-5))


def _between(
    deltas: Sequence[torch.Tensor], weights: Sequence[float], shared: dict[str, Any], shape: Sequence[int]
) -> torch.Tensor:
    flatten = shared.get("nuslerp_flatten", True) or len(shape) == 1
    axis = 0 if flatten or shared.get("nuslerp_row_wise") else -1
    first, second = (delta if flatten else delta.reshape(tuple(shape)) for delta in deltas)
    units = [values / values.norm(dim=axis, keepdim=True).clamp(min=1e-7) for values in (first, second)]
    cosine = (units[0] * units[1]).sum(axis, keepdim=True).clamp(-1, 1)
    share, angle = weights[1] / sum(weights), cosine.acos()
    curved = (torch.sin((1 - share) * angle) * first + torch.sin(share * angle) * second) / torch.sin(angle)
    straight = (1 - share) * first + share * second
    return torch.where(cosine.abs() > 1 - 1e-6, straight, curved).reshape(-1)


def _stock(base: torch.Tensor, deltas: Sequence[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
    rows = [delta.reshape(shape) for delta in deltas]
    count = len(rows)
    cosines = [
        (rows[i] * rows[j]).sum(-1, keepdim=True)
        / (rows[i].norm(dim=-1, keepdim=True) * rows[j].norm(dim=-1, keepdim=True)).clamp(min=1e-6)
        for i in range(count)
        for j in range(i)
    ]
    cosine = torch.stack(cosines).mean(0)
    share = count * cosine / (1 + (count - 1) * cosine)
    return base + (share * torch.stack(rows).mean(0)).reshape(-1)


def _middle(models: Sequence[torch.Tensor], steps: int, tol: float) -> torch.Tensor:
    lengths = [model.norm() for model in models]
    units = [model / length for model, length in zip(models, lengths, strict=True)]
    middle = torch.stack(units).mean(0)
    middle /= middle.norm()
    for _ in range(steps):
        pull = torch.zeros_like(middle)
        for unit in units:
            cosine = (unit @ middle).clamp(-1, 1)
            angle = cosine.acos()
            if float(angle) > 1e-9:
                pull += angle / angle.sin() * (unit - cosine * middle) / len(units)
        size = pull.norm()
        if float(size) < tol:
            break
        middle = size.cos() * middle + size.sin() / size * pull
        middle /= middle.norm()
    return middle * torch.stack(lengths).mean()
