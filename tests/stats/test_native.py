"""Machine code on disk: made once, loaded without numba, never trusted when damaged, and dispensable."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mpfs.stats import native
from mpfs.stats.backend import kernels_available

pytestmark = pytest.mark.skipif(not kernels_available(), reason="needs numba")

ARGUMENTS = (native.Array("f32", unaligned=True), native.Array("f64"))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where code is kept meanwhile."""
    folder = tmp_path / "code"
    native.keep_in(folder)
    yield folder
    native.keep_in(None)
    native.on_compiling(None)


def lanes() -> list[float]:
    """What the kernel gives."""
    total = np.zeros(64)
    native.kernel("mpfs.stats.kernels", "lanes_f32", ARGUMENTS)(np.arange(128, dtype=np.float32), total)
    return total.tolist()


EXPECTED = [64.0 + 2 * lane for lane in range(64)]


def test_it_is_compiled_once_and_told(folder: Path) -> None:
    told: list[str] = []
    native.on_compiling(told.append)
    assert lanes() == EXPECTED
    [code] = folder.iterdir()
    made = code.stat().st_mtime_ns, code.read_bytes()
    assert lanes() == EXPECTED
    assert (code.stat().st_mtime_ns, code.read_bytes()) == made
    assert told == ["compiling kernels for this machine, once: this takes some seconds"]


def test_nobody_is_told_when_it_is_only_loaded(folder: Path) -> None:
    lanes()
    told: list[str] = []
    native.on_compiling(told.append)
    assert lanes() == EXPECTED
    assert told == []


def test_damaged_code_is_made_anew(folder: Path) -> None:
    lanes()
    [code] = folder.iterdir()
    whole = code.read_bytes()
    for damaged in (b"", whole[:-1], whole[: len(whole) // 2], bytes([whole[0] ^ 1]) + whole[1:]):
        code.write_bytes(damaged)
        assert lanes() == EXPECTED
        assert code.read_bytes()[-32:] != damaged[-32:] or not damaged


def test_where_nothing_can_be_written_it_works_all_the_same(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    native.keep_in(blocked / "folder")
    try:
        assert lanes() == EXPECTED
    finally:
        native.keep_in(None)


def test_a_new_process_loads_it_without_numba(folder: Path) -> None:
    lanes()
    program = (
        "import sys, pathlib, numpy as np; from mpfs.stats import native; native.keep_in(pathlib.Path(sys.argv[1]))\n"
        "total = np.zeros(64); arguments = (native.Array('f32', unaligned=True), native.Array('f64'))\n"
        "native.kernel('mpfs.stats.kernels', 'lanes_f32', arguments)(np.arange(128, dtype=np.float32), total)\n"
        "print(total.sum(), 'numba' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(sum(EXPECTED)), "False"]


def test_code_is_made_anew_when_a_module_that_the_kernels_import_changes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def path() -> Path | None:
        return native._path("mpfs.merge.kernels.compiled", "linear", ARGUMENTS)

    before = path()
    assert before is not None
    assert path() == before
    read = Path.read_bytes
    for name, changes in (("draws", True), ("formats", True), ("backend", False)):
        native._sources.cache_clear()
        monkeypatch.setattr(Path, "read_bytes", lambda self, name=name: read(self) + b"#" * (self.stem == name))
        assert (path() != before) == changes
    monkeypatch.undo()
    native._sources.cache_clear()
