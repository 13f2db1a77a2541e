"""What `plan` and `explain` show of a merge's cost, by layer and by tensor."""

from __future__ import annotations

import re
from pathlib import Path

from cli_helpers import Command

pytest_plugins = ["cli_fixtures"]

OUTLOOK = {
    "expert_bytes", "base_bytes", "bytes_written", "bytes_on_disk", "blocks_computed", "blocks_reused",
    "seconds_estimated",
}  # fmt: skip


def test_costs_apart(mpfs: Command, workplace: Path) -> None:
    shown = mpfs("plan", "recipe.yml", "--budget", "50%").out
    for name in ("expert reads", "base reads", "writes", "kept", "blocks", "on the disk"):
        assert re.search(rf"^  {name} +\S", shown, re.MULTILINE), name
    assert "known already" not in shown
    document = mpfs("plan", "recipe.yml", "--budget", "50%", "--explain", "--json").json
    assert document["outlook"].keys() == OUTLOOK
    assert document["outlook"]["expert_bytes"] == document["run"]["expert_bytes_planned"]
    assert document["run"]["bytes_kept"] >= 0
    assert {layer["layer"] for layer in document["layers"]} >= {"layer.0"}
    mpfs("merge", "recipe.yml", "--into", "m", "--budget", "50%")
    again = mpfs("plan", "recipe.yml", "--budget", "50%", "--json").json
    assert again["plan"] == document["plan"]
    assert again["outlook"]["expert_bytes"] == again["outlook"]["bytes_written"] == 0
    assert again["outlook"]["blocks_reused"] == again["run"]["blocks_computed"]
    assert re.search(
        r"^  known already +(\d+) of \1 blocks; 0 B", mpfs("plan", "recipe.yml", "--budget", "50%").out, re.M
    )


def test_tables_by_layer_and_by_tensor(mpfs: Command, workplace: Path) -> None:
    mpfs("merge", "recipe.yml", "--into", "m", "--budget", "30%")
    for arguments in (("explain", "m"), ("plan", "recipe.yml", "--budget", "30%", "--explain")):
        lines = mpfs(*arguments).out.splitlines()
        first, second = lines.index("layers"), lines.index("tensors")
        assert re.fullmatch(r"layer +a +b +kept +cosine +tensors", lines[first + 1])
        assert re.fullmatch(r"tensor +operator +a +b +kept +cosine +why", lines[second + 1])
        layers = lines[first + 2 : second - 1]
        assert any(line.startswith("layer.0 ") for line in layers)
        assert max(map(len, layers)) <= 80
    assert "% touched)" in mpfs("explain", "m").out
    document = mpfs("explain", "m", "--json").json
    assert 0 < document["touched_share"] < 1
    assert document["cost"]["bytes_kept"] > 0
    assert [item["model"] for item in document["experts"]] == ["a", "b"]


def test_parameters_that_vary_are_told_by_layer(mpfs: Command, workplace: Path) -> None:
    text = Path("recipe.yml").read_text(encoding="utf-8")
    Path("gradient.yml").write_text(re.sub(r"weight: [\d.]+", "weight: [0.25, 0.75]", text, count=1), encoding="utf-8")
    shown = mpfs("plan", "gradient.yml", "--explain").out
    assert re.search(r"^layer +a +b +kept +cosine +parameters +tensors$", shown, re.MULTILINE)
    assert re.search(r"^layer\.0 .* a weight 0\.\d+", shown, re.MULTILINE)
    mpfs("merge", "gradient.yml", "--into", "g")
    assert re.search(r"^  expert +a @ \w{12}: .*weight 0\.25 to 0\.75", mpfs("explain", "g").out, re.MULTILINE)
    mpfs("explain", "g", "--html", "g.html")
    assert "Layer by layer" in Path("g.html").read_text(encoding="utf-8")


def test_plan_and_explain_say_the_same_of_models(mpfs: Command, workplace: Path) -> None:
    planned = mpfs("plan", "recipe.yml", "--budget", "30%").out
    plan = mpfs("plan", "recipe.yml", "--budget", "30%", "--json").json["plan"]
    explained = mpfs("explain", plan).out
    told = [re.findall(r"^  (expert|base) +(\S+ @ .*)$", text, re.MULTILINE) for text in (planned, explained)]
    assert told[0] == told[1]
    assert len(told[0]) == 3
    for item in mpfs("explain", plan, "--json").json["experts"]:
        assert f": {item['columns_read']} of {item['columns']} columns read" in planned
