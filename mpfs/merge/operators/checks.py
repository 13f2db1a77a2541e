"""Checking a method's parameter values and its number of models."""

from __future__ import annotations

from mpfs.merge.operators.base import Operator, Parameters
from mpfs.merge.operators.values import problems


def checked(operator: Operator, parameters: Parameters) -> list[str]:
    """What is wrong with the values by themselves (`problems`), and with the number of models."""
    found = problems(operator.parameters, parameters)
    count = operator.count_problem(len(parameters.experts))
    return found if count is None else [count, *found]
