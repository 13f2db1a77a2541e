"""What a merge method is: the contract between the engine and an operator.

An operator never sees a whole model, nor even a whole tensor: it is given *columns*, runs of elements that are
aligned over all inputs. Its work has two phases. `prepare` runs once a tensor and condenses whatever needs the
whole tensor (thresholds, norms) into a few JSON values, streaming over the columns as often as it must. `apply`
is pure and runs once a column, on any thread, in any order.
"""

from __future__ import annotations

import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mpfs.merge.deferred import torch
from mpfs.merge.kernels.backend import Kernels
from mpfs.merge.kernels.columns import Bits, BitsColumn, BitsColumns
from mpfs.merge.numeric import torch_dtype
from mpfs.objects import Cut

Scalar: TypeAlias = float | int | bool
Histogram: TypeAlias = NDArray[np.int64]
"""How often magnitudes occur among a delta's elements, by the 15 leading bits of their patterns; shape (32768,)."""

Prepared: TypeAlias = Mapping[str, object]
"""The result of `prepare`: JSON values only, so that it can be cached and compared."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a method, as the recipe spells it.

    `per_model` parameters are looked up for each expert (source, then the levels above); the others once a tensor.
    A required parameter has no default.
    """

    name: str
    default: Scalar | None = None
    required: bool = False
    per_model: bool = False


@dataclass(frozen=True)
class Parameters:
    """The parameter values in force for one tensor: shared ones, and one mapping per expert, in listing order."""

    shared: Mapping[str, Scalar]
    experts: Sequence[Mapping[str, Scalar]]


@dataclass(frozen=True)
class LeftOut:
    """A run of an expert's elements that the plan does not read: how many, and the RMS of their delta.

    `rms` is an estimate from sketches, in units of the weights.
    """

    numel: int
    rms: float


@dataclass(frozen=True)
class TensorContext:
    """What an operator may know about the tensor that it works on.

    `work` is the dtype that all arithmetic runs in and that columns arrive in, by its stored name ("BF16", …); `dtype` is
    the same as torch names it. `expert_keys` identify the experts by content (for random generators: independent of
    listing order). `left_out[i]` describes what a budgeted plan leaves unread of expert i (empty at full budget).
    `shape` is the tensor's; where it is not given, `()`, methods that work by rows take the tensor for a vector.
    `cuts[i]` is what `Operator.cuts` told of expert i, where a histogram of its whole delta was at hand. `counted` is
    told the histogram of an expert's whole delta, by the expert's number, where a method counts it.
    """

    name: str
    numel: int
    work: str
    seed: int
    expert_keys: Sequence[str]
    left_out: Sequence[Sequence[LeftOut]] = field(default=())
    shape: tuple[int, ...] = ()
    cuts: Sequence[Sequence[Cut]] = field(default=())
    counted: Callable[[int, Histogram], None] | None = field(default=None, compare=False)

    @property
    def dtype(self) -> torch.dtype:
        """The work dtype, as torch names it; importing torch, which kernels do without."""
        return torch_dtype(self.work)


@dataclass(frozen=True)
class Column:
    """Elements [start, start + n) of one tensor, from every input.

    `base` is 1-D of n elements in the context's dtype, None where the method has no base. `experts[i]` is the same
    for expert i, or None where the plan does not read that expert here (its delta then counts as zero). An expert
    that equals the base here arrives as `base` itself.
    """

    start: int
    base: torch.Tensor | None
    experts: Sequence[torch.Tensor | None]


class FastPath(Protocol):
    """A method at work on one tensor's bit patterns. `apply` is pure, and may be called from several threads."""

    def prepare(self, columns: BitsColumns) -> Prepared:
        """What `Operator.prepare` gives, to the bit."""

    def apply(self, prepared: Prepared, column: BitsColumn) -> Bits:
        """What `Operator.apply` gives, to the bit."""


class Operator(ABC):
    """A merge method. Stateless: everything that varies comes in as an argument.

    `interaction` tells the planner how experts combine within a column: "additive" when each expert's block is worth
    reading by itself, "column" when a half-read column misleads (sign election). `draws` says that results depend on
    the seed, the tensor's name and the experts' keys. `version` goes up whenever the same inputs give other results,
    so that nothing stale is reused.

    Which model comes in where: with `needs_base` the recipe must name a base, which is `Column.base` and never an
    expert. With `optional_base` it may, and then the same holds. Otherwise the base is an expert like any other, and
    `Column.base` only stands in for what is not read. `models` are the least and the most experts that a method takes
    (None: any number), in the sense of `Column.experts`. `by_rows` says that results depend on the tensor's shape.
    """

    name: ClassVar[str]
    parameters: ClassVar[tuple[Parameter, ...]]
    needs_base: ClassVar[bool] = True
    optional_base: ClassVar[bool] = False
    models: ClassVar[tuple[int, int | None]] = (1, None)
    by_rows: ClassVar[bool] = False
    interaction: ClassVar[Literal["additive", "column"]] = "additive"
    draws: ClassVar[bool] = False
    version: ClassVar[int] = 1

    @property
    def source(self) -> str:
        """Where the method is from: what the class's docstring says after "Source: "; empty if it says nothing."""
        found = re.search(r"^Source: (.+?)(?:\n\n|\Z)", inspect.getdoc(type(self)) or "", re.M | re.S)
        return "" if found is None else " ".join(found[1].split())

    def keeps_base(self, parameters: Parameters) -> bool:
        """Whether a column in which no expert differs from the base comes out as the base, bit for bit."""
        return self.needs_base

    def count_problem(self, experts: int) -> str | None:
        """What is wrong with this number of experts (models besides the base, where the method has one), if anything."""
        least, most = self.models
        if experts >= least and (most is None or experts <= most):
            return None
        wanted = f"{least}" if least == most else f"{least} or more" if most is None else f"{least} to {most}"
        besides = " besides the base" if self.needs_base else ""
        return f"{self.name} takes {wanted} model{'' if wanted == '1' else 's'}{besides}, not {experts}"

    def validate(self, parameters: Parameters) -> list[str]:
        """What is wrong with these values, a sentence each; empty if nothing is.

        Called before work starts, so that all mistakes of a recipe can be told together.
        """
        return []

    def cuts(
        self, work: str, numel: int, parameters: Parameters, histograms: Sequence[Histogram | None]
    ) -> Sequence[Sequence[Cut]]:
        """Where a method that keeps magnitudes by their rank in the whole tensor makes its cuts, an entry for each expert:
        empty where there is no histogram of its delta. Without entries, a method has no use for histograms."""
        return ()

    def held(self, context: TensorContext, parameters: Parameters) -> int:
        """The bytes that `prepare` holds besides the columns that it is given, if they depend on the tensor's shape.

        The engine counts them against its memory bound. By rows, that is a row of every model, put together in float64.
        """
        if not self.by_rows:
            return 0
        return 16 * (len(parameters.experts) + 1) * (context.shape or (context.numel,))[-1]

    def prepare(
        self, context: TensorContext, parameters: Parameters, columns: Callable[[], Iterator[Column]]
    ) -> Prepared:
        """Condense what needs the whole tensor. Each call of `columns()` streams the tensor once, in order."""
        return {}

    def fast(self, context: TensorContext, parameters: Parameters, kernels: Kernels) -> FastPath | None:
        """The same work on bit patterns, where there are kernels for it; None where there are not."""
        return None

    @abstractmethod
    def apply(self, context: TensorContext, parameters: Parameters, prepared: Prepared, column: Column) -> torch.Tensor:
        """Merge one column; the result is 1-D, in the context's dtype."""
