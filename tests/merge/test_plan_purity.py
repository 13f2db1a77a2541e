"""A plan is a pure function of its inputs: the same id in any store, process, order and number of threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from merge_cases import family, recipe
from safetensors.torch import save_file

from mpfs.errors import MPFSError
from mpfs.merge.planner import POLICIES
from mpfs.objects import Budget
from mpfs.repository import Repository
from mpfs.stats.backend import kernels_available

SHAPES = {f"layer.{i}.weight": (33 + 16 * i, 64) for i in range(3)} | {"norm": (80,), "scalar": ()}
EXPERTS = ("e0", "e1", "e2")
ASKED = recipe("ties", 3, densities=[0.4, 0.7, 0.9])
BUDGET = Budget("percent", 45)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Repository, Repository]]:
    """Two repositories of the same models, which came in another order, on other threads, and beside others."""
    root = tmp_path_factory.mktemp("stores")
    made = family(3, shapes=SHAPES, seed=9, changed=0.7, dtype=torch.bfloat16)
    for name, tensors in zip(("base", *EXPERTS), (made.base, *made.experts), strict=True):
        (root / name).mkdir()
        save_file(tensors, root / name / "model.safetensors")
    orders = (("base", *EXPERTS), 1), (("e2", "other", "e0", "base", "e1"), 4)
    with pytest.MonkeyPatch.context() as patch:
        # A commit's id has its time in it.
        patch.setattr("mpfs.ingest.commit.clock", SimpleNamespace(time=lambda: 1.7e9, monotonic=lambda: 0.0))
        made_of = []
        for number, (order, threads) in enumerate(orders):
            repository = Repository.create(root / str(number), block_size=4096, map_size=1 << 28, author="tester")
            for name in order:
                repository.import_checkpoint(root / name.replace("other", "e1"), name, threads=threads)
            made_of.append(repository)
    yield made_of[0], made_of[1]
    for repository in made_of:
        repository.close()


WEIGHTS = st.one_of(
    st.sampled_from([0.0, 0.5, 1.0, -0.4]), st.floats(-2, 2), st.lists(st.floats(0, 1.5), min_size=2, max_size=3)
)
BUDGETS = st.one_of(
    st.just(Budget()),
    st.builds(Budget, st.just("percent"), st.floats(0, 100)),
    st.builds(Budget, st.just("bytes"), st.integers(0, 200_000).map(float)),
    st.builds(Budget, st.just("fidelity"), st.floats(0, 1)),
)


@st.composite
def recipes(draw: st.DrawFn) -> dict[str, Any]:
    """Recipes over the family: a method, some experts in some order, parameters with and without gradients."""
    method = draw(
        st.sampled_from(["linear", "task_arithmetic", "ties", "dare_ties", "dare_linear", "breadcrumbs", "della"])
    )
    models: list[dict[str, Any]] = []
    for name in draw(st.lists(st.sampled_from(EXPERTS), min_size=1, unique=True)):
        own: dict[str, Any] = {"weight": draw(WEIGHTS)}
        if method not in ("linear", "task_arithmetic"):
            own["density"] = draw(st.floats(0.2, 1.0))
        models.append({"model": name, "parameters": own})
    if method == "linear":
        models.insert(0, {"model": "base", "parameters": {"weight": 0.5}})
    value: dict[str, Any] = {"merge_method": method, "base_model": "base", "models": models}
    value["parameters"] = draw(st.fixed_dictionaries({}, optional={"normalize": st.booleans()}))
    if draw(st.booleans()):
        value["dtype"] = draw(st.sampled_from(["float32", "bfloat16"]))
    if draw(st.booleans()):
        models[-1]["budget"] = f"{draw(st.integers(1, 100))}%"
    return value


def backwards(value: Any) -> Any:
    """The same mapping, its keys the other way round."""
    if isinstance(value, dict):
        return {key: backwards(value[key]) for key in reversed(value)}
    return [backwards(item) for item in value] if isinstance(value, list) else value


def planned(repository: Repository, asked: Any, budget: Budget, policy: Any, seed: int) -> tuple[str, bytes] | str:
    """A plan's id and bytes, or why there is none."""
    try:
        report = repository.plan(asked, budget=budget, policy=policy, seed=seed, save=False)
    except MPFSError as error:
        return error.message
    return report.identity, report.plan.encode()


@settings(max_examples=40)
@given(
    asked=recipes(),
    budget=BUDGETS,
    policy=st.sampled_from(POLICIES),
    seed=st.integers(0, 1 << 40),
)
def test_a_plan_is_a_function_of_its_inputs(
    stores: tuple[Repository, Repository], asked: dict[str, Any], budget: Budget, policy: Any, seed: int
) -> None:
    first, second = stores
    here = planned(first, asked, budget, policy, seed)
    with ThreadPoolExecutor(2) as executor:
        there: Sequence[Any] = list(
            executor.map(lambda value: planned(second, value, budget, policy, seed), (asked, backwards(asked)))
        )
    assert there == [here, here]


def test_a_plan_does_not_depend_on_the_process(stores: tuple[Repository, Repository]) -> None:
    here = [stores[0].plan(ASKED, budget=BUDGET, policy=policy, seed=3).identity for policy in POLICIES]
    code = (
        "import json, os, sys\n"
        "if 'WITHOUT_NUMBA' in os.environ: sys.modules['numba'] = None\n"
        "import mpfs, mpfs.stats.estimate\n"
        "mpfs.stats.estimate._WORTH_A_KERNEL = 0\n"
        "from mpfs.objects import Budget\n"
        "path, recipe = sys.argv[1], json.loads(sys.argv[2])\n"
        "with mpfs.open(path) as repository:\n"
        "    for policy in sys.argv[3:]:\n"
        "        budget = Budget('percent', 45)\n"
        "        print(repository.plan(recipe, budget=budget, policy=policy, seed=3, save=False).identity)\n"
    )
    for seed, threads, more in (("0", "1", {}), ("1", "2", {"WITHOUT_NUMBA": "1"})):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": threads, **more}
        arguments = [sys.executable, "-c", code, str(stores[0].path), json.dumps(ASKED), *POLICIES]
        done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.split() == here
    assert len(set(here)) == len(POLICIES)


def test_a_plan_does_not_depend_on_what_is_weighed_together(
    stores: tuple[Repository, Repository], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [recipe(method, 3, densities=[0.4, 0.7, 0.9]) for method in ("ties", "linear", "dare_ties", "slerp")]
    asked[3]["models"] = asked[3]["models"][:1]
    asked[3]["parameters"] = {"t": 0.3}

    def identities() -> list[Any]:
        return [planned(stores[0], one, budget, "energy", 0) for one in asked for budget in (BUDGET, Budget())]

    together = identities()
    assert len({item[0] for item in together}) == len(together)
    monkeypatch.setattr("mpfs.merge.weighing._BATCH_BYTES", 1)
    assert identities() == together
    if kernels_available():
        monkeypatch.setattr("mpfs.stats.estimate._WORTH_A_KERNEL", 0)
        assert identities() == together
