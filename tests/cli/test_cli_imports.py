"""`mpfs import`'s notes and `mpfs verify`, as a user sees them."""

from __future__ import annotations

from pathlib import Path

from cli_helpers import Command

pytest_plugins = ["cli_fixtures"]


def test_verify(mpfs: Command, workplace: Path) -> None:
    document = mpfs("verify", "a", "a", "--json").json
    assert document["ok"]
    assert document["problems"] == []
    assert set(document) == {"ok", "commit", "checked", "seconds", "problems"}
    assert mpfs("verify", "a", "a").out.startswith("ok: ")
    (workplace / "a" / "extra.txt").write_text("x")
    assert "extra  extra.txt" in mpfs("verify", "a", "a", code=3).out
    assert [item["kind"] for item in mpfs("verify", "a", "a", "--json", code=3).json["problems"]] == ["extra"]


def test_a_base_that_is_found(mpfs: Command, workplace: Path) -> None:
    report = mpfs("import", "a", "--as", "again", "--base", "auto", "--json").json
    assert {"known_bytes", "notes", "base", "stated_bases"} <= set(report)
