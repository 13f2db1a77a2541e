"""The pictures of docs: well-formed, titled, self-contained, and nothing in them cut off."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
PICTURES = sorted(DOCS.glob("*.svg"))
SVG = "{http://www.w3.org/2000/svg}"
WIDEST = 0.58
"""An upper bound on the width of a character on average, of its height."""


def test_there_are_pictures_and_pages_show_them() -> None:
    assert len(PICTURES) >= 2
    pages = "".join(page.read_text("utf-8") for page in DOCS.glob("*.md"))
    for picture in PICTURES:
        shown = re.search(rf"!\[([^\]]+)\]\({picture.name}\)", pages)
        assert shown, picture.name


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.name)
def test_a_picture_is_whole(picture: Path) -> None:
    text = picture.read_text("utf-8")
    root = ElementTree.fromstring(text)
    assert root.get("role") == "img"
    title = root.find(f"{SVG}title")
    assert title is not None
    assert title.text
    assert root.get("aria-labelledby") == title.get("id")
    assert not re.search(r"href|<script|<image|url\(|@import", text)
    assert root.find(f"{SVG}rect") is not None, "a ground of its own: its text is dark wherever it is shown"
    left, top, width, height = map(float, (root.get("viewBox") or "").split())
    assert (left, top) == (0, 0)
    size = float(root.get("font-size") or re.findall(r"font-size:([\d.]+)", root.get("style") or "")[0])
    texts = 0
    for group, x, y in _placed(root):
        for item in group.findall(f"{SVG}text"):
            texts += 1
            own = float(item.get("font-size") or size)
            length = len(item.text or "") * own * WIDEST * (1.1 if item.get("font-weight") else 1.0)
            start = {"end": length, "middle": length / 2}.get(item.get("text-anchor") or "", 0.0)
            turned = re.fullmatch(r"translate\(([\d.]+) ([\d.]+)\) rotate\(-90\)", item.get("transform") or "")
            if turned:
                across, along, room = float(turned[1]), y + float(turned[2]) - start, height
            else:
                across, along, room = y + float(item.get("y") or 0), x + float(item.get("x") or 0) - start, width
            assert along >= 0, item.text
            assert along + length <= room, item.text
            assert own * 0.8 <= across <= (width if turned else height), item.text
        for line in group.findall(f"{SVG}polyline"):
            for point in (line.get("points") or "").split():
                across, down = map(float, point.split(","))
                assert 0 <= x + across <= width
                assert 0 <= y + down <= height
    assert texts > 10


def _placed(root: ElementTree.Element) -> list[tuple[ElementTree.Element, float, float]]:
    """The root and its groups, with where they are."""
    found = [(root, 0.0, 0.0)]
    for group in root.findall(f"{SVG}g"):
        match = re.fullmatch(r"translate\(([\d.]+) ([\d.]+)\)", group.get("transform") or "")
        assert match is not None
        found.append((group, float(match[1]), float(match[2])))
    return found
