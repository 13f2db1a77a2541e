"""The verbs as a person uses them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer
from cli_helpers import Command, model, write_model
from mpfs_cli import main
from safetensors.torch import load_file

from mpfs import Repository

pytest_plugins = ["cli_fixtures"]


def test_the_first_five_minutes(mpfs: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = mpfs("init", "--block-size", "4KiB")
    assert made.out == f"made an empty repository at {tmp_path / '.mpfs'}, in blocks of 4.0 KiB\n"
    assert mpfs("log").err == "mpfs: no commits yet; 'mpfs import SOURCE --as REF' makes one\n"
    source = write_model(tmp_path / "model", model(1))
    first = mpfs("import", source, "--as", "main", "-m", "the first")
    assert re.match(r"main  [0-9a-f]{12}\n", first.out)
    again = mpfs("import", source, "--as", "main")
    assert "nothing new" in again.out
    assert "the first" in mpfs("log").out
    mpfs("checkout", "main", "out")
    for name in ("config.json", "model.safetensors", "sub/notes.txt"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()


def test_quiet_prints_the_bare_id(mpfs: Command, workplace: Path) -> None:
    for arguments in (
        ["import", "a", "--as", "x"],
        ["merge", "recipe.yml", "--into", "m"],
        ["plan", "recipe.yml"],
        ["branch", "y", "a"],
        ["tag", "z", "a"],
    ):
        assert re.fullmatch(r"[0-9a-f]{64}\n", mpfs("-q", *arguments).out), arguments


def test_options_of_the_program_stand_before_the_verb_or_behind_it(
    mpfs: Command, workplace: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    mpfs("-q", "init", other, "--block-size", "4KiB")
    names = [item["refs"] for item in mpfs("--json", "log").json]
    assert mpfs("log", "--json").json == mpfs("--json", "log", "--json").json == mpfs("--json", "log").json
    assert sorted(name for item in names for name in item) == ["a", "b", "base"]
    assert mpfs("-r", other, "log", "--json").json == mpfs("log", "--json", "-r", other).json == []
    # The one nearest to the verb's own options counts.
    assert mpfs("-r", ".mpfs", "log", "--json", "--repository", other).json == []
    plan = mpfs("plan", "recipe.yml", "-q").out
    assert re.fullmatch(r"[0-9a-f]{64}\n", plan)
    assert mpfs("-q", "plan", "--quiet", "recipe.yml").out == plan
    # A value is not mistaken for an option.
    commit = mpfs("merge", "recipe.yml", "--into", "m", "-m", "-q", "-q").out
    assert mpfs("show", commit.strip(), "--json").json["message"] == "-q"


def test_json_of_a_verb_that_prints_none(mpfs: Command, workplace: Path) -> None:
    for arguments in (["--json", "cat", "base:config.json"], ["--json", "export", "base"]):
        refused = mpfs(*arguments, code=2)
        assert refused.json["error"]["kind"] == "usage"
        assert "prints no JSON" in refused.json["error"]["message"]


def test_every_verb_takes_the_options_of_the_program() -> None:
    group: Any = typer.main.get_command(main.app)
    context = group.context_class(group, info_name="mpfs")
    for name, verb in group.commands.items():
        options = {option for item in verb.get_params(verb.context_class(verb, parent=context)) for option in item.opts}
        assert {"-r", "-q", "--help"} <= options, name


def test_a_plan_is_run_by_file_by_id_and_by_its_beginning(mpfs: Command, workplace: Path) -> None:
    shown = mpfs("plan", "recipe.yml", "--budget", "40%", "-o", "plan.json")
    assert "run it:  mpfs merge plan.json --into BRANCH" in shown.out
    plan = mpfs("-q", "plan", "recipe.yml", "--budget", "40%").out.strip()
    results = set()
    for number, what in enumerate(("plan.json", plan, plan[:12])):
        report = mpfs("merge", what, "--into", f"m{number}", "--json").json
        assert report["plan"] == plan
        results.add(report["snapshot"])
    direct = mpfs("merge", "recipe.yml", "--into", "m", "--budget", "40%", "--json").json
    assert results == {direct["snapshot"]}
    refused = mpfs("merge", "plan.json", "--into", "m", "--budget", "50%", "--seed", "1", code=2)
    assert "--budget, --seed" in refused.err


def test_a_recipe_may_be_json(mpfs: Command, workplace: Path) -> None:
    (workplace / "recipe.json").write_text(
        '{"merge_method": "linear", "models": [{"model": "a", "parameters": {"weight": 1}}]}'
    )
    assert mpfs("-q", "merge", "recipe.json", "--into", "m").code == 0


def test_mergekit_users_need_two_commands(mpfs: Command, template: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yml"
    text = (template / "recipe.yml").read_text()
    for name in ("base", "a", "b"):
        text = re.sub(rf"(model: |base_model: ){name}\n", rf"\g<1>{template / name}\n", text)
    recipe.write_text(text)
    repository = tmp_path / "r"
    mpfs("init", repository)
    mpfs("-r", repository, "merge", recipe, "--into", "merged", "--checkout", tmp_path / "out")
    base, a, b = model(1), model(2, 0.1), model(3, 0.2)
    merged = load_file(tmp_path / "out" / "model.safetensors")
    name = "layer.0.weight"
    expected = base[name] + 0.5 * (a[name] - base[name]) + 0.25 * (b[name] - base[name])
    assert (merged[name] - expected).abs().max() < 1e-5


def test_a_budget_may_be_bytes_or_a_result(mpfs: Command, workplace: Path) -> None:
    run = mpfs("plan", "recipe.yml", "--budget", "20KiB", "--json").json["run"]
    assert 0 < run["expert_bytes_planned"] <= 20 << 10
    good = mpfs("plan", "recipe.yml", "--fidelity", "60%", "--json").json
    assert good["fidelity_predicted"] >= 0.6
    assert good["run"]["expert_bytes_planned"] < good["run"]["expert_bytes_full"]


def test_an_unwritable_checkout_leaves_the_merge_and_says_so(
    mpfs: Command, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mpfs.errors import NoSpaceError

    def full(*_: object, **__: object) -> None:
        raise NoSpaceError("the disk is full", needed=5)

    monkeypatch.setattr(Repository, "checkout", full)
    failed = mpfs("merge", "recipe.yml", "--into", "m", "--checkout", "out", "--json", code=15).json["error"]
    assert failed["commit"] == mpfs("show", "m", "--json").json["commit"]
    assert "the merge itself is committed to m" in failed["message"]
    assert failed["needed"] == 5


def test_explain_shows_plan_and_run(mpfs: Command, workplace: Path) -> None:
    mpfs("merge", "recipe.yml", "--into", "m", "--budget", "30%")
    shown = mpfs("explain", "m").out
    assert shown.index("expert bytes read") < shown.index("fidelity predicted") < shown.index("layer.0.weight")
    assert re.search(r"^tensor +operator +a +b +kept +cosine +why$", shown, re.MULTILINE)
    assert max(map(len, shown.splitlines())) > 80, "a pipe gets whole lines"
    assert shown.count("layer.0.weight") == 1
    plan = mpfs("plan", "recipe.yml", "--explain").out
    assert "run it:" in plan
    assert "layer.0.weight" in plan


def test_log_and_its_graph(mpfs: Command, workplace: Path) -> None:
    for budget in ("30%", "60%"):
        mpfs("merge", "recipe.yml", "--into", "m", "--budget", budget, "-m", f"at {budget}")
    lines = mpfs("log").out.splitlines()
    assert re.fullmatch(r"[0-9a-f]{10} \(m\) \d{4}-\d\d-\d\d \d\d:\d\d  ada  at 60%", lines[0])
    assert lines[1].startswith("    from ")
    assert "expert a @ " in lines[1]
    assert len(mpfs("log", "m").out.splitlines()) == 4
    graph = mpfs("log", "m", "--graph", "-n", "3").out
    assert graph.startswith("●")
    assert graph.count("●") == 3
    assert "├─┬─┬─╮" in graph


def test_diff_in_words(mpfs: Command, workplace: Path) -> None:
    tensors = model(2, 0.1)
    tensors["new"] = tensors.pop("norm.weight")
    tensors["layer.0.weight"] = tensors["layer.0.weight"].reshape(128, 32).clone()
    write_model(workplace / "other", tensors)
    (workplace / "other" / "config.json").write_text("{}")
    mpfs("import", "other", "--as", "other")
    shown = mpfs("diff", "a", "other").out
    assert re.search(r"^reshaped .* layer.0.weight  F32 \[64, 64\] → F32 \[128, 32\]$", shown, re.MULTILINE)
    assert re.search(r"^added .* new  \(the same as norm.weight before\)$", shown, re.MULTILINE)
    assert "changed  file config.json" in shown
    assert "frozen" not in shown
    assert "frozen" in mpfs("diff", "a", "other", "--tensors").out
    assert mpfs("diff", "a", "other", "--stat").out.splitlines() == [
        "5 tensors: 2 identical, 1 added, 1 removed, 1 reshaped",
        "other files: 1 changed",
    ]
    assert re.search(r"~\d\.\d\de-\d\d", mpfs("diff", "base", "a").out)
    assert "~" not in mpfs("diff", "base", "a", "--exact").out


def test_cat_is_byte_for_byte(workplace: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    from mpfs_cli.main import run

    assert run(["cat", "a:model.safetensors"]) == 0
    assert capfdbinary.readouterr().out == (workplace / "a" / "model.safetensors").read_bytes()


def test_refs_move_and_come_back(mpfs: Command, workplace: Path) -> None:
    mpfs("merge", "recipe.yml", "--into", "m", "--budget", "30%")
    mpfs("merge", "recipe.yml", "--into", "m")
    newest = mpfs("show", "m", "--json").json["commit"]
    mpfs("reset", "m", "m~1")
    assert mpfs("show", "m", "--json").json["commit"] != newest
    mpfs("rm", "m")
    assert "m " not in mpfs("branch").out
    shown = mpfs("reflog", "m").out.splitlines()
    assert len(shown) == 4
    assert shown[-1].split()[:4] == ["m", mpfs("reflog", "m", "--json").json[2]["new"][:10], "→", "-"]
    mpfs("branch", "m", newest[:12])
    assert mpfs("show", "m", "--json").json["commit"] == newest


def test_gc_says_what_it_did(mpfs: Command, workplace: Path) -> None:
    mpfs("rm", "b")
    assert "would remove 0 blocks" in mpfs("gc", "--dry-run").out
    would = mpfs("gc", "--dry-run", "--reflog-days", "0").out
    assert re.match(r"would remove [1-9]\d* blocks", would)
    assert mpfs("gc", "--reflog-days", "0").out == would.replace("would remove", "removed")
    assert mpfs("show", "a").code == 0


def test_names_from_strangers_cannot_drive_the_terminal(mpfs: Command, workplace: Path) -> None:
    mpfs("import", "a", "--as", "x", "-m", "evil \x1b[2J\x07 message\nsecond line")
    for arguments in (["log", "x"], ["show", "x"], ["log", "--graph"]):
        shown = mpfs(*arguments).out
        assert "\x1b" not in shown
        assert "\x07" not in shown
    assert "evil \\x1b[2J\\x07 message\n" in mpfs("log", "x").out
    assert "    second line\n" in mpfs("show", "x").out
    assert "\x1b" not in mpfs("show", "\x1b[31mred", code=13).err


def test_import_notes_what_it_leaves_out(mpfs: Command, workplace: Path) -> None:
    (workplace / "a" / ".git").mkdir()
    (workplace / "a" / ".git" / "config").write_text("x")
    result = mpfs("import", "a", "--as", "again")
    skipped = mpfs("import", "a", "--as", "again", "--json").json["skipped"]
    assert bool(skipped) == ("left out" in result.err)
