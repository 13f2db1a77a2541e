"""What was computed before is not computed again, and nothing stale is ever taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from merge_cases import Lab, Tensors, assert_same, counted_reads, expected, family, recipe, without_kernels

from mpfs.merge.operators import get_operator
from mpfs.objects import Budget

pytest_plugins = ["merge_fixtures"]

METHODS = ["linear", "task_arithmetic", "ties", "dare_linear", "dare_ties"]


@pytest.fixture
def models(lab: Lab) -> Lab:
    """Four experts."""
    shapes = {"a": (64, 80), "b": (33, 64), "c": (7,)}
    family(4, shapes=shapes, seed=4, changed=0.8).add_to(lab)
    return lab


def asked(method: str, count: int = 3, **top: Any) -> dict[str, Any]:
    densities = None if method in ("linear", "task_arithmetic") else [0.4, 0.7, 0.9, 0.5]
    return recipe(method, count, densities=densities, **top)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("budget", [Budget(), Budget("percent", 40)])
def test_doing_it_again_reads_nothing(
    models: Lab, monkeypatch: pytest.MonkeyPatch, method: str, budget: Budget
) -> None:
    first = models.merge(asked(method), budget=budget)
    assert first.figures.blocks_computed > 0
    assert first.figures.blocks_reused == 0
    with counted_reads(monkeypatch) as read:
        second = models.merge(asked(method), into="again", budget=budget, threads=1)
    assert not read
    assert second.figures.expert_bytes_read == second.figures.base_bytes_read == second.figures.bytes_written == 0
    assert second.figures.blocks_computed == 0
    assert second.figures.blocks_reused == first.figures.blocks_computed
    assert (second.snapshot, second.plan) == (first.snapshot, first.plan)
    third = models.merge(asked(method), into="again", budget=budget)
    assert not third.new_commit
    assert third.commit == second.commit


@pytest.mark.parametrize("method", METHODS)
def test_without_reuse_everything_is_computed_to_the_same_end(models: Lab, method: str) -> None:
    first = models.merge(asked(method))
    second = models.merge(asked(method), into="again", reuse=False)
    assert second.snapshot == first.snapshot
    assert second.figures.blocks_reused == 0
    assert second.figures.blocks_computed == first.figures.blocks_computed
    assert second.figures.expert_bytes_read == first.figures.expert_bytes_read


CHANGES: dict[str, dict[str, Any]] = {
    "a weight": {"weights": [0.3, 0.8, -0.5]},
    "lambda": {"parameters": {"lambda": 0.5}},
    "dtype": {"dtype": "bfloat16"},
    "out_dtype": {"out_dtype": "float16"},
    "order": {"names": ["e1", "e0", "e2"]},
    "an expert": {"names": ["e0", "e1", "e3"]},
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_recipe_is_merged_anew(models: Lab, method: str, change: str) -> None:
    models.merge(asked(method))
    densities = None if method in ("linear", "task_arithmetic") else [0.4, 0.7, 0.9]
    other = recipe(method, 3, densities=densities, **CHANGES[change])
    report = models.merge(other)
    assert_same(models.load(), expected(models, other))
    if change != "lambda" or method != "linear":
        assert report.figures.blocks_computed > 0


@pytest.mark.parametrize("method", METHODS)
def test_a_default_that_is_spelt_out_is_no_change(models: Lab, method: str) -> None:
    first = models.merge(asked(method))
    spelt = method in ("linear", "ties")
    assert models.merge(asked(method, parameters={"normalize": spelt})).figures.blocks_computed == 0
    other = asked(method, parameters={"normalize": not spelt})
    assert models.merge(other).snapshot != first.snapshot
    assert_same(models.load(), expected(models, other))


@pytest.mark.parametrize("method", ["ties", "dare_linear", "dare_ties"])
def test_a_changed_density_is_merged_anew(models: Lab, method: str) -> None:
    models.merge(asked(method))
    other = recipe(method, 3, densities=[0.4, 0.6, 0.9])
    models.merge(other)
    assert_same(models.load(), expected(models, other))


@pytest.mark.parametrize("method", METHODS)
def test_the_seed_matters_where_something_is_drawn(models: Lab, method: str) -> None:
    models.merge(asked(method), seed=0)
    report = models.merge(asked(method), seed=1)
    assert_same(models.load(), expected(models, asked(method), seed=1))
    assert (report.figures.blocks_computed > 0) == get_operator(method).draws == method.startswith("dare")


def test_tensors_of_equal_content_share_results_unless_something_is_drawn(lab: Lab) -> None:
    models = family(2, shapes={"a": (64, 64)}, seed=6)

    def twice(tensors: Tensors) -> Tensors:
        return {"a": tensors["a"], "b": tensors["a"].clone()}

    lab.add("base", twice(models.base))
    for index, expert in enumerate(models.experts):
        lab.add(f"e{index}", twice(expert))
    for method in ("task_arithmetic", "dare_linear"):
        densities = None if method == "task_arithmetic" else [0.5, 0.5]
        wanted = recipe(method, 2, densities=densities)
        lab.merge(wanted)
        assert_same(lab.load(), expected(lab, wanted))
        blocks = lab.blocks("merged")
        assert (blocks["a"] == blocks["b"]) == (method == "task_arithmetic")


def test_another_expert_is_merged_in(models: Lab) -> None:
    for method in METHODS:
        models.merge(asked(method, 3))
        report = models.merge(asked(method, 4))
        assert_same(models.load(), expected(models, asked(method, 4)))
        assert report.figures.expert_bytes_read <= report.figures.expert_bytes_full


def test_a_changed_layer_alone_is_recomputed(models: Lab) -> None:
    first = models.merge(asked("ties"))
    changed = models.load("e0")
    changed["b"] = changed["b"] + 0.25
    models.add("e0", changed)
    second = models.merge(asked("ties"))
    assert_same(models.load(), expected(models, asked("ties")))
    b_blocks = len(models.blocks("merged")["b"].blocks)
    assert 0 < second.figures.blocks_computed <= b_blocks
    assert second.figures.blocks_reused >= first.figures.blocks_computed - b_blocks


def test_a_budget_reuses_what_it_shares_with_the_full_merge(models: Lab) -> None:
    models.merge(asked("task_arithmetic"))
    report = models.merge(asked("task_arithmetic"), budget=Budget("percent", 60))
    plan = models.repository.find_plan(report.plan).plan
    assert report.figures.blocks_reused > 0
    fresh = models.merge(asked("task_arithmetic"), into="fresh", budget=Budget("percent", 60), reuse=False)
    assert fresh.snapshot == report.snapshot
    assert fresh.figures.expert_bytes_read == plan.cost.expert_bytes_planned > report.figures.expert_bytes_read


def test_results_survive_gc_only_with_their_blocks(models: Lab) -> None:
    first = models.merge(asked("ties"))
    models.repository.remove_ref("merged")
    models.repository.gc(reflog_days=0)
    second = models.merge(asked("ties"))
    assert second.snapshot == first.snapshot
    assert_same(models.load(), expected(models, asked("ties")))
    assert models.repository.fsck(read_data=True).ok


def test_nothing_is_prepared_again(models: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    without_kernels(monkeypatch)
    models.merge(asked("ties"))
    operator = type(get_operator("ties"))
    with pytest.MonkeyPatch.context() as patch:

        def forbidden(*_: object) -> None:
            raise AssertionError("prepared again")

        patch.setattr(operator, "prepare", forbidden)
        patch.setattr(operator, "apply", forbidden)
        assert models.merge(asked("ties"), into="again").figures.blocks_computed == 0


def test_a_zero_sized_difference_in_dtype_is_seen(lab: Lab) -> None:
    """Zeros have the same bytes in every dtype of a width, and may share."""
    for name, dtype in (("h", torch.float16), ("b", torch.bfloat16)):
        lab.add(f"base{name}", {"w": torch.zeros(4096, dtype=dtype)})
        changed = torch.zeros(4096, dtype=dtype)
        changed[::2] = 2.0
        lab.add(f"e{name}", {"w": changed})
        wanted = recipe("task_arithmetic", 1, weights=[1.0], base=f"base{name}", names=[f"e{name}"])
        lab.merge(wanted)
        assert_same(lab.load(), {"w": changed})
