"""Whether there are kernels, and what happens where there are none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mpfs.merge import random
from mpfs.merge.kernels import backend, compiled, dispatch, draws


def python(program: str, *arguments: str, **environment: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *arguments],
        capture_output=True,
        text=True,
        env={**environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_warm_up_compiles_everything() -> None:
    assert backend.warm_up(["BF16"])
    assert {name for name, dtype in dispatch.LOADED if dtype == "BF16"} == set(dispatch.NAMES)


def test_without_numba_there_are_none() -> None:
    program = (
        "import sys; sys.modules['numba'] = None; from mpfs.merge.kernels import backend; print(backend.warm_up())"
    )
    assert python(program) == "False"


def test_with_compilation_switched_off_there_are_none(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib; from mpfs.stats import native; native.keep_in(pathlib.Path(sys.argv[1])); "
        "from mpfs.merge.kernels import backend; print(backend.kernels())"
    )
    assert python(program, str(tmp_path), NUMBA_DISABLE_JIT="1") == "None"


def test_a_numba_that_cannot_compile_is_told_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str, dtype: str) -> Any:
        raise RuntimeError("no such machine")

    monkeypatch.setattr(dispatch, "load", broken)
    with pytest.warns(RuntimeWarning, match="no such machine"):
        assert backend._choose() is None


def test_constants_are_those_of_the_kernels() -> None:
    assert backend._ROWS == compiled.ROWS
    assert random.GROUP == draws.GROUP
    for name in ("TILE", "WHOLE", "LARGEST", "DRAWN", "BETWEEN"):
        assert getattr(backend, name) == getattr(compiled, name)


def test_float16_without_the_processors_conversions(tmp_path: Path) -> None:
    program = """
import sys
sys.path.insert(0, sys.argv[1])
import pathlib, numpy as np, torch
from mpfs.stats import native
native.keep_in(pathlib.Path(sys.argv[2]))
from mpfs.merge.kernels import formats
formats._CONVERTS = False
import kernel_cases as cases
everything = np.arange(65536, dtype=np.uint16).view(np.int16)
generator = np.random.default_rng(3)
base, second = generator.permutation(everything), generator.permutation(everything)
for method in ("linear", "task_arithmetic", "ties"):
    for weight in (1.0, 0.3, -1e-3):
        values = cases.parameters([weight, 0.5], [0.4, 1.0])
        columns = cases.Columns(base, [everything, second], [1024])
        cases.check(method, cases.context(65536, 2, torch.float16), values, columns)
print("same")
"""
    assert python(program, str(Path(__file__).parent), str(tmp_path)) == "same"
