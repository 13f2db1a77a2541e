"""The documents of a recipe: reading them, planning and merging each, and which branch each is merged to."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpfs.errors import NotFoundError, RecipeError
from mpfs.merge.commit import load_model, make_plan, run_plan
from mpfs.merge.models import Aligned, Model
from mpfs.merge.naming import ModelFinder
from mpfs.merge.options import MergeOptions
from mpfs.merge.recipe import Recipe, load_recipes, recipe_from_mapping
from mpfs.merge.remembered import Memory
from mpfs.merge.reports import MergeReport
from mpfs.objects import Budget, Commit, ObjectId, Plan, object_id
from mpfs.store import Store

if TYPE_CHECKING:
    from mpfs.merge.inputs import OnMismatch
    from mpfs.merge.planner import Policy


def read_documents(recipe: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[tuple[Recipe, ...], Path | None]:
    """The documents of a recipe (one, if it is a mapping), and the folder that its paths may start from.

    Raises:
        NotFoundError: there is no such file.
        RecipeError: it has mistakes.
    """
    if isinstance(recipe, Mapping):
        return (recipe_from_mapping(recipe),), None
    return load_recipes(Path(recipe)), Path(recipe).parent


def plan_document(
    recipe: Recipe,
    finder: ModelFinder,
    budget: Budget,
    policy: Policy,
    seed: int,
    on_mismatch: OnMismatch,
    memory: Memory | None = None,
) -> Plan:
    """Find the models of one document, and plan it; see `Repository.plan`. What `memory` knows is not planned again."""
    memory = memory or Memory(finder.store)
    commits = {name: finder.commit(name) for name in recipe.model_names}
    memory.begin()
    key = memory.plan_key(recipe, commits, budget, policy, seed, on_mismatch)
    plan = memory.plan(key, recipe, commits)
    if plan is not None:
        return plan
    found = find_models(recipe, finder, commits)
    plan = make_plan(
        finder.store,
        recipe,
        found.models,
        budget=budget,
        policy=policy,
        seed=seed,
        on_mismatch=on_mismatch,
        author=finder.author,
        notes=found.notes,
        memory=memory,
    )
    memory.learn_plan(key, recipe, plan)
    return plan


def find_models(recipe: Recipe, finder: ModelFinder, commits: Mapping[str, ObjectId] | None = None) -> Aligned:
    """The models of a recipe in the order of its `model_names`, with the vocabulary that it asks for, and notes. `commits`
    are those of models that have been found.

    Raises:
        As `ModelFinder.commit` and `mpfs.merge.align.align`.
    """

    def load(names: Sequence[str]) -> list[Model]:
        found = commits or {}
        return [load_model(finder.store, name, found.get(name) or finder.commit(name)) for name in names]

    models = load(recipe.model_names)
    if recipe.tokenizer is None and recipe.chat_template is None:
        return Aligned(tuple(models), ())
    from mpfs.merge.align import align

    return align(finder.store, recipe, models, load(recipe.tokenizer_models), finder.author)


def branches_of(documents: Sequence[Recipe], into: str, store: Store) -> list[tuple[str, Recipe]]:
    """The branches that documents are merged to, in order: those of their names, and for the last one `into`.

    Raises:
        RecipeError: a name is that of `into`, or of a branch that no merge has made.
    """
    problems: list[dict[str, str]] = []
    found: list[tuple[str, Recipe]] = []
    for index, document in enumerate(documents, start=1):
        name = into if index == len(documents) or document.name is None else document.name
        found.append((name, document))
        if index == len(documents):
            break
        if name == into:
            problems.append({"path": f"#{index}.name", "message": f"{name} is where the last document is merged to"})
        elif not _is_free(name, store):
            problems.append(
                {"path": f"#{index}.name", "message": f"there is a branch or tag {name} that no merge has made"}
            )
    if problems:
        raise RecipeError("; ".join(f"{item['path']}: {item['message']}" for item in problems), problems=problems)
    return found


def merge_documents(
    documents: Sequence[tuple[str, Recipe]],
    finder: ModelFinder,
    budget: Budget,
    policy: Policy,
    seed: int,
    on_mismatch: OnMismatch,
    *,
    message: str | None,
    options: MergeOptions,
) -> tuple[MergeReport, ...]:
    """Merge documents in order, each to its branch; see `Repository.merge`."""
    reports = []
    memory = Memory(finder.store, use=options.reuse, learn=True)
    for branch, document in documents:
        with finder.store.objects.remembering():
            plan = plan_document(document, finder, budget, policy, seed, on_mismatch, memory)
            report = run_plan(
                finder.store,
                plan,
                branch,
                message=message,
                author=finder.author,
                options=options,
                learnt=memory.take(),
            )
        reports.append(report)
    return tuple(reports)


def committed_note(report: MergeReport) -> str:
    """What is told of a document that is not the last one."""
    return f"document {report.ref}: committed to the branch {report.ref} as {report.commit[:12]}"


def require_merged(
    documents: Sequence[tuple[str, Recipe]],
    finder: ModelFinder,
    budget: Budget,
    policy: Policy,
    seed: int,
    on_mismatch: OnMismatch,
) -> None:
    """Whether each document's branch holds what merging it would make.

    Raises:
        NotFoundError: it does not.
    """
    for branch, document in documents:
        plan = plan_document(document, finder, budget, policy, seed, on_mismatch)
        tip = finder.store.refs.branch_tip(branch)
        if tip is None or finder.store.objects.get(Commit, tip).plan != object_id(plan.encode()):
            raise NotFoundError(
                f"document {branch} is not merged yet, and the last document cannot be planned without its result: "
                "merge the documents first"
            )


def _is_free(name: str, store: Store) -> bool:
    try:
        ref = store.refs.get(name)
    except NotFoundError:
        return True
    return ref.kind == "branch" and store.objects.get(Commit, ref.commit).plan is not None
