"""No method holds a tensor: what one needs of the whole comes from streams, and memory does not grow with the tensor."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

WHOLE = (
    *["slerp", "nuslerp", "multislerp", "karcher", "model_stock", "sce", "arcee_fusion", "della", "ramplus_tl"],
    *["ties", "dare_ties", "breadcrumbs"],
)
"""Methods that need something of the whole tensor."""

CHILD = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch
from method_cases import ASKS, context
from test_method_laws import FIRST
from mpfs.merge.operators import Column, get_operator

WIDTH, COLUMN = 1000, 1 << 16
torch.set_num_threads(1)


def memory(key):
    for line in open("/proc/self/status"):
        if line.startswith(key):
            return int(line.split()[1]) * 1024


def work(ask, rows):
    numel = rows * WIDTH
    where = context((rows, WIDTH), ask.experts, torch.float32)

    def columns():
        for start in range(0, numel, COLUMN):
            size = min(COLUMN, numel - start)
            generator = torch.Generator().manual_seed(start)
            base = torch.randn(size, generator=generator)
            experts = [base + 0.1 * torch.randn(size, generator=generator) for _ in range(ask.experts)]
            yield Column(start, base if ask.base else None, experts)

    operator = get_operator(ask.method)
    prepared = operator.prepare(where, ask.parameters(), columns)
    for column in columns():
        operator.apply(where, ask.parameters(), prepared, column)


for ask in (*FIRST, *ASKS):
    if ask.method not in sys.argv[2].split(","):
        continue
    work(ask, 400)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # The peak starts anew.
    before = memory("VmHWM")
    work(ask, 4000)
    print(json.dumps([str(ask), memory("VmHWM") - before]), flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read as Linux gives them")
def test_memory_does_not_grow_with_the_tensor() -> None:
    """The second tensor has 16 MB a model, in float32; methods may keep a row of each, and a few values for each cut row."""
    command = [sys.executable, "-c", CHILD, str(Path(__file__).parent), ",".join(WHOLE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    grown = dict(json.loads(line) for line in done.stdout.splitlines())
    assert len(grown) >= len(WHOLE)
    print(grown)
    assert {ask: size for ask, size in grown.items() if size > 12 << 20} == {}, grown
