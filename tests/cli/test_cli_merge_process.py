"""What a merge loads: torch only where there is no kernel, kernels only where something is computed, planning only where
there is something to plan; and no block again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mpfs.repository import Repository

RECIPES = {
    "ties": "{weight: 0.5, density: 0.4}",
    "dare_ties": "{weight: 0.5, density: 0.6}",
    "breadcrumbs_ties": "{weight: 0.5, density: 0.6, gamma: 0.1}",
}

PROGRAM = """
import sys
from mpfs_cli.main import run
code = run(sys.argv[1:])
print(*sys.modules, file=sys.stderr)
sys.exit(code)
"""

COMPUTING = {"torch", "numba", "llvmlite"}
PLANNING = {f"mpfs.merge.{name}" for name in ("compile", "inputs", "outline", "planner", "weighing")}
ELSEWHERE = {
    "fsspec",
    "rich",
    "mpfs.merge.check",
    "mpfs.ingest.hub",
    "mpfs.ingest.importer",
    "mpfs.store.fsck",
    "mpfs.store.gc",
}
"""What no merge of models that are in the repository needs."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a repository of three bfloat16 models, and a recipe for each method."""
    folder = tmp_path_factory.mktemp("merge")
    generator = torch.Generator().manual_seed(1)
    base = {"model.norm.weight": torch.randn(700, generator=generator), "w": torch.randn(90, 70, generator=generator)}
    for index, name in enumerate(("base", "a", "b")):
        (folder / name).mkdir()
        model = {
            key: value + 0.01 * index * torch.randn(value.shape, generator=generator) for key, value in base.items()
        }
        save_file({key: value.bfloat16() for key, value in model.items()}, folder / name / "model.safetensors")
    with Repository.create(folder / ".mpfs", block_size=4096, map_size=1 << 28) as repository:
        for name in ("base", "a", "b"):
            repository.import_checkpoint(folder / name, name)
    for method, values in RECIPES.items():
        listed = "".join(f"  - {{model: {name}, parameters: {values}}}\n" for name in ("a", "b"))
        (folder / f"{method}.yml").write_text(f"merge_method: {method}\nbase_model: base\nmodels:\n{listed}")
    return folder


def merge(folder: Path, method: str, into: str) -> tuple[Any, set[str]]:
    """The document that a merge prints, and which modules it has loaded."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "merge", f"{method}.yml", "--into", into, "--json"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), set(done.stderr.splitlines()[-1].split())


@pytest.mark.parametrize("method", RECIPES)
def test_kernels_need_no_torch_and_a_known_result_no_kernels_and_no_planning(models: Path, method: str) -> None:
    first, loaded = merge(models, method, method)
    assert first["run"]["blocks_computed"] > 0
    assert loaded >= PLANNING
    assert not ({"torch"} | ELSEWHERE) & loaded
    again, loaded = merge(models, method, f"{method}-again")
    assert again["snapshot"] == first["snapshot"]
    assert again["run"]["blocks_computed"] == 0
    assert again["run"]["expert_bytes_read"] == again["run"]["base_bytes_read"] == 0
    assert not (COMPUTING | PLANNING | ELSEWHERE) & loaded
