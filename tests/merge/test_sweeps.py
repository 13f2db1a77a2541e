"""Sweeps: every variant is what it would be alone, shared blocks are read once, and each is committed by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from merge_cases import Lab, family, problems_of, recipe, told_reads, without_kernels

from mpfs.errors import BudgetInfeasibleError, MPFSError, NotFoundError, RecipeError, RefConflictError, UsageError
from mpfs.merge.delta import PlanInputs, planned_blocks
from mpfs.merge.operators import Operator, get_operator
from mpfs.merge.sweep.report import SweepReport
from mpfs.objects import BlockId, Budget, Plan
from mpfs.store import Writer

pytest_plugins = ["merge_fixtures"]

SHAPES = {"a": (64, 80), "b": (33, 64), "c": (7,), "layers.0.w": (60, 64), "layers.1.w": (60, 64)}
METHODS = [
    "linear",
    "task_arithmetic",
    "ties",
    "dare_linear",
    "dare_ties",
    "breadcrumbs",
    "della",
    "sce",
    "model_stock",
]
HALF = Budget("percent", 50)


@pytest.fixture
def models(lab: Lab) -> Lab:
    """Three experts."""
    family(3, shapes=SHAPES, seed=4, changed=0.8).add_to(lab)
    return lab


def asked(method: str = "ties", **top: Any) -> dict[str, Any]:
    densities = None if method in ("linear", "task_arithmetic", "sce", "model_stock") else [0.4, 0.7, 0.8]
    return recipe(method, 3, densities=densities, **top)


def sweep(
    lab: Lab, given: Any, values: Mapping[str, Sequence[Any]], into: str = "sweep", **options: Any
) -> SweepReport:
    options.setdefault("threads", 2)
    return lab.repository.sweep(given, values, into, **options)


def plans(report: SweepReport) -> list[Plan]:
    return [item.plan.plan for item in report.variants]


def union(lab: Lab, found: Sequence[Plan]) -> set[BlockId]:
    """The expert blocks that plans list."""
    objects = lab.repository._store.objects
    return {
        block
        for plan in found
        for tensor in plan.tensors
        for block in planned_blocks(tensor, PlanInputs.load(objects, tensor))
    }


def assert_as_alone(lab: Lab, report: SweepReport) -> None:
    """Each result is that of its plan, run by itself from nothing."""
    assert report.failed == ()
    for index, item in enumerate(report.variants):
        assert item.merge is not None
        alone = lab.merge(item.plan.plan, f"alone-{index}", reuse=False)
        assert alone.snapshot == item.merge.snapshot, item.title
        assert lab.repository.show(item.ref).commit.snapshot == alone.snapshot
        figures = item.merge.figures
        assert figures.expert_bytes_read <= figures.expert_bytes_planned == alone.figures.expert_bytes_planned
        assert figures.blocks_kept == alone.figures.blocks_kept


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[BlockId]]:
    """How often each block is read from the store within the `with` block."""
    seen: Counter[BlockId] = Counter()
    with told_reads(monkeypatch, seen.update):
        yield seen


@pytest.mark.parametrize("fast", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("method", METHODS)
def test_variants_are_what_they_would_be_alone(
    models: Lab, monkeypatch: pytest.MonkeyPatch, method: str, fast: bool
) -> None:
    if not fast:
        without_kernels(monkeypatch)
    values: dict[str, list[Any]] = {"models.e0.parameters.weight": [0.3, 0.9], "out_dtype": ["float32", "bfloat16"]}
    assert_as_alone(models, sweep(models, asked(method), values, budget=HALF))


@settings(max_examples=15)
@given(st.data())
def test_any_sweep_is_what_its_variants_would_be_alone(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    lab = Lab(tmp_path_factory.mktemp("sweep"))
    try:
        dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
        family(3, shapes=SHAPES, dtype=dtype, seed=data.draw(st.integers(0, 3)), changed=0.7).add_to(lab)
        possible: dict[str, list[Any]] = {
            "merge_method": ["ties", "dare_ties", "dare_linear", "task_arithmetic", "breadcrumbs"],
            "models.*.parameters.density": [0.2, 0.6, 1.0, [0.2, 0.8]],
            "models.e1.parameters.weight": [0.0, 0.5, -1.0],
            "dtype": ["float32", "bfloat16"],
            "models.2.model": ["e2", "base"],
            "seed": [0, 7],
        }
        chosen = data.draw(st.lists(st.sampled_from(sorted(possible)), min_size=1, max_size=3, unique=True))
        values = {
            path: data.draw(st.lists(st.sampled_from(possible[path]), min_size=1, max_size=2, unique_by=repr))
            for path in chosen
        }
        budget = data.draw(
            st.sampled_from([None, Budget("percent", 30), Budget("bytes", 40000), Budget("fidelity", 0.6)])
        )
        report = sweep(lab, recipe("ties", 3, densities=[0.4, 0.7, 0.9]), values, budget=budget)
        assert_as_alone(lab, report)
        assert report.figures is not None
        assert report.figures.expert_bytes_read <= report.expert_bytes.planned <= report.expert_bytes.apart
        limit = {"percent": report.expert_bytes.full * 0.3, "bytes": 40000}.get(budget.kind if budget else "none")
        assert limit is None or report.expert_bytes.planned <= limit
    finally:
        lab.close()


@pytest.mark.parametrize(("method", "passes"), [("task_arithmetic", 1), ("dare_ties", 2), ("ties", 3)])
@pytest.mark.parametrize("fast", [True, False], ids=["kernels", "torch"])
def test_blocks_are_read_as_often_as_by_one_merge(
    models: Lab, monkeypatch: pytest.MonkeyPatch, method: str, passes: int, fast: bool
) -> None:
    if not fast:
        without_kernels(monkeypatch)
    values = {"models.*.parameters.density": [0.3, 0.5, 0.7], "parameters.lambda": [1.0, 0.5]}
    report = sweep(models, asked(method), values, budget=HALF, dry_run=True)
    with counted(monkeypatch) as alone:
        models.merge(plans(report)[0], "alone", reuse=False)
    with counted(monkeypatch) as together:
        report = sweep(models, asked(method), values, budget=HALF, reuse=False)
    assert report.failed == ()
    experts = union(models, plans(report))
    assert experts
    assert {alone[block] for block in experts} == {passes}
    assert {together[block] for block in experts} == {passes}
    assert report.figures is not None
    assert report.figures.expert_bytes_read == report.expert_bytes.planned
    assert report.expert_bytes.apart == 6 * report.expert_bytes.planned


def test_variants_that_agree_are_planned_as_they_would_be_alone(models: Lab) -> None:
    values = {"parameters.lambda": [1.0, 0.5]}
    report = sweep(models, asked("task_arithmetic"), values, budget=HALF, dry_run=True)
    for plan, factor in zip(plans(report), (1.0, 0.5), strict=True):
        alone = models.repository.plan(asked("task_arithmetic", parameters={"lambda": factor}), budget=HALF).plan
        assert [item.selections for item in plan.tensors] == [item.selections for item in alone.tensors]
        assert plan.budget == HALF


def test_the_budget_is_that_of_all_together(models: Lab) -> None:
    """Of variants with other experts each may read more than that share of its own."""
    values = {"models.0.model": ["e0", "e1"]}
    given = recipe("task_arithmetic", 1, names=["e0"])
    report = sweep(models, given, values, budget=Budget("percent", 30))
    limit = int(report.expert_bytes.full * 0.3)
    assert 0.9 * limit < report.expert_bytes.planned <= limit
    sizes = {block: size for plan in plans(report) for block, size in _sizes(models, plan).items()}
    assert sum(sizes.values()) == report.expert_bytes.planned
    for plan in plans(report):
        assert plan.budget == Budget("bytes", limit)
    assert_as_alone(models, report)


def _sizes(lab: Lab, plan: Plan) -> dict[BlockId, int]:
    blocks = union(lab, [plan])
    known = {
        block: size for name in lab.names for item in lab.blocks(name).values() for block, size in item.sized_blocks()
    }
    return {block: known[block] for block in blocks}


def test_budgets_of_variants(models: Lab) -> None:
    budgets = [Budget("percent", 10), Budget("percent", 40), Budget("bytes", 30000)]
    report = sweep(models, asked(), {"budget": budgets})
    assert [plan.budget for plan in plans(report)] == budgets
    for plan, budget in zip(plans(report), budgets, strict=True):
        assert plan == models.repository.plan(asked(), budget=budget).plan
    assert report.expert_bytes.planned < report.expert_bytes.apart
    assert_as_alone(models, report)


def _with_budgets() -> dict[str, Any]:
    given = asked("task_arithmetic", budget=[{"filter": "layers", "value": "60%"}, {"value": "90%"}])
    given["models"][0]["budget"] = "20%"
    return given


def test_own_budgets_hold_within_the_one_for_all(models: Lab) -> None:
    values: dict[str, list[Any]] = {"models.e1.parameters.weight": [0.2, 0.9], "models.e2.budget": ["40%", 30000]}
    report = sweep(models, _with_budgets(), values, budget=Budget("percent", 30), dry_run=True)
    limit = int(report.expert_bytes.full * 0.3)
    assert 0.8 * limit < report.expert_bytes.planned <= limit
    assert sum({b: n for plan in plans(report) for b, n in _sizes(models, plan).items()}.values()) == (
        report.expert_bytes.planned
    )
    for plan in plans(report):
        assert [bound.path for bound in plan.bounds] == [
            "budget[0]",
            "budget[1]",
            "models[0].budget",
            "models[2].budget",
        ]
        for bound in plan.bounds:
            assert bound.limit is not None
            assert bound.planned <= bound.limit
    assert_as_alone(models, sweep(models, _with_budgets(), values, budget=Budget("percent", 30)))


def test_where_the_one_for_all_leaves_room_own_budgets_choose_alone(models: Lab) -> None:
    values = {"models.e1.parameters.weight": [0.2, 0.9]}
    report = sweep(models, _with_budgets(), values, budget=Budget("percent", 100), dry_run=True)
    for plan, weight in zip(plans(report), (0.2, 0.9), strict=True):
        given = _with_budgets()
        given["models"][1]["parameters"]["weight"] = weight
        alone = models.repository.plan(given).plan
        assert [tensor.selections for tensor in plan.tensors] == [tensor.selections for tensor in alone.tensors]
        assert plan.bounds == alone.bounds
        assert plan.fidelity_predicted == alone.fidelity_predicted


def test_a_variant_without_own_budgets_is_not_held_to_another_ones(models: Lab) -> None:
    values = {"models.e0.budget": [None, "1%"]}
    report = sweep(models, asked("task_arithmetic"), values, budget=HALF, dry_run=True)
    free, bound = plans(report)
    assert free.bounds == ()
    assert bound.bounds[0].planned <= (bound.bounds[0].limit or 0) < bound.bounds[0].full
    assert free.fidelity_predicted > bound.fidelity_predicted


def test_a_fidelity_of_a_recipe_cannot_be_promised_under_one_budget(models: Lab) -> None:
    given = asked("task_arithmetic")
    given["models"][0]["budget"] = {"fidelity": 0.9}
    with pytest.raises(UsageError, match=r"models\[0\]\.budget: a fidelity of 0\.9 cannot be promised"):
        sweep(models, given, {"parameters.lambda": [0.5, 1.0]}, budget=HALF)
    assert sweep(models, given, {"parameters.lambda": [0.5, 1.0]}, dry_run=True).failed == ()


DOCUMENTS = """
name: both
merge_method: task_arithmetic
base_model: base
models:
  - {model: e0, parameters: {weight: 0.5}}
  - {model: e1, parameters: {weight: 0.5}}
