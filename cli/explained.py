"""How an explanation of a plan is shown: the plan view, by layer and by tensor, and the figures of a run above it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .output import HEAD, Column, Output
from .sizes import format_count, format_seconds, format_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from mpfs.history import Explanation
    from mpfs.history.explain import ExpertShare, ModelShare
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
            f"{figures.blocks_kept:,} kept from the base{_touched(figures)}",
        ),
        ("time", format_seconds(figures.seconds)),
    ]
    if predicted is not None:
        facts.insert(-1, ("fidelity predicted", f"{predicted:.4f}"))
    if figures.fidelity is not None:
        facts.insert(-1, ("fidelity measured", f"{figures.fidelity:.4f}"))
    return facts


def _touched(figures: Figures) -> str:
    touched = figures.blocks_computed + figures.blocks_reused
    total = touched + figures.blocks_kept
    return f" ({touched / total:.1%} touched)" if total else ""


def cost_facts(plan: Plan) -> list[tuple[str, str]]:
    """What a plan reads, writes and refers to, apart."""
    cost = plan.cost
    share = f" ({cost.expert_bytes_planned / cost.expert_bytes_full:.1%})" if cost.expert_bytes_full else ""
    return [
        (
            "expert reads",
            f"{format_size(cost.expert_bytes_planned)} of {format_size(cost.expert_bytes_full)}{share}",
        ),
        ("base reads", format_size(cost.base_bytes_read)),
        ("writes", f"at most {format_size(cost.bytes_written)}"),
        ("kept", f"{format_size(plan.bytes_kept)} of the base, referenced"),
        ("blocks", f"{cost.blocks_computed:,} computed, {cost.blocks_kept:,} kept from the base"),
    ]


def model_facts(explanation: Explanation) -> list[tuple[str, str]]:
    """A line for each model: its commit; and of an expert, what is read of it, and the method's parameters for it."""
    from mpfs.history.explain import ranges_text

    plan = explanation.plan
    experts = iter(explanation.experts)
    facts = []
    for index, model in enumerate(plan.models):
        name = f"{model.name} @ {model.commit[:12]}"
        if index == plan.base:
            facts.append(("base", name))
            continue
        item = next(experts)
        parameters = ranges_text(item.parameters)
        read = f"{item.columns_read:,} of {format_count(item.columns, 'column')} read"
        facts.append(("expert", f"{name}: {read}" + (f"; {parameters}" if parameters else "")))
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


def tables(out: Output, explanation: Explanation) -> None:
    """The layers, then the tensors."""
    out.line(("layers", HEAD))
    layer_table(out, explanation)
    out.line()
    out.line(("tensors", HEAD))
    tensor_table(out, explanation)


def layer_table(out: Output, explanation: Explanation) -> None:
    """One row a layer: what is read of each expert, how much of the change that keeps, and what became of its tensors."""
    experts = [item.model for item in explanation.experts]
    # Those that are the same everywhere are told once, above.
    varying = {
        item.model: {name for name, (low, high) in item.parameters.items() if low != high}
        for item in explanation.experts
    }
    any_vary = any(varying.values())
    columns = [Column("layer"), *_read_titles(experts), Column("kept", "right"), Column("cosine", "right")]
    columns += [Column("parameters")] * any_vary + [Column("tensors")]
    rows = []
    for layer in explanation.layers:
        cosine = "" if layer.cosine is None else f"{layer.cosine:+.3f}"
        parameters = [_parameters(layer.experts, varying)] * any_vary
        rows.append(
            [layer.name, *_read_cells(experts, layer.experts), f"{layer.kept:.1%}", cosine, *parameters, layer.why]
        )
    out.table(columns, rows, name=0)


def tensor_table(out: Output, explanation: Explanation) -> None:
    """One row a tensor: what is done, what is read of each expert, how much of the change that keeps, and why."""
    plan = explanation.plan
    experts = [item.model for item in explanation.experts]
    columns = [Column("tensor"), Column("operator"), *_read_titles(experts)]
    columns += [Column("kept", "right"), Column("cosine", "right"), Column("why")]
    rows = []
    for tensor in explanation.tensors:
        operator = plan.method if tensor.action == "compute" else tensor.action
        cosine = "" if tensor.cosine is None else f"{tensor.cosine:+.3f}"
        read = _read_cells(experts, tensor.experts)
        rows.append([tensor.name, operator, *read, f"{tensor.kept:.1%}", cosine, tensor.why])
    out.table(columns, rows, name=0)


def _parameters(experts: Sequence[ModelShare], wanted: Mapping[str, AbstractSet[str]]) -> str:
    """The wanted parameters of each expert, or of all together where there are many."""
    from mpfs.history.explain import ranges_text, spanned

    found = {
        item.model: {name: ends for name, ends in item.parameters.items() if name in wanted[item.model]}
        for item in experts
    }
    if len(experts) > _MOST_EXPERT_COLUMNS:
        return ranges_text(spanned(found.values()))
    return "; ".join(f"{_short(model)} {ranges_text(ranges)}" for model, ranges in found.items() if ranges)


def _read_titles(experts: Sequence[str]) -> list[Column]:
    titles = [_short(name) for name in experts] if len(experts) <= _MOST_EXPERT_COLUMNS else ["columns read"]
    return [Column(title, "right") for title in titles]


def _read_cells(experts: Sequence[str], shares: Sequence[ExpertShare] | Sequence[ModelShare]) -> list[str]:
    """Columns read, of all: of each expert, or of all together where there are many."""
    if len(experts) <= _MOST_EXPERT_COLUMNS:
        found = {item.model: item for item in shares}
        return [
            f"{found[name].columns_read:,}/{found[name].columns:,}" if name in found and found[name].columns else ""
            for name in experts
        ]
    return [f"{sum(item.columns_read for item in shares):,}/{sum(item.columns for item in shares):,}"]


def _short(name: str) -> str:
    """A model's name as a column's title: the end of a long one."""
    return name if len(name) <= _TITLE_LENGTH else "…" + name[1 - _TITLE_LENGTH :]
