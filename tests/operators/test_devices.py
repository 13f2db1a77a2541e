"""Methods work on any device: what they make besides their inputs lies where those do."""

from __future__ import annotations

import operator_cases as cases
import pytest
import torch
from method_cases import ASKS, Ask, merge

ALL = (*ASKS, *(Ask(name, 3, {}, {"weight": 0.5, "density": 0.5}, name != "linear") for name in cases.METHODS))


@pytest.mark.parametrize("ask", ALL, ids=str)
def test_nothing_is_made_on_the_default_device(ask: Ask) -> None:
    """What does not name a device is made on the default one; with another one here, mixing the two fails."""
    base, models = cases.inputs(12 * 40, ask.experts, torch.bfloat16)
    expected = merge(ask, base, models, (12, 40), cuts=[192])
    with torch.device("meta"):
        found = merge(ask, base, models, (12, 40), cuts=[192])
    assert torch.equal(cases.bits(found), cases.bits(expected))
