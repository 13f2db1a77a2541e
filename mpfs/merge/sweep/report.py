"""What a sweep reports: data, importable without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpfs.errors import MPFSError
from mpfs.merge.reports import MergeReport, PlanReport
from mpfs.objects import Budget, Figures
from mpfs.objects.encoding import Json


@dataclass(frozen=True, slots=True)
class SweepBytes:
    """Stored bytes of distinct expert blocks, over all variants.

    `full` is what they read without a budget, `planned` the most that they read together, `apart` the sum of what each
    would read alone.
    """

    full: int
    planned: int
    apart: int


@dataclass(frozen=True, slots=True)
class SweepVariant:
    """One variant: its settings by key path, and in short as text; its branch and its plan.

    `shared_bytes` are those of its planned expert bytes that another variant reads, too. Of a sweep that was run either
    `merge` or `error` is there.
    """

    settings: Mapping[str, Any]
    title: str
    ref: str
    plan: PlanReport
    shared_bytes: int
    merge: MergeReport | None = None
    error: Exception | None = None

    def as_json(self) -> Json:
        """The JSON form: the keys of a plan, or those of a merge, and what a sweep adds to them."""
        done: Json = self.plan.as_json() if self.merge is None else self.merge.as_json()
        done["run"]["expert_bytes_shared"] = self.shared_bytes
        value: Json = {"settings": {path: _plain(item) for path, item in self.settings.items()}, **done}
        value["ref"] = self.ref
        if self.error is not None:
            value["error"] = error_as_json(self.error)
        return value


@dataclass(frozen=True, slots=True)
class SweepReport:
    """A sweep: its variants, what they read together, and what running them took (None: it was only planned).

    `figures` are those of all variants together: of bytes those of distinct blocks, which what several of them read or
    wrote counts for once; `seconds` is wall time.
    """

    variants: tuple[SweepVariant, ...]
    expert_bytes: SweepBytes
    notes: tuple[str, ...]
    figures: Figures | None = None

    @property
    def failed(self) -> tuple[SweepVariant, ...]:
        """The variants that were not committed."""
        return tuple(item for item in self.variants if item.error is not None)

    def as_json(self) -> Json:
        """The JSON form."""
        run: Json = {
            "expert_bytes_full": self.expert_bytes.full,
            "expert_bytes_planned": self.expert_bytes.planned,
            "expert_bytes_apart": self.expert_bytes.apart,
        }
        if self.figures is not None:
            run |= self.figures.as_json()
        return {
            "variants": [item.as_json() for item in self.variants],
            "failed": len(self.failed),
            "notes": list(self.notes),
            "run": run,
        }


def error_as_json(error: Exception) -> Json:
    """An error in the form that it has wherever errors are JSON."""
    if isinstance(error, MPFSError):
        return dict(error.as_dict())
    return {"kind": "internal", "message": f"{type(error).__name__}: {error}"}


def _plain(value: Any) -> Any:
    return {"kind": value.kind, "value": value.value} if isinstance(value, Budget) else value
