"""Nothing is published that holds NaN or infinity, unless that is asked for."""

from __future__ import annotations

import pytest
import torch
from merge_cases import Lab, family, recipe

from mpfs.errors import NonFiniteError, NotFoundError

pytest_plugins = ["merge_fixtures"]


def refused(lab: Lab, *said: str, **top: object) -> None:
    with pytest.raises(NonFiniteError) as caught:
        lab.merge(recipe("task_arithmetic", 1, weights=[1.0], **top))  # type: ignore[arg-type]
    for part in (*said, "--allow-nonfinite"):
        assert part in caught.value.message
    with pytest.raises(NotFoundError):
        lab.repository.resolve("merged")


def test_the_expert_is_named(lab: Lab) -> None:
    models = family(1)
    models.experts[0]["layer.0.weight"][3, 5] = torch.inf
    models.experts[0]["layer.1.weight"][:2, 5] = torch.nan
    models.add_to(lab)
    refused(lab, "layer.0.weight has 1 of 5,120 (its inputs have 1 in e0)", "layer.1.weight has 2")
    report = lab.merge(recipe("task_arithmetic", 1), allow_nonfinite=True)
    assert any("layer.1.weight has 2" in note for note in report.notes)


def test_the_base_is_named(lab: Lab) -> None:
    models = family(1, same_tensors=["embed.weight"])
    for tensors in (models.base, models.experts[0]):
        tensors["embed.weight"][0, 0] = torch.nan
    models.base["layer.0.bias"][0] = -torch.inf
    models.add_to(lab)
    refused(lab, "embed.weight has 1", "kept as it is", "1 in the base")


def test_arithmetic_that_overflows(lab: Lab) -> None:
    lab.add("base", {"w": torch.full((3000,), -6e4)})
    lab.add("e0", {"w": torch.full((3000,), 6e4)})
    refused(lab, "w has 3,000 of 3,000", "all inputs are finite", "in F16", dtype="float16")
    lab.add("e0", {"w": torch.full((3000,), 7e4)})
    refused(lab, "rounding to F16 overflowed", out_dtype="float16")


def test_many_tensors_are_counted(lab: Lab) -> None:
    lab.add("base", {f"w{i}": torch.zeros(4) for i in range(9)})
    lab.add("e0", {f"w{i}": torch.full((4,), torch.nan) for i in range(9)})
    refused(lab, "w2", "and 6 more tensors")


def test_what_is_reused_is_checked(lab: Lab) -> None:
    models = family(1)
    models.experts[0]["layer.0.weight"][3, 5] = torch.inf
    models.add_to(lab)
    asked = recipe("task_arithmetic", 1, weights=[1.0])
    lab.merge(asked, into="allowed", allow_nonfinite=True)
    refused(lab, "layer.0.weight has 1")
