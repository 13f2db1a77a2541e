"""Import, merge and checkout of a Qwen3-0.6B-shaped family against `cp` of the same bytes followed by sync.

The sides alternate within each round, each operation in a fresh process; medians of the rounds. What answers from
statistics and history alone is timed from the command line, with the start of the interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import mpfs
from benchmarks.measure import Measured, machine, measure, median, spread
from mpfs.testing.synthetic import QWEN3_600M, QWEN3_TINY, Architecture, write_model

MIB = 1 << 20


def import_model(repository: str, source: str, ref: str, base: str | None = None) -> dict[str, object]:
    """Import into a repository."""
    with mpfs.open(repository) as repo:
        return repo.import_checkpoint(source, ref, base=base).as_json()


def merge(repository: str, method: str, into: str, percent: float | None, reuse: bool) -> dict[str, object]:
    """Merge two experts."""
    density = {"density": 0.5} if method != "task_arithmetic" else {}
    recipe = {
        "merge_method": method,
        "base_model": "m0",
        "dtype": "bfloat16",
        "models": [
            {"model": "m1", "parameters": {"weight": 0.6, **density}},
            {"model": "m2", "parameters": {"weight": 0.4, **density}},
        ],
    }
    budget = None if percent is None else mpfs.Budget("percent", percent)
    with mpfs.open(repository) as repo:
        return repo.merge(recipe, into, budget=budget, reuse=reuse).as_json()


def checkout(repository: str, ref: str, target: str) -> dict[str, object]:
    """Check out."""
    with mpfs.open(repository) as repo:
        return repo.checkout(ref, target).as_json()


def command(*arguments: str) -> Measured:
    """The command line; its memory is not watched."""
    program = str(Path(sys.executable).with_name("mpfs"))
    started = time.perf_counter()
    subprocess.run([program, *arguments], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return Measured(time.perf_counter() - started, 0, None)


def copy(source: str, target: str) -> None:
    """`cp -r` and sync of the copy."""
    subprocess.run(["cp", "-r", source, target], check=True)
    subprocess.run(["sync", *(str(path) for path in Path(target).iterdir())], check=True)


def main(arguments: list[str]) -> None:
    """Run and print a table."""
    parser = argparse.ArgumentParser(prog="benchmarks throughput", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the benchmark itself")
    parser.add_argument("--scratch", type=Path, help="where to work (default: a temporary directory)")
    parser.add_argument("--json", type=Path, help="also write the raw figures here")
    options = parser.parse_args(arguments)
    scratch = Path(tempfile.mkdtemp(prefix="mpfs-bench-", dir=options.scratch))
    try:
        _run(scratch, options.rounds, QWEN3_TINY if options.tiny else QWEN3_600M, options.json)
    finally:
        shutil.rmtree(scratch)


def _run(scratch: Path, rounds: int, architecture: Architecture, json_file: Path | None) -> None:
    sources = [scratch / f"source-{expert}" for expert in range(3)]
    for expert, source in enumerate(sources):
        nbytes = write_model(source, architecture, seed=1, expert=expert)
        print(f"made {source.name}: {nbytes:,} bytes", file=sys.stderr, flush=True)
    os.sync()
    runs: dict[str, list[Measured]] = {}

    def note(name: str, measured: Measured) -> Measured:
        runs.setdefault(name, []).append(measured)
        print(f"{name}: {measured.seconds:.2f} s, {measured.peak_anonymous // MIB} MiB", file=sys.stderr, flush=True)
        return measured

    for number in range(rounds):
        repository = str(scratch / f"repository-{number}")
        mpfs.open(repository, create=True).close()
        note("cp + sync", measure(copy, str(sources[0]), str(scratch / "copy")))
        note("import", measure(import_model, repository, str(sources[0]), "m0"))
        shutil.rmtree(scratch / "copy")
        note("import", measure(import_model, repository, str(sources[1]), "m1"))
        note("import --base", measure(import_model, repository, str(sources[2]), "m2", "m0"))
        note("import again", measure(import_model, repository, str(sources[0]), "m0"))
        for name, method, percent in (
            ("task_arithmetic", "task_arithmetic", None),
            ("task_arithmetic, 10%", "task_arithmetic", 10.0),
            ("ties", "ties", None),
            ("ties, 10%", "ties", 10.0),
        ):
            branch = name.replace(", ", "-").replace("%", "")
            note(f"merge {name}", measure(merge, repository, method, branch, percent, False))
        note("merge ties, again", measure(merge, repository, "ties", "again", None, True))
        note("cp + sync", measure(copy, str(sources[1]), str(scratch / "copy")))
        note("checkout", measure(checkout, repository, "ties", str(scratch / "out")))
        shutil.rmtree(scratch / "copy")
        shutil.rmtree(scratch / "out")
        for verb in (["--version"], ["log", "m0"], ["ls", "m0"], ["diff", "m0", "m1"], ["diff", "m1", "m2", "--stat"]):
            note(" ".join(["mpfs", *verb]), command("-r", repository, *verb))
        shutil.rmtree(repository)
    _report(runs, sum(path.stat().st_size for path in sources[0].iterdir()), rounds)
    if json_file is not None:
        raw = {
            name: [[item.seconds, item.peak_anonymous, item.value] for item in items] for name, items in runs.items()
        }
        json_file.write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")


def _report(runs: dict[str, list[Measured]], nbytes: int, rounds: int) -> None:
    floor = median([item.seconds for item in runs["cp + sync"]])
    print(f"{machine()}; one model is {nbytes:,} bytes; {rounds} rounds: median (range)\n")
    print("| operation | seconds | of cp + sync | GB/s of one model | peak anonymous memory |")
    print("|---|---:|---:|---:|---:|")
    for name, items in runs.items():
        seconds = [item.seconds for item in items]
        peak = max(item.peak_anonymous for item in items) // MIB
        rate = nbytes / median(seconds) / 1e9
        print(
            f"| {name} | {spread(seconds)} | {median(seconds) / floor:.2f} | {rate:.2f} | {f'{peak} MiB' if peak else ''} |"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
