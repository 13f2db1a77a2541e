"""The pictures of an explanation's page: maps of figures as coloured tables, and the curve of budgets as SVG. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from math import ceil, log10

from mpfs.history.insight import CurvePoint, Insight, Layer, Share

_NAMED_CELLS = 12
"""Cells carry their number in tables of at most so many columns; in wider ones it is in the tooltip."""

_FLAT_NAMES = 6

_WIDTH, _HEIGHT = 720, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 132, 16, 46
_LINES = {"energy": "a", "layerwise": "b", "uniform": "c", "random": "d"}


def size(nbytes: float) -> str:
    """A number of bytes, to be read."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024.0:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024.0
    return f"{value:.1f} TiB"


def layer_maps(insight: Insight) -> str:
    """Three maps, layer by expert: how much of the change is there, what is read, and what that keeps."""
    layers = insight.layers()
    most = max((share.energy for layer in layers for share in layer.experts if share is not None), default=0.0)
    total = sum(share.energy for layer in layers for share in layer.experts if share is not None)

    def energy(share: Share) -> tuple[float, str, str]:
        strength = (share.energy / most) ** 0.5 if most > 0.0 else 0.0
        part = share.energy / total if total > 0.0 else 0.0
        return strength, _percent(part), f"{part:.2%} of all change (squared norm {share.energy:.4g})"

    def read(share: Share) -> tuple[float, str, str]:
        part = share.nbytes_read / share.nbytes if share.nbytes else 0.0
        return part, _percent(part), f"{size(share.nbytes_read)} of {size(share.nbytes)} read"

    def kept(share: Share) -> tuple[float, str, str]:
        part = share.energy_read / share.energy if share.energy > 0.0 else 0.0
        return part, _percent(part), f"{part:.1%} of its change here is read"

    maps = (
        ("Change", "share of all experts' change", "change", energy),
        ("Read", "share of the differing bytes", "read", read),
        ("Kept", "share of the change that is read", "kept", kept),
    )
    parts = [_map(title, note, kind, insight.experts, layers, cell) for title, note, kind, cell in maps]
    return f'<div class="maps">{"".join(parts)}</div>'


