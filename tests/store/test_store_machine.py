"""Any order of the store's operations, against a dictionary."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule
from store_helpers import DAY, NOW, assert_clean, data, merge, publish, staged

from mpfs.errors import NotFoundError, RefConflictError
from mpfs.objects import Commit, Snapshot, Tensor
from mpfs.store import Store, execute_gc

NAMES = st.sampled_from(["main", "dev", "a/b", "a"])
WEIGHTS = st.dictionaries(st.sampled_from(["w", "x", "y"]), st.integers(0, 5), min_size=1, max_size=2)


@dataclass
class Known:
    """What the model knows of a commit."""

    weights: dict[str, int]
    needs: tuple[str, ...]


class StoreMachine(RuleBasedStateMachine):
    """`refs` and `commits` say what the store must hold; `time` moves on by a day with every step."""

    published = Bundle("published")

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="mpfs-machine-"))
        self.store = Store.create(self.directory / "repo", block_size=4096, map_size=64 << 20)
        self.refs: dict[str, str] = {}
        self.commits: dict[str, Known] = {}
        self.log: list[tuple[int, str | None, str | None]] = []
        self.time = NOW

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.directory)

    def nests(self, name: str) -> bool:
        return any(name.startswith(f"{other}/") or other.startswith(f"{name}/") for other in self.refs)

    def moved(self, name: str, commit: str | None) -> None:
        self.log.append((self.time, self.refs.get(name), commit))
        if commit is None:
            del self.refs[name]
        else:
            self.refs[name] = commit

    def reachable(self, roots: set[str]) -> set[str]:
        found: set[str] = set()
        while roots:
            found |= roots
            roots = {needed for commit in roots for needed in self.commits[commit].needs} - found
        return found

    @rule(seed=st.integers(0, 9))
    def stage(self, seed: int) -> None:
        """Blocks that nothing refers to."""
        with self.store.writer() as writer:
            writer.put_block(staged(data(seed, 4096)))
            writer.flush()

    @rule(target=published, name=NAMES, weights=WEIGHTS, parents=st.booleans(), message=st.integers(0, 2))
    def publish(self, name: str, weights: dict[str, int], parents: bool, message: int) -> str:
        self.time += DAY
        expected = self.refs.get(name)
        needs = (expected,) if parents and expected else ()
        content = {key: data(seed) for key, seed in weights.items()}

        def attempt(expected: str | None) -> str:
            return publish(
                self.store, content, ref=name, expected=expected, parents=needs, time=self.time, message=str(message)
            )

        if expected is None and self.nests(name):
            with pytest.raises(RefConflictError):
                attempt(None)
            return ""
        commit = attempt(expected)
        self.commits[commit] = Known(weights, needs)
        self.moved(name, commit)
        return commit

    @rule(name=NAMES, wrong=published)
    def publish_where_the_ref_is_not(self, name: str, wrong: str) -> None:
        if self.refs.get(name) != (wrong or None):
            with pytest.raises(RefConflictError):
                publish(self.store, {"w": data(1)}, ref=name, expected=wrong or None, time=self.time)

    @rule(target=published, base=published, expert=published)
    def merge(self, base: str, expert: str) -> str:
        self.time += DAY
        if base not in self.commits or expert not in self.commits or "merged" in self.refs:
            return ""
        commit = merge(self.store, base, expert, ref="merged", seed=3, time=self.time)
        self.commits[commit] = Known({"w": 3}, (base, expert))
        self.moved("merged", commit)
        return commit

    @rule(name=st.one_of(NAMES, st.just("merged")), commit=published, right=st.booleans())
    def move(self, name: str, commit: str, right: bool) -> None:
        self.time += DAY
        expected = self.refs.get(name) if right else "1" * 64
        possible = right and commit in self.commits and not (expected is None and self.nests(name))
        try:
            self.store.move_ref(
                name, commit, expected=expected, kind="branch", time=self.time, author="t", reason="move"
            )
        except (RefConflictError, NotFoundError):
            assert not possible
        else:
            assert possible
            self.moved(name, commit)

    @rule(name=st.one_of(NAMES, st.just("merged")))
    def remove(self, name: str) -> None:
        self.time += DAY
        if name in self.refs:
            self.store.move_ref(
                name, None, expected=self.refs[name], kind="branch", time=self.time, author="t", reason="rm"
            )
            self.moved(name, None)

    @rule(days=st.sampled_from([0, 1, 3, 10]), compact=st.booleans())
    def collect(self, days: int, compact: bool) -> None:
        young = [entry for entry in self.log if entry[0] > self.time - days * DAY]
        roots = {commit for _, old, new in young for commit in (old, new) if commit is not None}
        live = self.reachable(roots | set(self.refs.values()))
        execute_gc(self.store, now=self.time, reflog_days=days, compact=compact)
        self.commits = {commit: known for commit, known in self.commits.items() if commit in live}
        self.log = [entry for entry in self.log if {entry[1], entry[2]} <= live | {None}]
        with self.store.environment.read() as txn:
            blocks = {key for key, _ in txn.scan("blocks", values=False)}
        needed = {
            block
            for commit in live
            for reference in self.snapshot(commit).references()
            for block in self.store.objects.get(Tensor, reference).blocks
        }
        assert blocks == needed

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = Store.open(self.directory / "repo")

    @rule(factor=st.integers(1, 3))
    def grow(self, factor: int) -> None:
        assert self.store.grow_map(self.store.environment.map_size + factor) >= 64 << 20

    @rule(target=published, name=NAMES, weights=WEIGHTS, after=st.integers(0, 4))
    def die_while_publishing(self, name: str, weights: dict[str, int], after: int) -> str:
        """The ref is the old one or the new one."""
        self.time += DAY
        expected = self.refs.get(name)
        if expected is None and self.nests(name):
            return ""
        content = {key: data(seed) for key, seed in weights.items()}
        self.die(after, lambda store: publish(store, content, ref=name, expected=expected, time=self.time))
        found = self.store.refs.find(name)
        if found is None or found.commit == expected:
            return ""
        self.commits[found.commit] = Known(weights, ())
        self.moved(name, found.commit)
        return found.commit

    @rule(after=st.integers(0, 9), compact=st.booleans())
    def die_while_collecting(self, after: int, compact: bool) -> None:
        """What was left over is found by the next collection."""
        self.die(after, lambda store: execute_gc(store, now=self.time, reflog_days=0, compact=compact))
        self.every_ref_reads_back()
        self.fsck_is_clean()
        self.collect(0, compact)

    def die(self, after: int, act: Callable[[Store], object]) -> None:
        """Let a child do something, and be killed with its transaction number `after`, before it or in it."""
        self.store.close()
        pid = os.fork()
        if pid == 0:
            try:
                store = Store.open(self.directory / "repo")
                real, count = store.environment._begin, iter(range(1000))

                def begin(handle: Any, write: bool) -> Any:
                    if write and next(count) == after:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return real(handle, write)

                store.environment._begin = begin  # type: ignore[method-assign]
                act(store)
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        self.store = Store.open(self.directory / "repo")

    def snapshot(self, commit: str) -> Snapshot:
        return self.store.objects.get(Snapshot, self.store.objects.get(Commit, commit).snapshot)

    @invariant()
    def the_store_is_what_the_model_says(self) -> None:
        assert {ref.name: ref.commit for ref in self.store.refs.all()} == self.refs
        assert set(self.store.objects.ids(Commit)) == set(self.commits)
        assert sorted((entry.time, entry.old or "", entry.new or "") for entry in self.store.refs.log()) == sorted(
            (time, old or "", new or "") for time, old, new in self.log
        )

    @invariant()
    def every_ref_reads_back(self) -> None:
        for commit in set(self.refs.values()):
            tensors = self.snapshot(commit).tensors
            assert set(tensors) == set(self.commits[commit].weights)
            for name, seed in self.commits[commit].weights.items():
                blocks = self.store.objects.get(Tensor, tensors[name]).blocks
                assert b"".join(self.store.blocks.read(block, name) for block in blocks) == data(seed)

    @invariant()
    def fsck_is_clean(self) -> None:
        assert_clean(self.store)


TestStoreMachine = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")(StoreMachine.TestCase)
TestStoreMachine.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
