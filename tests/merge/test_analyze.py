"""Exact pair statistics: what is stored, and that plans are better for them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from merge_cases import Lab, counted_reads, family, recipe

from mpfs.objects import Budget
from mpfs.stats.differences import compare_blocks
from mpfs.stats.exact import in_columns, pack_distances, unpack_distances, with_exact
from mpfs.store.pairs import PairRecord, PairTable, put_pairs

pytest_plugins = ["merge_fixtures"]

SHAPES = {f"layer.{i}": (64, 80) for i in range(20)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_squared_distance(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(1000, generator=generator).to(dtype) for _ in range(2))
    name = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64"}[dtype]
    a[3], b[7] = torch.inf, torch.nan
    found = compare_blocks(a.view(torch.uint8).numpy().tobytes(), b.view(torch.uint8).numpy().tobytes(), name)
    finite = torch.isfinite(a) & torch.isfinite(b)
    assert found == pytest.approx(float(((b.double() - a.double())[finite] ** 2).sum()), rel=1e-12)


def test_distances_are_packed_and_added_up() -> None:
    values = np.array([1.0, 2.5, 4.0])
    assert np.array_equal(np.asarray(unpack_distances(pack_distances(values), 3)), values)
    assert unpack_distances(pack_distances(values), 4) is None
    assert unpack_distances(pack_distances(np.array([np.nan])), 1) is None
    assert in_columns(values, 1).tolist() == [1.0, 2.5, 4.0]
    assert in_columns(values, 2).tolist() == [3.5, 4.0]


def test_exact_figures_replace_estimates() -> None:
    rng = np.random.default_rng(2)
    deltas = rng.normal(size=(5, 3, 10))
    exact = np.einsum("cik,cjk->cij", deltas, deltas)
    distance = {(i, j): ((deltas[:, i] - deltas[:, j]) ** 2).sum(-1) for i in range(3) for j in range(i + 1, 3)}
    noisy = exact * 1.3
    result = with_exact(noisy, {i: exact[:, i, i] for i in range(3)}, distance)
    np.testing.assert_allclose(result, exact, rtol=1e-9)
    half = with_exact(noisy, {0: exact[:, 0, 0]}, {})
    np.testing.assert_allclose(half[:, 0, 0], exact[:, 0, 0])
    np.testing.assert_allclose(half[:, 1, 1], noisy[:, 1, 1])
    cosine = half[:, 0, 1] / np.sqrt(half[:, 0, 0] * half[:, 1, 1])
    np.testing.assert_allclose(cosine, exact[:, 0, 1] / np.sqrt(exact[:, 0, 0] * exact[:, 1, 1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_analysis_makes_predictions_exact(lab: Lab, dtype: torch.dtype) -> None:
    family(3, shapes=SHAPES, seed=5, dtype=dtype).add_to(lab)
    asked = recipe("task_arithmetic", 3, out_dtype="float32")
    before = lab.repository.plan(asked, budget=Budget("percent", 20))
    report = lab.repository.analyze(["e0", "e1", "e2"], "base", threads=2)
    assert report.pairs == 6 * len(SHAPES)
    assert report.known == 0
    after = lab.repository.plan(asked, budget=Budget("percent", 20))
    assert after.identity != before.identity
    merged = lab.merge(asked, budget=Budget("percent", 20), verify_fidelity=True)
    assert merged.plan == after.identity
    assert merged.figures.fidelity == pytest.approx(merged.fidelity_predicted, abs=1e-3)
    rough = lab.merge(before.plan, "rough", verify_fidelity=True)
    assert rough.figures.fidelity is not None
    assert merged.figures.fidelity is not None
    assert merged.figures.fidelity >= rough.figures.fidelity - 1e-6


def test_what_is_known_is_not_read_again(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    family(2, shapes=SHAPES, same_tensors=["layer.3"]).add_to(lab)
    first = lab.repository.analyze(["e0"], "base")
    assert first.pairs == len(SHAPES) - 1
    with counted_reads(monkeypatch) as seen:
        again = lab.repository.analyze(["e0"], "base")
    assert (again.pairs, again.known, again.bytes_compared) == (0, first.pairs, 0)
    assert not seen
    assert lab.repository.analyze(["e0", "e1"], "base").known == first.pairs


def test_no_block_is_read_that_both_have(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    family(1, shapes=SHAPES, changed=0.5).add_to(lab)
    base, expert = lab.blocks("base"), lab.blocks("e0")
    with counted_reads(monkeypatch) as seen:
        lab.repository.analyze(["e0"], "base")
    wanted = {
        block
        for name in SHAPES
        for ours, theirs in zip(base[name].blocks, expert[name].blocks, strict=True)
        if ours != theirs
        for block in (ours, theirs)
    }
    assert seen == wanted


def test_a_damaged_record_is_as_good_as_none(lab: Lab) -> None:
    family(1, shapes=SHAPES).add_to(lab)
    asked, budget = recipe("task_arithmetic", 1), Budget("percent", 20)
    before = lab.repository.plan(asked, budget=budget).identity
    lab.repository.analyze(["e0"], "base")
    environment = lab.repository._store.environment
    with environment.write() as txn:
        damaged = {bytes(key): bytes(value) for key, value in txn.scan("pairs")}
        for key, value in damaged.items():
            txn.put("pairs", key, value[:-1] + bytes([value[-1] ^ 1]))
    assert lab.repository.plan(asked, budget=budget).identity == before


def test_records_of_tensors_that_are_gone_are_left_out(lab: Lab) -> None:
    family(1, shapes=SHAPES).add_to(lab)
    put_pairs(lab.repository._store, {("ab" * 32, "cd" * 32): PairRecord(b"x" * 8)})
    assert PairTable(lab.repository._store.environment).get("ab" * 32, "cd" * 32) is None


def test_more_budget_is_never_worse_with_exact_figures(lab: Lab) -> None:
    family(3, shapes=SHAPES).add_to(lab)
    lab.repository.analyze(["e0", "e1"], "base")
    plans = [
        lab.repository.plan(recipe("task_arithmetic", 3), budget=Budget("percent", p)).plan for p in (0, 10, 40, 100)
    ]
    assert all(a.fidelity_predicted <= b.fidelity_predicted for a, b in pairwise(plans))
