"""What planning came to is remembered, and never tells anything else than planning would."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from merge_cases import Lab, counted_reads, family, recipe

from mpfs.errors import BudgetInfeasibleError, FidelityInfeasibleError, UsageError
from mpfs.merge.engine import Execution
from mpfs.merge.options import MergeOptions
from mpfs.merge.planner import POLICIES
from mpfs.merge.remembered import PLANNER
from mpfs.merge.reports import MergeReport
from mpfs.objects import Budget
from mpfs.objects.encoding import encode
from mpfs.repository import Repository
from mpfs.store.reuse import PLANNED
from mpfs.store.seal import SEAL_SIZE, seal

pytest_plugins = ["merge_fixtures"]

SHAPES = {"layer.0.weight": (64, 80), "layer.1.weight": (70, 64), "norm": (7,)}
HALF = Budget("percent", 50)


@pytest.fixture
def models(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """Three experts, of whose small tensors histograms are kept."""
    monkeypatch.setattr("mpfs.store.histogram._BYTES_PER_BIN", 8)
    family(3, shapes=SHAPES, seed=4, changed=0.8, dtype=torch.bfloat16).add_to(lab)
    return lab


def asked(density: float = 0.5, **more: Any) -> dict[str, Any]:
    return recipe("ties", 3, densities=[density, 0.7, 0.9], **more)


@contextmanager
def counted(name: str) -> Iterator[list[object]]:
    """The first arguments of all calls of a function or method."""
    module, _, function = name.rpartition(".")
    calls: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        target: Any = pytest.importorskip(module) if module.islower() else None
        if target is None:
            outer, _, inner = module.rpartition(".")
            target = getattr(pytest.importorskip(outer), inner)
        original = getattr(target, function)

        def calling(*args: Any, **options: Any) -> Any:
            calls.append(args[1] if len(args) > 1 else None)
            return original(*args, **options)

        patch.setattr(target, function, calling)
        yield calls


def planned(lab: Lab, wanted: Mapping[str, Any], **options: Any) -> tuple[MergeReport, bool]:
    """A merge, and whether it was planned for it."""
    with counted("mpfs.merge.documents.make_plan") as calls:
        report = lab.merge(wanted, **options)
    return report, bool(calls)


def told(report: MergeReport) -> dict[str, Any]:
    """What a merge says of itself, but for what it names, and what it had to do."""
    value = report.as_json()
    run = {
        name: value["run"][name] for name in ("expert_bytes_full", "expert_bytes_planned", "blocks_kept", "fidelity")
    }
    return {**{name: value[name] for name in value if name not in ("commit", "ref", "run", "new_commit")}, "run": run}


def entries(lab: Lab, kind: str) -> dict[bytes, bytes]:
    """The payloads of the reuse table's JSON entries of a kind, by their keys."""
    with lab.repository._store.environment.read() as txn:
        found = {bytes(key): bytes(value)[:-SEAL_SIZE] for key, value in txn.scan("reuse")}
    return {key: value for key, value in found.items() if f'"kind":"{kind}"'.encode() in value}


@pytest.mark.parametrize("budget", [Budget(), HALF])
def test_the_same_again_is_not_planned_again(models: Lab, budget: Budget) -> None:
    first, was = planned(models, asked(), budget=budget)
    assert was
    again, was = planned(models, asked(), budget=budget, into="again")
    assert not was
    assert told(again) == told(first)
    assert again.figures.expert_bytes_read == again.figures.blocks_computed == 0
    assert again.figures.blocks_reused == first.figures.blocks_computed
    with counted("mpfs.merge.documents.make_plan") as calls:
        assert models.repository.plan(asked(), budget=budget).identity == first.plan
    assert not calls
    fresh, was = planned(models, asked(), budget=budget, into="fresh", reuse=False)
    assert was
    assert told(fresh) == told(first)
    assert fresh.figures.blocks_reused == 0


