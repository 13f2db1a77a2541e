"""A merge as a transaction: plan it over commits, run the plan, publish the result as a commit on a branch."""

from __future__ import annotations

import json
import time as clock
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from mpfs.formats.training import DIRECTORY as TRAINING_STATE
from mpfs.merge.architecture import Config
from mpfs.merge.card import card_files
from mpfs.merge.config import layers_taken
from mpfs.merge.engine import Outcome, execute
from mpfs.merge.finite import check_finite
from mpfs.merge.models import Model, ModelTensor
from mpfs.merge.operators import Operator, get_operator
from mpfs.merge.options import MergeOptions
from mpfs.merge.output import assemble
from mpfs.merge.recipe import Recipe, recipe_from_mapping
from mpfs.merge.remembered import Memory
from mpfs.merge.reports import MergeReport
from mpfs.merge.room import require_room
from mpfs.objects import (
    BlobFile,
    Budget,
    Commit,
    Figures,
    Input,
    ModelRef,
    ObjectId,
    Plan,
    Run,
    Snapshot,
    Tensor,
    object_id,
)
from mpfs.store import RefMove, Store, WriteFigures, Writer
from mpfs.store.pairs import PairTable, put_pairs

if TYPE_CHECKING:
    from mpfs.merge.inputs import Fit, OnMismatch
    from mpfs.merge.planner import Policy

_LARGEST_CONFIG = 1 << 24


def load_model(store: Store, name: str, commit: ObjectId, config_path: str = "config.json") -> Model:
    """A commit as a model of a merge: its tensor objects by name, and its config.json; no block of a tensor is read.

    The state of a training (`mpfs.formats.training`) is no part of the model.
    """
    snapshot_id = store.objects.get(Commit, commit).snapshot
    whole = store.objects.get(Snapshot, snapshot_id)
    snapshot = whole.outside(TRAINING_STATE)
    notes = () if snapshot is whole else (f"{name}: the state of its training is no part of the merge",)
    found = store.objects.get_many(Tensor, snapshot.tensors.values())
    tensors = {key: ModelTensor(identity, found[identity]) for key, identity in snapshot.tensors.items()}
    return Model(ModelRef(name, commit, snapshot_id), tensors, _config(store, snapshot, config_path), notes)


def _config(store: Store, snapshot: Snapshot, path: str) -> Config:
    """The model's config.json; empty if it has none that can be read."""
    file = snapshot.file(path)
    if not isinstance(file, BlobFile) or file.size > _LARGEST_CONFIG:
        return {}
    content = store.objects.get(Tensor, file.content)
    try:
        value = json.loads(b"".join(store.blocks.read(block, file.path) for block in content.blocks))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def make_plan(
    store: Store,
    recipe: Recipe,
    models: Sequence[Model],
    *,
    budget: Budget,
    policy: Policy,
    seed: int,
    on_mismatch: OnMismatch,
    author: str = "",
    notes: Sequence[str] = (),
    memory: Memory | None = None,
) -> Plan:
    """Fit the models together and choose what to read; see `Repository.plan`.

    `author` is who cut models are by, `notes` what a person should know of the models besides, `memory` what is known of
    earlier plans.
    """
    from mpfs.merge.compile import compile_plan

    fitting = fit_models(store, recipe, models, on_mismatch, author)
    return compile_plan(
        recipe,
        fitting.models,
        replace(fitting.fit, notes=(*notes, *fitting.fit.notes)),
        fitting.operator,
        store.blocks,
        block_size=store.info.block_size,
        budget=budget,
        policy=policy,
        seed=seed,
        pairs=PairTable(store.environment),
        memory=memory,
    )


@dataclass(frozen=True, slots=True)
class Fitting:
    """Models that fit together, cut where they have to be, and the method that merges them."""

    models: tuple[Model, ...]
    fit: Fit
    operator: Operator


def fit_models(
    store: Store, recipe: Recipe, given: Sequence[Model], on_mismatch: OnMismatch, author: str = ""
) -> Fitting:
    """Fit the models of a recipe together, in the order of its `model_names`.

    Raises:
        MismatchError: they do not fit.
        RecipeError: parameter values that the method cannot work with.
    """
    from mpfs.merge.inputs import fit

    operator = get_operator(recipe.method)
    models = list(given)
    cuts: list[str] = []
    if on_mismatch == "crop":
        from mpfs.merge.crop import cropped, find_crops

        for index, crop in find_crops(models).items():
            model = models[index]
            models[index] = load_model(store, model.ref.name, cropped(store, model, crop, author))
            cuts.append(crop.note(model.ref.name))
    fitted = fit(recipe, models, operator, on_mismatch)
    return Fitting(tuple(models), replace(fitted, notes=(*cuts, *fitted.notes)), operator)


def check_foreign_plan(store: Store, plan: Plan) -> None:
    """A plan from elsewhere must fit this repository and itself; raises what `mpfs.merge.check` raises."""
    from mpfs.merge.check import check_models, check_plan

    check_models(store, plan)
    check_plan(plan, [load_model(store, model.name, model.commit) for model in plan.models])


