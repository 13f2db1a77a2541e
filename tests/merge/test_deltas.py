"""Checkpoints of differences: imported as the sum with their base."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from merge_cases import Lab, Tensors, recipe
from safetensors.torch import save_file

from mpfs.errors import MismatchError, NotFoundError, RefConflictError

pytest_plugins = ["merge_fixtures"]


@pytest.fixture
def base(lab: Lab) -> Tensors:
    """A model of two tensors, a buffer and a scalar, called base."""
    tensors = {"a": torch.randn(300, 70).bfloat16(), "b": torch.randn(5), "n": torch.arange(4), "s": torch.tensor(2.0)}
    lab.add("base", tensors)
    return tensors


def delta(lab: Lab, tensors: Tensors) -> Path:
    path = lab.root / "delta.safetensors"
    save_file(tensors, path)
    return path


def test_the_sum(lab: Lab, base: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpfs.merge.derived.CHUNK_BYTES", 1000)
    change = torch.randn(300, 70) * 0.01
    path = delta(lab, {"a": change, "n": torch.arange(4), "s": torch.tensor(0.5)})
    report = lab.repository.import_delta(path, "tuned", delta_of="base", threads=1)
    assert (report.ref, report.new_commit, report.tensors) == ("tuned", True, 4)
    assert report.commit == lab.repository.resolve("tuned")
    tuned = lab.load("tuned")
    assert torch.equal(tuned["a"], (base["a"].float() + change).bfloat16())
    assert tuned["s"].item() == 2.5
    assert lab.blocks("tuned")["b"] == lab.blocks("base")["b"]
    assert torch.equal(lab.load("deltas/tuned")["a"], change)
    again = lab.repository.import_delta(path, "tuned", delta_of="base", threads=1)
    assert (again.commit, again.new_commit) == (report.commit, False)
    inputs = [(item.role, item.name) for item in lab.repository.show("tuned").commit.inputs]
    assert inputs == [("base", "base"), ("delta", "deltas/tuned")]
    lab.merge(recipe("task_arithmetic", 1, weights=[1.0], names=["tuned"]))
    assert torch.equal(lab.load()["b"], base["b"])


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"x": torch.ones(2)}, "x matches no tensor of base"),
        ({"a": torch.ones(2)}, r"a is \[2\], in base \[300, 70\]"),
        ({"n": torch.ones(4, dtype=torch.int64)}, "n is I64, which cannot be added"),
    ],
)
def test_deltas_that_do_not_fit(lab: Lab, base: Tensors, tensors: Tensors, said: str) -> None:
    with pytest.raises(MismatchError, match=said):
        lab.repository.import_delta(delta(lab, tensors), "tuned", delta_of="base", threads=1)
    with pytest.raises(NotFoundError):
        lab.repository.resolve("tuned")


def test_what_cannot_be_asked(lab: Lab, base: Tensors) -> None:
    path = delta(lab, {"b": torch.ones(5)})
    lab.repository.tag("v1", "base")
    with pytest.raises(RefConflictError):
        lab.repository.import_delta(path, "v1", delta_of="base")
    with pytest.raises(NotFoundError):
        lab.repository.import_delta(path, "tuned", delta_of="nothing")
