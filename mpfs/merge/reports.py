"""What planning and merging report: data, importable without torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from mpfs.objects import Figures, ObjectId, Plan
from mpfs.objects.encoding import Json


@dataclass(frozen=True, slots=True)
class PlanReport:
    """A plan and its id. If it was stored, `merge` runs it again by id. `seconds_estimated` goes by past runs of the
    repository; None where there are none."""

    identity: ObjectId
    plan: Plan
    seconds_estimated: float | None = None

    def as_json(self) -> Json:
        """The JSON form: the keys of a merge's, less what only a run knows."""
        cost = self.plan.cost
        return {
            "plan": self.identity,
            "fidelity_predicted": self.plan.fidelity_predicted,
            "files_from": self.plan.models[self.plan.template].name,
            "notes": list(self.plan.notes),
            "renamed": {model: dict(names) for model, names in self.plan.renamed.items()},
            "bounds": [asdict(bound) for bound in self.plan.bounds],
            "run": {
                "expert_bytes_full": cost.expert_bytes_full,
                "expert_bytes_planned": cost.expert_bytes_planned,
                "base_bytes_planned": cost.base_bytes_read,
                "bytes_written_planned": cost.bytes_written,
                "blocks_kept": cost.blocks_kept,
                "blocks_computed": cost.blocks_computed,
                "seconds_estimated": self.seconds_estimated,
            },
        }


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What a merge did. `new_commit` is False when the branch already held just this result of this plan."""

    commit: ObjectId
    ref: str
    snapshot: ObjectId
    plan: ObjectId
    fidelity_predicted: float
    figures: Figures
    notes: tuple[str, ...]
    new_commit: bool

    def as_json(self) -> Json:
        """The JSON form."""
        return {
            "commit": self.commit,
            "ref": self.ref,
            "snapshot": self.snapshot,
            "plan": self.plan,
            "fidelity_predicted": self.fidelity_predicted,
            "fidelity": self.figures.fidelity,
            "notes": list(self.notes),
            "new_commit": self.new_commit,
            "run": self.figures.as_json(),
        }
