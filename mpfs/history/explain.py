"""What a plan does and why, by tensor, layer and model: the plan view, and with a run's record the merge view."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from typing import Literal, TypeAlias

from mpfs.history.insight import layer_of, natural
from mpfs.objects import Figures, Plan, PlanTensor
from mpfs.objects.encoding import Json
from mpfs.objects.plan import NO_DELTA, Scalar

Reason: TypeAlias = Literal["full", "part", "base", "skipped", "same", "noted"]
"""What became of a tensor: read in full or in part, computed from the base alone, left out under the budget, without a
delta, or what its note says."""

Ranges: TypeAlias = Mapping[str, tuple[float, float]]
"""Parameters by name: the least and the largest of their values over some tensors."""

_IN_WORDS: Mapping[Reason, str] = {
    "full": "in full",
    "part": "in part",
    "base": "from the base alone",
    "skipped": "skipped",
    "same": "unchanged",
    "noted": "noted",
}


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """What is read of one expert of one tensor: columns read, of all; and the method's parameters for it."""

    model: str
    columns_read: int
    columns: int
    parameters: Mapping[str, Scalar] = field(default_factory=dict)

    @property
    def weight(self) -> float | None:
        """The method's weight for it; None for a method without."""
        weight = self.parameters.get("weight")
        return None if weight is None else float(weight)

    def as_json(self) -> Json:
        """The JSON form."""
        return {
            "model": self.model,
            "columns_read": self.columns_read,
            "columns": self.columns,
            "weight": self.weight,
            "parameters": dict(self.parameters),
        }


@dataclass(frozen=True, slots=True)
class TensorExplanation:
    """One tensor of a plan.

    `kept` is the share of the delta's energy that is read (1 where there is none), `cosine` the mean cosine of the
    experts' deltas (negative: they conflict), `why` a sentence, and `reason` its kind.
    """

    name: str
    action: str
    dtype: str
    shape: tuple[int, ...]
    columns_computed: int
    columns: int
    experts: tuple[ExpertShare, ...]
    kept: float
    cosine: float | None
    reason: Reason
    why: str

    def as_json(self) -> Json:
        """The JSON form."""
        return {
            "name": self.name,
            "action": self.action,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "columns_computed": self.columns_computed,
            "columns": self.columns,
            "experts": [item.as_json() for item in self.experts],
            "energy_kept": self.kept,
            "cosine": self.cosine,
            "reason": self.reason,
            "why": self.why,
        }


@dataclass(frozen=True, slots=True)
class ModelShare:
    """What is read of one model in some tensors: columns read, of those of all tensors that have a delta; and the
    range of each of the method's parameters for it."""

    model: str
    columns_read: int
    columns: int
    parameters: Ranges

    def as_json(self) -> Json:
        """The JSON form."""
        return {
            "model": self.model,
            "columns_read": self.columns_read,
            "columns": self.columns,
            "parameters": {name: list(ends) for name, ends in self.parameters.items()},
        }


@dataclass(frozen=True, slots=True)
class LayerExplanation:
    """The tensors of a layer together.

    `experts` are all models but the base. `kept` is the share of the deltas' energy that is read, `cosine` the mean of the
    tensors' cosines, by energy. `reasons` counts what became of the tensors.
    """

    name: str
    tensors: int
    computed: int
    experts: tuple[ModelShare, ...]
    kept: float
    cosine: float | None
    reasons: Mapping[Reason, int]

    @property
    def why(self) -> str:
        """What became of its tensors, in words."""
        return ", ".join(
            f"{self.reasons[reason]:,} {words}" for reason, words in _IN_WORDS.items() if reason in self.reasons
        )

    def as_json(self) -> Json:
        """The JSON form."""
        return {
            "layer": self.name,
            "tensors": self.tensors,
            "tensors_computed": self.computed,
            "experts": [item.as_json() for item in self.experts],
            "energy_kept": self.kept,
            "cosine": self.cosine,
            "reasons": dict(self.reasons),
            "why": self.why,
        }


@dataclass(frozen=True, slots=True)
class Explanation:
    """A plan, explained. `experts` are all models but the base; `figures` are those of the run that made the commit, if
    it was run."""

    plan: Plan
    experts: tuple[ModelShare, ...]
    layers: tuple[LayerExplanation, ...]
    tensors: tuple[TensorExplanation, ...]
    figures: Figures | None

    @property
    def touched(self) -> float:
        """The share of the output's blocks that are not the base's: as planned, or once it was run, as it came."""
        cost, run = self.plan.cost, self.figures
        touched = cost.blocks_computed if run is None else run.blocks_computed + run.blocks_reused
        total = touched + (cost.blocks_kept if run is None else run.blocks_kept)
        return touched / total if total else 0.0

    def as_json(self) -> Json:
        """The JSON form."""
        return {
            "method": self.plan.method,
            "policy": self.plan.policy,
            "models": [{"name": model.name, "commit": model.commit} for model in self.plan.models],
            "base": None if self.plan.base is None else self.plan.models[self.plan.base].name,
            "fidelity_predicted": self.plan.fidelity_predicted,
            "cost": {**asdict(self.plan.cost), "bytes_kept": self.plan.bytes_kept},
            "touched_share": self.touched,
            "notes": list(self.plan.notes),
            "renamed": {model: dict(names) for model, names in self.plan.renamed.items()},
            "experts": [item.as_json() for item in self.experts],
            "layers": [item.as_json() for item in self.layers],
            "tensors": [item.as_json() for item in self.tensors],
            "run": None if self.figures is None else self.figures.as_json(),
        }


