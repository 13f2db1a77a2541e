"""One bit of data.mdb flipped: harmless, or reported by `fsck --read-data`, or refused on opening. Never a crash.

The checks run in a process of their own, so that a crash of the interpreter would be seen, and counted as a failure.
"""

from __future__ import annotations

import json
import random
import shutil
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from seeds import exploration_seed

from mpfs.repository import Repository

HERE = Path(__file__).parent
GOLDEN = HERE.parent / "format" / "golden" / "v1"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a bit of everything, and with free pages."""
    path = Path(shutil.copytree(GOLDEN, tmp_path / "repo"))
    with Repository.open(path) as opened:
        for ref in ("torch", "expert/two"):
            opened.remove_ref(ref)
        opened.gc(reflog_days=0)
        opened.branch("last", "base")
    return path


class Examiner:
    """Runs checks in another process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(HERE / "flips.py"), str(self.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def look(self, offset: int = -1, bit: int = 0) -> dict[str, Any]:
        """What is found with one bit flipped."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{offset} {bit}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if line:
            found: dict[str, Any] = json.loads(line)
            return found
        code = self._process.wait()
        self._process = self._start()
        return {"outcome": "crashed", "kinds": [str(code)]}

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def flip_and_judge(path: Path, places: list[tuple[int, int]]) -> Counter[str]:
    """Flip one bit after the other; how often what came of it."""
    data = path / json.loads((path / "config.json").read_text())["store"] / "data.mdb"
    original = data.read_bytes()
    examiner = Examiner(path)
    outcomes: Counter[str] = Counter()
    try:
        whole = examiner.look()
        assert whole["outcome"] == "clean"
        for offset, bit in places:
            found = examiner.look(offset, bit)
            if found["outcome"] == "crashed":
                data.write_bytes(original)
            if found["outcome"] == "clean":
                assert found["contents"] == whole["contents"], f"bit {bit} at {offset} is a silent change"
                outcomes["harmless"] += 1
            else:
                outcomes[found["outcome"]] += 1
                outcomes.update(found["kinds"])
            assert found["outcome"] != "crashed", f"bit {bit} at {offset}: {found}"
    finally:
        examiner.close()
    return outcomes


def random_places(path: Path, count: int, seed: int) -> list[tuple[int, int]]:
    """Places anywhere in the file."""
    source = random.Random(seed)
    size = (path / "store-1" / "data.mdb").stat().st_size
    return [(source.randrange(size), source.randrange(8)) for _ in range(count)]


def structure_places(path: Path, count: int, seed: int) -> list[tuple[int, int]]:
    """Places in meta pages, and in the pages of trees, where a flip is worst."""
    source = random.Random(seed)
    data = (path / "store-1" / "data.mdb").read_bytes()
    trees = [page for page in range(2, len(data) // 4096) if data[page * 4096 + 10] in (1, 2)]
    places = []
    for _ in range(count):
        if source.random() < 0.3:
            places.append((source.randrange(2) * 4096 + source.randrange(160), source.randrange(8)))
            continue
        page = source.choice(trees)
        lower, upper = struct.unpack_from("<HH", data, page * 4096 + 12)
        inside = [*range(lower), *range(upper, min(4096, upper + 600))]
        places.append((page * 4096 + source.choice(inside), source.randrange(8)))
    return places


def test_flips_anywhere(repository: Path) -> None:
    outcomes = flip_and_judge(repository, random_places(repository, 150, 1))
    assert outcomes["reported"] > 20


def test_flips_where_they_are_worst(repository: Path) -> None:
    outcomes = flip_and_judge(repository, structure_places(repository, 150, 2))
    assert outcomes["reported"] + outcomes["refused"] > 60


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_flips(repository: Path) -> None:
    seed = exploration_seed()
    outcomes = flip_and_judge(repository, random_places(repository, 1500, seed))
    print("anywhere:", dict(outcomes))
    outcomes = flip_and_judge(repository, structure_places(repository, 1500, seed))
    print("structure:", dict(outcomes))
