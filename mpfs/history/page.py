"""An explanation as one HTML page that needs nothing else: pictures, tables, light and dark. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from mpfs.history.explain import ExpertShare, Explanation, ModelShare, TensorExplanation, ranges_text, spanned
from mpfs.history.insight import Insight, natural
from mpfs.history.pictures import budget_curve, conflict_matrix, layer_maps, size
from mpfs.objects import Plan

_STYLE = """
:root{color-scheme:light dark;--paper:#fbfbfa;--card:#fff;--ink:#1c2024;--soft:#5f6770;--rule:#e3e5e8;--cold:#f0f2f4;
--change:#1f6f8b;--read:#7a4fb5;--kept:#2c7a4b;--with:#2563b8;--against:#c0392b;--dot:#d9480f}
@media(prefers-color-scheme:dark){:root{--paper:#14171a;--card:#1b1f23;--ink:#e6e8ea;--soft:#98a1aa;--rule:#2c3238;
--cold:#23282d;--change:#4fb3d1;--read:#b08cf0;--kept:#5cc486;--with:#6ea8ff;--against:#ff7b6b;--dot:#ff9248}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1180px;margin:0 auto;padding:32px 24px 64px}
h1{font-size:26px;margin:0 0 2px;letter-spacing:-.01em;overflow-wrap:anywhere}h2{font-size:18px;margin:40px 0 4px}
p{margin:4px 0 14px;color:var(--soft);max-width:78ch}p.lead{margin-bottom:20px}
code{font:13px ui-monospace,"SF Mono",Menlo,Consolas,monospace}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(168px,1fr));gap:12px;margin:0}
.facts div{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:12px 14px}
.facts dt{color:var(--soft);font-size:13px}.facts dd{margin:0;font-size:20px;font-variant-numeric:tabular-nums}
.facts small{display:block;font-size:12.5px;color:var(--soft)}
.card{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:16px;overflow-x:auto}
.maps{display:flex;flex-wrap:wrap;gap:20px 30px}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
.map{font-size:12.5px}.map caption{text-align:left;padding-bottom:6px;font-size:14px}
.map caption span{color:var(--soft);font-size:12.5px}
.map th{font-weight:400;text-align:right;padding:0 8px 0 0;color:var(--soft);white-space:nowrap}
.map thead th{text-align:center;padding:0 3px 5px;vertical-align:bottom}
.map.turned thead th span{writing-mode:vertical-rl;transform:rotate(180deg)}
.map td{min-width:44px;height:24px;padding:0 4px;text-align:center;border:2px solid var(--card);border-radius:4px;
background:color-mix(in oklab,var(--hot) var(--v),var(--cold))}
.map.wide td{min-width:20px;width:20px;height:20px;padding:0}
.map td.strong{color:var(--card)}
.map td.none{background:repeating-linear-gradient(135deg,var(--cold) 0 2px,transparent 2px 6px)}
td.change{--hot:var(--change)}td.read{--hot:var(--read)}td.kept{--hot:var(--kept)}
td.with{--hot:var(--with)}td.against{--hot:var(--against)}
svg{display:block;width:100%;max-width:920px;height:auto}
svg text{font:12px system-ui,sans-serif;fill:var(--soft)}svg .axis{font-size:12.5px}
svg .label{fill:var(--ink);font-weight:600;paint-order:stroke;stroke:var(--card);stroke-width:4px;font-size:13px}
.grid{stroke:var(--rule);fill:none}.guide{stroke:var(--dot);stroke-dasharray:3 4;fill:none}.dot{fill:var(--dot)}
.line{fill:none;stroke-width:2;stroke-linejoin:round}.line.a{stroke:var(--with);stroke-width:2.5}
.line.b{stroke:var(--kept)}.line.c{stroke:var(--read);stroke-dasharray:7 4}.line.d{stroke:var(--soft);stroke-dasharray:2 4}
.list{width:100%;font-size:13.5px}.list th{font-weight:600;text-align:left;color:var(--soft);white-space:nowrap;
border-bottom:1px solid var(--rule);padding:6px 12px 6px 0}
.list td{padding:5px 12px 5px 0;border-bottom:1px solid var(--rule);vertical-align:top}
.list .n{text-align:right;white-space:nowrap}.list td.why{color:var(--soft)}.list small{display:block;color:var(--soft);font-size:12px}
.bar{display:inline-block;width:48px;height:8px;border-radius:4px;background:var(--cold);margin-right:8px;overflow:hidden}
.bar i{display:block;height:100%;background:var(--kept)}
.bad{color:var(--against)}
ul{margin:4px 0 0;padding-left:20px;color:var(--soft)}
footer{margin-top:36px;color:var(--soft);font-size:13px}
@media print{main{max-width:none;padding:0}.card{border:0;padding:0}}
"""


def explanation_page(explanation: Explanation, insight: Insight, title: str) -> str:
    """A whole HTML document, which loads nothing. `title` is what was asked about."""
    plan = explanation.plan
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="lead">{_lead(plan)}</p>',
        _facts(_figures(explanation)),
    ]
    if plan.notes:
        body.append(f"<ul>{''.join(f'<li>{escape(note)}</li>' for note in plan.notes)}</ul>")
    if insight.curves:
        body.append(
            "<h2>What a budget buys</h2><p>Fidelity is how much of the full merge's change a budgeted one makes; 1 is "
            "the full merge. Each line is a way of choosing what to read; all are predicted from statistics alone.</p>"
            f'<div class="card">{budget_curve(insight.curves, insight.chosen)}</div>'
        )
    if insight.tensors:
        body.append(
            "<h2>Layers and experts</h2><p>Where the experts change the base (weighted, squared), what of that is read, "
            "and how much of the change this keeps. Hatched: nothing differs from the base.</p>"
            f'<div class="card">{layer_maps(insight)}</div>'
        )
    if len(insight.experts) > 1:
        body.append(
            "<h2>Agreement</h2><p>The cosine between the experts' weighted changes: above 0 they pull the same way, "
            "near 0 they have nothing to do with each other, below 0 they conflict.</p>"
            f'<div class="card">{conflict_matrix(insight)}</div>'
        )
    body.append(f'<h2>Models</h2><div class="card">{_models(explanation, insight)}</div>')
    body.append(
        "<h2>Layer by layer</h2><p>What became of each layer's tensors. A column is a run of elements that are read and "
        "computed together; kept is the share of the changes' energy that is read.</p>"
        f'<div class="card">{_layers(explanation)}</div>'
    )
    body.append(
        "<h2>Tensors</h2><p>Columns are runs of elements that are read and computed together; "
        "kept is the share of the change's energy that is read.</p>"
        f'<div class="card">{_tensors(explanation)}</div>'
    )
    body.append("<footer>Made by <code>mpfs explain --html</code>.</footer>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)} · MPFS</title><style>{_STYLE}</style></head><body><main>"
        f"{''.join(body)}</main></body></html>\n"
    )


def _lead(plan: Plan) -> str:
    experts = [model.name for index, model in enumerate(plan.models) if index != plan.base]
    base = "" if plan.base is None else f" into <b>{escape(plan.models[plan.base].name)}</b>"
    shown = ", ".join(f"<b>{escape(name)}</b>" for name in experts[:6])
    more = f" and {len(experts) - 6} more" if len(experts) > 6 else ""
    return f"<code>{escape(plan.method)}</code> of {shown}{more}{base}"


def _figures(explanation: Explanation) -> list[tuple[str, str, str]]:
    plan, run = explanation.plan, explanation.figures
    full = plan.cost.expert_bytes_full
    budget = {
        "none": ("none", "everything is read"),
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
        amount = "" if role == "base" else f"{size(read)} of {size(total)}"
        rows.append(
            f"<tr><td>{escape(model.name)}</td><td>{role}</td><td><code>{model.commit[:12]}</code></td>"
            f'<td>{escape(parameters)}</td><td class="n">{amount}</td></tr>'
        )
    return (
        '<table class="list"><thead><tr><th>model</th><th>role</th><th>commit</th><th>parameters</th>'
        f'<th class="n">read of what differs</th></tr></thead><tbody>{"".join(rows)}</tbody></table>'
    )


def _layers(explanation: Explanation) -> str:
    rows = "".join(
        f"<tr><td><code>{escape(layer.name)}</code></td>"
        f'<td class="n">{layer.computed:,}/{layer.tensors:,}</td><td>{escape(_read_of(layer.experts))}</td>'
        f"<td>{escape(_parameters(layer.experts))}</td>{_kept_and_cosine(layer.kept, layer.cosine)}"
        f'<td class="why">{escape(layer.why)}</td></tr>'
        for layer in explanation.layers
    )
    return (
        '<table class="list"><thead><tr><th>layer</th><th class="n">tensors computed</th>'
        '<th>read of each expert</th><th>parameters</th><th class="n">kept</th><th class="n">cosine</th>'
        f"<th>its tensors are read</th></tr></thead><tbody>{rows}</tbody></table>"
    )


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
    bar = f'<span class="bar"><i style="width:{100 * kept:.1f}%"></i></span>{kept:.1%}'
    conflict = " bad" if cosine is not None and cosine < -0.1 else ""
    return f'<td class="n">{bar}</td><td class="n{conflict}">{"" if cosine is None else f"{cosine:+.3f}"}</td>'


def _tensors(explanation: Explanation) -> str:
    ordered = sorted(explanation.tensors, key=lambda tensor: natural(tensor.name))
    rows = "".join(_tensor(explanation.plan, tensor) for tensor in ordered)
    return (
        '<table class="list"><thead><tr><th>tensor</th><th>operator</th>'
        '<th class="n">computed</th><th>read of each expert</th><th class="n">kept</th>'
        f'<th class="n">cosine</th><th>why</th></tr></thead><tbody>{rows}</tbody></table>'
    )


def _tensor(plan: Plan, tensor: TensorExplanation) -> str:
    shape = " \u00d7 ".join(map(str, tensor.shape)) or "scalar"
    operator = plan.method if tensor.action == "compute" else tensor.action
    return (
        f"<tr><td><code>{escape(tensor.name)}</code><small>{escape(tensor.dtype)}, {shape}</small></td>"
        f'<td>{escape(operator)}</td><td class="n">{tensor.columns_computed:,}/{tensor.columns:,}</td>'
        f"<td>{escape(_read_of(tensor.experts))}</td>{_kept_and_cosine(tensor.kept, tensor.cosine)}"
        f'<td class="why">{escape(tensor.why)}</td></tr>'
    )
