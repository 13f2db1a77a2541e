"""One model as it is."""

from __future__ import annotations

from typing import ClassVar

from mpfs.merge.deferred import torch
from mpfs.merge.operators.arithmetic import scaled
from mpfs.merge.operators.base import Column, Operator, Parameter, Parameters, Prepared, TensorContext
from mpfs.merge.operators.checks import checked
from mpfs.merge.operators.reductions import filled
from mpfs.merge.operators.values import value_of


class Passthrough(Operator):
    """Exactly one model, times `scale` (1 by default) where that is set. Bit for bit as mergekit 0.1.5.

    Source: mergekit, arXiv 2403.13257.
    """

    name: ClassVar[str] = "passthrough"
    parameters: ClassVar[tuple[Parameter, ...]] = (Parameter("scale", default=1.0, per_model=True),)
    needs_base: ClassVar[bool] = False
    models: ClassVar[tuple[int, int | None]] = (1, 1)

    def validate(self, parameters: Parameters) -> list[str]:
        """A scale that is not a finite number, or more than one model."""
        return checked(self, parameters)

    def apply(self, context: TensorContext, parameters: Parameters, prepared: Prepared, column: Column) -> torch.Tensor:
        """The column, scaled and rounded once.

        Raises:
            ValueError: it is not read.
        """
        values = filled(context, column)[0]
        scale = float(value_of(self.parameters, parameters.experts[0], "scale"))
        return values if scale == 1 else scaled(values, scale)
