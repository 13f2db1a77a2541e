"""Thresholds out of stored histograms: exact under a budget, and no first pass over the data where all of it is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from merge_cases import Lab, family, recipe

from mpfs.errors import BadInputError
from mpfs.merge.kernels.backend import Kernels
from mpfs.merge.operators import Parameters, get_operator
from mpfs.merge.operators.magnitude import LAYOUTS, patterns
from mpfs.objects import Budget, Plan, Snapshot
from mpfs.store.pairs import HISTOGRAM

pytest_plugins = ["merge_fixtures"]

SHAPES = {"wide": (256, 300), "tall": (500, 200), "one.block": (30, 30)}
NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
BUDGET = Budget("percent", 30)


@pytest.fixture(autouse=True)
def kept_of_small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Histograms of tensors as small as these, with as many magnitudes as float16 has."""
    monkeypatch.setattr("mpfs.store.histogram._BYTES_PER_BIN", 8)


def asked(method: str, density: float = 0.3) -> dict[str, Any]:
    """A recipe of two experts that trims."""
    return recipe(method, 2, densities=[density, density])


def deltas(lab: Lab, name: str, ref: str) -> torch.Tensor:
    """An expert's whole delta, rounded as merges do."""
    base, tuned = (lab.repository.tensor(model, name).flatten() for model in ("base", ref))
    return tuned - base


def forget(lab: Lab) -> None:
    """Drop every histogram."""
    with lab.repository._store.environment.write() as txn:
        for key in [bytes(key) for key, _ in txn.scan("pairs", values=False)]:
            if key.endswith(HISTOGRAM, 64):
                txn.delete("pairs", key)


def contents(lab: Lab, commit: str) -> Mapping[str, str]:
    """The ids of a commit's tensors."""
    return lab.repository._store.objects.get(Snapshot, lab.repository.show(commit).commit.snapshot).tensors


@pytest.mark.parametrize("dtype", list(NAMES))
def test_thresholds_under_a_budget_are_those_of_the_whole_delta(lab: Lab, dtype: torch.dtype) -> None:
    family(2, shapes=SHAPES, seed=3, dtype=dtype).add_to(lab)
    lab.repository.analyze(["e0", "e1"], "base")
    plan = lab.repository.plan(asked("ties"), budget=BUDGET).plan
    shift = 8 * dtype.itemsize - 16
    seen = 0
    for tensor in plan.tensors:
        for i, cuts in enumerate(tensor.cuts):
            if not cuts:
                continue
            seen += 1
            found = patterns(deltas(lab, tensor.name, f"e{i}")).numpy().astype(np.int64)
            keep = int(0.3 * len(found))
            exact = int(np.sort(found)[::-1][keep - 1])
            assert cuts[0].digit == exact >> shift
            assert cuts[0].total == int((found >> shift == exact >> shift).sum())
            assert cuts[0].wanted == keep - int((found >> shift > exact >> shift).sum())
    assert seen >= 2


@pytest.mark.parametrize("method", ["ties", "breadcrumbs", "breadcrumbs_ties"])
@pytest.mark.parametrize("dtype", list(NAMES))
def test_what_is_read_is_trimmed_as_the_whole_merge_trims_it(lab: Lab, method: str, dtype: torch.dtype) -> None:
    """Columns that are read of all experts come out as in the merge that reads everything, but for what only the whole
    tensor tells: which of equal magnitudes come first, and where in a bin of 1/128 a float32 threshold lies."""
    family(2, shapes=SHAPES, seed=3, dtype=dtype).add_to(lab)
    full = lab.merge(asked(method), "full")
    rough = lab.merge(asked(method), "rough", budget=BUDGET)
    lab.repository.analyze(["e0", "e1"], "base")
    plan = lab.repository.plan(asked(method), budget=BUDGET).plan
    assert any(tensor.cuts for tensor in plan.tensors)
    merged = lab.merge(plan, "merged")
    assert merged.figures.expert_bytes_read <= plan.cost.expert_bytes_planned

    def wrong(ref: str, plan: Plan) -> float:
        differing = read = 0
        for tensor in plan.tensors:
            if tensor.action == "keep" or tensor.name == "one.block":
                continue
            whole = lab.repository.tensor("full", tensor.name).flatten()
            ours = lab.repository.tensor(ref, tensor.name).flatten()
            both = set(tensor.selections[0].columns()) & set(tensor.selections[1].columns())
            for column in both:
                span = slice(column * tensor.column_elements, (column + 1) * tensor.column_elements)
                differing += int((whole[span] != ours[span]).sum())
                read += whole[span].numel()
        assert read
        return differing / read

    share = wrong("merged", plan)
    assert share < (0.08 if dtype == torch.bfloat16 else 0.01)
    assert share < wrong("rough", lab.repository._store.objects.get(Plan, rough.plan)) + 0.02
    assert full.commit != merged.commit