def test_whatever_a_plan_depends_on_is_seen(models: Lab) -> None:
    planned(models, asked())
    for options in (
        {"budget": HALF},
        {"seed": 1},
        {"policy": "random"},
        {"on_mismatch": "base"},
        {"on_mismatch": "crop"},
    ):
        assert planned(models, asked(), **options)[1], options
    assert planned(models, asked(0.6))[1]
    assert planned(models, asked(names=["e1", "e0", "e2"]))[1]
    changed = models.load("e0")
    changed["norm"] = changed["norm"] + 1
    models.add("e0", changed)
    assert planned(models, asked())[1]
    assert not planned(models, asked())[1]


def test_only_what_is_changed_is_weighed(models: Lab) -> None:
    models.merge(asked())
    other = asked()
    for item in other["models"]:
        item["parameters"]["density"] = [{"filter": "layer.1", "value": 0.3}, {"value": item["parameters"]["density"]}]
    with counted("mpfs.merge.compile.Weigher.weigh") as calls:
        report = models.merge(other)
    [weighed] = calls
    assert [inputs.name for inputs in weighed] == ["layer.1.weight"]  # type: ignore[attr-defined]
    assert told(report) == told(models.merge(other, into="fresh", reuse=False))


def test_exact_distances_make_other_plans(models: Lab) -> None:
    before = [models.merge(asked(), budget=budget).plan for budget in (Budget(), HALF)]
    models.repository.analyze(["e0", "e1", "e2"], "base")
    after = [planned(models, asked(), budget=budget) for budget in (Budget(), HALF)]
    assert all(was for _, was in after)
    assert before[0] != after[0][0].plan
    for (report, _), budget in zip(after, (Budget(), HALF), strict=True):
        assert told(report) == told(models.merge(asked(), into="fresh", budget=budget, reuse=False))


def test_histograms_make_other_plans_only_under_a_budget(models: Lab) -> None:
    under = models.merge(asked(), budget=HALF)
    whole = models.merge(asked())  # counts the magnitudes
    assert not planned(models, asked())[1]
    again, was = planned(models, asked(), budget=HALF)
    assert was
    assert again.plan != under.plan
    assert told(again) == told(models.merge(asked(), into="fresh", budget=HALF, reuse=False))
    assert told(whole) == told(models.merge(asked(), into="fresh", reuse=False))


def test_what_is_of_no_use_any_more_goes(models: Lab) -> None:
    models.merge(asked(), budget=HALF)
    assert len(entries(models, PLANNED)) == 1
    models.repository.gc(reflog_days=0)
    assert len(entries(models, PLANNED)) == 1
    models.repository.remove_ref("merged")
    models.repository.gc(reflog_days=0)
    assert not entries(models, PLANNED)
    models.merge(asked())
    assert entries(models, PLANNED)
    models.repository.analyze(["e0"], "base")
    models.repository.gc(reflog_days=0)
    assert not entries(models, PLANNED)
    assert planned(models, asked())[1]
    assert models.repository.fsck(read_data=True).ok


