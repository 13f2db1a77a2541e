"""Where torch computes: the CPU by request, a GPU if there is one, and an error that says why not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from merge_cases import Lab, family, recipe

from mpfs.errors import UsageError
from mpfs.merge import engine
from mpfs.merge.device import check_device

pytest_plugins = ["merge_fixtures"]


def test_the_cpu_by_request_is_torch_and_gives_the_same(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    family(2, shapes={"a": (64, 80), "b": (7,)}, seed=4).add_to(lab)
    by_kernels = lab.merge(recipe("ties", 2, densities=[0.4, 0.6]))

    def refuse() -> None:
        raise AssertionError("kernels were asked for")

    monkeypatch.setattr(engine, "kernels", refuse)
    by_torch = lab.merge(recipe("ties", 2, densities=[0.4, 0.6]), "torch", device="cpu", reuse=False)
    assert by_torch.figures.blocks_computed > 0
    assert by_torch.snapshot == by_kernels.snapshot


@pytest.mark.parametrize(
    ("device", "says"),
    [("gpu", "'gpu' is no device"), ("meta", "run on cpu or cuda, not on meta"), ("cuda:x", "no device")],
)
def test_what_is_no_device_is_refused(device: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        check_device(device)


def test_a_torch_without_cuda_is_told(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(UsageError, match="built without CUDA"):
        lab.merge(recipe("ties", 2, densities=[0.4, 0.6]), device="cuda")


@pytest.mark.parametrize(
    ("device", "count", "says"),
    [
        ("cuda", 0, "torch finds no GPU here"),
        ("cuda:1", 1, "1 GPU, the last one being cuda:0"),
        ("cuda:7", 4, "4 GPUs"),
    ],
)
def test_a_gpu_that_is_not_there_is_told(device: str, count: int, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, Callable[[], object]] = {"is_available": lambda: count > 0, "device_count": lambda: count}
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    with pytest.raises(UsageError, match=says):
        check_device(device)
    if count > 1:
        check_device("cuda:3")