@pytest.mark.parametrize("method", ["ties", "breadcrumbs", "breadcrumbs_ties"])
@pytest.mark.parametrize(
    ("dtype", "fast"), [*((dtype, True) for dtype in NAMES), (torch.bfloat16, False), (torch.float64, False)]
)
def test_full_merges_are_the_same_to_the_bit(
    lab: Lab, method: str, dtype: torch.dtype, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not fast:
        monkeypatch.setattr("mpfs.merge.engine.kernels", lambda: None)
    family(2, shapes=SHAPES, seed=8, dtype=dtype, changed=0.7).add_to(lab)
    plain = lab.merge(asked(method), "plain", reuse=False)
    forget(lab)
    lab.repository.analyze(["e0", "e1"], "base")
    known = lab.merge(asked(method), "known", reuse=False)
    assert contents(lab, known.commit) == contents(lab, plain.commit)


@pytest.mark.parametrize("dtype", list(NAMES))
def test_the_first_pass_is_saved(lab: Lab, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    family(2, shapes=SHAPES, seed=8, dtype=dtype).add_to(lab)
    passes: list[int] = []
    plain = Kernels.histogram

    def histogram(self: Kernels, name: str, column: Any, shift: int, *rest: Any) -> Any:
        passes.append(shift)
        return plain(self, name, column, shift, *rest)

    monkeypatch.setattr(Kernels, "histogram", histogram)
    lab.merge(asked("ties"), "one", reuse=False)
    first = 8 * dtype.itemsize - 16
    assert first in passes
    passes.clear()
    # The first merge has counted for the second.
    lab.merge(asked("ties", 0.4), "two", reuse=False)
    assert passes.count(first) == 1, "the tensor of one block has no histogram"
    if dtype == torch.float32:
        assert 0 in passes


@pytest.mark.parametrize("method", ["ties", "breadcrumbs"])
@pytest.mark.parametrize("dtype", list(NAMES))
def test_a_merge_counts_what_an_analysis_counts(lab: Lab, method: str, dtype: torch.dtype) -> None:
    family(2, shapes=SHAPES, seed=8, dtype=dtype, changed=0.7).add_to(lab)
    environment = lab.repository._store.environment

    def histograms() -> dict[bytes, bytes]:
        with environment.read() as txn:
            return {bytes(key): bytes(value) for key, value in txn.scan("pairs") if bytes(key).endswith(HISTOGRAM, 64)}

    lab.merge(asked(method), "whole")
    counted = histograms()
    assert len(counted) == 4
    assert lab.repository.fsck(read_data=True).ok
    forget(lab)
    lab.repository.analyze(["e0", "e1"], "base")
    assert histograms() == counted


@pytest.mark.parametrize("method", ["ties", "task_arithmetic", "dare_ties"])
def test_a_merge_under_a_budget_counts_nothing(lab: Lab, method: str) -> None:
    family(2, shapes=SHAPES, seed=8).add_to(lab)
    lab.merge(asked(method), "part", budget=BUDGET)
    with lab.repository._store.environment.read() as txn:
        assert txn.count("pairs") == 0


def test_a_merge_again_is_the_same_merge(lab: Lab) -> None:
    family(2, shapes=SHAPES, seed=8).add_to(lab)
    first = lab.merge(asked("ties"), "out")
    again = lab.merge(asked("ties"), "out")
    assert again.commit == first.commit
    assert not again.new_commit
    part = lab.merge(asked("ties"), "part", budget=BUDGET)
    assert lab.merge(asked("ties"), "part", budget=BUDGET).commit == part.commit


def test_a_plan_knows_what_it_rests_on(lab: Lab) -> None:
    family(2, shapes=SHAPES, seed=3).add_to(lab)
    lab.repository.analyze(["e0", "e1"], "base")
    with_histograms = lab.repository.plan(asked("ties"), budget=BUDGET)
    assert Plan.decode(with_histograms.plan.encode()) == with_histograms.plan
    merged = lab.merge(with_histograms.plan, "one", reuse=False)
    forget(lab)
    without = lab.repository.plan(asked("ties"), budget=BUDGET)
    assert without.identity != with_histograms.identity
    assert not any(tensor.cuts for tensor in without.plan.tensors)
    # The plan says all that it needs: it gives the same where nothing is known any more.
    assert contents(lab, lab.merge(with_histograms.plan, "two", reuse=False).commit) == contents(lab, merged.commit)


def test_histograms_of_another_dtype_than_the_merge_s_are_not_used(lab: Lab) -> None:
    family(2, shapes=SHAPES, seed=3, dtype=torch.bfloat16).add_to(lab)
    lab.repository.analyze(["e0", "e1"], "base")
    plan = lab.repository.plan({**asked("ties"), "dtype": "float32"}, budget=BUDGET).plan
    assert not any(tensor.cuts for tensor in plan.tensors)


def test_a_base_that_is_not_finite_is_left_to_the_merge(lab: Lab) -> None:
    found = family(2, shapes=SHAPES, seed=3, dtype=torch.bfloat16)
    found.base["wide"][0, 0] = torch.nan
    for expert in found.experts:
        expert["wide"][0, 0] = torch.nan
    found.add_to(lab)
    lab.repository.analyze(["e0", "e1"], "base")
    plan = lab.repository.plan(asked("ties"), budget=BUDGET).plan
    cuts = {tensor.name: any(tensor.cuts) for tensor in plan.tensors}
    assert cuts["tall"]
    assert not cuts["wide"]


def test_forged_cuts_are_refused(lab: Lab) -> None:
    family(2, shapes=SHAPES, seed=3).add_to(lab)
    lab.repository.analyze(["e0", "e1"], "base")
    document = lab.repository.plan(asked("ties"), budget=BUDGET).plan.as_json()
    item = next(e for tensor in document["tensors"] for e in tensor["experts"] if "cuts" in e)
    good = item["cuts"]
    for bad in (
        [[1 << 15, 0, 1]],
        [[1, 2, 1]],
        [[-1, 0, 0]],
        [[1, 1, 10**9]],
        [good[0], good[0]],
        [[1.5, 0, 1]],
        [[1, 1]],
    ):
        item["cuts"] = bad
        with pytest.raises((BadInputError, ValueError)):
            lab.merge(Plan.decode(json.dumps(document).encode()), "forged")


def test_a_cut_of_every_density_matches_the_search() -> None:
    generator = np.random.default_rng(2)
    delta = torch.from_numpy(np.round(generator.normal(size=5000) * 50) / 1000).bfloat16()
    found = patterns(delta).numpy().astype(np.int64)
    histogram = np.bincount(found, minlength=1 << 15)
    for method, count in (("ties", 1), ("breadcrumbs", 2)):
        operator = get_operator(method)
        for density in (0.0, 0.001, 0.3, 0.999, 1.0, 2.0):
            parameters = Parameters({}, [{"weight": 1.0, "density": density}])
            (cuts,) = operator.cuts("BF16", 5000, parameters, [histogram])
            assert len(cuts) == count
            assert all(0 <= cut.wanted <= cut.total <= 5000 for cut in cuts)
    assert LAYOUTS["BF16"].last == LAYOUTS["BF16"].nan