def test_entries_that_are_damaged_or_wrong_are_as_good_as_none(models: Lab) -> None:
    other = models.repository.plan(asked(0.3), budget=HALF).identity
    first = models.merge(asked(), budget=HALF)
    [(key, payload)] = entries(models, PLANNED).items()
    wrong = [
        payload.replace(first.plan.encode(), b"0" * 64),
        payload.replace(first.plan.encode(), b"plan"),
        payload.replace(b'"plan":"' + first.plan.encode() + b'"', b'"plan":null'),
        payload.replace(first.plan.encode(), models.repository.resolve("base").encode()),
        b'{"kind":"planned","pairs":[1,[]],"plan":7}',
        b"{}",
        b"",
        bytes(16),
    ]
    values = [seal(key, item) for item in wrong] + [payload + bytes(8), b"x"]
    for value in values:
        with models.repository._store.environment.write() as txn:
            txn.put("reuse", key, value)
        report, was = planned(models, asked(), budget=HALF)
        assert was
        assert told(report) == told(first)
        with models.repository._store.environment.write() as txn:
            txn.put("reuse", key, value)
        models.repository.gc(reflog_days=0)
    # Nor are plans of another recipe, or of other commits.
    with models.repository._store.environment.write() as txn:
        txn.put("reuse", key, seal(key, payload.replace(first.plan.encode(), other.encode())))
    assert planned(models, asked(), budget=HALF)[1]
    models.add("e0", {name: tensor + 1 for name, tensor in models.load("e0").items()})
    new = models.merge(asked(), budget=HALF)
    with models.repository._store.environment.write() as txn:
        for key in entries(models, PLANNED):
            txn.put("reuse", key, seal(key, payload))
    report, was = planned(models, asked(), budget=HALF)
    assert was
    assert told(report) == told(new)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_budgets_that_cannot_be_are_told_as_before(models: Lab, value: float) -> None:
    with pytest.raises(UsageError):
        models.merge(asked(), budget=Budget("bytes", value))


@pytest.mark.parametrize("left", ["tensors", "columns"])
def test_results_are_found_by_tensor_or_by_column(models: Lab, monkeypatch: pytest.MonkeyPatch, left: str) -> None:
    first = models.merge(asked())
    store = models.repository._store
    plan = models.repository.find_plan(first.plan).plan
    with store.writer() as writer:
        run = Execution(plan, store, writer, MergeOptions())
        whole = {run.tensor_key(tensor) for tensor in plan.tensors}
    with store.environment.write() as txn:
        keys = {bytes(key) for key, _ in txn.scan("reuse", values=False)}
        assert whole < keys
        for number, key in enumerate(sorted(whole if left == "columns" else keys - whole)):
            txn.put("reuse", key, b"damaged") if number % 2 else txn.delete("reuse", key)
    with counted_reads(monkeypatch) as read:
        again = models.merge(asked(), into="again", threads=1)
    assert not read
    assert told(again) == told(first)
    assert again.figures.blocks_reused == first.figures.blocks_computed
    with store.environment.read() as txn:
        assert len(txn.get_many("reuse", list(whole))) == len(whole)


@pytest.mark.parametrize("key", [b"pairs_distances", b"pairs_histograms"])
@pytest.mark.parametrize("value", [None, b"", b"\xff\x00"])
def test_a_store_that_has_forgotten_the_states_of_its_pairs_is_not_believed(
    models: Lab, key: bytes, value: bytes | None
) -> None:
    models.merge(asked(), budget=HALF)
    with models.repository._store.environment.write() as txn:
        assert txn.delete("meta", key)
        if value is not None:
            txn.put("meta", key, value)
    assert planned(models, asked(), budget=HALF)[1]
    assert not planned(models, asked(), budget=HALF)[1]
    models.repository.close()
    with Repository.open(models.root / "repo") as again:
        assert again.fsck().ok


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A repository to copy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mpfs.store.histogram._BYTES_PER_BIN", 8)
        lab = Lab(tmp_path_factory.mktemp("origin"))
        family(3, shapes=SHAPES, seed=4, changed=0.8, dtype=torch.bfloat16).add_to(lab)
        family(1, shapes=SHAPES, seed=5, changed=0.3, dtype=torch.bfloat16).add_to(lab)
        lab.close()
        yield lab.root / "repo"


def _recipe(method: str, count: int, density: float, filtered: str | None, budget: str | None) -> dict[str, Any]:
    value = recipe(method, count, densities=None if method == "task_arithmetic" else [density] * count)
    if filtered is not None:
        value["models"][0]["parameters"]["weight"] = [{"filter": filtered, "value": 0.9}, {"value": 0.4}]
    if budget is not None:
        value["models"][-1]["budget"] = budget
    return value


