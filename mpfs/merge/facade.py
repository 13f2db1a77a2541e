"""Explaining: the part of the facade that tells what a merge does, did, and would take.

The facade inherits it, so that it stays a list of what one can do. Importing it is cheap: torch waits until it is used.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from mpfs.errors import IntegrityError, NotFoundError
from mpfs.merge.reports import Outlook, PlanReport
from mpfs.objects import Commit, Cost, ObjectId, Plan, Run
from mpfs.store import Store

if TYPE_CHECKING:
    from mpfs.history import Explanation, Insight

_MOST_RUNS = 500
"""Past runs that an estimate of time looks at, whichever they are."""


class Explains:
    """Explaining, for a class that has a store and finds revisions and plans in it."""

    _store: Store

    def resolve(self, revision: str) -> ObjectId:
        raise NotImplementedError

    def find_plan(self, plan: str | os.PathLike[str]) -> PlanReport:
        raise NotImplementedError

    def explain(self, target: str) -> Explanation:
        """Explain the plan of a merge commit (given as a revision), or a plan (by id or file).

        Raises:
            NotFoundError: there is no such commit or plan, or the commit was not made by a merge.
        """
        from mpfs.history.explain import explain_plan

        plan, run = self._plan_of(target)
        return explain_plan(plan, None if run is None else run.figures)

    def insight(self, target: str) -> Insight:
        """The numbers behind a plan, from statistics: what each expert changes where, how the experts agree, and what
        every budget would have bought.

        Args:
            target: as for `explain`.

        Raises:
            NotFoundError: as for `explain`; or one of the plan's models is not here any more.
        """
        from mpfs.merge.insight import find_insight

        return find_insight(self._store, self._plan_of(target)[0])

    def outlook(self, plan: Plan) -> Outlook:
        """What running a plan now would read and write, given what earlier merges have computed, and how long it would take.

        Raises:
            NotFoundError: an input of the plan is not in this repository.
            LockedError: a garbage collection is at work and does not end soon.
        """
        from mpfs.merge.known import find_outlook

        found = find_outlook(self._store, plan)
        left = replace(
            plan.cost,
            expert_bytes_planned=found.expert_bytes,
            base_bytes_read=found.base_bytes,
            bytes_written=found.bytes_written,
        )
        return replace(found, seconds_estimated=self._seconds(left))

    def _seconds(self, cost: Cost) -> float | None:
        """How long a merge of this cost will take, going by the past runs of this repository."""
        from mpfs.merge.seconds import estimate_seconds

        figures = []
        for identity in self._store.objects.ids(Run)[:_MOST_RUNS]:
            with suppress(NotFoundError, IntegrityError):  # one that is damaged, or collected meanwhile, is no loss
                figures.append(self._store.objects.get(Run, identity).figures)
        return estimate_seconds(cost, figures)

    def _plan_of(self, target: str) -> tuple[Plan, Run | None]:
        """The plan that a target names, and the run that made the commit, if it is one."""
        try:
            identity = self.resolve(target)
        except NotFoundError:
            return self.find_plan(target).plan, None
        commit = self._store.objects.get(Commit, identity)
        if commit.plan is None:
            raise NotFoundError(f"{target} was imported, not merged: it has no plan to explain")
        return self._store.objects.get(Plan, commit.plan), self._store.objects.run_of(identity)
