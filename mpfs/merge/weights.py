"""The weights that deltas have in a merge's result, as the planner needs them: with all that a method divides or
multiplies by. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from mpfs.merge.operators import Operator, Parameters

_SMALL_DIVISOR = 1e-8
"""Below this, task vector methods do not divide."""


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """M_full - base = Σ `experts`[i] · delta_i + `surplus` · base, where the method is linear. Elsewhere a stand-in."""

    experts: tuple[float, ...]
    surplus: float = 0.0


def delta_weights(operator: Operator, parameters: Parameters) -> DeltaWeights:
    """The weights of one tensor's deltas."""
    weights = [float(values.get("weight", 1.0)) for values in parameters.experts]
    total = 0.0
    for weight in weights:
        total += weight
    normalize = normalizes(operator, parameters)
    if operator.name == "linear":
        if not normalize:
            return DeltaWeights(tuple(weights), total - 1.0)
        return DeltaWeights(tuple(weight / total for weight in weights) if total else tuple(weights))
    factor = float(_shared(operator, parameters, "lambda", default=1.0))
    if normalize and operator.interaction == "additive" and abs(total) >= _SMALL_DIVISOR:
        factor /= total
    return DeltaWeights(tuple(weight * factor for weight in weights))


def normalizes(operator: Operator, parameters: Parameters) -> bool:
    """Whether what is added up is divided by weights."""
    return bool(_shared(operator, parameters, "normalize", default=False))


def _shared(operator: Operator, parameters: Parameters, name: str, *, default: float | bool) -> float | bool:
    if name in parameters.shared:
        return parameters.shared[name]
    for parameter in operator.parameters:
        if parameter.name == name and parameter.default is not None:
            return parameter.default
    return default
