"""Line charts as SVG, without a library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT, _LEFT, _TOP, _COLUMNS = 260, 170, 44, 34, 3
_INNER = (_WIDTH - _LEFT - 14, _HEIGHT - _TOP - 34)
_COLOURS = ("#1b6ca8", "#d9822b", "#8a8a8a", "#3d9970")


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


def chart(title: str, panels: Sequence[Panel]) -> str:
    """Panels in rows of three, with one legend, as an SVG document. The x axes go from 0 to 100%, by square roots, so that
    small budgets can be told apart."""
    rows = -(-len(panels) // _COLUMNS)
    width, height = _WIDTH * _COLUMNS, _HEIGHT * rows + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="10">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for index, name in enumerate(line.name for line in panels[0].lines):
        x = 20 + 90 * index
        parts.append(f'<path d="M{x} 16h18" stroke="{_COLOURS[index % len(_COLOURS)]}" stroke-width="2"/>')
        parts.append(f'<text x="{x + 24}" y="20">{escape(name)}</text>')
    for index, panel in enumerate(panels):
        at = f"{_WIDTH * (index % _COLUMNS)} {30 + _HEIGHT * (index // _COLUMNS)}"
        parts.append(f'<g transform="translate({at})">{_panel(panel)}</g>')
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel) -> str:
    values = [y for line in panel.lines for _, y in line.points]
    low, high = min(values), max(values)
    span = (high - low) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + _INNER[0] * (x / 100.0) ** 0.5, _TOP + _INNER[1] * (1.0 - (y - low) / span)

    parts = [f'<text x="{_LEFT}" y="{_TOP - 10}" font-weight="bold">{escape(panel.title)}</text>']
    for y in (low, (low + high) / 2.0, high):
        left, top = place(0.0, y)
        parts.append(f'<path d="M{left} {top:.1f}h{_INNER[0]}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 4}" y="{top + 3:.1f}" text-anchor="end">{y:.2f}</text>')
    for x in (0.0, 5.0, 10.0, 20.0, 50.0, 100.0):
        left, top = place(x, low)
        parts.append(f'<text x="{left:.1f}" y="{top + 14:.1f}" text-anchor="middle">{x:g}%</text>')
    for index, line in enumerate(panel.lines):
        points = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in line.points)
        colour = _COLOURS[index % len(_COLOURS)]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
    return "".join(parts)
