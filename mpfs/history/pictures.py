"""The pictures of an explanation's page: maps of figures as coloured tables, and the curve of budgets as SVG. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from math import ceil, log10

from mpfs.history.insight import CurvePoint, Insight, Layer, Share

_NAMED_CELLS = 12
"""Tables of more columns are drawn narrow, with their numbers for screen readers and in tooltips only."""

_FLAT_NAMES = 4
_LONGEST_NAME = 20

_WIDTH, _HEIGHT = 720, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 52, 16, 56
_LINES = {"energy": "a", "layerwise": "b", "uniform": "c", "random": "d"}


def size(nbytes: float) -> str:
    """A number of bytes, to be read."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024.0:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024.0
    return f"{value:.1f} TiB"


def percent(part: float) -> str:
    """A share in percent without the sign, in at most three characters or so: `0`, `<.1`, `0.4`, `27`, `>99`, `100`."""
    value = 100.0 * part
    if value <= 0.0:
        return "0"
    if value < 0.05:
        return "<.1"
    if value < 9.95:
        return f"{value:.1f}"
    return ">99" if 99.5 <= value < 100.0 else f"{value:.0f}"


def short_names(names: Sequence[str]) -> list[str]:
    """Names for narrow places: where some are long, without what all begin with; and without their middle if need be."""
    if max(map(len, names), default=0) <= _LONGEST_NAME:
        return list(names)
    prefix = max(len(_common(names, separator)) for separator in "/-_.")
    ends = (_LONGEST_NAME - 1) // 2
    short = [name[prefix:] for name in names]
    return [name if len(name) <= _LONGEST_NAME else f"{name[:ends]}…{name[-ends:]}" for name in short]


def layer_maps(insight: Insight, *, based: bool) -> str:
    """Maps, layer by expert: what is read, and where there is a base how much of the change is there and what of it is
    kept."""
    layers = insight.layers()
    most = max((share.energy for layer in layers for share in layer.experts if share is not None), default=0.0)
    total = sum(share.energy for layer in layers for share in layer.experts if share is not None)

    def energy(share: Share) -> tuple[float, str, str]:
        strength = (share.energy / most) ** 0.5 if most > 0.0 else 0.0
        part = share.energy / total if total > 0.0 else 0.0
        return strength, percent(part), f"{part:.2%} of all change (squared norm {share.energy:.4g})"

    def read(share: Share) -> tuple[float, str, str]:
        part = share.nbytes_read / share.nbytes if share.nbytes else 0.0
        return part, percent(part), f"{size(share.nbytes_read)} of {size(share.nbytes)} read"

    def kept(share: Share) -> tuple[float, str, str]:
        part = share.energy_read / share.energy if share.energy > 0.0 else 0.0
        return part, percent(part), f"{part:.1%} of its change here is read"

    experts = insight.experts
    differing = "% of the bytes that differ" if based else "% of its bytes"
    parts = [_map("Read", differing, "read", "100%", experts, layers, read)]
    if total > 0.0:
        largest = f"{percent(most / total)}%"
        parts.insert(0, _map("Change", "% of all experts' change", "change", largest, experts, layers, energy))
        parts.append(_map("Kept", "% of the change, by reading that", "kept", "100%", experts, layers, kept))
    return f'<div class="maps">{"".join(parts)}</div>'


