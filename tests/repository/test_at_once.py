"""Two processes at work on one repository: neither loses what the other has done."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from child_server import Children, Outcome
from family import BATCH, new_repository, recipe, variant

from mpfs.repository import Repository

ROUNDS = 6


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Children, Children]]:
    """Two servers of children."""
    with Children() as one, Children() as two:
        yield one, two


def both(pair: tuple[Children, Children], commands: list[dict[str, object]]) -> list[Outcome]:
    """Run two commands at the same time."""
    for children, command in zip(pair, commands, strict=True):
        children.start(**command, batch=BATCH)
    return [children.finish() for children in pair]


def command(repo: Path, root: Path, operation: str, number: int, ref: str) -> dict[str, object]:
    if operation == "import":
        return {"op": "import", "repo": str(repo), "source": str(variant(root, number)), "ref": ref}
    return {"op": "merge", "repo": str(repo), "recipe": recipe(number), "into": ref}


KINDS = [("import", "import"), ("merge", "merge"), ("import", "merge")]


@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
def test_into_different_branches(pair: tuple[Children, Children], tmp_path: Path, kinds: tuple[str, str]) -> None:
    repo = new_repository(tmp_path / "repo", tmp_path)
    # A copy, since a merge's model card names the commits of its models, which bear their time.
    calm = shutil.copytree(repo, tmp_path / "calm")
    for number in range(ROUNDS):
        commands = [
            command(repo, tmp_path, kind, 100 + 2 * number + side, f"b{side}") for side, kind in enumerate(kinds)
        ]
        for outcome, each in zip(both(pair, commands), commands, strict=True):
            alone = pair[0].run(**{**each, "repo": str(calm)})
            assert outcome.result["snapshot"] == alone.result["snapshot"]
    with Repository.open(repo) as repository:
        assert [len(repository.log(name)) for name in ("b0", "b1")] == [ROUNDS, ROUNDS]
        assert repository.fsck(read_data=True).problems == ()


@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
def test_into_the_same_branch(pair: tuple[Children, Children], tmp_path: Path, kinds: tuple[str, str]) -> None:
    """One of them finds that the branch has moved, or they happen to run one after the other."""
    repo = new_repository(tmp_path / "repo", tmp_path)
    published: list[str] = []
    for number in range(ROUNDS):
        commands = [command(repo, tmp_path, kind, 200 + 2 * number + side, "main") for side, kind in enumerate(kinds)]
        outcomes = both(pair, commands)
        commits = [outcome.result["commit"] for outcome in outcomes if "result" in outcome.messages]
        failed = [outcome.messages["error"] for outcome in outcomes if "result" not in outcome.messages]
        assert failed in ([], ["ref_conflict"])
        published += commits
    with Repository.open(repo) as repository:
        assert {entry.identity for entry in repository.log("main")} == set(published)
        assert len(repository.reflog("main")) == len(published) >= ROUNDS
        assert repository.fsck(read_data=True).problems == ()


def test_the_same_into_the_same_branch(pair: tuple[Children, Children], tmp_path: Path) -> None:
    """Blocks that two writers stage at once are stored once."""
    repo = new_repository(tmp_path / "repo", tmp_path)
    for number in range(ROUNDS):
        outcomes = both(pair, [command(repo, tmp_path, "import", 300 + number, "main")] * 2)
        assert any("result" in outcome.messages for outcome in outcomes)
    with Repository.open(repo) as repository:
        assert len(repository.log("main")) == ROUNDS
        assert repository.fsck(read_data=True).problems == ()
        assert repository.gc().blocks_removed == 0
