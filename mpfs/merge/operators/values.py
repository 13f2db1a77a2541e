"""Reading parameter values, and checking them before work starts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mpfs.merge.operators.base import Parameter, Parameters, Scalar


def value_of(spec: Sequence[Parameter], values: Mapping[str, Scalar], name: str) -> Scalar:
    """The value of parameter `name`, or its default.

    Raises:
        ValueError: it is required and absent (`Operator.validate` says so first).
    """
    if name in values:
        return values[name]
    default = next(parameter.default for parameter in spec if parameter.name == name)
    if default is None:
        raise ValueError(f"parameter {name} is required")
    return default


def problems(spec: Sequence[Parameter], parameters: Parameters) -> list[str]:
    """What is wrong with the values by themselves: absent though required, not a number, not finite."""
    found: list[str] = []
    for parameter in spec:
        places = (
            [(f"model {i + 1}: ", values) for i, values in enumerate(parameters.experts)]
            if parameter.per_model
            else [("", parameters.shared)]
        )
        for place, values in places:
            value = values.get(parameter.name)
            if value is None:
                if parameter.required:
                    found.append(f"{place}{parameter.name} is required")
            elif not isinstance(value, (int, float)) or not math.isfinite(value):
                found.append(f"{place}{parameter.name} must be a finite number, not {value!r}")
            elif parameter.name == "density" and value < 0:
                found.append(f"{place}density must lie between 0 and 1, not {value!r}")
    return found
