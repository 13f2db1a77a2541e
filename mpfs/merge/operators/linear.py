"""Weighted averages of the models themselves."""

from __future__ import annotations

from typing import ClassVar

from mpfs.errors import BadInputError
from mpfs.merge.deferred import torch
from mpfs.merge.kernels.backend import Kernels
from mpfs.merge.kernels.columns import BIT_TYPES
from mpfs.merge.operators.arithmetic import accumulator, fused_multiply_add, one_nan
from mpfs.merge.operators.base import Column, FastPath, Operator, Parameter, Parameters, Prepared, TensorContext
from mpfs.merge.operators.fast import LinearPath
from mpfs.merge.operators.pieces import by_piece
from mpfs.merge.operators.scalars import accumulator_name, sum_weights
from mpfs.merge.operators.values import problems, value_of


class Linear(Operator):
    """The weighted mean (or, with `normalize: false`, sum) of the models.

    A base model is an ordinary input, listed with a weight like any other. Values are widened to float32 (float64 stays)
    and accumulated in listing order, each step sum ← weight · x + sum rounded once; then divided once by the float32
    sum of the weights, and rounded once to the tensor's dtype.

    Where a plan does not read an expert, the base's values stand in for it, under the expert's weight.

    Bit for bit as mergekit 0.1.5 on a CPU.

    Source: Wortsman et al., "Model soups", arXiv 2203.05482.
    """

    name: ClassVar[str] = "linear"
    parameters: ClassVar[tuple[Parameter, ...]] = (
        Parameter("weight", required=True, per_model=True),
        Parameter("normalize", default=True),
    )
    needs_base: ClassVar[bool] = False

    def validate(self, parameters: Parameters) -> list[str]:
        """Also: weights that sum to zero cannot be normalised."""
        found = problems(self.parameters, parameters)
        if not found and self._normalize(parameters) and sum_weights(self._weights(parameters), "F32") == 0:
            found.append(_ZERO_SUM)
        return found

    def apply(self, context: TensorContext, parameters: Parameters, prepared: Prepared, column: Column) -> torch.Tensor:
        """The mean of one column.

        Raises:
            BadInputError: the weights sum to zero and the result is to be normalised.
            ValueError: an expert is not read and there is no base to stand in for it, or there are no experts.
        """
        inputs = [column.base if expert is None else expert for expert in column.experts]
        present = [values for values in inputs if values is not None]
        if not inputs or len(present) < len(inputs):
            raise ValueError(f"{context.name}: a model is missing at {column.start}, and there is no base to stand in")
        wide = accumulator(context.dtype)
        weights = self._weights(parameters)
        divisor = self._divisor(context, parameters)

        def mean(piece: Column) -> torch.Tensor:
            models = [values for values in piece.experts if values is not None]
            total = torch.zeros_like(models[0], dtype=wide)
            for values, weight in zip(models, weights, strict=True):
                total = fused_multiply_add(values, weight, total)
            if divisor != 1:
                total /= torch.tensor(divisor, dtype=wide, device=total.device)
            return one_nan(total.to(context.dtype))

        return by_piece(Column(column.start, None, present), present[0], mean)

    def fast(self, context: TensorContext, parameters: Parameters, kernels: Kernels) -> FastPath | None:
        """By the kernel for linear combinations."""
        if context.work not in BIT_TYPES:
            return None
        return LinearPath(kernels, context, self._weights(parameters), self._divisor(context, parameters))

    def _divisor(self, context: TensorContext, parameters: Parameters) -> float:
        """What the sum is divided by; 1 if it is not."""
        if not self._normalize(parameters):
            return 1.0
        divisor = sum_weights(self._weights(parameters), accumulator_name(context.work))
        if divisor == 0:
            raise BadInputError(f"{context.name}: {_ZERO_SUM}", tensor=context.name)
        return divisor

    def _weights(self, parameters: Parameters) -> list[float]:
        return [float(value_of(self.parameters, values, "weight")) for values in parameters.experts]

    def _normalize(self, parameters: Parameters) -> bool:
        return bool(value_of(self.parameters, parameters.shared, "normalize"))


_ZERO_SUM = "the weights sum to zero, so their mean is undefined; change a weight or set normalize: false"