def spanned(ranges: Iterable[Ranges]) -> Ranges:
    """The ranges of several models as one."""
    found: dict[str, tuple[float, float]] = {}
    for one in ranges:
        for name, (low, high) in one.items():
            least, most = found.get(name, (inf, -inf))
            found[name] = (min(low, least), max(high, most))
    return found


def ranges_text(ranges: Ranges) -> str:
    """Parameters in words: `density 0.5, weight 0.1 to 0.9`."""
    return ", ".join(
        f"{name} {low:.4g}" if low == high else f"{name} {low:.4g} to {high:.4g}"
        for name, (low, high) in sorted(ranges.items())
    )


def explain_plan(plan: Plan, figures: Figures | None = None) -> Explanation:
    """Explain a plan. Pure."""
    tensors = tuple(_tensor(plan, tensor) for tensor in plan.tensors)
    groups: dict[str, list[int]] = {}
    for index, tensor in enumerate(plan.tensors):
        groups.setdefault(layer_of(tensor.name), []).append(index)
    layers = tuple(
        _layer(plan, name, [plan.tensors[i] for i in groups[name]], [tensors[i] for i in groups[name]])
        for name in sorted(groups, key=natural)
    )
    return Explanation(plan, _experts(plan, plan.tensors), layers, tensors, figures)


def _layer(
    plan: Plan, name: str, planned: Sequence[PlanTensor], explained: Sequence[TensorExplanation]
) -> LayerExplanation:
    energy = sum(tensor.energy for tensor in planned)
    left_out = sum(tensor.energy_left_out for tensor in planned)
    told = [(tensor.energy, tensor.cosine) for tensor in planned if tensor.cosine is not None and tensor.energy > 0.0]
    weight = sum(share for share, _ in told)
    return LayerExplanation(
        name,
        len(planned),
        sum(tensor.action == "compute" for tensor in planned),
        _experts(plan, planned),
        max(0.0, 1.0 - left_out / energy) if energy > 0.0 else 1.0,
        sum(share * cosine for share, cosine in told) / weight if weight > 0.0 else None,
        Counter(tensor.reason for tensor in explained),
    )


def _experts(plan: Plan, tensors: Iterable[PlanTensor]) -> tuple[ModelShare, ...]:
    wanted = [index for index in range(len(plan.models)) if index != plan.base]
    read = dict.fromkeys(wanted, 0)
    total = dict.fromkeys(wanted, 0)
    ranges: dict[int, dict[str, tuple[float, float]]] = {index: {} for index in wanted}
    for tensor in tensors:
        if tensor.action == "keep" and tensor.energy > 0.0:
            # The plan does not say any more which experts have it.
            for index in wanted:
                total[index] += tensor.column_count
        for (index, _), selection, parameters in zip(tensor.experts, tensor.selections, tensor.parameters, strict=True):
            if index not in ranges:
                continue
            read[index] += len(selection)
            total[index] += tensor.column_count
            for name, value in parameters.items():
                low, high = ranges[index].get(name, (inf, -inf))
                ranges[index][name] = (min(low, float(value)), max(high, float(value)))
    return tuple(ModelShare(plan.models[index].name, read[index], total[index], ranges[index]) for index in wanted)


def _tensor(plan: Plan, tensor: PlanTensor) -> TensorExplanation:
    columns = tensor.column_count
    experts = tuple(
        ExpertShare(plan.models[model].name, len(selection), columns, parameters)
        for (model, _), selection, parameters in zip(tensor.experts, tensor.selections, tensor.parameters, strict=True)
    )
    kept = 1.0 if tensor.energy <= 0.0 else 1.0 - tensor.energy_left_out / tensor.energy
    computed = len(tensor.columns) if tensor.action == "compute" else 0
    reason, why = _why(plan, tensor, kept, experts)
    return TensorExplanation(
        tensor.name,
        tensor.action,
        tensor.dtype,
        tensor.shape,
        computed,
        columns,
        experts,
        max(0.0, kept),
        tensor.cosine,
        reason,
        why,
    )


def _why(plan: Plan, tensor: PlanTensor, kept: float, experts: tuple[ExpertShare, ...]) -> tuple[Reason, str]:
    if tensor.note is not None:
        return "same" if tensor.note == NO_DELTA else "noted", tensor.note
    if tensor.action == "keep":
        if tensor.energy <= 0.0:
            return "same", "no delta"
        return "skipped", "its delta is not worth the bytes under this budget"
    if all(item.columns_read == 0 for item in experts):
        return "base", "computed from the base alone"
    if (plan.budget.kind == "none" and not plan.bounds) or kept >= 1.0:
        return "full", "read in full"
    return "part", f"the columns that keep most of the delta for the bytes ({kept:.0%} of its energy)"