def run_plan(
    store: Store,
    plan: Plan,
    into: str,
    *,
    message: str | None,
    author: str,
    options: MergeOptions,
    learnt: Mapping[bytes, bytes] = MappingProxyType({}),
) -> MergeReport:
    """Run a plan and commit its result to a branch; see `Repository.merge`. `learnt` is what the reuse table shall have of
    the planning."""
    started, started_at = clock.monotonic(), int(clock.time())
    tip = store.refs.branch_tip(into)
    with store.writer() as writer:
        if options.check_space:
            require_room(store, writer, [plan], reuse=options.reuse)
        outcome = execute(plan, store, writer, options)
        for key, value in learnt.items():
            writer.put_reuse(key, value)
        return publish_outcome(
            store,
            writer,
            plan,
            outcome,
            into,
            tip,
            message=message or describe_merge(plan),
            author=author,
            options=options,
            started_at=started_at,
            seconds=lambda: clock.monotonic() - started,
        )


def publish_outcome(
    store: Store,
    writer: Writer,
    plan: Plan,
    outcome: Outcome,
    into: str,
    tip: ObjectId | None,
    *,
    message: str,
    author: str,
    options: MergeOptions,
    started_at: int,
    seconds: Callable[[], float],
    variants: int = 1,
) -> MergeReport:
    """Commit what running a plan came to.

    Args:
        store, writer: where to; the writer took the outcome's blocks.
        plan, outcome: what was run, and what came out.
        into, tip: the branch, and where it was before.
        message, author: of the commit.
        options: of the merge.
        started_at: in seconds since 1970, UTC.
        seconds: how long it has taken, asked when all is done.
        variants: how many plans the writer took blocks of; all blocks must be durable if there are several.

    Raises:
        RefConflictError: the branch has moved.
        NonFiniteError: the result holds NaN or infinity.
    """
    identity = object_id(plan.encode())
    before = replace(writer.figures)
    template = store.objects.get(Snapshot, plan.models[plan.template].snapshot)
    assembled = assemble(
        template,
        outcome.tensors,
        plan.out_dtype or plan.work_dtype,
        layers=layers_taken(plan.recipe),
        # Without a config.json it is no model's directory, and gets no card.
        replaced={} if template.file("config.json") is None else card_files(plan),
        objects=store.objects,
        blocks=store.blocks,
        writer=writer,
        block_size=store.info.block_size,
    )
    writer.flush()
    odd = check_finite(plan, outcome.tensors, store.objects, store.blocks, allow=options.allow_nonfinite)
    fidelity = _measure(store, plan) if options.verify_fidelity else None
    written = writer.figures
    if variants > 1:
        # The writer has also written for the others.
        written = outcome.written.plus(writer.figures.less(before))
    figures = _figures(plan, outcome, written, seconds(), fidelity, variants)
    snapshot = object_id(assembled.snapshot.encode())
    current = None if tip is None else store.objects.get(Commit, tip)
    same = current is not None and current.snapshot == snapshot and current.plan == identity
    if same and tip is not None:
        put_pairs(store, outcome.pairs)
        result = tip
    else:
        commit = Commit(
            snapshot=snapshot,
            parents=() if tip is None else (tip,),
            inputs=_inputs(plan),
            plan=identity,
            message=message,
            author=author,
            time=started_at,
        )
        result = writer.publish(
            tensors=assembled.tensors,
            snapshot=assembled.snapshot,
            commit=commit,
            plan=plan,
            run=lambda made: Run(made, identity, started_at, figures),
            move=RefMove(into, tip, "branch", f"merge: {plan.method}"),
            pairs=outcome.pairs,
        )
    return MergeReport(
        result, into, snapshot, identity, plan.fidelity_predicted, figures, (*plan.notes, *odd), new_commit=not same
    )


def _figures(
    plan: Plan, outcome: Outcome, written: WriteFigures, seconds: float, fidelity: float | None, variants: int
) -> Figures:
    return Figures(
        expert_bytes_full=plan.cost.expert_bytes_full,
        expert_bytes_planned=plan.cost.expert_bytes_planned,
        expert_bytes_read=outcome.expert_bytes_read,
        base_bytes_read=outcome.base_bytes_read,
        bytes_written=written.bytes_written,
        blocks_kept=outcome.blocks_kept,
        blocks_computed=outcome.blocks_computed,
        blocks_reused=outcome.blocks_reused,
        blocks_deduplicated=written.deduplicated_blocks,
        seconds=seconds,
        fidelity=fidelity,
        variants=variants,
    )


def _measure(store: Store, plan: Plan) -> float:
    """How close to the same merge, of the same commits, without a budget."""
    from mpfs.merge.fidelity import measure_fidelity

    full = make_plan(
        store,
        recipe_from_mapping(plan.recipe).without_budgets(),
        [load_model(store, model.name, model.commit) for model in plan.models],
        budget=Budget(),
        policy="energy",
        seed=plan.seed,
        on_mismatch="base",
    )
    return measure_fidelity(plan, full, store)


def _inputs(plan: Plan) -> tuple[Input, ...]:
    return tuple(
        Input("base" if index == plan.base else "expert", model.name, model.commit)
        for index, model in enumerate(plan.models)
    )


def describe_merge(plan: Plan) -> str:
    """The message of a merge's commit, where none is given."""
    experts = [model.name for index, model in enumerate(plan.models) if index != plan.base]
    base = "" if plan.base is None else f" into {plan.models[plan.base].name}"
    limit = {
        "none": "",
        "bytes": f", budget {int(plan.budget.value):,} bytes",
        "percent": f", budget {plan.budget.value:g}%",
        "fidelity": f", fidelity {plan.budget.value:g}",
    }[plan.budget.kind]
    return f"Merge {', '.join(experts)}{base} ({plan.method}{limit})"
