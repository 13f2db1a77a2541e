"""log, resolve, explain, and refs through the facade."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from history_cases import Models, new_repository, publish

from mpfs.errors import NotFoundError, RefConflictError, UsageError
from mpfs.history import ancestry
from mpfs.objects import Budget, ObjectId
from mpfs.repository import Repository

RECIPE = {
    "merge_method": "task_arithmetic",
    "base_model": "base",
    "models": [
        {"model": "one", "parameters": {"weight": 0.5}},
        {"model": "two", "parameters": {"weight": 0.25}},
    ],
    "dtype": "float32",
}


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    """A repository with small blocks."""
    with new_repository(tmp_path / "repo") as made:
        yield made


@pytest.fixture
def snapshot(repository: Repository, tmp_path: Path) -> ObjectId:
    """A snapshot to commit again and again; its ref is `seed`."""
    Models(repository, tmp_path).put("seed", {"w": torch.ones(3)})
    found: ObjectId = repository.show("seed").commit.snapshot
    return found


def identities(repository: Repository, *starts: ObjectId, inputs: bool = True) -> list[ObjectId]:
    store = repository._store
    return [item.identity for item in ancestry(starts, store.objects, store.refs, inputs=inputs)]


class TestLog:
    def test_newest_first_and_none_before_what_came_from_it(self, repository: Repository, snapshot: ObjectId) -> None:
        """Clocks are wrong at times: a parent may look younger than its child."""
        root = publish(repository, snapshot, "main", time=500)
        child = publish(repository, snapshot, "main", parents=[root], time=100)
        leaf = publish(repository, snapshot, "main", parents=[child], time=300)
        side = publish(repository, snapshot, "side", parents=[root], time=200)
        assert identities(repository, leaf, side) == [leaf, side, child, root]
        assert identities(repository, leaf) == [leaf, child, root]

    def test_ties_are_broken_by_id(self, repository: Repository, snapshot: ObjectId) -> None:
        commits = [publish(repository, snapshot, f"b{n}", time=7, message=str(n)) for n in range(6)]
        assert identities(repository, *commits) == sorted(commits)
        assert identities(repository, *reversed(commits), *commits) == sorted(commits)

    def test_merge_inputs(self, repository: Repository, snapshot: ObjectId) -> None:
        base = publish(repository, snapshot, "base", time=1)
        expert = publish(repository, snapshot, "expert", time=2, inputs=[base])
        before = publish(repository, snapshot, "merged", time=3)
        merge = publish(repository, snapshot, "merged", parents=[before], inputs=[base, expert, base], time=4)
        assert identities(repository, merge) == [merge, before, expert, base]
        assert identities(repository, merge, inputs=False) == [merge, before]
        assert [item.identity for item in repository.log("merged")] == [merge, before]
        assert [item.identity for item in repository.log("merged", inputs=True)] == [merge, before, expert, base]

    def test_unrelated_histories_and_all_refs(self, repository: Repository, snapshot: ObjectId) -> None:
        one = publish(repository, snapshot, "one", time=1)
        two = publish(repository, snapshot, "two", time=2, parents=[one])
        other = publish(repository, snapshot, "other", time=3)
        repository.tag("v1", "two")
        seed = repository.resolve("seed")
        everything = repository.log()
        assert [item.identity for item in everything] == [seed, other, two, one]
        assert {item.identity: item.refs for item in everything} == {
            seed: ("seed",),
            other: ("other",),
            two: ("two", "v1"),
            one: ("one",),
        }
        assert [item.identity for item in repository.log("other")] == [other]

    def test_an_empty_repository(self, repository: Repository) -> None:
        assert repository.log() == []
        with pytest.raises(NotFoundError, match="no refs yet"):
            repository.log("main")

    def test_a_diamond_is_listed_once(self, repository: Repository, snapshot: ObjectId) -> None:
        tip = publish(repository, snapshot, "main", time=0)
        for time in range(1, 40):
            left = publish(repository, snapshot, "left", parents=[tip], time=2 * time)
            tip = publish(repository, snapshot, "main", parents=[tip], inputs=[left], time=2 * time + 1)
        found = identities(repository, tip)
        assert len(found) == len(set(found)) == 79

    def test_json(self, repository: Repository, snapshot: ObjectId) -> None:
        commit = publish(repository, snapshot, "main", time=1_700_000_000)
        value = repository.show("main").as_json()
        assert json.loads(json.dumps(value)) == {
            "commit": commit,
            "snapshot": snapshot,
            "parents": [],
            "inputs": [],
            "plan": None,
            "message": "by hand",
            "author": "tester",
            "time": "2023-11-14T22:13:20Z",
            "source": None,
            "refs": ["main"],
        }


class TestResolve:
    def test_refs_ids_prefixes_and_ancestors(self, repository: Repository, snapshot: ObjectId) -> None:
        first = publish(repository, snapshot, "main", time=1)
        second = publish(repository, snapshot, "main", parents=[first], time=2)
        third = publish(repository, snapshot, "main", parents=[second, first], time=3)
        names = ["main", third, third[:12], third[:4], "main~0", f"{third[:9]}~0"]
        assert {repository.resolve(name) for name in names} == {third}
        assert repository.resolve("main~1") == repository.resolve(f"{third}~1") == second
        assert repository.resolve("main~2") == first
        with pytest.raises(NotFoundError, match="main has only 2"):
            repository.resolve("main~3")
        with pytest.raises(NotFoundError, match="main has only 2"):
            repository.resolve("main~999999999")

    def test_ambiguous_prefixes(self, repository: Repository, snapshot: ObjectId) -> None:
        seen: dict[str, ObjectId] = {}
        for number in range(3000):
            commit = publish(repository, snapshot, "main", message=str(number))
            if commit[:4] in seen:
                break
            seen[commit[:4]] = commit
        else:
            pytest.fail("no two commits share four digits")
        with pytest.raises(UsageError, match=f"{commit[:4]} is the beginning of 2 commit ids"):
            repository.resolve(commit[:4])
        assert repository.resolve(commit[:24]) == commit

    def test_a_ref_that_looks_like_a_prefix_wins(self, repository: Repository, snapshot: ObjectId) -> None:
        commit = publish(repository, snapshot, "main", time=1)
        other = publish(repository, snapshot, commit[:8], time=2)
        assert repository.resolve(commit[:8]) == other

    @pytest.mark.parametrize(
        "name",
        [
            "",
            "no",
            "abc",
            "abcd1234",
            "~1",
            "main~",
            "main~x",
            "main~~1",
            "a\nb",
            "x" * 5000,
            "ü",
            "a\0",
            "../a",
            "f" * 64,
            "main~" + "9" * 5000,
            os.fsdecode(b"\xff"),
        ],
    )
    def test_what_is_not_there(self, repository: Repository, snapshot: ObjectId, name: str) -> None:
        publish(repository, snapshot, "main")
        with pytest.raises(NotFoundError):
            repository.resolve(name)

    def test_the_message_lists_refs(self, repository: Repository, snapshot: ObjectId) -> None:
        with pytest.raises(NotFoundError, match=r"no ref or commit is called mian; there are: seed$"):
            repository.resolve("mian")
        for number in range(9):
            publish(repository, snapshot, f"b{number}")
        with pytest.raises(NotFoundError, match=r"there are: b0, b1, b2, b3, b4, b5, b6, b7 and 2 more$"):
            repository.resolve("mian")


class TestRefs:
    @pytest.fixture
    def commits(self, repository: Repository, snapshot: ObjectId) -> tuple[ObjectId, ObjectId]:
        first = publish(repository, snapshot, "main", time=1)
        return first, publish(repository, snapshot, "main", parents=[first], time=2)

    def test_branch_and_tag(self, repository: Repository, commits: tuple[ObjectId, ObjectId]) -> None:
        assert repository.branch("dev/x", "main~1").commit == commits[0]
        assert repository.tag("v1", commits[1][:10]).commit == commits[1]
        assert {(ref.name, ref.kind) for ref in repository.refs()} == {
            ("dev/x", "branch"),
            ("main", "branch"),
            ("seed", "branch"),
            ("v1", "tag"),
        }
        for make in (repository.branch, repository.tag):
            with pytest.raises(RefConflictError):
                make("v1", "main")
            with pytest.raises(RefConflictError):
                make("dev", "main")
            with pytest.raises(NotFoundError):
                make("new", "nothing")
            with pytest.raises(UsageError):
                make("a b", "main")

    def test_reset_and_remove(self, repository: Repository, commits: tuple[ObjectId, ObjectId]) -> None:
        repository.tag("v1", "main")
        assert repository.reset("main", "main~1").commit == commits[0]
        assert repository.reset("main", "v1").commit == commits[1]
        with pytest.raises(RefConflictError, match="tags do not move"):
            repository.reset("v1", "main~1")
        with pytest.raises(NotFoundError):
            repository.reset("nothing", "main")
        assert repository.remove_ref("main").commit == commits[1]
        assert repository.remove_ref("v1").kind == "tag"
        with pytest.raises(NotFoundError):
            repository.remove_ref("main")
        assert repository.resolve(commits[1]) == commits[1]
        assert [ref.name for ref in repository.refs()] == ["seed"]

    def test_reflog(self, repository: Repository, commits: tuple[ObjectId, ObjectId]) -> None:
        repository.reset("main", "main~1")
        repository.remove_ref("main")
        repository.branch("main", commits[1])
        moves = [(item.old, item.new, item.author) for item in repository.reflog("main")]
        first, second = commits
        assert moves == [
            (None, first, "tester"),
            (first, second, "tester"),
            (second, first, "tester"),
            (first, None, "tester"),
            (None, second, "tester"),
        ]
        assert [item.sequence for item in repository.reflog("main")] == [0, 1, 2, 3, 4]
        assert repository.reflog("main")[2].reason == "reset: to main~1"
        assert {item.name for item in repository.reflog()} == {"main", "seed"}
        with pytest.raises(NotFoundError, match="no ref was ever called maim"):
            repository.reflog("maim")

    def test_a_removed_branch_is_kept_until_gc(
        self, repository: Repository, commits: tuple[ObjectId, ObjectId]
    ) -> None:
        repository.remove_ref("main")
        assert repository.gc().objects_removed == 0
        assert repository.branch("again", repository.reflog("main")[-1].old or "").commit == commits[1]
        repository.remove_ref("again")
        repository.gc(reflog_days=-1)
        with pytest.raises(NotFoundError):
            repository.resolve(commits[1])
        assert repository.fsck(read_data=True).ok


class TestExplain:
    @pytest.fixture
    def models(self, repository: Repository, tmp_path: Path) -> Models:
        made = Models(repository, tmp_path)
        w, still = torch.randn(8192), torch.randn(3000)
        made.put("base", {"w": w, "still": still})
        made.put("one", {"w": w + torch.linspace(0, 1, 8192), "still": still}, base="base")
        made.put("two", {"w": w - torch.linspace(0, 1, 8192), "still": still}, base="base")
        return made

    def test_plan_and_commit(self, models: Models, tmp_path: Path) -> None:
        repository = models.repository
        planned = repository.plan(RECIPE, budget=Budget("percent", 50.0))
        merged = repository.merge(planned.plan, "merged")
        by_plan, by_commit = repository.explain(planned.identity), repository.explain("merged")
        assert by_plan.plan == by_commit.plan == planned.plan
        assert by_plan.figures is None
        assert by_commit.figures is not None
        assert by_commit.figures == merged.figures
        assert repository.explain(planned.identity[:12]).plan == planned.plan
        file = tmp_path / "plan.json"
        file.write_bytes(planned.plan.encode())
        assert repository.explain(str(file)).plan == planned.plan
        tensors = {item.name: item for item in by_commit.tensors}
        assert (tensors["still"].action, tensors["still"].kept, tensors["still"].why) == (
            "keep",
            1.0,
            "all experts equal the base",
        )
        w = tensors["w"]
        assert w.action == "compute"
        assert {item.model: item.weight for item in w.experts} == {"one": 0.5, "two": 0.25}
        assert 0 < sum(item.columns_read for item in w.experts) < sum(item.columns for item in w.experts) == 16
        assert 0.0 < w.kept < 1.0
        assert w.cosine == pytest.approx(-1.0, abs=0.01)
        assert "of its energy" in w.why
        value = by_commit.as_json()
        json.dumps(value, allow_nan=False)
        assert (value["base"], value["run"]["expert_bytes_read"]) == ("base", merged.figures.expert_bytes_read)

    def test_full_budget(self, models: Models) -> None:
        models.repository.merge(RECIPE, "merged")
        w = next(item for item in models.repository.explain("merged").tensors if item.name == "w")
        assert (w.kept, w.why, w.columns_computed, w.columns) == (1.0, "read in full", 8, 8)
        assert [item.columns_read for item in w.experts] == [8, 8]

    def test_what_has_no_plan(self, models: Models) -> None:
        with pytest.raises(NotFoundError, match="base was imported, not merged"):
            models.repository.explain("base")
        with pytest.raises(NotFoundError, match="no plan nothing"):
            models.repository.explain("nothing")
