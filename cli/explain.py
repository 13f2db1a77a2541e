"""`mpfs explain`: what a merge does, or did, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .explained import bound_facts, cost_facts, model_facts, run_facts, tables
from .options import JsonOption
from .output import HEAD, ID
from .session import Session
from .sizes import format_size

if TYPE_CHECKING:
    from mpfs.history import Explanation, Insight

_ID_LENGTH = 64


def explain(
    ctx: typer.Context,
    target: Annotated[
        str, typer.Argument(metavar="COMMIT|PLAN", help="A ref or commit that a merge made; or a plan's id or file.")
    ],
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write a page with pictures to a file instead, for a browser."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Explain a merge, layer by layer and tensor by tensor.

    Shows what is read of each expert, how much of its change that keeps, and why. Columns are runs of elements that are read and computed together. 'kept' is the share of the change's energy
    (its squared size); 'cosine' says how the experts agree: 0 not at all, below 0 they conflict.

        mpfs explain merged
        mpfs explain plan.json
        mpfs explain merged --html merged.html
    """
    session = Session.of(ctx)
    out = session.output(as_json)
    with session.open() as repository:
        explanation = repository.explain(target)
        entry = None if explanation.figures is None else repository.show(target)
        insight = None if html is None else repository.insight(target)
    if html is not None and insight is not None:
        # Nobody reads a whole id in a heading.
        title = target[:12] if len(target) == _ID_LENGTH and target.isalnum() else target
        about = "" if entry is None else f"{entry.identity[:12]}: {entry.commit.message.partition(chr(10))[0]}"
        _write_page(html, explanation, insight, title, about)
    if as_json:
        document = {**explanation.as_json(), "message": None if entry is None else entry.commit.message}
        if insight is not None:
            document.update(insight=insight.as_json(), file=str(html))
        out.document(document)
        return
    if html is not None:
        out.line(str(html))
        return
    plan = explanation.plan
    if entry is not None:
        out.line("commit ", (entry.identity[:12], ID), "  ", entry.commit.message.partition("\n")[0])
        out.line()
    if explanation.figures is not None:
        out.line(("run", HEAD))
        out.facts(run_facts(explanation.figures))
        out.line()
    budget = {
        "none": "none but those of the recipe" if plan.bounds else "none: everything is read",
        "bytes": format_size(plan.budget.value),
        "percent": f"{plan.budget.value:g}% of the expert bytes",
        "fidelity": f"as little as reaches fidelity {plan.budget.value:g}",
    }[plan.budget.kind]
    facts = [
        ("method", plan.method),
        *model_facts(explanation),
        ("budget", f"{budget} (policy {plan.policy})" if plan.budget.kind != "none" else budget),
        *cost_facts(plan),
        ("fidelity predicted", f"{plan.fidelity_predicted:.4f}"),
        *bound_facts(plan),
    ]
    out.line(("plan", HEAD))
    out.facts(facts)
    for note in plan.notes:
        out.line("  note: ", note)
    out.line()
    tables(out, explanation)


def _write_page(file: Path, explanation: Explanation, insight: Insight, title: str, about: str) -> None:
    from mpfs.history.page import explanation_page

    file.write_text(explanation_page(explanation, insight, title, about), encoding="utf-8")
