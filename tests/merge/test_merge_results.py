"""What comes out of a merge: the bits of the plain formulas, whatever the cut into blocks and the number of threads."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from merge_cases import Family, Lab, assert_same, expected, family, recipe, without_kernels

pytest_plugins = ["merge_fixtures"]

METHODS: dict[str, dict[str, Any]] = {
    "linear": {},
    "task_arithmetic": {"parameters": {"lambda": 0.7}},
    "ties": {"densities": [0.2, 0.5, 1.0]},
    "dare_linear": {"densities": [0.3, 0.9, 1.0]},
    "dare_ties": {"densities": [0.5, 0.5, 0.7]},
}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}
MIXED = {
    "f32 base, bf16 experts": (torch.float32, [torch.bfloat16] * 3),
    "bf16 base, one f32 expert": (torch.bfloat16, [torch.float32, torch.bfloat16, torch.bfloat16]),
    "bf16 base, f16 experts": (torch.bfloat16, [torch.float16, torch.bfloat16, torch.float16]),
    "f16 base, f64 expert": (torch.float16, [torch.float16, torch.float64, torch.float16]),
}


def build(lab: Lab, models: Family) -> None:
    models.add_to(lab)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_full_merge_is_the_plain_formula(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, method: str, dtype: str, fast: bool
) -> None:
    if not fast:
        without_kernels(monkeypatch)
    build(lab, family(3, dtype=DTYPES[dtype], changed=0.7, same_tensors=["layer.0.bias"]))
    asked = recipe(method, 3, **METHODS[method])
    report = lab.merge(asked)
    assert_same(lab.load(), expected(lab, asked))
    assert report.fidelity_predicted == 1.0
    assert report.figures.expert_bytes_read == report.figures.expert_bytes_full == report.figures.expert_bytes_planned


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mixture", MIXED)
def test_mixed_dtypes_are_promoted(lab: Lab, method: str, mixture: str) -> None:
    base, experts = MIXED[mixture]
    build(lab, family(3, dtype=base, expert_dtypes=experts))
    asked = recipe(method, 3, **METHODS[method])
    lab.merge(asked)
    assert_same(lab.load(), expected(lab, asked))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("dtype", "out_dtype"), [("float32", None), ("bfloat16", "float32"), ("float32", "float16")])
def test_dtypes_that_are_asked_for(lab: Lab, method: str, dtype: str, out_dtype: str | None) -> None:
    build(lab, family(3, dtype=torch.bfloat16, expert_dtypes=[torch.bfloat16, torch.float32, torch.bfloat16]))
    asked = recipe(method, 3, dtype=dtype, **METHODS[method])
    if out_dtype is not None:
        asked["out_dtype"] = out_dtype
    lab.merge(asked)
    assert_same(lab.load(), expected(lab, asked))


@pytest.mark.parametrize("method", METHODS)
def test_block_size_and_threads_change_nothing(tmp_path: Path, method: str) -> None:
    models = family(3, dtype=torch.bfloat16, expert_dtypes=[torch.bfloat16, torch.float32, torch.bfloat16])
    asked = recipe(method, 3, **METHODS[method])
    results = []
    for block_size, threads in itertools.product((4096, 1 << 20), (1, 4)):
        lab = Lab(tmp_path / f"{block_size}-{threads}", block_size)
        build(lab, models)
        lab.merge(asked, threads=threads)
        results.append(lab.load())
        lab.close()
    for other in results[1:]:
        assert_same(other, results[0])


def test_threads_and_memory_do_not_change_the_snapshot(lab: Lab) -> None:
    build(lab, family(3))
    asked = recipe("ties", 3, densities=[0.2, 0.5, 0.4])
    snapshots = {
        lab.merge(asked, reuse=False, threads=threads, memory=memory).snapshot
        for threads, memory in [(1, 1 << 30), (4, 1 << 30), (3, 1)]
    }
    assert len(snapshots) == 1


@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "dare_linear", "dare_ties"])
def test_untouched_blocks_are_the_bases(lab: Lab, method: str) -> None:
    build(lab, family(2, changed=0.4, same_tensors=["layer.1.weight"], seed=3))
    report = lab.merge(recipe(method, 2, densities=[0.5, 0.5]))
    base, merged = lab.blocks("base"), lab.blocks("merged")
    experts = [lab.blocks("e0"), lab.blocks("e1")]
    kept = 0
    for name, tensor in merged.items():
        for index, block in enumerate(tensor.blocks):
            if all(expert[name].blocks[index] == base[name].blocks[index] for expert in experts):
                assert block == base[name].blocks[index]
                kept += 1
    assert merged["layer.1.weight"] == base["layer.1.weight"]
    assert kept == report.figures.blocks_kept > 2


@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "dare_linear", "dare_ties"])
def test_experts_equal_to_the_base_give_the_base(lab: Lab, method: str) -> None:
    models = family(1, dtype=torch.float16)
    lab.add("base", models.base)
    lab.add("e0", models.base)
    lab.add("e1", models.base, {"config.json": b"{}"})
    report = lab.merge(recipe(method, 2, densities=[0.5, 0.5]))
    assert lab.blocks("merged") == lab.blocks("base")
    assert report.figures.expert_bytes_full == report.figures.expert_bytes_read == report.figures.base_bytes_read == 0
    assert report.figures.blocks_computed == 0
    plan = lab.repository.find_plan(report.plan).plan
    assert {tensor.note for tensor in plan.tensors} == {"all experts equal the base"}


def test_a_zero_that_does_not_move_keeps_its_sign(lab: Lab) -> None:
    base = torch.full((4096,), -0.0)
    changed = base.clone()
    changed[1:1024] = 1.0
    lab.add("base", {"w": base})
    lab.add("e0", {"w": changed})
    report = lab.merge(recipe("task_arithmetic", 1, weights=[1.0]))
    assert (report.figures.blocks_computed, report.figures.blocks_kept) == (1, 3)
    merged = lab.load()["w"]
    assert torch.signbit(merged).equal(torch.signbit(changed))
    assert_same({"w": merged}, {"w": changed})


def test_non_finite_values_go_through(lab: Lab) -> None:
    models = family(2)
    models.experts[0]["layer.0.weight"][3, 5] = float("inf")
    models.experts[1]["layer.1.weight"][0, 0] = float("nan")
    build(lab, models)
    asked = recipe("task_arithmetic", 2)
    report = lab.merge(asked, verify_fidelity=True, allow_nonfinite=True)
    assert_same(lab.load(), expected(lab, asked))
    assert report.figures.fidelity == 1.0
    lab.merge(recipe("ties", 2, densities=[0.5, 0.5]), budget=None, allow_nonfinite=True)


def test_one_expert_and_many(lab: Lab) -> None:
    models = family(20, shapes={"w": (50, 60), "b": (7,)})
    build(lab, models)
    for count in (1, 20):
        asked = recipe("ties", count, weights=[0.5 + i / 7 for i in range(count)], densities=[0.3] * count)
        lab.merge(asked)
        assert_same(lab.load(), expected(lab, asked))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_same_bytes_of_other_dtypes_are_other_numbers(lab: Lab, dtype: str) -> None:
    """Blocks are named by their bytes: what is remembered of a merge must not be taken for another dtype's."""
    pattern = torch.arange(0x3C00, 0x3C00 + 4096, dtype=torch.int16)
    halves = {"w": pattern.view(torch.float16), "v": pattern.clone().view(torch.bfloat16)}
    lab.add("base", {name: torch.ones(4096) for name in halves})
    lab.add("e0", halves)
    asked = recipe("task_arithmetic", 1, weights=[1.0], dtype=dtype)
    lab.merge(asked)
    assert_same(lab.load(), expected(lab, asked))
