"""The JSON contract: the keys that other programs rely on. Keys may be added, never taken away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cli_helpers import Command
from mpfs_cli.output import to_json

pytest_plugins = ["cli_fixtures"]


def has(value: Any, keys: str) -> Any:
    """`value`, after checking that it has the keys."""
    assert set(keys.split()) <= value.keys()
    return value


RUN = (
    "expert_bytes_full expert_bytes_planned expert_bytes_read base_bytes_read bytes_written blocks_kept "
    "blocks_computed blocks_reused seconds"
)


def test_init(mpfs: Command, tmp_path: Path) -> None:
    made = has(mpfs("init", tmp_path / "r", "--json").json, "path uuid format_version block_size hash")
    assert made["path"] == str(tmp_path / "r")
    assert made["block_size"] == 1 << 20


def test_import(mpfs: Command, workplace: Path) -> None:
    keys = "commit ref snapshot tensors bytes new_blocks deduplicated_blocks bytes_written seconds new_commit skipped"
    report = has(mpfs("import", "a", "--as", "again", "--json").json, keys)
    assert report["ref"] == "again"
    assert (report["new_blocks"], report["bytes_written"]) == (0, 0)
    assert report["tensors"] == 4


def test_plan(mpfs: Command, workplace: Path) -> None:
    document = mpfs("plan", "recipe.yml", "--budget", "50%", "-o", "plan.json", "--explain", "--json").json
    has(document, "plan fidelity_predicted notes run file tensors")
    run = has(document["run"], "expert_bytes_full expert_bytes_planned blocks_kept blocks_computed")
    assert 0 < run["expert_bytes_planned"] <= run["expert_bytes_full"] / 2
    assert 0 < document["fidelity_predicted"] < 1


def test_merge(mpfs: Command, workplace: Path) -> None:
    arguments = ("merge", "recipe.yml", "--into", "m", "--budget", "50%", "--verify-fidelity", "--checkout", "out")
    document = has(mpfs(*arguments, "--json").json, "commit ref snapshot plan fidelity_predicted run notes checkout")
    run = has(document["run"], RUN)
    assert run["expert_bytes_read"] <= run["expert_bytes_planned"]
    assert 0 < document["fidelity"] < 1
    has(document["checkout"], "target files bytes seconds")


def test_checkout(mpfs: Command, workplace: Path) -> None:
    document = has(mpfs("checkout", "a", "out", "--json").json, "commit target files bytes seconds")
    assert document["files"] == ["config.json", "model.safetensors", "sub/notes.txt"]


def test_log_and_show(mpfs: Command, workplace: Path) -> None:
    mpfs("merge", "recipe.yml", "--into", "m")
    keys = "commit snapshot parents inputs message author time refs"
    for arguments in (["log"], ["log", "m", "--graph"], ["log", "-n", "2"]):
        for entry in mpfs(*arguments, "--json").json:
            has(entry, keys)
    (newest,) = mpfs("log", "m", "--json").json
    assert newest["refs"] == ["m"]
    assert [(item["role"], item["name"]) for item in newest["inputs"]].count(("base", "base")) == 1
    assert len(mpfs("log", "--json", "-n", "0").json) == 0
    shown = has(mpfs("show", "m", "--json").json, keys + " files tensors bytes run")
    has(shown["run"], RUN)
    assert mpfs("show", "a", "--json").json["run"] is None
    assert shown["author"] == "ada"


def test_ls(mpfs: Command, workplace: Path) -> None:
    files = mpfs("ls", "a", "--json").json
    assert [has(item, "path size tensors")["path"] for item in files] == [
        "config.json",
        "model.safetensors",
        "sub/notes.txt",
    ]
    assert [item["path"] for item in mpfs("ls", "a", "sub", "--json").json] == ["sub/notes.txt"]
    tensors = {item["name"]: item for item in mpfs("ls", "a", "--tensors", "--json").json}
    assert tensors["layer.1.weight"] == {
        "name": "layer.1.weight",
        "dtype": "BF16",
        "shape": [128, 64],
        "bytes": 16384,
        "blocks": 4,
    }
    assert mpfs("ls", "a", "sub", "--tensors", "--json").json == []


@pytest.mark.parametrize("exact", [False, True])
def test_diff(mpfs: Command, workplace: Path, exact: bool) -> None:
    document = has(mpfs("diff", "base", "a", "--json", *(["--exact"] if exact else [])).json, "summary tensors files")
    assert document["summary"] == {
        "identical": 1,
        "changed": 3,
        "added": 0,
        "removed": 0,
        "reshaped": 0,
        "retyped": 0,
    }
    for tensor in document["tensors"]:
        has(tensor, "name status blocks_changed blocks_total relative_l2 cosine max_abs elements_changed estimated")
        if tensor["status"] == "changed":
            assert tensor["estimated"] is not exact
            assert (tensor["max_abs"] is None) is not exact
            assert (tensor["elements_changed"] is None) is not exact
            assert tensor["relative_l2"] == pytest.approx(0.1, rel=0.5)


def test_explain(mpfs: Command, workplace: Path) -> None:
    mpfs("merge", "recipe.yml", "--into", "m", "--budget", "30%")
    document = has(mpfs("explain", "m", "--json").json, "method policy models base fidelity_predicted tensors run")
    has(document["run"], RUN)
    for tensor in document["tensors"]:
        has(tensor, "name action experts energy_kept cosine why columns columns_computed")
    plan = mpfs("plan", "recipe.yml", "--json").json["plan"]
    assert mpfs("explain", plan, "--json").json["run"] is None


def test_explain_as_a_page(mpfs: Command, workplace: Path) -> None:
    mpfs("merge", "recipe.yml", "--into", "m")
    assert mpfs("explain", "m", "--html", "m.html").out.strip() == "m.html"
    page = (workplace / "m.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    document = mpfs("explain", "m", "--html", "n.html", "--json").json
    assert document["file"] == "n.html"
    assert has(document["insight"], "experts layers conflict curves chosen")["experts"]
    assert (workplace / "n.html").read_text(encoding="utf-8") == page


def test_refs(mpfs: Command, workplace: Path) -> None:
    for verb, kind in (("branch", "branch"), ("tag", "tag")):
        made = mpfs(verb, f"new-{verb}", "a", "--json").json
        assert has(made, "ref kind commit")["kind"] == kind
        assert made in mpfs(verb, "--json").json
    assert [item["ref"] for item in mpfs("tag", "--json").json] == ["new-tag"]
    moved = mpfs("reset", "new-branch", "b", "--json").json
    assert moved["commit"] == mpfs("show", "b", "--json").json["commit"]
    assert mpfs("rm", "new-branch", "--json").json == moved
    entries = mpfs("reflog", "new-branch", "--json").json
    assert [has(entry, "ref sequence old new time author reason")["new"] for entry in entries][1:] == [
        moved["commit"],
        None,
    ]


def test_upkeep(mpfs: Command, workplace: Path) -> None:
    has(mpfs("stats", "--json").json, "snapshots tensors logical_bytes unique_bytes stored_bytes blocks dedup_ratio")
    has(mpfs("stats", "a", "--json").json, "logical_bytes codec_ratio")
    report = has(mpfs("fsck", "--json").json, "ok checked problems")
    assert (report["ok"], report["problems"]) == (True, [])
    for options in (["--dry-run"], []):
        result = has(mpfs("gc", "--json", *options).json, "blocks_removed bytes_removed dry_run")
        assert result["dry_run"] is bool(options)


def test_numbers_that_json_does_not_have_become_null() -> None:
    assert to_json({"a": [float("nan"), float("inf"), 1.5, {"b": (float("-inf"),)}]}).split() == (
        ["{", '"a":', "[", "null,", "null,", "1.5,", "{", '"b":', "[", "null", "]", "}", "]", "}"]
    )


def test_analyze(mpfs: Command, workplace: Path) -> None:
    document = has(mpfs("analyze", "a", "b", "--base", "base", "--json").json, "pairs known bytes_compared seconds")
    assert document["pairs"] > 0
    assert mpfs("analyze", "a", "b", "--base", "base", "--json").json["pairs"] == 0
    assert "known already" in mpfs("analyze", "a", "--base", "base").out
