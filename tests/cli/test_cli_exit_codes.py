"""Every exit code, with the one clear line that goes with it, and its JSON form."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest
from cli_helpers import Command, flip_byte, model

from mpfs import Repository
from mpfs.store import locks

pytest_plugins = ["cli_fixtures"]


def both_ways(mpfs: Command, *arguments: str | Path, code: int, kind: str) -> str:
    """The message, after checking that it is one line on stderr and the same in JSON on stdout."""
    text = mpfs(*arguments, code=code)
    assert text.out == ""
    assert text.err.startswith("mpfs: ")
    assert text.err.count("\n") == 1
    found = mpfs(*arguments, "--json", code=code)
    assert found.err == ""
    assert found.json.keys() == {"error"}
    assert found.json["error"]["kind"] == kind
    assert text.err == f"mpfs: {found.json['error']['message']}\n"
    return text.err


def test_0_and_the_help_of_every_verb(mpfs: Command) -> None:
    assert mpfs("--version").out.startswith("mpfs ")
    assert "Usage: mpfs import" in mpfs("import", "-h").out


def test_1_what_the_system_refuses(mpfs: Command, workplace: Path) -> None:
    message = both_ways(mpfs, "plan", "recipe.yml", "-o", workplace / "no" / "plan.json", code=1, kind="error")
    assert message.endswith("no/plan.json: No such file or directory\n")


def test_1_an_internal_error(mpfs: Command, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ValueError("two\nlines")

    monkeypatch.setattr(Repository, "log", broken)
    message = both_ways(mpfs, "log", code=1, kind="internal")
    assert message == "mpfs: internal error: ValueError: two lines (run with MPFS_DEBUG=1 for a traceback)\n"
    monkeypatch.setenv("MPFS_DEBUG", "1")
    assert "in broken" in mpfs("log", code=1).err


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["loog"], "no such command 'loog'"),
        (["log", "--grap"], "--graph"),
        (["import", "x"], "missing option '--as'"),
        (["merge", "recipe.yml"], "missing option '--into'"),
        (["plan", "recipe.yml", "--budget", "2G"], "'--budget': 2G: is that 1000s or 1024s? Write GB or GiB"),
        (["plan", "recipe.yml", "--policy", "best"], "'energy'"),
        (["plan", "recipe.yml", "--budget", "1GB", "--fidelity", "0.9"], "exclude each other"),
        (["cat", "base"], "write REF:PATH"),
        (["branch", "new"], "at what?"),
        (["branch", "a b", "base"], "cannot be a ref's name"),
        (["diff", "a", "b", "--stat", "--tensors"], "exclude each other"),
        (["fsck", "--subset", "0%"], "subset"),
        (["init"], "a repository is there already"),
        (["init", "new", "--block-size", "5000"], "power of two"),
        (["checkout", "a", "a"], "not empty"),
        (["merge", "recipe.yml", "--into", "m", "--checkout", "a"], "not empty"),
    ],
)
def test_2_usage(mpfs: Command, workplace: Path, arguments: list[str], hint: str) -> None:
    if arguments[0] == "cat":
        assert hint in mpfs(*arguments, code=2).err
    else:
        assert hint in both_ways(mpfs, *arguments, code=2, kind="usage")
    assert mpfs("--version").code == 0


def test_2_no_verb(mpfs: Command) -> None:
    assert "Usage: mpfs" in mpfs(code=2).out


def test_3_diff_found_something(mpfs: Command, workplace: Path) -> None:
    assert "changed" in mpfs("diff", "base", "a", "--exit-code", code=3).out
    assert mpfs("diff", "base", "a").code == 0
    assert mpfs("diff", "base", "base", "--exit-code").code == 0


def test_3_fsck_found_something_and_90_cat_refuses_it(mpfs: Command, workplace: Path) -> None:
    assert mpfs("fsck", "--read-data").out.startswith("ok: ")
    flip_byte(workplace / ".mpfs", model(1)["layer.0.weight"].numpy().tobytes()[:64])
    assert mpfs("fsck").code == 0
    assert mpfs("fsck", "--read-data", code=3).out.startswith("damaged_block  ")
    report = mpfs("fsck", "--subset", "100%", "--json", code=3).json
    assert report["ok"] is False
    assert [problem["kind"] for problem in report["problems"]] == ["damaged_block"]
    assert "layer.0.weight" in mpfs("cat", "base:model.safetensors", code=90).err
    assert "layer.0.weight" in both_ways(mpfs, "checkout", "base", "out", code=90, kind="integrity")
    assert not (workplace / "out").exists()
    both_ways(mpfs, "merge", "recipe.yml", "--into", "merged", code=90, kind="integrity")


def test_10_no_repository(mpfs: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "'mpfs init'" in both_ways(mpfs, "log", code=10, kind="not_a_repository")
    both_ways(mpfs, "-r", tmp_path, "log", code=10, kind="not_a_repository")


def test_11_locked(mpfs: Command, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    acquire = locks._acquire
    monkeypatch.setattr(locks, "_acquire", lambda fd, path, mode, timeout: acquire(fd, path, mode, 0.1))
    with (workplace / ".mpfs" / "lock").open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "try again later" in both_ways(mpfs, "import", "a", "--as", "c", code=11, kind="locked")
        fcntl.flock(file, fcntl.LOCK_SH)
        both_ways(mpfs, "gc", code=11, kind="locked")
        assert mpfs("log").code == 0
    assert mpfs("gc").code == 0


def test_12_ref_conflict(mpfs: Command, workplace: Path) -> None:
    both_ways(mpfs, "branch", "a", "b", code=12, kind="ref_conflict")
    mpfs("tag", "v1", "a")
    both_ways(mpfs, "reset", "v1", "b", code=12, kind="ref_conflict")
    both_ways(mpfs, "import", "a", "--as", "v1", code=12, kind="ref_conflict")
    both_ways(mpfs, "merge", "recipe.yml", "--into", "v1", code=12, kind="ref_conflict")


@pytest.mark.parametrize(
    "arguments",
    [
        ["show", "nothing"],
        ["show", "base~1"],
        ["checkout", "nothing", "out"],
        ["ls", "a", "no/such/path"],
        ["diff", "a", "nothing"],
        ["import", "no-such-directory", "--as", "x"],
        ["import", "a", "--as", "x", "--base", "nothing"],
        ["plan", "no-recipe.yml"],
        ["merge", "no-recipe.yml", "--into", "m"],
        ["merge", "abcdef12", "--into", "m"],
        ["explain", "base"],
        ["explain", "abcdef12"],
        ["rm", "nothing"],
        ["reflog", "nothing"],
        ["stats", "nothing"],
    ],
)
def test_13_not_found(mpfs: Command, workplace: Path, arguments: list[str]) -> None:
    both_ways(mpfs, *arguments, code=13, kind="not_found")


def test_13_a_file_that_is_not_there(mpfs: Command, workplace: Path) -> None:
    assert "nothing.json" in mpfs("cat", "a:nothing.json", code=13).err


def test_14_infeasible(mpfs: Command, workplace: Path) -> None:
    (workplace / "linear.yml").write_text(
        "merge_method: linear\nmodels:\n- {model: a, parameters: {weight: 1}}\n- {model: b, parameters: {weight: 1}}\n"
    )
    both_ways(mpfs, "plan", "linear.yml", "--budget", "1B", code=14, kind="budget_infeasible")
    both_ways(mpfs, "merge", "linear.yml", "--into", "m", "--budget", "1B", code=14, kind="budget_infeasible")


def test_15_no_space(mpfs: Command, workplace: Path, tmp_path: Path) -> None:
    mpfs("init", tmp_path / "small", "--block-size", "4KiB", "--map-size", "96KiB")
    both_ways(mpfs, "-r", tmp_path / "small", "import", "a", "--as", "a", code=15, kind="no_space")
    assert mpfs("-r", tmp_path / "small", "fsck").code == 0


def test_65_bad_input(mpfs: Command, workplace: Path) -> None:
    (workplace / "bad.safetensors").write_bytes(b"\xff" * 100)
    both_ways(mpfs, "import", "bad.safetensors", "--as", "x", code=65, kind="format")
    (workplace / "plan.json").write_text('{"kind": "pla')
    both_ways(mpfs, "merge", "plan.json", "--into", "m", code=65, kind="bad_input")
    (workplace / "bad.yml").write_text("merge_method: [\n")
    both_ways(mpfs, "plan", "bad.yml", code=65, kind="recipe")


def test_65_every_mistake_of_a_recipe_gets_its_own_line(mpfs: Command, workplace: Path) -> None:
    (workplace / "bad.yml").write_text(
        "merge_method: ties\nbase_model: base\nmodels:\n"
        "- {model: a, parameters: {wieght: 1}}\n- {model: b, weight: 1}\ndtpye: float32\n"
    )
    result = mpfs("plan", "bad.yml", code=65)
    lines = result.err.splitlines()
    assert len(lines) >= 2
    assert all(line.startswith("mpfs: bad.yml: ") for line in lines)
    assert any("models[1].weight: " in line for line in lines)
    error = mpfs("plan", "bad.yml", "--json", code=65).json["error"]
    assert len(error["problems"]) == len(lines)
    assert all(problem.keys() == {"path", "message"} for problem in error["problems"])


def test_130_interrupted(mpfs: Command, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Repository, "log", interrupt)
    assert both_ways(mpfs, "log", code=130, kind="interrupted") == "mpfs: interrupted\n"
