"""Merge methods: the contract (`base`), the methods, and how to find one by name (`registry`)."""

from __future__ import annotations

from mpfs.merge.operators.base import (
    Column,
    LeftOut,
    Operator,
    Parameter,
    Parameters,
    Prepared,
    Scalar,
    TensorContext,
)
from mpfs.merge.operators.registry import get_operator, operator_names, own_parameters

__all__ = [
    "Column",
    "LeftOut",
    "Operator",
    "Parameter",
    "Parameters",
    "Prepared",
    "Scalar",
    "TensorContext",
    "get_operator",
    "operator_names",
    "own_parameters",
]
