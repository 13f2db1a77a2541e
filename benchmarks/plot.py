"""Line charts as SVG, without a library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

_WIDTH, _HEIGHT, _LEFT, _TOP, _COLUMNS = 270, 180, 48, 30, 3
_INNER = (_WIDTH - _LEFT - 18, _HEIGHT - _TOP - 40)
_MARGIN, _HEAD, _FOOT = 22, 66, 16
_COLOURS = ("#1b6ca8", "#b85c00", "#5f5f5f", "#2d7a4b")
_DASHES = ("", "6 3", "2 3", "8 3 2 3")
_BUDGETS = (0.0, 5.0, 10.0, 20.0, 50.0, 100.0)


@dataclass(frozen=True)
class Line:
    """A line: its name, and points of x in percent and y."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """Lines over one another."""

    title: str
    lines: Sequence[Line]


def chart(title: str, x_label: str, y_label: str, panels: Sequence[Panel]) -> str:
    """Panels in rows of three, with one legend, as an SVG document. The x axes go from 0 to 100%, by square roots, so that
    small budgets can be told apart; each panel has a y axis of its own."""
    rows = -(-len(panels) // _COLUMNS)
    width, height = _MARGIN + _WIDTH * min(_COLUMNS, len(panels)), _HEAD + _HEIGHT * rows + _FOOT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11" '
        'role="img" aria-labelledby="title">',
        f'<title id="title">{escape(title)}</title>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="20" y="22" font-size="13" font-weight="bold">{escape(title)}</text>',
        f'<text x="{width / 2:.0f}" y="{height - 8}" text-anchor="middle">{escape(x_label)}</text>',
        f'<text transform="translate(16 {(_HEAD + height - _FOOT) / 2:.0f}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label)}</text>",
    ]
    x = 20
    for index, line in enumerate(panels[0].lines):
        parts.append(f'<path d="M{x} 44h26" {_stroke(index)}/>')
        parts.append(f'<text x="{x + 32}" y="48">{escape(line.name)}</text>')
        x += 62 + 7 * len(line.name)
    for index, panel in enumerate(panels):
        at = f"{_MARGIN + _WIDTH * (index % _COLUMNS)} {_HEAD + _HEIGHT * (index // _COLUMNS)}"
        parts.append(f'<g transform="translate({at})">{_panel(panel)}</g>')
    return "\n".join([*parts, "</svg>", ""])


def ticks(low: float, high: float) -> tuple[list[float], int]:
    """Three to six round numbers around a range, at equal distances, and the decimals that tell them apart."""
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** floor(log10(span / 4.0))
    step = next(power * factor for factor in (1.0, 2.0, 2.5, 5.0, 10.0) if power * factor >= span / 4.0)
    first, last = floor(low / step + 1e-9), ceil(high / step - 1e-9)
    decimals = next(digits for digits in range(12) if abs(round(step, digits) - step) < step * 1e-6)
    return [number * step for number in range(first, max(last, first + 1) + 1)], decimals


def _stroke(index: int) -> str:
    dash = _DASHES[index % len(_DASHES)]
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'fill="none" stroke="{_COLOURS[index % len(_COLOURS)]}" stroke-width="1.8"{dashes}'


def _panel(panel: Panel) -> str:
    values = [y for line in panel.lines for _, y in line.points]
    levels, decimals = ticks(min(values), max(values))
    low, span = levels[0], levels[-1] - levels[0]

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + _INNER[0] * (x / 100.0) ** 0.5, _TOP + _INNER[1] * (1.0 - (y - low) / span)

    parts = [f'<text x="{_LEFT}" y="{_TOP - 10}" font-weight="bold">{escape(panel.title)}</text>']
    for y in levels:
        left, top = place(0.0, y)
        parts.append(f'<path d="M{left} {top:.1f}h{_INNER[0]}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 5}" y="{top + 4:.1f}" text-anchor="end">{y:.{decimals}f}</text>')
    for x in _BUDGETS:
        left, top = place(x, low)
        parts.append(f'<path d="M{left:.1f} {top:.1f}v4" stroke="#888"/>')
        parts.append(f'<text x="{left:.1f}" y="{top + 16:.1f}" text-anchor="middle">{x:g}</text>')
    for index, line in enumerate(panel.lines):
        points = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in line.points)
        parts.append(f'<polyline points="{points}" {_stroke(index)}/>')
        for x, y in line.points:
            left, top = place(x, y)
            told = f"{escape(line.name)}, {x:g}%: {y:.3f}"
            colour = _COLOURS[index % len(_COLOURS)]
            parts.append(
                f'<circle cx="{left:.1f}" cy="{top:.1f}" r="2.2" fill="{colour}"><title>{told}</title></circle>'
            )
    return "".join(parts)