def _map(
    title: str,
    note: str,
    kind: str,
    largest: str,
    experts: Sequence[str],
    layers: Sequence[Layer],
    cell: Callable[[Share], tuple[float, str, str]],
) -> str:
    prefix = _common([layer.name for layer in layers], ".")
    rows = []
    for layer in layers:
        cells = []
        for expert, share in zip(experts, layer.experts, strict=True):
            if share is None or share.nbytes == 0:
                what = "does not have it" if share is None else "equals the base"
                cells.append(_nothing(f"{layer.name}: {expert} {what}"))
                continue
            strength, text, detail = cell(share)
            cells.append(_cell(kind, strength, text, f"{layer.name}, {expert}: {detail}"))
        label = escape(layer.name[len(prefix) :])
        rows.append(f'<tr><th scope="row" title="{escape(layer.name)}">{label}</th>{"".join(cells)}</tr>')
    return (
        f'<table class="map{_kind(experts)}"><caption><b>{title}</b> <span>{note}</span>'
        f"{_scale(kind, '0', largest)}</caption>"
        f"<thead><tr><td></td>{_heads(experts)}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def conflict_matrix(insight: Insight) -> str:
    """How the experts' changes agree, in pairs."""
    names = short_names(insight.experts)
    rows = []
    for i, (expert, row) in enumerate(zip(insight.experts, insight.conflict, strict=True)):
        cells = []
        for j, (other, cosine) in enumerate(zip(insight.experts, row, strict=True)):
            if i == j:
                cells.append(f'<td class="self" title="{escape(expert)}">\N{MIDDLE DOT}</td>')
            elif cosine is None:
                cells.append(_nothing(f"{expert}, {other}: one of them changes nothing"))
            else:
                kind = "against" if cosine < 0 else "with"
                detail = f"{expert}, {other}: cosine {_signed(cosine, 4)}"
                cells.append(_cell(kind, abs(cosine) ** 0.5, _signed(cosine, 2), detail))
        rows.append(f'<tr><th scope="row" title="{escape(expert)}">{escape(names[i])}</th>{"".join(cells)}</tr>')
    return (
        f'<table class="map{_kind(insight.experts)}"><caption><b>Cosine</b>{_scale("both", _signed(-1.0, 0), "+1")}'
        f"</caption><thead><tr><td></td>{_heads(insight.experts)}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    )


def _scale(kind: str, low: str, high: str) -> str:
    """What colours mean."""
    label = f"Colours: from {low} to {high}"
    return f'<span class="scale {kind}" role="img" aria-label="{label}">{low}<i></i>{high}</span>'


def _kind(experts: Sequence[str]) -> str:
    """Names stand upright over many columns; very many are drawn narrow."""
    if len(experts) > _NAMED_CELLS:
        return " turned wide"
    return " turned" if len(experts) > _FLAT_NAMES else ""


def _common(names: Sequence[str], separator: str) -> str:
    """The leading parts, up to a separator, that all names share."""
    if len(names) < 2:
        return ""
    first, last = min(names), max(names)
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[: first.rfind(separator, 0, length) + 1]


def _heads(names: Sequence[str]) -> str:
    return "".join(
        f'<th scope="col" title="{escape(name)}"><span>{escape(short)}</span></th>'
        for name, short in zip(names, short_names(names), strict=True)
    )


def _cell(kind: str, strength: float, text: str, detail: str) -> str:
    style = f"--v:{100.0 * max(0.0, min(1.0, strength)):.0f}%"
    zero = " zero" if text == "0" else ""
    return f'<td class="{kind}{zero}" style="{style}" title="{escape(detail)}">{escape(text)}</td>'


def _nothing(detail: str) -> str:
    return f'<td class="none" title="{escape(detail)}"></td>'


def _signed(cosine: float, digits: int) -> str:
    """A cosine with its sign; 0 has none."""
    text = f"{cosine:+.{digits}f}"
    return "0" if float(text) == 0.0 else text.replace("-", "\N{MINUS SIGN}")


def budget_curve(
    curves: Mapping[str, Sequence[CurvePoint]], chosen: CurvePoint, measured: CurvePoint | None = None
) -> str:
    """Fidelity against bytes, a line for each policy, and the plan's own place; with a legend. `measured` is what the
    merge came to."""
    largest = max([chosen.nbytes, *(points[-1].nbytes for points in curves.values())]) or 1
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def x(nbytes: float) -> float:
        return _LEFT + width * max(0.0, min(1.0, nbytes / largest))

    def y(fidelity: float) -> float:
        return _TOP + height * (1.0 - max(0.0, min(1.0, fidelity)))

    parts = []
    for step in range(6):
        level = step / 5
        parts.append(f'<path class="grid" d="M{_LEFT} {y(level):.1f}h{width}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y(level) + 4:.1f}" text-anchor="end">{level:.1f}</text>')
    for nbytes in _ticks(largest):
        parts.append(f'<path class="grid" d="M{x(nbytes):.1f} {_TOP}v{height}"/>')
        text = size(nbytes).replace(".0 ", " ")
        parts.append(f'<text x="{x(nbytes):.1f}" y="{_TOP + height + 20}" text-anchor="middle">{text}</text>')
    parts.append(
        f'<text class="axis" x="{_LEFT + width / 2}" y="{_HEIGHT - 8}" text-anchor="middle">'
        f"expert bytes read, of {size(largest)}</text>"
        f'<text class="axis" transform="translate(18 {_TOP + height / 2}) rotate(-90)" text-anchor="middle">'
        "fidelity</text>"
    )
    legend: list[str] = []
    # The first line is drawn last: the others do not cover it.
    for policy, points in reversed(list(curves.items())):
        path = " ".join(f"{x(point.nbytes):.1f},{y(point.fidelity):.1f}" for point in points)
        line = _LINES.get(policy, "d")
        parts.append(f'<polyline class="line {line}" points="{path}"><title>{escape(policy)}</title></polyline>')
        key = f'<svg class="key" viewBox="0 0 26 12" aria-hidden="true"><path class="line {line}" d="M1 6h24"/></svg>'
        legend.insert(0, f"<li>{key}{escape(policy)}</li>")
    label = f"this plan: {_told(chosen, largest)}, predicted"
    cx, cy = x(chosen.nbytes), y(chosen.fidelity)
    parts.append(f'<path class="guide" d="M{cx:.1f} {_TOP + height}V{cy:.1f}H{_LEFT}"/>')
    parts.append(f'<circle class="dot" cx="{cx:.1f}" cy="{cy:.1f}" r="6"><title>{label}</title></circle>')
    legend.append(f"<li>{_mark('dot')}<b>{label}</b></li>")
    if measured is not None:
        found = f"its merge: {_told(measured, largest)}, measured"
        cx, cy = x(measured.nbytes), y(measured.fidelity)
        parts.append(f'<circle class="ring" cx="{cx:.1f}" cy="{cy:.1f}" r="6"><title>{found}</title></circle>')
        legend.append(f"<li>{_mark('ring')}<b>{found}</b></li>")
    return (
        f'<ul class="legend">{"".join(legend)}</ul>'
        f'<svg class="curve" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="Fidelity against expert bytes read; {label}">{"".join(parts)}</svg>'
    )


def _told(point: CurvePoint, largest: int) -> str:
    return f"fidelity {point.fidelity:.3f} for {size(point.nbytes)} ({point.nbytes / largest:.1%})"


def _mark(kind: str) -> str:
    return (
        f'<svg class="key" viewBox="0 0 26 12" aria-hidden="true"><circle class="{kind}" cx="13" cy="6" r="5"/></svg>'
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
