"""Plans from files are checked before they are run: an edited one is refused, and nothing is published."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import mpfs
from mpfs.errors import BadInputError, MPFSError, NotFoundError, RecipeError, UsageError
from mpfs.merge.config import config_with_dtype

Edit = Callable[[dict[str, Any]], None]


@pytest.fixture
def repository(tmp_path: Path) -> mpfs.Repository:
    generator = torch.Generator().manual_seed(5)
    base = {name: torch.randn(64, 64, generator=generator) for name in ("a", "b")}
    repo = mpfs.Repository.create(tmp_path / "repo", block_size=4096)
    for name, scale in (("base", 0.0), ("one", 0.1), ("two", 0.2)):
        (tmp_path / name).mkdir()
        tensors = {key: value + scale * torch.randn(64, 64, generator=generator) for key, value in base.items()}
        save_file(tensors, tmp_path / name / "model.safetensors")
        repo.import_checkpoint(tmp_path / name, name)
    return repo


def planned(repo: mpfs.Repository) -> dict[str, Any]:
    recipe = {
        "merge_method": "ties",
        "base_model": "base",
        "models": [{"model": name, "parameters": {"weight": 1.0, "density": 0.5}} for name in ("one", "two")],
    }
    plan = repo.plan(recipe, budget=mpfs.Budget("bytes", 20_000), save=False).plan
    return dict(json.loads(plan.encode()))


def tensor(plan: dict[str, Any]) -> dict[str, Any]:
    return next(item for item in plan["tensors"] if item["action"] == "compute")


def set_in(**values: object) -> Edit:
    return lambda plan: tensor(plan).update(values)


def set_expert(**values: object) -> Edit:
    return lambda plan: tensor(plan)["experts"][0].update(values)


EDITS: dict[str, tuple[Edit, type[MPFSError]]] = {
    "columns beyond the tensor": (set_in(columns=[[0, 99]]), BadInputError),
    "columns that overlap": (set_expert(columns=[[0, 2], [1, 3]]), BadInputError),
    "columns backwards": (set_expert(columns=[[2, 1]]), BadInputError),
    "columns before the first": (set_expert(columns=[[-1, 1]]), BadInputError),
    "no elements a column": (set_in(column_elements=0), BadInputError),
    "other elements a column": (set_in(column_elements=64), BadInputError),
    "another shape": (set_in(shape=[64, 65]), BadInputError),
    "a dtype that cannot be computed": (set_in(dtype="U8"), BadInputError),
    "a work dtype that cannot be computed in": (lambda plan: plan.update(work_dtype="F4"), BadInputError),
    "an output dtype that cannot be computed": (lambda plan: plan.update(out_dtype="F4"), BadInputError),
    "an unknown action": (set_in(action="guess"), BadInputError),
    "a model that is not there": (set_expert(model=7), BadInputError),
    "a tensor of another name": (lambda plan: tensor(plan)["experts"][0].update(tensor="0" * 64), BadInputError),
    "a base that is no tensor of the base": (set_in(base="0" * 64), BadInputError),
    "a negative density": (set_expert(parameters={"weight": 1.0, "density": -1.0}), RecipeError),
    "a method that does not exist": (lambda plan: plan.update(method="magic"), BadInputError),
    "a base index out of range": (lambda plan: plan.update(base=9), BadInputError),
    "the same tensor twice": (lambda plan: plan["tensors"].append(plan["tensors"][0]), BadInputError),
    "another block size": (lambda plan: plan.update(block_size=8192), UsageError),
    "a commit that is not here": (lambda plan: plan["models"][0].update(commit="1" * 64), NotFoundError),
    "a smaller budget than it reads": (lambda plan: plan["budget"].update(value=10.0), BadInputError),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_plan_is_refused(repository: mpfs.Repository, tmp_path: Path, name: str) -> None:
    edit, error = EDITS[name]
    plan = planned(repository)
    edit(plan)
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan), encoding="utf-8")
    with pytest.raises(error):
        repository.merge(repository.find_plan(file).plan, "out")
    assert [ref.name for ref in repository.refs()] == ["base", "one", "two"]
    assert repository.fsck().ok


def test_an_unedited_plan_passes(repository: mpfs.Repository, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(planned(repository)), encoding="utf-8")
    report = repository.merge(repository.find_plan(file).plan, "out")
    assert 0 < report.figures.expert_bytes_read <= 20_000


def test_config_is_left_alone_unless_its_dtype_is_wrong() -> None:
    config = b'{"torch_dtype":   "bfloat16"}'
    assert config_with_dtype(config, "BF16") == config
    assert json.loads(config_with_dtype(config, "F32")) == {"torch_dtype": "float32"}
    assert json.loads(config_with_dtype(b'{"dtype": "float16", "a": 1}', "F32")) == {"dtype": "float32", "a": 1}
    assert config_with_dtype(b"{}", "F32", add=False) == b"{}"
    assert json.loads(config_with_dtype(b"{}", "F32")) == {"torch_dtype": "float32"}
    assert config_with_dtype(b"[1, 2]", "F32") == b"[1, 2]"
