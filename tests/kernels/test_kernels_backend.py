"""Whether there are kernels, and what happens where there are none."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba  # type: ignore[import-untyped,unused-ignore]
import pytest

from mpfs.merge.kernels import backend, dispatch


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
    assert {name for name, dtype in dispatch.COMPILED if dtype == "BF16"} == set(dispatch.NAMES)


def test_without_numba_there_are_none() -> None:
    program = (
        "import sys; sys.modules['numba'] = None; from mpfs.merge.kernels import backend; print(backend.warm_up())"
    )
    assert python(program) == "False"


def test_with_compilation_switched_off_there_are_none() -> None:
    assert python("from mpfs.merge.kernels import backend; print(backend.kernels())", NUMBA_DISABLE_JIT="1") == "None"


def test_a_numba_that_cannot_compile_is_told_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str, dtype: str) -> Any:
        raise RuntimeError("no such machine")

    monkeypatch.setattr(dispatch, "COMPILED", {})
    monkeypatch.setattr(dispatch, "kernel", broken)
    with pytest.warns(RuntimeWarning, match="no such machine"):
        assert backend._choose() is None


def test_without_a_cache_on_disk_it_compiles_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    right = numba.njit
    asked: list[bool] = []

    def without_cache(*arguments: Any, **options: Any) -> Callable[..., Any]:
        asked.append(bool(options.get("cache")))
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return right(*arguments, **options)  # type: ignore[no-any-return,unused-ignore]

    monkeypatch.setattr(numba, "njit", without_cache)
    monkeypatch.setattr(dispatch, "COMPILED", {})
    dispatch.kernel("find_equal", "BF16")
    assert asked[:2] == [True, False]


def test_the_cache_is_used(tmp_path: Path) -> None:
    program = (
        "from mpfs.merge.kernels import dispatch; k = dispatch.kernel('linear', 'BF16'); "
        "print(sum(k.stats.cache_hits.values()), sum(k.stats.cache_misses.values()))"
    )
    assert python(program, NUMBA_CACHE_DIR=str(tmp_path)) == "0 1"
    assert python(program, NUMBA_CACHE_DIR=str(tmp_path)) == "1 0"


def test_float16_without_the_processors_conversions(tmp_path: Path) -> None:
    program = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np, torch
from mpfs.merge.kernels import compiled
compiled._CONVERTS = False
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
    assert python(program, str(Path(__file__).parent), NUMBA_CACHE_DIR=str(tmp_path)) == "same"
