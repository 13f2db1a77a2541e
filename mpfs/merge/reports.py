"""What planning and merging report: data, importable without torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from mpfs.objects import Figures, ObjectId, Plan
from mpfs.objects.encoding import Json


@dataclass(frozen=True, slots=True)
class Outlook:
    """What running a plan now would read and write: less than the plan says, where earlier merges have computed results.

    Bytes are those of distinct blocks; `disk_bytes` is what the `bytes_written` take on the disk at the most, in whole
    pages. `blocks_reused` are output blocks that are found, `blocks_computed` those that are not. `seconds_estimated` goes
    by past runs of the repository; None where there are none.
    """

    expert_bytes: int
    base_bytes: int
    bytes_written: int
    disk_bytes: int
    blocks_computed: int
    blocks_reused: int
    seconds_estimated: float | None = None

    def as_json(self) -> Json:
        """The JSON form."""
        return {
            "expert_bytes": self.expert_bytes,
            "base_bytes": self.base_bytes,
            "bytes_written": self.bytes_written,
            "bytes_on_disk": self.disk_bytes,
            "blocks_computed": self.blocks_computed,
            "blocks_reused": self.blocks_reused,
            "seconds_estimated": self.seconds_estimated,
        }


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
                "bytes_kept": self.plan.bytes_kept,
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
