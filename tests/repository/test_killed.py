"""Processes that die in the middle of an import or a merge (DESIGN §4, invariants 3 to 5).

After each death: the refs are the old ones or the new ones, fsck is clean, and the next command works.
"""

from __future__ import annotations

import random
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest
from child_server import INTERRUPTED, Children, Outcome
from family import BATCH, new_repository, recipe, variant

from mpfs.objects import ObjectId
from mpfs.repository import Repository
from mpfs.testing import checkpoints

KILLS = 110
"""Of each operation."""


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    """A server of children."""
    with Children() as made:
        yield made


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the models are."""
    return tmp_path_factory.mktemp("models")


class Disturbed:
    """A repository in which things are killed, and one in which nothing is, for comparison."""

    def __init__(self, children: Children, root: Path, folder: Path, operation: str) -> None:
        self.children = children
        self.root = root
        self.operation = operation
        self.path = new_repository(folder / "disturbed", root)
        # A copy: a merge's model card names its models' commits, which depend on when they were made.
        self.calm = shutil.copytree(self.path, folder / "calm")
        self.ref = {"import": "imported", "merge": "merged"}[operation]

    def command(self, number: int, path: Path) -> dict[str, object]:
        """An import or merge that nobody has done before."""
        if self.operation == "import":
            source = str(variant(self.root, number + 3))
            return {"op": "import", "repo": str(path), "source": source, "ref": self.ref, "batch": BATCH}
        return {"op": "merge", "repo": str(path), "recipe": recipe(number), "into": self.ref, "batch": BATCH}

    def run(self, number: int, path: Path) -> Outcome:
        """Undisturbed."""
        outcome = self.children.run(**self.command(number, path))
        assert outcome.status == 0, outcome
        return outcome

    def expected(self, number: int) -> ObjectId:
        """The snapshot that an undisturbed run gives."""
        found: ObjectId = self.run(number, self.calm).result["snapshot"]
        return found

    def tip(self) -> ObjectId | None:
        """Where the branch is."""
        with Repository.open(self.path) as repository:
            return next((ref.commit for ref in repository.refs() if ref.name == self.ref), None)

    def check(self, number: int, before: ObjectId | None, outcome: Outcome) -> str:
        """What must hold after a death; which of the things that may happen did."""
        with Repository.open(self.path) as repository:
            refs = {ref.name: ref.commit for ref in repository.refs()}
            after = refs.pop(self.ref, None)
            assert sorted(refs) == ["base", "one", "two"]
            assert repository.fsck().problems == (), outcome
            if after is None:
                assert before is None
                return "old"
            assert repository.reflog(self.ref)[-1].new == after
            assert repository.log(self.ref, inputs=True)[0].identity == after
            if after == before:
                assert "result" not in outcome.messages, "it said that it had published"
                return "old"
            assert repository.resolve(f"{self.ref}~1") == before if before else True
            assert repository.show(after).commit.snapshot == self.expected(number)
            return "new"

    def check_all(self) -> None:
        """Collect what was left over; then nothing is, and all is sound."""
        with Repository.open(self.path) as repository:
            repository.gc()
            assert repository.gc().objects_removed == 0
            assert repository.gc(dry_run=True).blocks_removed == 0
            assert repository.fsck(read_data=True).problems == ()


@pytest.mark.parametrize("operation", ["import", "merge"])
def test_sigkill_at_any_instant(children: Children, root: Path, tmp_path: Path, operation: str) -> None:
    disturbed = Disturbed(children, root, tmp_path, operation)
    numbers = iter(range(10_000))
    duration = median(disturbed.run(next(numbers), disturbed.calm).seconds for _ in range(3))
    rng = random.Random(operation)
    seen: Counter[str] = Counter()
    kills = 0
    while kills < KILLS:
        number = next(numbers)
        assert number < 3 * KILLS, f"only {kills} of {number} were killed: {seen}"
        before = disturbed.tip()
        outcome = children.kill(rng.uniform(0, 1.05 * duration), **disturbed.command(number, disturbed.path))
        assert outcome.status in (0, -signal.SIGKILL), outcome
        killed = outcome.status != 0
        kills += killed
        seen[("killed, " if killed else "done, ") + disturbed.check(number, before, outcome)] += 1
        if kills % 20 == 0 and killed:
            # What was killed is done again: the same comes out as if nothing had been.
            again = disturbed.run(number, disturbed.path)
            assert again.result["snapshot"] == disturbed.expected(number)
        if kills % 50 == 0 and killed:
            disturbed.check_all()
    assert seen["killed, old"] > KILLS // 3, seen
    disturbed.check_all()
    final = next(numbers)
    assert disturbed.run(final, disturbed.path).result["snapshot"] == disturbed.expected(final)
    with Repository.open(disturbed.path) as repository, Repository.open(disturbed.calm) as calm:
        repository.checkout(disturbed.ref, tmp_path / "out")
        calm.checkout(disturbed.ref, tmp_path / "calm_out")
    assert checkpoints.read(tmp_path / "out") == checkpoints.read(tmp_path / "calm_out")


@pytest.mark.parametrize("operation", ["import", "merge"])
def test_sigint_at_any_instant(children: Children, root: Path, tmp_path: Path, operation: str) -> None:
    """Ctrl-C: the process ends and has published nothing or all.

    Python raises KeyboardInterrupt anywhere, also where a lock was just taken, and may then hang (seen here once in
    some 30 times, in threading and in py-lmdb's close). So a second Ctrl-C ends a process at once, which is safe.
    """
    disturbed = Disturbed(children, root, tmp_path, operation)
    duration = disturbed.run(0, disturbed.calm).seconds
    seen: Counter[str] = Counter()
    for number in range(1, 21):
        before = disturbed.tip()
        delay = duration * number / 21
        outcome = children.interrupt(delay, **disturbed.command(number, disturbed.path))
        assert outcome.status in (0, INTERRUPTED), outcome
        seen[disturbed.check(number, before, outcome)] += 1
    assert seen["old"] >= 5, seen
    disturbed.check_all()
    assert disturbed.run(99, disturbed.path).result["snapshot"] == disturbed.expected(99)
