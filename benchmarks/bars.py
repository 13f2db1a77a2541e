"""A bar chart of medians on a logarithmic axis, as SVG: for pictures in docs that a benchmark makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10
from pathlib import Path

_COLOURS = ("#8a8f98", "#1f6feb", "#2da44e", "#bf8700", "#8250df", "#cf222e")
_LEFT, _RIGHT, _BAR, _GAP = 270, 90, 14, 14
_WIDTH = 760


@dataclass(frozen=True, slots=True)
class Group:
    """A group of bars with a heading: what each bar shows, and its value (above 0)."""

    heading: str
    bars: Sequence[tuple[str, float]]


def draw(path: Path, title: str, unit: str, groups: Sequence[Group]) -> None:
    """Write a chart of some groups, one under the other; bars of one name have one colour everywhere."""
    names = list(dict.fromkeys(name for group in groups for name, _ in group.bars))
    values = [value for group in groups for _, value in group.bars]
    low, high = floor(log10(min(values))), ceil(log10(max(values)))
    high = max(high, low + 1)
    scale = (_WIDTH - _LEFT - _RIGHT) / (high - low)
    parts, y = [], 52
    for group in groups:
        parts.append(f'<text x="8" y="{y + 11}" font-weight="bold">{escape(group.heading)}</text>')
        y += _BAR + 4
        for name, value in group.bars:
            length = max(1.0, (log10(value) - low) * scale)
            colour = _COLOURS[names.index(name) % len(_COLOURS)]
            parts.append(f'<text x="{_LEFT - 6}" y="{y + 11}" text-anchor="end">{escape(name)}</text>')
            parts.append(f'<rect x="{_LEFT}" y="{y}" width="{length:.1f}" height="{_BAR}" fill="{colour}"/>')
            parts.append(f'<text x="{_LEFT + length + 5:.1f}" y="{y + 11}">{_figure(value)} {escape(unit)}</text>')
            y += _BAR + 4
        y += _GAP
    for power in range(low, high + 1):
        x = _LEFT + (power - low) * scale
        parts.insert(0, f'<path d="M{x:.1f} 44V{y}" stroke="#d8dee4"/>')
        parts.append(f'<text x="{x:.1f}" y="40" text-anchor="middle" fill="#656d76">{10.0**power:g}</text>')
    style = "font-family:system-ui,sans-serif;font-size:11px"
    size = f'viewBox="0 0 {_WIDTH} {y + 8}" role="img" aria-labelledby="title"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} style="{style}"><title id="title">{escape(title)}</title>'
    back = f'<rect width="{_WIDTH}" height="{y + 8}" fill="#ffffff"/>'
    name = f'<text x="8" y="18" font-size="13" font-weight="bold">{escape(title)}</text>'
    path.write_text("\n".join([head, back, name, *parts, "</svg>"]) + "\n", encoding="utf-8")


def _figure(value: float) -> str:
    """Three digits that count."""
    return f"{value:.{max(0, 2 - floor(log10(value)))}f}"
