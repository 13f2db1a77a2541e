"""Operations on a disk without room: python full_disk.py limit|fill OPERATION DIRECTORY, prints a summary in JSON."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
from collections import Counter
from pathlib import Path

from crowd import BATCH, new_repository, variants

from mpfs.errors import NoSpaceError
from mpfs.repository import Repository
from mpfs.store import filesystem
from mpfs.store.writer import Writer

STEP = 24 << 10


def act(repository: Repository, operation: str, sources: list[Path], number: int) -> None:
    """Something that takes room, and does not look first whether there is any."""
    if operation == "import":
        repository.import_checkpoint(
            sources[number % len(sources)], "new", message=str(number), threads=1, check_space=False
        )
    elif operation == "merge":
        weight = 0.25 + number / 1000
        models = [{"model": f"expert/{i}", "parameters": {"weight": weight}} for i in range(2)]
        recipe = {"merge_method": "task_arithmetic", "base_model": "base", "models": models, "dtype": "float32"}
        repository.merge(recipe, "new", threads=1, check_space=False)
    else:
        repository.gc(reflog_days=0, compact=True)


def attempt(path: Path, operation: str, sources: list[Path], number: int) -> str:
    """What comes of it, with all that must hold afterwards."""
    with Repository.open(path) as repository:
        before = {ref.name: ref.commit for ref in repository.refs()}
        failure: NoSpaceError | None = None
        try:
            act(repository, operation, sources, number)
        except NoSpaceError as error:
            failure = error
        if failure is not None:
            assert "needed" in failure.details, failure
            assert {ref.name: ref.commit for ref in repository.refs()} == before
        report = repository.fsck(read_data=True)
        assert report.ok, report.problems[:5]
        return "done" if failure is None else "no_space"


def limited(path: Path, operation: str, sources: list[Path]) -> Counter[str]:
    """Let files grow a little further each time."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    outcomes: Counter[str] = Counter()
    number = 5
    extra = 0
    while outcomes["done"] < 1:
        copy = path.parent / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(path, copy)
        room = max(item.stat().st_size for item in copy.rglob("*")) if operation != "compact" else 0
        resource.setrlimit(resource.RLIMIT_FSIZE, (max(8192, room + extra), hard))
        outcomes[attempt(copy, operation, sources, number)] += 1
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        assert attempt(copy, operation, sources, number) == "done"
        extra += STEP if operation != "compact" else 3 * STEP
    return outcomes


def filled(path: Path, operation: str, sources: list[Path]) -> Counter[str]:
    """Leave a little more room each time."""
    outcomes: Counter[str] = Counter()
    ballast = path.parent / "ballast"
    extra = 0
    number = 5
    while outcomes["done"] < 3 and number < 300:
        free = shutil.disk_usage(path).free
        with ballast.open("wb") as file:
            file.write(b"x" * max(0, free - extra))
        outcomes[attempt(path, operation, sources, number)] += 1
        ballast.unlink()
        with Repository.open(path) as repository:
            repository.gc(reflog_days=0)
        assert attempt(path, operation, sources, number) == "done"
        extra += STEP
        number += 1
    return outcomes


def main() -> None:
    """Run."""
    mode, operation, name = sys.argv[1:]
    folder = Path(name)
    Writer.__init__.__defaults__ = (BATCH,)
    filesystem._RESERVE = 0  # the check before work starts must not spare us the worst
    sources = variants(folder / "sources")
    new_repository(folder / "repo", sources)
    with Repository.open(folder / "repo") as repository:
        repository.import_checkpoint(sources[4], "gone")
        repository.remove_ref("gone")
    outcomes = (limited if mode == "limit" else filled)(folder / "repo", operation, sources)
    print(json.dumps({"outcomes": outcomes}), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("NUMBA_NUM_THREADS", "1")
    main()
