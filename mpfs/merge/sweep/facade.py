"""Sweeping: the part of the facade that merges one recipe with many settings.

The facade inherits it, so that it stays a list of what one can do. Importing it is cheap: torch waits until it is used.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mpfs.merge.options import DEFAULT_MEMORY, MergeOptions
from mpfs.objects import Budget
from mpfs.objects.progress import Progress
from mpfs.store import Store

if TYPE_CHECKING:
    from mpfs.merge.naming import ModelFinder
    from mpfs.merge.recipe import Recipe
    from mpfs.merge.sweep.report import SweepReport

DEFAULT_LIMIT = 64
"""How many variants a sweep has at most, unless more are asked for."""


class Sweeps:
    """Sweeping, for a class that has a store and an author and can find models."""

    _store: Store
    _author: str

    def _finder(self, folder: Path | None) -> ModelFinder:
        raise NotImplementedError

    def sweep(
        self,
        recipe: str | os.PathLike[str] | Mapping[str, Any],
        settings: Mapping[str, Sequence[Any]],
        into: str,
        *,
        budget: Budget | None = None,
        policy: Literal["energy", "layerwise", "uniform", "random"] = "energy",
        seed: int = 0,
        on_mismatch: Literal["error", "crop", "base"] = "error",
        limit: int = DEFAULT_LIMIT,
        dry_run: bool = False,
        reuse: bool = True,
        verify_fidelity: bool = False,
        allow_nonfinite: bool = False,
        check_space: bool = True,
        memory: int = DEFAULT_MEMORY,
        threads: int | None = None,
        device: str | None = None,
        message: str | None = None,
        progress: Progress | None = None,
    ) -> SweepReport:
        """Merge a recipe with every combination of some settings, and commit each result to a branch of its own.

        All variants are planned together, what several of them read is read once, and each is committed by itself: one
        that fails is in the report with its error, and the others are committed all the same.

        Args:
            recipe: a YAML file in mergekit's grammar, or a document as a mapping. Of several documents the last one is
                swept; the others are merged once, each to its branch, as by `merge` with the same budget.
            settings: the values that keys of the recipe take, by key path: `{"parameters.density": [0.3, 0.5],
                "models.*.parameters.weight": [0.5, 1.0]}`. A list is entered by index, by the name of a model (or filter), or
                by `*`. `budget` (of `Budget`), `fidelity`, `policy` and `seed` may be set as well, for each variant.
            into: the prefix of the branches, `into/density=0.3`; or a template such as `ties/d{density}`.
            budget: what all variants together may read of the experts, each block counted once; None: everything. A
                fidelity is what each of them is to come to.
            limit: the most variants.
            dry_run: only plan. The plans are stored. Documents before the last must have been merged.
            message: of each commit, after its settings; default: what was merged.
            policy, seed, on_mismatch, reuse, verify_fidelity, allow_nonfinite, check_space, memory, threads, device,
                progress: as for `merge`.

        Raises:
            UsageError: settings, branches or a device that cannot be.
            RecipeError, MismatchError, BudgetInfeasibleError, NotFoundError, RefConflictError: some of the variants cannot
                be merged; all that is known before work starts is told together, and nothing is done.
            NoSpaceError: there is no room for the results; or the disk or the map got full: what was committed stays.
        """
        from mpfs.merge.documents import branches_of, committed_note, merge_documents, require_merged
        from mpfs.merge.recipe.documents import load_mappings
        from mpfs.merge.sweep.plans import SweepOptions, plan_sweep
        from mpfs.merge.sweep.run import report_plans, run_sweep
        from mpfs.merge.sweep.settings import Setting

        if device is not None:
            from mpfs.merge.device import check_device

            check_device(device)
        path = None if isinstance(recipe, Mapping) else Path(recipe)
        documents = [recipe] if isinstance(recipe, Mapping) else load_mappings(Path(recipe))
        options = MergeOptions(reuse, verify_fidelity, memory, threads, progress, allow_nonfinite, check_space, device)
        finder = self._finder(None if path is None else path.parent)
        asked = budget or Budget()

        def earlier(recipes: Sequence[Recipe], refs: Sequence[str]) -> list[str]:
            for ref in refs:
                before = branches_of(recipes, ref, self._store)[:-1]
            if dry_run:
                require_merged(before, finder, asked, policy, seed, on_mismatch)
                return []
            done = merge_documents(before, finder, asked, policy, seed, on_mismatch, message=message, options=options)
            return [committed_note(report) for report in done]

        with self._store.objects.remembering():
            planned = plan_sweep(
                documents,
                [Setting(name, tuple(values)) for name, values in settings.items()],
                into,
                finder,
                SweepOptions(asked, policy, seed, on_mismatch, limit),
                earlier,
                where="recipe" if path is None else str(path),
            )
            if dry_run:
                for item in planned.variants:
                    self._store.put_plan(item.plan)
                return report_plans(planned, self._store)
            return run_sweep(planned, self._store, message=message, author=self._author, options=options)
