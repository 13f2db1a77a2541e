"""A directory with a repository and models, to run command lines in."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cli_helpers import RECIPE, Command, model, write_model
from mpfs_cli.main import run


@pytest.fixture
def mpfs(capfd: pytest.CaptureFixture[str]) -> Command:
    """Runs command lines in this process."""
    return Command(capfd)


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models `base`, `a` and `b`, imported; and a recipe."""
    directory = tmp_path_factory.mktemp("cli")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        patch.setenv("MPFS_AUTHOR", "ada")
        assert run(["-q", "init", "--block-size", "4KiB"]) == 0
        for name, seed, shift in (("base", 1, 0.0), ("a", 2, 0.1), ("b", 3, 0.2)):
            write_model(directory / name, model(seed, shift))
            base = [] if name == "base" else ["--base", "base"]
            assert run(["-q", "import", str(directory / name), "--as", name, *base, "--threads", "1"]) == 0
    (directory / "recipe.yml").write_text(RECIPE)
    return directory


@pytest.fixture
def workplace(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the template that is the current directory."""
    directory = tmp_path / "work"
    shutil.copytree(template, directory)
    monkeypatch.chdir(directory)
    monkeypatch.setenv("MPFS_AUTHOR", "ada")
    return directory
