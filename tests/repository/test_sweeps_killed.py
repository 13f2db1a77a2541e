"""Sweeps that die in the middle: what is committed stays, the rest is done by doing it again."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from child_server import INTERRUPTED, TIMEOUT, Children, Outcome
from family import new_repository, recipe

from mpfs.objects import ObjectId
from mpfs.repository import Repository

VARIANTS = 3
BATCH = 256 << 10
"""Bytes of a write transaction: a sweep has some dozens of them."""


class Sweeps:
    """A repository in which sweeps die, and what they come to where they do not."""

    def __init__(self, children: Children, root: Path) -> None:
        self.children = children
        self.path = new_repository(root / "disturbed", root)
        self.calm = new_repository(root / "calm", root)

    def command(self, number: int, path: Path) -> dict[str, Any]:
        """A sweep that nobody has done before: other densities, to other branches."""
        densities = [round(0.05 + 0.15 * step + number / 1024, 6) for step in range(VARIANTS)]
        values = {"parameters.density": densities}
        merge = recipe(number, "ties")
        return {
            "op": "sweep",
            "repo": str(path),
            "recipe": merge,
            "values": values,
            "into": f"s{number}",
            "batch": BATCH,
        }

    def expected(self, number: int) -> dict[str, dict[str, ObjectId]]:
        """The tensors of an undisturbed sweep's results, by branch."""
        assert self.children.run(**self.command(number, self.calm)).status == 0
        return self.found(number, self.calm)

    def found(self, number: int, path: Path) -> dict[str, dict[str, ObjectId]]:
        """The tensors of those that are committed."""
        with Repository.open(path) as repository:
            assert repository.fsck().problems == ()
            refs = [ref.name for ref in repository.refs() if ref.name.startswith(f"s{number}/")]
            return {name: dict(repository.snapshot(name).tensors) for name in refs}

    def wait_for_a_commit(self, number: int) -> None:
        """Until the first of a sweep's results is committed."""
        deadline = time.monotonic() + TIMEOUT
        with Repository.open(self.path) as repository:
            while not any(ref.name.startswith(f"s{number}/") for ref in repository.refs()):
                assert time.monotonic() < deadline, "nothing is committed"
                time.sleep(0.001)

    def check(self, number: int, outcome: Outcome) -> str:
        """What is there after a death is right, and doing it again adds what is missing."""
        expected, found = self.expected(number), self.found(number, self.path)
        assert found == {name: expected[name] for name in found}
        if "result" in outcome.messages:
            assert found == expected
        again = self.children.run(**self.command(number, self.path)).result
        assert self.found(number, self.path) == expected
        done = [item["ref"] for item in again["variants"] if not item["new_commit"]]
        assert sorted(done) == sorted(found)
        return "all" if len(found) == VARIANTS else "some" if found else "none"


@pytest.mark.parametrize(
    ("sent", "times"),
    [(signal.SIGKILL, 4), (signal.SIGINT, 2), pytest.param(signal.SIGKILL, 40, marks=pytest.mark.slow)],
)
def test_what_is_committed_stays_and_the_rest_is_done_again(tmp_path: Path, sent: signal.Signals, times: int) -> None:
    with Children() as children:
        sweeps = Sweeps(children, tmp_path)
        duration = children.run(**sweeps.command(900, sweeps.calm)).seconds
        rng = random.Random(7)
        seen: Counter[str] = Counter()
        for number in range(times):
            # Most of the time nothing is committed yet, so that random instants seldom fall between two commits.
            delay: float | Callable[[], None] = duration * rng.uniform(0, 1.1)
            if number % 4 == 3:
                delay = partial(sweeps.wait_for_a_commit, number)
            stop = children.kill if sent == signal.SIGKILL else children.interrupt
            outcome = stop(delay, **sweeps.command(number, sweeps.path))
            assert outcome.status in (0, -signal.SIGKILL, INTERRUPTED), outcome
            seen[sweeps.check(number, outcome)] += 1
        assert seen["none"] >= 1, seen
        if times >= 40:
            assert seen["some"] >= 1, seen
        with Repository.open(sweeps.path) as repository:
            repository.gc()
            assert repository.fsck(read_data=True).problems == ()
