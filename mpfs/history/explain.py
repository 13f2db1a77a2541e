"""What a plan does and why, tensor by tensor: the plan view, and with a run's record the merge view."""

from __future__ import annotations

from dataclasses import dataclass

from mpfs.objects import Figures, Plan, PlanTensor
from mpfs.objects.encoding import Json


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """What is read of one expert of one tensor: columns read, of all."""

    model: str
    columns_read: int
    columns: int
    weight: float | None


@dataclass(frozen=True, slots=True)
class TensorExplanation:
    """One tensor of a plan.

    `kept` is the share of the delta's energy that is read (1 where there is none), `cosine` the mean cosine of the
    experts' deltas (negative: they conflict), `why` a sentence.
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
            "experts": [
                {
                    "model": item.model,
                    "columns_read": item.columns_read,
                    "columns": item.columns,
                    "weight": item.weight,
                }
                for item in self.experts
            ],
            "energy_kept": self.kept,
            "cosine": self.cosine,
            "why": self.why,
        }


@dataclass(frozen=True, slots=True)
class Explanation:
    """A plan, explained. `figures` are those of the run that made the commit, if it was run."""

    plan: Plan
    tensors: tuple[TensorExplanation, ...]
    figures: Figures | None

    def as_json(self) -> Json:
        """The JSON form."""
        return {
            "method": self.plan.method,
            "policy": self.plan.policy,
            "models": [{"name": model.name, "commit": model.commit} for model in self.plan.models],
            "base": None if self.plan.base is None else self.plan.models[self.plan.base].name,
            "fidelity_predicted": self.plan.fidelity_predicted,
            "notes": list(self.plan.notes),
            "renamed": {model: dict(names) for model, names in self.plan.renamed.items()},
            "tensors": [item.as_json() for item in self.tensors],
            "run": None if self.figures is None else self.figures.as_json(),
        }


def explain_plan(plan: Plan, figures: Figures | None = None) -> Explanation:
    """Explain a plan. Pure."""
    return Explanation(plan, tuple(_tensor(plan, tensor) for tensor in plan.tensors), figures)


def _tensor(plan: Plan, tensor: PlanTensor) -> TensorExplanation:
    columns = tensor.column_count
    experts = tuple(
        ExpertShare(plan.models[model].name, len(selection), columns, _weight(parameters.get("weight")))
        for (model, _), selection, parameters in zip(tensor.experts, tensor.selections, tensor.parameters, strict=True)
    )
    kept = 1.0 if tensor.energy <= 0.0 else 1.0 - tensor.energy_left_out / tensor.energy
    computed = len(tensor.columns) if tensor.action == "compute" else 0
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
        _why(plan, tensor, kept, experts, columns),
    )


def _weight(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _why(plan: Plan, tensor: PlanTensor, kept: float, experts: tuple[ExpertShare, ...], columns: int) -> str:
    if tensor.note is not None:
        return tensor.note
    if tensor.action == "keep":
        return "no delta" if tensor.energy <= 0.0 else "its delta is not worth the bytes under this budget"
    if all(item.columns_read == 0 for item in experts):
        return "computed from the base alone"
    if (plan.budget.kind == "none" and not plan.bounds) or kept >= 1.0:
        return "read in full"
    return f"the columns that keep most of the delta for the bytes ({kept:.0%} of its energy)"
