"""`mpfs plan`: compile a merge and show it, without running it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .explained import bound_facts, cost_facts, model_facts, tables
from .options import (
    BudgetOption,
    FidelityOption,
    JsonOption,
    MismatchOption,
    OnMismatch,
    Policy,
    PolicyOption,
    SeedOption,
    budget_of,
    flag,
)
from .output import ID, Output
from .session import Session
from .sizes import format_seconds, format_size

if TYPE_CHECKING:
    from mpfs.history import Explanation
    from mpfs.merge.reports import Outlook, PlanReport


def plan(
    ctx: typer.Context,
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A YAML file in mergekit's grammar.")],
    budget: BudgetOption = None,
    fidelity: FidelityOption = None,
    policy: PolicyOption = Policy.energy,
    seed: SeedOption = 0,
    on_mismatch: MismatchOption = OnMismatch.error,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the plan to a file, as JSON.")
    ] = None,
    explain: Annotated[
        bool, flag("--explain", help="Also show each layer and tensor: what is read of it, and why.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Compile a recipe and show what a merge would do; run nothing.

    The plan says what is read, computed and kept, and how close the result will come to the full merge. A model of the recipe is a ref, a commit or a path; a path is imported first. The plan is stored, and
    'mpfs merge PLAN' runs it.

        mpfs plan recipe.yml --budget 10%
        mpfs plan recipe.yml --fidelity 0.95 --explain -o plan.json
    """
    from mpfs.history import explain_plan

    session = Session.of(ctx)
    out = session.output(as_json)
    with session.open() as repository:
        report = repository.plan(
            recipe,
            budget=budget_of(budget, fidelity),
            policy=policy.value,
            seed=seed,
            on_mismatch=on_mismatch.value,
        )
        outlook = repository.outlook(report.plan)
    explanation = explain_plan(report.plan)
    if output is not None:
        output.write_bytes(report.plan.encode())
    if as_json:
        document = {**report.as_json(), "outlook": outlook.as_json()}
        if output is not None:
            document["file"] = str(output)
        if explain:
            told = explanation.as_json()
            document.update(layers=told["layers"], tensors=told["tensors"])
        out.document(document)
    elif session.quiet:
        out.line(report.identity)
    else:
        _summary(out, report, outlook, explanation)
        if explain:
            out.line()
            tables(out, explanation)
        out.line()
        out.line("run it:  mpfs merge ", str(output) if output is not None else report.identity[:12], " --into BRANCH")


def _summary(out: Output, report: PlanReport, outlook: Outlook, explanation: Explanation) -> None:
    plan = report.plan
    out.line("plan ", (report.identity[:12], ID), f"  {plan.method}")
    facts = [*cost_facts(plan), ("fidelity", f"{plan.fidelity_predicted:.4f} predicted"), *bound_facts(plan)]
    seconds = report.seconds_estimated
    if outlook.blocks_reused:
        seconds = outlook.seconds_estimated
        facts.append(
            (
                "known already",
                f"{outlook.blocks_reused:,} of {plan.cost.blocks_computed:,} blocks; {format_size(outlook.expert_bytes)} of the "
                f"experts left to read, {format_size(outlook.bytes_written)} to write",
            )
        )
    facts.append(("on the disk", f"at most {format_size(outlook.disk_bytes)} more"))
    if seconds is not None:
        facts.append(("time", f"about {format_seconds(seconds)}, going by past runs"))
    facts += model_facts(explanation)
    facts.append(("other files", f"those of {plan.models[plan.template].name}"))
    out.facts(facts)
    for note in plan.notes:
        out.line("  note: ", note)
