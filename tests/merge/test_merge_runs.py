"""Plans can be kept; runs that fail publish nothing; progress and memory behave."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from merge_cases import Lab, counted_reads, family, recipe, without_kernels

from mpfs.errors import BadInputError, IntegrityError, NotFoundError, UsageError
from mpfs.merge.delta import DeltaIterator, PlanInputs
from mpfs.merge.left_out import left_out
from mpfs.merge.operators import Column, get_operator
from mpfs.merge.planner import POLICIES
from mpfs.objects import BlockId, Budget, Plan, object_id
from mpfs.repository import Repository
from mpfs.store import BlockReader, Store

pytest_plugins = ["merge_fixtures"]

ASKED = recipe("ties", 3, densities=[0.4, 0.7, 0.9])
BUDGET = Budget("percent", 45)


@pytest.fixture
def models(lab: Lab) -> Lab:
    """Three experts."""
    family(3, shapes={"a": (64, 80), "b": (33, 64), "c": (7,), "d": (64, 64)}, seed=9).add_to(lab)
    return lab


def test_a_plan_is_kept_and_run_again_by_id_and_by_file(models: Lab, tmp_path: Path) -> None:
    report = models.repository.plan(ASKED, budget=BUDGET)
    path = tmp_path / "plan.json"
    path.write_bytes(report.plan.encode())
    assert object_id(report.plan.encode()) == report.identity
    merged = models.merge(ASKED, budget=BUDGET, into="direct", reuse=False)
    sources: list[str | Path] = [report.identity, report.identity[:10], path]
    for index, source in enumerate(sources):
        found = models.repository.find_plan(source)
        assert found == report
        again = models.merge(found.plan, into=f"again{index}", reuse=False)
        assert (again.snapshot, again.plan) == (merged.snapshot, report.identity)
        assert again.figures.expert_bytes_read == report.plan.cost.expert_bytes_planned
    assert Plan.decode(report.plan.encode()) == report.plan


def test_plans_that_do_not_belong_here(models: Lab, tmp_path: Path) -> None:
    plan = models.repository.plan(ASKED).plan
    other = Lab(tmp_path / "other", block_size=8192)
    with pytest.raises(UsageError, match="blocks of 4,096 bytes"):
        other.merge(plan)
    other.close()
    third = Lab(tmp_path / "third")
    with pytest.raises(NotFoundError):
        third.merge(plan)
    third.close()
    path = tmp_path / "plan.json"
    path.write_text("{}")
    with pytest.raises(BadInputError, match="not a plan"):
        models.repository.find_plan(path)


def test_a_plan_of_a_moved_branch_merges_what_was_planned(models: Lab) -> None:
    plan = models.repository.plan(ASKED).plan
    first = models.merge(plan)
    models.add("e0", {name: values + 1 for name, values in models.load("e0").items()})
    assert models.merge(plan, into="again").snapshot == first.snapshot
    assert models.merge(ASKED, into="again").snapshot != first.snapshot


@pytest.fixture
def damage(models: Lab) -> Callable[[BlockId], None]:
    """Flip a bit of a block where it lies."""

    def flip(block: BlockId) -> None:
        store = Store.open(models.repository.path)
        with store.environment.write() as txn:
            payload = txn.get("blocks", block)
            assert payload is not None
            data = bytearray(payload)
            data[len(data) // 2] ^= 1
            txn.put("blocks", block, bytes(data))
        store.close()

    return flip


@pytest.mark.parametrize(("model", "said"), [("e1", "a of e1"), ("base", "a of the base")])
def test_damage_is_named_and_nothing_is_published(
    models: Lab, damage: Callable[[BlockId], None], model: str, said: str
) -> None:
    before = models.merge(recipe("task_arithmetic", 3)).commit
    block = models.blocks(model)["a"].blocks[2]
    damage(block)
    with pytest.raises(IntegrityError) as caught:
        models.merge(ASKED)
    assert said in caught.value.message
    assert block.hex() in caught.value.message
    assert models.repository.resolve("merged") == before
    assert not [name for name in threading.enumerate() if name.name.startswith("mpfs-merge")]


@pytest.mark.parametrize("phase", ["apply", "prepare"])
@pytest.mark.parametrize("threads", [1, 4])
def test_a_method_that_fails(models: Lab, monkeypatch: pytest.MonkeyPatch, phase: str, threads: int) -> None:
    without_kernels(monkeypatch)
    calls = 0
    lock = threading.Lock()
    right = getattr(type(get_operator("ties")), phase)

    def failing(*arguments: Any) -> Any:
        nonlocal calls
        with lock:
            calls += 1
            if calls > (3 if phase == "apply" else 1):
                raise ValueError("out of luck")
        return right(*arguments)

    torch_threads = torch.get_num_threads()
    with monkeypatch.context() as patch:
        patch.setattr(type(get_operator("ties")), phase, failing)
        with pytest.raises(ValueError, match="out of luck"):
            models.merge(ASKED, threads=threads)
    assert [ref.name for ref in models.repository.refs()] == ["base", "e0", "e1", "e2"]
    assert torch.get_num_threads() == torch_threads
    assert models.repository.fsck(read_data=True).ok
    report = models.merge(ASKED, threads=threads)  # nothing is left that it would trip over
    assert report.snapshot == models.merge(ASKED, into="again", reuse=False).snapshot


def test_columns_come_out_in_order_whatever_is_done_first(models: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    without_kernels(monkeypatch)
    plain = models.merge(ASKED, reuse=False, threads=1)
    right = type(get_operator("ties")).apply

    def slow(self: Any, context: Any, parameters: Any, prepared: Any, column: Column) -> torch.Tensor:
        time.sleep(0.02 if (column.start // 1024) % 3 == 0 else 0.0)
        return right(self, context, parameters, prepared, column)

    monkeypatch.setattr(type(get_operator("ties")), "apply", slow)
    assert models.merge(ASKED, into="again", reuse=False, threads=4).snapshot == plain.snapshot


@pytest.mark.parametrize("budget", [Budget(), BUDGET, Budget("bytes", 0)])
def test_progress_rises_to_the_end(models: Lab, budget: Budget) -> None:
    told: list[tuple[int, int]] = []
    for reuse in (False, True):
        report = models.merge(
            ASKED, budget=budget, reuse=reuse, progress=lambda done, total: told.append((done, total))
        )
        plan = models.repository.find_plan(report.plan).plan
        assert told == sorted(told)
        assert len({total for _, total in told}) <= 1
        assert (told[-1] if told else (0, 0)) == (plan.cost.bytes_written, plan.cost.bytes_written)
        told.clear()


def test_no_more_columns_are_in_flight_than_memory_allows(models: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    without_kernels(monkeypatch)
    now = most = 0
    lock = threading.Lock()
    right = type(get_operator("ties")).apply
    read = DeltaIterator.read

    def entering(self: DeltaIterator, column: int) -> Column:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        return read(self, column)

    def leaving(*arguments: Any) -> torch.Tensor:
        nonlocal now
        time.sleep(0.005)
        result = right(*arguments)
        with lock:
            now -= 1
        return result

    monkeypatch.setattr(DeltaIterator, "read", entering)
    monkeypatch.setattr(type(get_operator("ties")), "apply", leaving)
    full = recipe("ties", 3, densities=[1.0, 1.0, 1.0])
    models.merge(full, threads=4, reuse=False, memory=1)
    assert most == 1
    models.merge(full, threads=4, reuse=False)
    assert 1 < most <= 4
    # What an operator holds of a whole tensor counts, too.
    most = 0
    monkeypatch.setattr(type(get_operator("ties")), "held", lambda *_: 1 << 40)
    models.merge(full, threads=4, reuse=False)
    assert most == 1


def test_keep_and_compute_are_what_the_plan_says(models: Lab) -> None:
    report = models.merge(ASKED, budget=Budget("percent", 20))
    plan = models.repository.find_plan(report.plan).plan
    base, merged = models.blocks("base"), models.blocks("merged")
    for tensor in plan.tensors:
        if tensor.action == "keep":
            assert merged[tensor.name] == base[tensor.name]
            continue
        assert 0 < len(tensor.columns) <= tensor.column_count
        computed = set(tensor.columns.columns())
        for selection in tensor.selections:
            assert set(selection.columns()) <= computed
        for index, block in enumerate(merged[tensor.name].blocks):
            assert (block == base[tensor.name].blocks[index]) == (index not in computed)
    assert list(merged) == list(base)


def test_the_disk_is_asked_for_what_is_planned_and_no_more(models: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[BlockId] = set()
    monkeypatch.setattr(BlockReader, "prefetch", lambda self, blocks: asked.update(blocks))
    for policy in POLICIES:
        asked.clear()
        with counted_reads(monkeypatch) as read:
            models.merge(ASKED, budget=Budget("percent", 20), policy=policy, reuse=False)
        assert asked == read
    asked.clear()
    models.merge(ASKED, into="again", budget=Budget("percent", 20), policy="random")
    assert not asked  # everything is known


def test_what_is_left_out_is_stated(models: Lab) -> None:
    plan = models.repository.plan(ASKED, budget=Budget("percent", 40), policy="random").plan
    base, experts = models.load("base"), [models.load(f"e{i}") for i in range(3)]
    store = Store.open(models.repository.path)
    for tensor in plan.tensors:
        runs = left_out(store, tensor, PlanInputs.load(store.objects, tensor))
        for expert, selection, unread in zip(experts, tensor.selections, runs, strict=bool(tensor.experts)):
            delta = (expert[tensor.name] - base[tensor.name]).flatten()
            read = set(selection.columns())
            columns = [c for c in range(tensor.column_count) if c not in read]
            parts = [delta[c * tensor.column_elements :][: tensor.column_elements] for c in columns]
            assert [run.numel for run in unread] == [len(part) for part in parts]
            for run, part in zip(unread, parts, strict=True):
                assert run.rms == pytest.approx(float(part.square().mean().sqrt()), rel=0.5)
    store.close()


def test_a_merge_opens_from_a_path_of_a_recipe_file(models: Lab, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(ASKED))  # JSON is YAML
    assert models.repository.plan(path).identity == models.repository.plan(ASKED).identity


def test_another_process_sees_the_merge(models: Lab) -> None:
    models.merge(ASKED)
    code = f"import mpfs; print(mpfs.open({str(models.repository.path)!r}).resolve('merged'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == models.repository.resolve("merged")
    assert isinstance(models.repository, Repository)
