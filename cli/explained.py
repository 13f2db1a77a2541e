"""How an explanation of a plan is shown: the plan view, tensor by tensor, and the figures of a run above it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .output import Column, Output
from .sizes import format_seconds, format_size

if TYPE_CHECKING:
    from mpfs.history import Explanation
    from mpfs.objects import Figures, Plan

_MOST_EXPERT_COLUMNS = 4
_TITLE_LENGTH = 16


def run_facts(figures: Figures, predicted: float | None = None) -> list[tuple[str, str]]:
    """The figures of a run as names and values; with the fidelity that its plan `predicted`."""
    full = figures.expert_bytes_full
    share = f" ({figures.expert_bytes_read / full:.1%} of {format_size(full)})" if full else ""
    facts = [
        ("expert bytes read", f"{format_size(figures.expert_bytes_read)}{share}"),
        ("expert bytes planned", format_size(figures.expert_bytes_planned)),
        ("base bytes read", format_size(figures.base_bytes_read)),
        ("bytes written", format_size(figures.bytes_written)),
        (
            "blocks",
            f"{figures.blocks_computed:,} computed, {figures.blocks_reused:,} reused, "
            f"{figures.blocks_kept:,} kept from the base",
        ),
        ("time", format_seconds(figures.seconds)),
    ]
    if predicted is not None:
        facts.insert(-1, ("fidelity predicted", f"{predicted:.4f}"))
    if figures.fidelity is not None:
        facts.insert(-1, ("fidelity measured", f"{figures.fidelity:.4f}"))
    return facts


def bound_facts(plan: Plan) -> list[tuple[str, str]]:
    """The recipe's own budgets: what each allows, and what is read under it."""
    facts = []
    for bound in plan.bounds:
        asked = f"fidelity {bound.budget.value:g}" if bound.limit is None else f"of {format_size(bound.limit)} allowed"
        about = [] if bound.filter is None else [f"tensors with {bound.filter!r}"]
        if bound.model is not None:
            about.append(plan.models[bound.model].name)
        where = f", {' of '.join(about)}" if about else ""
        facts.append(
            (bound.path, f"{format_size(bound.planned)} {asked}{where}; {format_size(bound.full)} without budgets")
        )
    return facts


def tensor_table(out: Output, explanation: Explanation) -> None:
    """One row a tensor: what is done, what is read of each expert, how much of the change that keeps, and why."""
    plan = explanation.plan
    experts = [model.name for index, model in enumerate(plan.models) if index != plan.base]
    apart = len(experts) <= _MOST_EXPERT_COLUMNS
    titles = [_short(name) for name in experts] if apart else ["columns read"]
    columns = [Column("tensor"), Column("operator")]
    columns += [Column(title, "right") for title in titles]
    columns += [Column("kept", "right"), Column("cosine", "right"), Column("why")]
    rows = []
    for tensor in explanation.tensors:
        shares = {item.model: item for item in tensor.experts}
        if apart:
            found = [shares.get(name) for name in experts]
            read = ["" if item is None else f"{item.columns_read:,}/{item.columns:,}" for item in found]
        else:
            done = sum(item.columns_read for item in tensor.experts)
            read = [f"{done:,}/{sum(item.columns for item in tensor.experts):,}"]
        operator = plan.method if tensor.action == "compute" else tensor.action
        cosine = "" if tensor.cosine is None else f"{tensor.cosine:+.3f}"
        rows.append([tensor.name, operator, *read, f"{tensor.kept:.1%}", cosine, tensor.why])
    out.table(columns, rows, name=0)


def _short(name: str) -> str:
    """A model's name as a column's title: the end of a long one."""
    return name if len(name) <= _TITLE_LENGTH else "…" + name[1 - _TITLE_LENGTH :]