RECIPES = st.builds(
    _recipe,
    st.sampled_from(["ties", "dare_ties", "task_arithmetic", "breadcrumbs"]),
    st.integers(1, 3),
    st.sampled_from([0.3, 0.6]),
    st.sampled_from([None, "layer.1", "norm"]),
    st.sampled_from([None, "40%"]),
)
MERGES = st.tuples(
    st.just("merge"),
    RECIPES,
    st.sampled_from([Budget(), Budget(), HALF, Budget("bytes", 20_000), Budget("fidelity", 0.8)]),
    st.sampled_from(POLICIES),
    st.integers(0, 1),
)
CHANGES = st.sampled_from(["analyze", "move", "rm", "gc", "forget", "repair"]).map(lambda name: (name,))


@settings(max_examples=40)
@given(steps=st.lists(st.one_of(MERGES, MERGES, CHANGES), min_size=3, max_size=7))
def test_what_is_remembered_is_what_would_be_planned(
    origin: Path, tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[Any, ...]]
) -> None:
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(origin, folder / "repo")
    with Repository.open(folder / "repo", author="tester") as repository:
        for step in steps:
            if step[0] != "merge":
                _change(repository, step[0])
                continue
            _, wanted, budget, policy, seed = step
            options = {"budget": budget, "policy": policy, "seed": seed, "threads": 1}
            try:
                reports = [repository.merge(wanted, "merged", **options)]
            except (BudgetInfeasibleError, FidelityInfeasibleError) as error:
                with pytest.raises(type(error)):
                    repository.merge(wanted, "fresh", reuse=False, **options)
                continue
            # A full merge counts magnitudes, from which a budget's plan is made: so it is asked twice before and after.
            reports.append(repository.merge(wanted, "merged", **options))
            reports.append(repository.merge(wanted, "fresh", reuse=False, **options))
            assert told(reports[0]) == told(reports[1]) == told(reports[2])
            explained = [repository.explain(ref).as_json() for ref in ("merged", "fresh")]
            assert explained[0]["tensors"] == explained[1]["tensors"]
        assert repository.fsck(read_data=True).ok
    shutil.rmtree(folder)


def _change(repository: Repository, name: str) -> None:
    """Something that others do to a repository between merges."""
    names = {ref.name for ref in repository.refs()}
    if name == "analyze":
        repository.analyze(["e0", "e1"], "base")
    elif name == "move":
        repository.reset("e0", "e0~1" if len(repository.log("e0")) > 1 else "e1")
    elif name == "rm" and "merged" in names:
        repository.remove_ref("merged")
    elif name == "gc":
        repository.gc(reflog_days=0)
    elif name == "forget":
        with repository._store.environment.write() as txn:
            for key in [bytes(key) for key, _ in txn.scan("reuse", values=False)][::3]:
                txn.delete("reuse", key)
    elif name == "repair":
        with repository._store.environment.write() as txn:
            for key in [bytes(key) for key, _ in txn.scan("pairs", values=False)][:2]:
                txn.put("pairs", key, b"damaged")
        repository.repair()


def test_plans_come_out_as_they_did(tmp_path: Path) -> None:
    """What MPFS planned before it may still remember: whoever means to change this raises `PLANNER` as well."""
    golden = Path(__file__).parent.parent / "format" / "golden" / "v1"
    shutil.copytree(golden, tmp_path / "v1")
    found = hashlib.sha256()
    with Repository.open(tmp_path / "v1") as repository:
        experts = [ref.name for ref in repository.refs() if ref.name.startswith("expert")]
        for method in ("ties", "dare_ties", "task_arithmetic", "breadcrumbs"):
            densities = None if method == "task_arithmetic" else [0.4] * len(experts)
            wanted = recipe(method, len(experts), densities=densities, names=experts)
            for budget in (Budget(), HALF, Budget("fidelity", 0.7)):
                plan = repository.plan(wanted, budget=budget, save=False).plan
                found.update(
                    encode({"tensors": [tensor.as_json() for tensor in plan.tensors], "cost": asdict(plan.cost)})
                )
    assert (PLANNER, found.hexdigest()[:16]) == (1, "bc600a284da372c6")
