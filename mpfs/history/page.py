"""An explanation as one HTML page that needs nothing else: pictures, tables, light and dark. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

from mpfs.history.explain import ExpertShare, Explanation, ModelShare, TensorExplanation, ranges_text, spanned
from mpfs.history.insight import CurvePoint, Insight, natural
from mpfs.history.pictures import budget_curve, conflict_matrix, layer_maps, size
from mpfs.objects import Plan

_NAMED = 6
"""Experts that the first line names; half as many where names are long."""

STYLE = """
:root{color-scheme:light dark;--paper:#fbfbfa;--card:#fff;--ink:#1c2024;--soft:#5f6770;--rule:#e3e5e8;--cold:#f0f2f4;
--change:#45a5c9;--read:#a584e0;--kept:#4fae78;--with:#6b9df0;--against:#ee7563;--cell:#000;
--a:#2563b8;--b:#2c7a4b;--c:#7a4fb5;--bad:#c0392b;--dot:#d9480f}
@media(prefers-color-scheme:dark){:root{--paper:#14171a;--card:#1b1f23;--ink:#e6e8ea;--soft:#98a1aa;--rule:#2c3238;
--cold:#23282d;--change:#1f7391;--read:#7d52bd;--kept:#2a7a4b;--with:#2c66c4;--against:#b8402f;--cell:#fff;
--a:#6ea8ff;--b:#5cc486;--c:#b08cf0;--bad:#ff7b6b;--dot:#ff9248}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1300px;margin:0 auto;padding:32px 24px 64px}
h1{font-size:26px;line-height:1.25;margin:0 0 2px;letter-spacing:-.01em;overflow-wrap:anywhere}h2{font-size:18px;margin:40px 0 4px}
p{margin:4px 0 14px;color:var(--soft);max-width:78ch;overflow-wrap:anywhere}p.lead{margin-bottom:20px}
p.kind{margin:0;font-size:13px;letter-spacing:.06em;text-transform:uppercase}
code{font:13px ui-monospace,"SF Mono",Menlo,Consolas,monospace}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin:0}
.facts div{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:12px 14px}
.facts dt{color:var(--soft);font-size:13px}.facts dd{margin:0;font-size:20px;font-variant-numeric:tabular-nums}
.facts small{display:block;font-size:12.5px;color:var(--soft)}
.card{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:16px;overflow-x:auto}
.card:focus-visible{outline:2px solid var(--a);outline-offset:2px}
.maps{display:flex;flex-wrap:wrap;gap:20px 24px}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
.map{font-size:11.5px}.map caption{text-align:left;padding-bottom:8px;font-size:14px;white-space:nowrap}
.map caption>span{color:var(--soft);font-size:12.5px}
.scale{display:block}.scale i{display:inline-block;vertical-align:-1px;width:96px;height:11px;border-radius:3px;margin:0 6px;
background:linear-gradient(to right in oklab,var(--cold),var(--hot))}
.scale.both i{background:linear-gradient(to right in oklab,var(--against),var(--cold),var(--with))}
.map th{font-weight:400;font-size:12.5px;text-align:right;padding:0 8px 0 0;color:var(--soft);white-space:nowrap}
.map tbody th{position:sticky;left:0;background:var(--card)}.map thead th{text-align:center;padding:0 3px 5px;vertical-align:bottom}
.map.turned thead th span{display:inline-block;writing-mode:vertical-rl;transform:rotate(180deg);line-height:1.2}
.map tbody td{min-width:34px;height:22px;padding:0 2px;text-align:center;border:2px solid var(--card);border-radius:4px;
color:var(--cell);background:color-mix(in oklab,var(--hot) var(--v),var(--cold))}
.map.wide tbody td{min-width:20px;width:20px;height:20px;padding:0;font-size:0}.map.wide thead th{padding:0 0 5px}
.map tbody td.none{background:repeating-linear-gradient(135deg,var(--cold) 0 2px,transparent 2px 6px)}
.map tbody td.self{background:none}.map tbody td.self,.map tbody td.zero{color:var(--soft)}
.change{--hot:var(--change)}.read{--hot:var(--read)}.kept{--hot:var(--kept)}
.with{--hot:var(--with)}.against{--hot:var(--against)}
svg{display:block}svg.curve{width:100%;max-width:880px;height:auto}
svg text{font:12px system-ui,sans-serif;fill:var(--soft)}svg .axis{font-size:12.5px}
.grid{stroke:var(--rule);fill:none}.guide{stroke:var(--dot);stroke-dasharray:3 4;fill:none}.dot{fill:var(--dot)}
.ring{fill:none;stroke:var(--dot);stroke-width:2.5}
.line{fill:none;stroke-width:2;stroke-linejoin:round}.line.a{stroke:var(--a);stroke-width:2.5}
.line.b{stroke:var(--b)}.line.c{stroke:var(--c);stroke-dasharray:7 4}.line.d{stroke:var(--soft);stroke-dasharray:2 4}
.legend{display:flex;flex-wrap:wrap;gap:4px 20px;margin:0 0 12px;padding:0;list-style:none;font-size:13px}
.legend li{display:flex;align-items:center;gap:7px}.legend b{font-weight:600;color:var(--ink)}.key{width:26px;height:12px;flex:none}
.list{width:100%;font-size:13.5px}.list th{font-weight:600;text-align:left;color:var(--soft);
vertical-align:bottom;border-bottom:1px solid var(--rule);padding:6px 14px 6px 0}
.list td{padding:5px 14px 5px 0;border-bottom:1px solid var(--rule);vertical-align:top}
.list tr:last-child td{border-bottom:0}
.list .n{text-align:right}.list td.n{white-space:nowrap}.list small{display:block;color:var(--soft);font-size:12px}
.list .name{min-width:clamp(150px,27vw,340px);overflow-wrap:anywhere}.list .reads{min-width:120px}.list .why{min-width:190px;color:var(--soft)}
.bar{display:inline-block;width:48px;height:8px;border-radius:4px;background:var(--cold);overflow:hidden}
.bar i{display:block;height:100%;background:var(--b)}.bar+span{display:inline-block;min-width:58px}
.list .bad{color:var(--bad)}
ul{margin:14px 0 0;padding-left:20px;color:var(--soft);overflow-wrap:anywhere}
footer{margin-top:36px;color:var(--soft);font-size:13px}
@media(max-width:640px){main{padding:20px 14px 48px}.card{padding:12px}svg text{font-size:19px}svg .axis{font-size:20px}
.facts{grid-template-columns:repeat(auto-fit,minmax(132px,1fr));gap:8px}}
@media print{main{max-width:none;padding:0}.card{border:0;padding:0;overflow:visible}body{print-color-adjust:exact}}
"""


def explanation_page(explanation: Explanation, insight: Insight, title: str, subtitle: str = "") -> str:
    """A whole HTML document, which loads nothing. `title` is what was asked about, `subtitle` more words about it."""
    plan, run = explanation.plan, explanation.figures
    body = [
        f'<p class="kind">{"Plan" if run is None else "Merge"}</p><h1>{escape(title)}</h1>',
        f"<p>{escape(subtitle)}</p>" if subtitle else "",
        f'<p class="lead">{_lead(plan)}</p>',
        _facts(_figures(explanation)),
    ]
    if plan.notes:
        body.append(f"<ul>{''.join(f'<li>{escape(note)}</li>' for note in plan.notes)}</ul>")
    if insight.curves:
        measured = None
        if run is not None and run.fidelity is not None:
            measured = CurvePoint(plan.cost.expert_bytes_planned, run.fidelity)
        body += _section(
            "What a budget buys",
            "Fidelity is how much of the full merge's change a budgeted one makes; 1 is the full merge. Each line is a "
            "way of choosing what to read (a policy); all lines are predicted from statistics alone.",
            budget_curve(insight.curves, insight.chosen, measured),
        )
    if insight.tensors:
        based = plan.base is not None
        words = (
            "How much each expert changes each layer of the base (by the squared norm of its weighted delta; coloured by "
            "the norm), how much of what differs is read, and how much of the change that keeps. Hatched: nothing differs "
            "from the base."
        )
        words = words if based else "How much of each model is read. Hatched: it does not have the layer."
        body += _section("Layers and experts", words, layer_maps(insight, based=based))
    if len(insight.experts) > 1 and any(any(value is not None for value in row) for row in insight.conflict):
        body += _section(
            "Agreement",
            "The cosine between the experts' weighted changes: above 0 they pull the same way, near 0 they have nothing to "
            "do with each other, below 0 they conflict. Hatched: one of the two changes nothing.",
            conflict_matrix(insight),
        )
    body += _section("Models", "", _models(explanation, insight))
    if plan.bounds:
        body += _section(
            "Budgets of the recipe", "What each allows, and what the plan reads under it.", _bounds(explanation)
        )
    body += _section(
        "Layer by layer",
        "What became of each layer's tensors, and what is read of each expert. A column is a run of elements that are read and computed together; kept is "
        "the share of the change's energy (its squared norm) that is read.",
        _layers(explanation),
    )
    body += _section("Tensors", "The same for each tensor, and why.", _tensors(explanation))
    body.append("<footer>Made by <code>mpfs explain --html</code>.</footer>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)} · MPFS</title><style>{STYLE}</style></head><body><main>"
        f"{''.join(body)}</main></body></html>\n"
    )


def _section(heading: str, text: str, content: str) -> list[str]:
    """A heading, words, and a card, which can be scrolled by keyboard where it is wider than the window."""
    words = f"<p>{escape(text, quote=False)}</p>" if text else ""
    card = f'<div class="card" role="region" tabindex="0" aria-label="{escape(heading)}">{content}</div>'
    return [f"<h2>{heading}</h2>{words}", card]


def _lead(plan: Plan) -> str:
    experts = [model.name for index, model in enumerate(plan.models) if index != plan.base]
    base = "" if plan.base is None else f" into <b>{escape(plan.models[plan.base].name)}</b>"
    most = _NAMED if sum(map(len, experts[:_NAMED])) <= _NAMED * 16 else _NAMED // 2
    shown = ", ".join(f"<b>{escape(name)}</b>" for name in experts[:most])
    more = f" and {len(experts) - most} more" if len(experts) > most else ""
    return f"<code>{escape(plan.method)}</code> of {shown}{more}{base}"


def _figures(explanation: Explanation) -> list[tuple[str, str, str]]:
    plan, run = explanation.plan, explanation.figures
    full = plan.cost.expert_bytes_full
    budget = {
        "none": ("none", "but those of the recipe" if plan.bounds else "everything is read"),
        "bytes": (size(plan.budget.value), f"policy {plan.policy}"),
        "percent": (f"{plan.budget.value:g}%", f"of the expert bytes, policy {plan.policy}"),
        "fidelity": (f"≥ {plan.budget.value:g}", f"fidelity asked for, policy {plan.policy}"),
    }[plan.budget.kind]
    planned = plan.cost.expert_bytes_planned
    facts = [
        ("budget", *budget),
        ("fidelity predicted", f"{plan.fidelity_predicted:.4f}", "1 is the full merge"),
        ("expert reads planned", size(planned), f"{planned / full:.1%} of {size(full)}" if full else ""),
    ]
    if run is None:
        cost = plan.cost
        touched, total = cost.blocks_computed, cost.blocks_computed + cost.blocks_kept
        facts += [
            ("base reads planned", size(cost.base_bytes_read), f"at most {size(cost.bytes_written)} written"),
            ("blocks computed", f"{touched:,}", f"{touched / total:.1%} of {total:,}" if total else ""),
            ("kept from the base", size(plan.bytes_kept), f"{cost.blocks_kept:,} blocks, referenced"),
        ]
        return facts
    if run.fidelity is not None:
        facts.insert(2, ("fidelity measured", f"{run.fidelity:.4f}", f"{run.fidelity - plan.fidelity_predicted:+.4f}"))
    touched = run.blocks_computed + run.blocks_reused
    total = touched + run.blocks_kept
    facts += [
        (
            "expert reads",
            size(run.expert_bytes_read),
            f"{run.expert_bytes_read / planned:.1%} of the plan" if planned else "",
        ),
        ("base reads", size(run.base_bytes_read), f"{size(run.bytes_written)} written"),
        ("blocks touched", f"{touched / total:.1%}" if total else "0%", f"{touched:,} of {total:,}"),
        ("blocks reused", f"{run.blocks_reused:,}", f"{run.blocks_computed:,} computed, {run.blocks_kept:,} kept"),
        ("time", f"{run.seconds:.2f} s", ""),
    ]
    return facts


def _facts(facts: Sequence[tuple[str, str, str]]) -> str:
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>"
        for name, value, note in facts
    )
    return f'<dl class="facts">{cells}</dl>'


def _table(heads: Sequence[tuple[str, str]], rows: Iterable[str]) -> str:
    """A table whose columns have titles and classes."""
    titles = "".join(f'<th scope="col" class="{kind}">{title}</th>' for title, kind in heads)
    return f'<table class="list"><thead><tr>{titles}</tr></thead><tbody>{"".join(rows)}</tbody></table>'


def _models(explanation: Explanation, insight: Insight) -> str:
    plan = explanation.plan
    rows = []
    shares = {item.model: item for item in explanation.experts}
    for index, model in enumerate(plan.models):
        read = total = 0
        if index != plan.base:
            place = insight.experts.index(model.name)
            for tensor in insight.tensors:
                share = tensor.experts[place]
                if share is not None:
                    read, total = read + share.nbytes_read, total + share.nbytes
        parameters = "" if index == plan.base else ranges_text(shares[model.name].parameters)
        role = "base" if index == plan.base else "expert"
        share_read = f" ({read / total:.1%})" if total else ""
        amount = "" if role == "base" else f"{size(read)} of {size(total)}{share_read}"
        rows.append(
            f'<tr><td class="name">{escape(model.name)}</td><td>{role}</td><td><code>{model.commit[:12]}</code></td>'
            f'<td>{escape(parameters)}</td><td class="n">{amount}</td></tr>'
        )
    heads = [("model", "name"), ("role", ""), ("commit", ""), ("parameters", ""), ("read of what differs", "n")]
    return _table(heads, rows)


def _bounds(explanation: Explanation) -> str:
    plan = explanation.plan
    rows = []
    for bound in plan.bounds:
        allowed = f"fidelity {bound.budget.value:g}" if bound.limit is None else size(bound.limit)
        model = "all experts" if bound.model is None else plan.models[bound.model].name
        tensors = "all" if bound.filter is None else f"with {bound.filter!r}"
        rows.append(
            f"<tr><td><code>{escape(bound.path)}</code></td><td>{escape(model)}</td><td>{escape(tensors)}</td>"
            f'<td class="n">{allowed}</td><td class="n">{size(bound.planned)}</td><td class="n">{size(bound.full)}</td></tr>'
        )
    heads = [("budget", ""), ("of", ""), ("tensors", ""), ("allowed", "n"), ("read", "n"), ("without budgets", "n")]
    return _table(heads, rows)


def _layers(explanation: Explanation) -> str:
    rows = (
        f'<tr><td class="name"><code>{_name(layer.name)}</code></td>'
        f'<td class="n">{layer.computed:,}/{layer.tensors:,}</td><td>{escape(_read_of(layer.experts))}</td>'
        f"<td>{escape(_parameters(layer.experts))}</td>{_kept_and_cosine(layer.kept, layer.cosine)}"
        f'<td class="why">{escape(layer.why)}</td></tr>'
        for layer in explanation.layers
    )
    heads = [("layer", "name"), ("tensors computed", "n"), ("columns read", "reads"), ("parameters", "")]
    return _table([*heads, ("kept", "n"), ("cosine", "n"), ("its tensors are read", "why")], rows)


def _name(name: str) -> str:
    """A dotted name that can be broken where a reader would break it."""
    return re.sub(r"([._/])", r"\1<wbr>", escape(name))


def _parameters(experts: Sequence[ModelShare]) -> str:
    """Those of each expert, or of all at once where they are the same or many."""
    texts = {ranges_text(item.parameters) for item in experts if item.parameters}
    if len(texts) < 2 or len(experts) > 4:
        return ranges_text(spanned(item.parameters for item in experts))
    return "; ".join(f"{item.model} {ranges_text(item.parameters)}" for item in experts if item.parameters)


def _read_of(experts: Sequence[ExpertShare | ModelShare]) -> str:
    if len(experts) <= 4:
        return ", ".join(f"{item.model} {item.columns_read:,}/{item.columns:,}" for item in experts)
    done = sum(item.columns_read for item in experts)
    return f"{done:,}/{sum(item.columns for item in experts):,} in {len(experts)} experts"


def _kept_and_cosine(kept: float, cosine: float | None) -> str:
    bar = f'<span class="bar"><i style="width:{100 * kept:.1f}%"></i></span><span>{kept:.1%}</span>'
    conflict = " bad" if cosine is not None and cosine < -0.1 else ""
    return f'<td class="n">{bar}</td><td class="n{conflict}">{"" if cosine is None else f"{cosine:+.3f}"}</td>'


def _tensors(explanation: Explanation) -> str:
    ordered = sorted(explanation.tensors, key=lambda tensor: natural(tensor.name))
    rows = (_tensor(explanation.plan, tensor) for tensor in ordered)
    heads = [("tensor", "name"), ("operator", ""), ("columns computed", "n"), ("columns read", "reads")]
    return _table([*heads, ("kept", "n"), ("cosine", "n"), ("why", "why")], rows)


def _tensor(plan: Plan, tensor: TensorExplanation) -> str:
    shape = " \u00d7 ".join(map(str, tensor.shape)) or "scalar"
    operator = plan.method if tensor.action == "compute" else tensor.action
    return (
        f'<tr><td class="name"><code>{_name(tensor.name)}</code><small>{escape(tensor.dtype)}, {shape}</small></td>'
        f'<td>{escape(operator)}</td><td class="n">{tensor.columns_computed:,}/{tensor.columns:,}</td>'
        f"<td>{escape(_read_of(tensor.experts))}</td>{_kept_and_cosine(tensor.kept, tensor.cosine)}"
        f'<td class="why">{escape(tensor.why)}</td></tr>'
    )
