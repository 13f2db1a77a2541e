"""`--all`: what a training checkpoint holds besides the model is kept, comes back, and stays out of merges."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ingest_cases import assert_clean, directory_digests, new_repository, refused
from mpfs_cli.main import app
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from mpfs.errors import BadInputError, FormatError, NotFoundError
from mpfs.formats import training
from mpfs.formats.training import rebuild, take_apart
from mpfs.repository import Repository


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    with new_repository(tmp_path / "repo") as made:
        yield made


def trained(steps: int = 2) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A module that was trained a little, and what a script would save of it."""
    torch.manual_seed(steps)
    module = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 2))
    adam = torch.optim.AdamW(module.parameters(), lr=0.01, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(adam, 10)
    for _ in range(steps):
        adam.zero_grad()
        module(torch.randn(4, 6)).square().sum().backward()
        adam.step()
        scheduler.step()
    saved = {
        "model": {"state_dict": module.state_dict(), "args": {"width": 5}},
        "optimizer": adam.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": torch.get_rng_state(),
        "epoch": steps,
        "best": math.inf,
        "losses": [0.5, float("nan"), (1, 2)],
        "shape": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "odd": {1: "one", "$": b"bytes", "set": {3}, "c": 1 + 2j, "none": None, "yes": True},
    }
    return module, saved


def same(left: Any, right: Any) -> bool:
    """Whether two objects are the same, NaN being NaN."""
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return (
            isinstance(right, dict) and list(left) == list(right) and all(same(left[key], right[key]) for key in left)
        )
    if isinstance(left, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float) and math.isnan(left):
        return isinstance(right, float) and math.isnan(right)
    return type(left) is type(right) and bool(left == right)


def plain(value: Any) -> Any:
    """With dicts for every kind of mapping."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if type(value) is list else value


def test_everything_comes_back(repository: Repository, tmp_path: Path) -> None:
    module, saved = trained()
    torch.save(saved, tmp_path / "step2.pt")
    report = repository.import_checkpoint(tmp_path / "step2.pt", "main", everything=True)
    assert report.skipped == ()
    names = set(repository.tensors("main"))
    assert names >= {"0.weight", "2.bias", "training_state/optimizer.state.0.exp_avg", "training_state/rng"}
    found = repository.load_training("main")
    assert same(found, plain(saved))
    again = torch.optim.AdamW(module.parameters())
    again.load_state_dict(found["optimizer"])
    assert same(plain(again.state_dict()), plain(saved["optimizer"]))
    assert_clean(repository)


def test_files_of_it(repository: Repository, tmp_path: Path) -> None:
    _, saved = trained()
    torch.save(saved, tmp_path / "step2.pt")
    first = repository.import_checkpoint(tmp_path / "step2.pt", "main", everything=True)
    repository.checkout("main", tmp_path / "out")
    files = directory_digests(tmp_path / "out")
    assert sorted(files) == ["model.safetensors", "training_state/tensors.safetensors", "training_state/values.json"]
    stored = load_file(tmp_path / "out/training_state/tensors.safetensors")
    assert torch.equal(stored["optimizer.state.0.exp_avg"], saved["optimizer"]["state"][0]["exp_avg"])
    tree = json.loads((tmp_path / "out/training_state/values.json").read_text())
    assert tree["epoch"] == 2
    assert tree["scheduler"]["T_max"] == 10
    assert tree["model"]["state_dict"]["0.weight"] == {"$": "model", "name": "0.weight"}
    # What was checked out is the same checkpoint.
    second = repository.import_checkpoint(tmp_path / "out", "again")
    assert second.snapshot == first.snapshot
    assert same(repository.load_training("again"), plain(saved))


def test_without_it_nothing_of_that_is_kept(repository: Repository, tmp_path: Path) -> None:
    _, saved = trained()
    torch.save(saved, tmp_path / "step2.pt")
    report = repository.import_checkpoint(tmp_path / "step2.pt", "main")
    assert {"optimizer", "scheduler", "epoch", "model.args"} <= set(report.skipped)
    assert not any("training_state" in name for name in repository.tensors("main"))
    with pytest.raises(NotFoundError, match="--all"):
        repository.load_training("main")


def test_a_prefix_that_goes_is_known_to_the_tree(repository: Repository, tmp_path: Path) -> None:
    torch.save({"model": {"module.w": torch.ones(2)}, "ema": {"module.w": torch.zeros(2)}}, tmp_path / "x.pt")
    repository.import_checkpoint(tmp_path / "x.pt", "main", key="model", strip_prefix="module.", everything=True)
    assert sorted(repository.tensors("main")) == ["training_state/ema.module.w", "w"]
    found = repository.load_training("main")
    assert same(found, {"model": {"module.w": torch.ones(2)}, "ema": {"module.w": torch.zeros(2)}})


def test_names_that_paths_share_are_kept_apart(repository: Repository, tmp_path: Path) -> None:
    saved = {"model": {"w": torch.ones(2)}, "a": {"b": {"c": torch.ones(1)}}, "a.b": {"c": torch.zeros(1)}}
    torch.save(saved, tmp_path / "x.pt")
    repository.import_checkpoint(tmp_path / "x.pt", "main", key="model", everything=True)
    assert {"training_state/a.b.c", "training_state/a.b.c~2"} <= set(repository.tensors("main"))
    assert same(repository.load_training("main"), saved)


def test_merges_are_of_models(repository: Repository, tmp_path: Path) -> None:
    for steps, name in enumerate(["base", "e0"], start=1):
        _, saved = trained(steps)
        torch.save(saved, tmp_path / f"{name}.pt")
        repository.import_checkpoint(tmp_path / f"{name}.pt", name, everything=True)
        repository.import_checkpoint(tmp_path / f"{name}.pt", f"{name}-plain")
    recipe = {
        "merge_method": "task_arithmetic",
        "base_model": "base",
        "models": [{"model": "e0", "parameters": {"weight": 1}}],
    }
    report = repository.merge(recipe, "merged")
    assert sum("the state of its training is no part of the merge" in note for note in report.notes) == 2
    plainly = json.loads(json.dumps(recipe).replace('"base"', '"base-plain"').replace('"e0"', '"e0-plain"'))
    repository.merge(plainly, "wanted")
    assert repository.snapshot("merged") == repository.snapshot("wanted")
    # One that has it merges with one that has not, and is known as its base.
    repository.merge(json.loads(json.dumps(recipe).replace('"e0"', '"e0-plain"')), "mixed")
    assert repository.snapshot("mixed") == repository.snapshot("wanted")
    report_of_import = repository.import_checkpoint(tmp_path / "e0.pt", "e1", base="e0-plain", everything=True)
    assert report_of_import.notes == ()


class TestRefused:
    def test_it_is_for_torch_files(self, repository: Repository, tmp_path: Path) -> None:
        save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
        for source in (tmp_path / "model.safetensors", tmp_path):
            with refused(repository, BadInputError, match="--all is for torch files"):
                repository.import_checkpoint(source, "main", everything=True)

    def test_two_files_with_more_than_a_model(self, repository: Repository, tmp_path: Path) -> None:
        names = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
        (tmp_path / "in").mkdir()
        for name, tensor in zip(names, "ab", strict=True):
            torch.save({tensor: torch.ones(2), "epoch": 3}, tmp_path / "in" / name)
        index = {"weight_map": dict(zip("ab", names, strict=True))}
        (tmp_path / "in/pytorch_model.bin.index.json").write_text(json.dumps(index))
        with refused(repository, BadInputError, match="--all is for one torch file"):
            repository.import_checkpoint(tmp_path / "in", "main", everything=True)
        assert repository.import_checkpoint(tmp_path / "in", "main").tensors == 2

    def test_what_has_no_end(self, repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(training, "MAX_VALUES", 10_000)
        loop: dict[str, Any] = {"model": {"w": torch.ones(1)}}
        loop["self"] = loop
        bomb: list[Any] = []
        for _ in range(40):
            bomb = [bomb, bomb]
        deep: list[Any] = []
        for _ in range(300):
            deep = [deep]
        for value, message in ((loop, "holds itself"), (deep, "100 deep"), (bomb, "10,000 values")):
            torch.save(value if value is loop else {"model": {"w": torch.ones(1)}, "x": value}, tmp_path / "x.pt")
            with refused(repository, FormatError, match=message):
                repository.import_checkpoint(tmp_path / "x.pt", "main", everything=True)

    def test_a_tensor_that_cannot_be_kept(self, repository: Repository, tmp_path: Path) -> None:
        torch.save({"model": {"w": torch.ones(1)}, "x": [torch.eye(2).to_sparse()]}, tmp_path / "x.pt")
        with refused(repository, FormatError, match=r'"x\.0" is sparse'):
            repository.import_checkpoint(tmp_path / "x.pt", "main", everything=True)

    @pytest.mark.parametrize(
        "content", [b"", b"{", b'{"$": "evil"}', b'{"$": "torch.dtype", "value": "save"}', b'{"$": "tuple"}', b"\xff"]
    )
    def test_values_that_mpfs_did_not_write(self, content: bytes) -> None:
        with pytest.raises(FormatError, match=r"values\.json is none that MPFS wrote"):
            rebuild(content, lambda name: None)


TREES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text("a$.", max_size=3) | st.integers(), inner, max_size=4)
        | st.dictionaries(st.text("a.", max_size=3), inner, max_size=4).map(OrderedDict)
    ),
    max_leaves=20,
)


@given(value=TREES)
def test_any_tree_comes_back(value: Any) -> None:
    try:
        state = take_apart(value, {})
        content = state.values({})
    except UnicodeEncodeError:
        pytest.fail("texts are kept")
    assert same(rebuild(content, lambda name: None), plain(value))


def test_on_the_command_line(repository: Repository, tmp_path: Path) -> None:
    _, saved = trained()
    torch.save(saved, tmp_path / "step2.pt")
    path = repository.path
    repository.close()
    done = CliRunner().invoke(
        app, ["-r", str(path), "import", str(tmp_path / "step2.pt"), "--as", "main", "--all", "--json"]
    )
    assert done.exit_code == 0
    assert json.loads(done.stdout)["skipped"] == []
    listed = CliRunner().invoke(app, ["-r", str(path), "ls", "main", "--json"])
    assert "training_state/values.json" in listed.stdout