---
merge_method: task_arithmetic
base_model: base
models:
  - {model: both, parameters: {weight: 0.5}}
  - {model: e2, parameters: {weight: 0.5}}
"""


def test_of_several_documents_the_last_is_swept(models: Lab, tmp_path: Path) -> None:
    file = tmp_path / "two.yml"
    file.write_text(DOCUMENTS)
    values = {"parameters.lambda": [0.3, 0.9]}
    with pytest.raises(NotFoundError, match="document both is not merged yet"):
        sweep(models, file, values, dry_run=True)
    report = sweep(models, file, values, budget=HALF)
    (first, *_) = report.notes
    assert first == f"document both: committed to the branch both as {models.repository.resolve('both')[:12]}"
    for item, factor in zip(report.variants, (0.3, 0.9), strict=True):
        file.write_text(f"{DOCUMENTS}parameters: {{lambda: {factor}}}")
        alone = models.repository.merge(file, f"alone-{factor}", budget=HALF)
        assert item.merge is not None
        assert item.merge.snapshot == alone.snapshot
    file.write_text(DOCUMENTS)
    planned = sweep(models, file, {"#2.parameters.lambda": [0.3, 0.9]}, budget=HALF, dry_run=True)
    assert [item.plan.identity for item in planned.variants] == [item.plan.identity for item in report.variants]
    assert [item.ref for item in planned.variants] == [item.ref for item in report.variants]


def test_mistakes_in_documents_are_told_before_any_is_merged(models: Lab, tmp_path: Path) -> None:
    file = tmp_path / "two.yml"
    file.write_text(DOCUMENTS)
    before = models.repository.refs()
    with pytest.raises(UsageError, match=r"#1\.models\.e0\.parameters\.weight: settings are of the last document"):
        sweep(models, file, {"#1.models.e0.parameters.weight": [0.3, 0.9]})
    found = problems_of(lambda: sweep(models, file, {"models.both.parameters.wieght": [0.3, 0.9]}))
    assert found.keys() == {"#2.models[0].parameters.wieght"}
    with pytest.raises(RecipeError, match="both is where the last document is merged to"):
        sweep(models, file, {"models.both.model": ["both"]}, "{model}")
    assert models.repository.refs() == before


def test_a_fidelity_is_that_of_each(models: Lab) -> None:
    values = {"models.e0.parameters.weight": [0.1, 2.0]}
    report = sweep(models, asked("task_arithmetic"), values, budget=Budget("fidelity", 0.7), dry_run=True)
    assert all(plan.fidelity_predicted >= 0.7 for plan in plans(report))
    assert len({plan.cost.expert_bytes_planned for plan in plans(report)}) == 2


def test_messages_say_the_settings(models: Lab) -> None:
    values = {"parameters.lambda": [0.5], "models.e0.parameters.weight": [1.0]}
    sweep(models, asked(), values, budget=HALF)
    name = "sweep/lambda=0.5,weight=1.0"
    assert models.repository.show(name).commit.message == (
        "lambda=0.5, weight=1.0: Merge e0, e1, e2 into base (ties, budget 50%)"
    )
    sweep(models, asked(), values, message="tried out")
    assert models.repository.show(name).commit.message == "lambda=0.5, weight=1.0: tried out"


def test_doing_it_again_reads_and_commits_nothing(models: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"models.*.parameters.density": [0.3, 0.5]}
    first = sweep(models, asked(), values)
    with counted(monkeypatch) as seen:
        again = sweep(models, asked(), values)
    assert not union(models, plans(first)) & set(seen)
    for before, after in zip(first.variants, again.variants, strict=True):
        assert before.merge is not None
        assert after.merge is not None
        assert not after.merge.new_commit
        assert after.merge.commit == before.merge.commit
    more = sweep(models, asked(), {"models.*.parameters.density": [0.3, 0.5, 0.7]}, into="sweep")
    assert [item.merge is not None and item.merge.new_commit for item in more.variants] == [False, False, True]


def test_what_variants_have_in_common_is_computed_once(models: Lab) -> None:
    choices = [[{"filter": "layers", "value": value}, {"value": 1.0}] for value in (0.2, 0.4, 0.6)]
    report = sweep(models, asked("task_arithmetic"), {"models.e0.parameters.weight": choices}, reuse=False)
    assert report.figures is not None
    first, *others = [item.merge.figures for item in report.variants if item.merge is not None]
    assert first.blocks_reused == 0
    for figures in others:
        assert figures.blocks_reused == sum(len(models.blocks("base")[name].blocks) for name in ("a", "b", "c"))
    assert_as_alone(models, report)


def test_variants_that_come_to_the_same_are_noted(models: Lab) -> None:
    report = sweep(models, asked(), {"parameters.density": [0.3, 0.5], "parameters.lambda": [1.0]}, dry_run=True)
    assert report.notes == (
        "density=0.3, lambda=1.0, density=0.5, lambda=1.0 come out the same: what is set has no part in it, or each model "
        "has a value of its own",
    )


def test_a_dry_run_stores_plans_and_merges_nothing(models: Lab) -> None:
    before = models.repository.refs()
    report = sweep(models, asked(), {"models.*.parameters.density": [0.3, 0.5]}, dry_run=True)
    assert models.repository.refs() == before
    assert report.figures is None
    for item in report.variants:
        assert item.merge is None
        assert models.repository.find_plan(item.plan.identity).plan == item.plan.plan


def test_mistakes_of_all_variants_are_told_together(models: Lab) -> None:
    def wrong(values: Mapping[str, Sequence[Any]], given: dict[str, Any] | None = None) -> dict[str, str]:
        return problems_of(lambda: sweep(models, given or asked(), values))

    assert wrong({"parameters.densty": [1, 2]}) == {
        "parameters.densty": "ties has no such parameter; did you mean density?"
    }
    found = wrong({"merge_method": ["ties", "tise"], "models.e0.parameters.weight": [1, "x"]})
    assert found.keys() == {"merge_method", "models[0].parameters.weight"}
    assert found["merge_method"].endswith("(with merge_method=tise, weight=1 and merge_method=tise, weight=x)")
    assert "(with merge_method=ties, weight=x and merge_method=tise, weight=x)" in found["models[0].parameters.weight"]
    with pytest.raises(NotFoundError) as caught:
        sweep(models, asked(), {"models.2.model": ["e2", "e7", "e8"]})
    lines = caught.value.message.splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["model=e7", "model=e8"]
    listed: Any = caught.value.details["variants"]
    assert [item["variant"] for item in listed] == ["model=e7", "model=e8"]
    assert len(models.repository.refs()) == 4


def test_branches_that_cannot_be_are_told_before_work(models: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    models.repository.tag("sweep/lambda=0.5", "base")
    models.repository.branch("other", "base")
    with counted(monkeypatch) as seen:
        for into, message in (("sweep", "is a tag"), ("other", "there is a ref other")):
            with pytest.raises(RefConflictError, match=message):
                sweep(models, asked(), {"parameters.lambda": [0.5, 1.0]}, into)
    assert not seen
    with pytest.raises(UsageError, match="exclude each other"):
        sweep(models, asked(), {"budget": [HALF]}, budget=HALF)
    with pytest.raises(UsageError, match="3 variants are more than 2"):
        sweep(models, asked(), {"parameters.lambda": [1, 2, 3]}, limit=2)


def test_a_budget_that_is_too_small_for_all_together(models: Lab) -> None:
    given = recipe("linear", 3, base=None)
    with pytest.raises(BudgetInfeasibleError):
        sweep(models, given, {"models.0.parameters.weight": [0.5, 1.0]}, budget=Budget("percent", 50))


def test_a_variant_that_fails_does_not_lose_the_others(models: Lab) -> None:
    report = sweep(models, asked(), {"models.e0.parameters.weight": [0.5, 1e39, 0.25], "dtype": ["float32"]})
    assert [item.title for item in report.failed] == ["weight=1e+39, dtype=float32"]
    (failed,) = report.failed
    assert isinstance(failed.error, MPFSError)
    assert failed.error.kind == "nonfinite"
    refs = {ref.name for ref in models.repository.refs()}
    assert refs >= {"sweep/weight=0.5,dtype=float32", "sweep/weight=0.25,dtype=float32"}
    assert failed.ref not in refs
    document = report.as_json()
    assert document["failed"] == 1
    assert ["error" in item for item in document["variants"]] == [False, True, False]


@pytest.mark.parametrize("where", ["prepare", "apply"])
@pytest.mark.parametrize("method", ["ties", "dare_ties"])
def test_an_operator_that_fails_does_not_lose_the_others(
    models: Lab, monkeypatch: pytest.MonkeyPatch, where: str, method: str
) -> None:
    without_kernels(monkeypatch)
    kind: type[Operator] = type(get_operator(method))
    work = getattr(kind, where)

    def failing(self: Operator, context: Any, parameters: Any, *rest: Any) -> Any:
        if parameters.experts[0]["weight"] == 13.0:
            raise ZeroDivisionError("an operator's mistake")
        return work(self, context, parameters, *rest)

    monkeypatch.setattr(kind, where, failing)
    report = sweep(models, asked(method), {"models.e0.parameters.weight": [0.5, 13.0, 0.25]})
    assert [type(item.error) for item in report.variants] == [type(None), ZeroDivisionError, type(None)]
    monkeypatch.undo()
    for item in (report.variants[0], report.variants[2]):
        assert item.merge is not None
        assert models.merge(item.plan.plan, "alone", reuse=False).snapshot == item.merge.snapshot


def test_a_damaged_block_fails_only_those_that_read_it(models: Lab) -> None:
    report = sweep(models, recipe("ties", 1, names=["e0"]), {"models.0.model": ["e0", "e1"]}, dry_run=True)
    (block, *_) = union(models, plans(report)[:1]) - union(models, plans(report)[1:])
    data = models.repository._store.blocks.read(block, "test")
    path = next((models.root / "repo").glob("store*/data.mdb"))
    stored = path.read_bytes()
    at = stored.index(data)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([data[0] ^ 1]))
    done = sweep(models, recipe("ties", 1, names=["e0"]), {"models.0.model": ["e0", "e1"]})
    assert [item.title for item in done.failed] == ["model=e0"]
    (failed,) = done.failed
    assert isinstance(failed.error, MPFSError)
    assert failed.error.kind == "integrity"
    assert "e0" in failed.error.message


def test_a_branch_that_moves_meanwhile_fails_alone(models: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    publish = Writer.publish

    def moving(self: Writer, **options: Any) -> str:
        if options["move"].name == "sweep/lambda=0.5":
            monkeypatch.undo()
            models.repository.branch("sweep/lambda=0.5", "base")
        return publish(self, **options)

    monkeypatch.setattr(Writer, "publish", moving)
    report = sweep(models, asked(), {"parameters.lambda": [1.0, 0.5, 2.0]})
    assert [type(item.error) for item in report.variants] == [type(None), RefConflictError, type(None)]


def test_slices_may_be_swept(models: Lab) -> None:
    """Layers that come out elsewhere are still read once."""
    sources = [{"model": "e0", "layer_range": [0, 1]}, {"model": "e1", "layer_range": [0, 1]}]
    given = {"merge_method": "linear", "slices": [{"sources": sources}], "parameters": {"weight": 0.5}}
    report = sweep(models, given, {"slices.*.sources.*.layer_range": [[0, 1], [1, 2], [0, 2]]})
    assert_as_alone(models, report)
    assert [item.ref for item in report.variants] == [f"sweep/layer_range={name}" for name in ("0-1", "1-2", "0-2")]


def test_a_recipe_from_a_file(models: Lab) -> None:
    path = models.root / "recipe.yml"
    path.write_text(
        "merge_method: ties\nbase_model: base\nmodels:\n- model: e0\n- model: e1\nparameters:\n  weight: 1\n"
    )
    report = sweep(models, path, {"parameters.density": [0.5, 0.25]})
    assert [item.title for item in report.variants] == ["density=0.5", "density=0.25"]
    path.write_text("merge_method: ties\n---\nmerge_method: ties\n")
    with pytest.raises(RecipeError, match=r"#1\.name: missing: all documents but the last one need a name"):
        sweep(models, path, {"parameters.density": [0.5]})


def test_little_memory_and_many_variants(models: Lab, tmp_path: Path) -> None:
    values = {"models.*.parameters.density": [0.1 * step for step in range(1, 10)]}
    report = sweep(models, asked(), values, memory=1, threads=3)
    assert_as_alone(models, report)