def _map(
    title: str,
    note: str,
    kind: str,
    experts: Sequence[str],
    layers: Sequence[Layer],
    cell: Callable[[Share], tuple[float, str, str]],
) -> str:
    named = len(experts) <= _NAMED_CELLS
    prefix = _common([layer.name for layer in layers])
    rows = []
    for layer in layers:
        cells = []
        for expert, share in zip(experts, layer.experts, strict=True):
            if share is None or share.nbytes == 0:
                what = "does not have it" if share is None else "equals the base"
                cells.append(f'<td class="none" title="{escape(f"{expert} {what}: {layer.name}")}"></td>')
                continue
            strength, text, detail = cell(share)
            cells.append(_cell(kind, strength, text if named else "", f"{layer.name}, {expert}: {detail}"))
        label = escape(layer.name[len(prefix) :])
        rows.append(f'<tr><th scope="row" title="{escape(layer.name)}">{label}</th>{"".join(cells)}</tr>')
    return (
        f'<table class="map{_kind(experts)}"><caption><b>{title}</b> <span>{note}</span></caption>'
        f"<thead><tr><th></th>{_heads(experts)}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def conflict_matrix(insight: Insight) -> str:
    """How the experts' changes agree, in pairs."""
    named = len(insight.experts) <= _NAMED_CELLS
    rows = []
    for i, (expert, row) in enumerate(zip(insight.experts, insight.conflict, strict=True)):
        cells = []
        for j, (other, cosine) in enumerate(zip(insight.experts, row, strict=True)):
            if i == j or cosine is None:
                cells.append('<td class="none"></td>')
                continue
            kind = "against" if cosine < 0 else "with"
            text = f"{cosine:+.2f}" if named else ""
            cells.append(_cell(kind, abs(cosine) ** 0.5, text, f"{expert}, {other}: cosine {cosine:+.4f}"))
        rows.append(f'<tr><th scope="row">{escape(expert)}</th>{"".join(cells)}</tr>')
    return (
        f'<table class="map{_kind(insight.experts)}"><thead><tr><th></th>{_heads(insight.experts)}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def _kind(experts: Sequence[str]) -> str:
    """Names stand upright over many columns; very many are drawn narrow."""
    if len(experts) > _NAMED_CELLS:
        return " turned wide"
    return " turned" if len(experts) > _FLAT_NAMES else ""


def _common(names: Sequence[str]) -> str:
    """The leading parts, up to a dot, that all names share."""
    if len(names) < 2:
        return ""
    first, last = min(names), max(names)
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[: first.rfind(".", 0, length) + 1]


def _heads(names: Sequence[str]) -> str:
    return "".join(f'<th scope="col" title="{escape(name)}"><span>{escape(_short(name))}</span></th>' for name in names)


def _cell(kind: str, strength: float, text: str, detail: str) -> str:
    bright = " strong" if strength > 0.65 else ""
    style = f"--v:{100.0 * max(0.0, min(1.0, strength)):.1f}%"
    return f'<td class="{kind}{bright}" style="{style}" title="{escape(detail)}">{text}</td>'


def _percent(part: float) -> str:
    return "0" if part <= 0.0 else "<1%" if part < 0.005 else f"{part:.0%}"


def _short(name: str, length: int = 18) -> str:
    return name if len(name) <= length else "…" + name[1 - length :]


def budget_curve(curves: Mapping[str, Sequence[CurvePoint]], chosen: CurvePoint) -> str:
    """Fidelity against bytes, a line for each policy, and the plan's own place."""
    largest = max([chosen.nbytes, *(points[-1].nbytes for points in curves.values())]) or 1
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def x(nbytes: float) -> float:
        return _LEFT + width * nbytes / largest

    def y(fidelity: float) -> float:
        return _TOP + height * (1.0 - fidelity)

    parts = []
    for step in range(6):
        level = step / 5
        parts.append(f'<path class="grid" d="M{_LEFT} {y(level):.1f}h{width}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y(level) + 4:.1f}" text-anchor="end">{level:.1f}</text>')
    for nbytes in _ticks(largest):
        parts.append(f'<path class="grid" d="M{x(nbytes):.1f} {_TOP}v{height}"/>')
        parts.append(f'<text x="{x(nbytes):.1f}" y="{_TOP + height + 18}" text-anchor="middle">{size(nbytes)}</text>')
    parts.append(
        f'<text class="axis" x="{_LEFT + width / 2}" y="{_HEIGHT - 6}" text-anchor="middle">'
        "expert bytes read</text>"
        f'<text class="axis" transform="translate(14 {_TOP + height / 2}) rotate(-90)" text-anchor="middle">'
        "predicted fidelity</text>"
    )
    for place, (policy, points) in enumerate(curves.items()):
        path = " ".join(f"{x(point.nbytes):.1f},{y(point.fidelity):.1f}" for point in points)
        line = _LINES.get(policy, "d")
        at = _TOP + 14 + 20 * place
        parts.append(f'<polyline class="line {line}" points="{path}"><title>{escape(policy)}</title></polyline>')
        parts.append(f'<path class="line {line}" d="M{_LEFT + width + 16} {at}h22"/>')
        parts.append(f'<text x="{_LEFT + width + 44}" y="{at + 4}">{escape(policy)}</text>')
    cx, cy = x(chosen.nbytes), y(max(0.0, min(1.0, chosen.fidelity)))
    label = f"this plan: {size(chosen.nbytes)}, {chosen.fidelity:.3f}"
    side = "end" if cx > _LEFT + width * 0.6 else "start"
    dx = -12 if side == "end" else 12
    dy = 22 if cy < _TOP + height * 0.8 else -14
    parts.append(f'<path class="guide" d="M{cx:.1f} {_TOP + height}V{cy:.1f}H{_LEFT}"/>')
    parts.append(f'<circle class="dot" cx="{cx:.1f}" cy="{cy:.1f}" r="6"><title>{label}</title></circle>')
    parts.append(f'<text class="label" x="{cx + dx:.1f}" y="{cy + dy:.1f}" text-anchor="{side}">{label}</text>')
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="Predicted fidelity against expert bytes read; '
        f'{label}">{"".join(parts)}</svg>'
    )


def _ticks(largest: int) -> list[float]:
    """A handful of round numbers of bytes from 0 to `largest`, in powers of 1024 times 1, 2 or 5."""
    unit = 1
    while largest // unit >= 1024:
        unit *= 1024
    rough = largest / unit / 4
    power = 10.0 ** ceil(log10(rough) - 1) if rough > 0 else 1.0
    step = min((power * factor for factor in (0.5, 1, 2, 5, 10)), key=lambda value: abs(value - rough)) * unit
    return [number * step for number in range(int(largest / step) + 1)]
