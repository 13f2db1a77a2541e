"""What a budget costs: bytes that the disk reads with a cold cache, growth with the number of experts, planning time.

Every operation runs in a process of its own. The cache is emptied of the store's file before a merge.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.families import Family, synthetic
from benchmarks.measure import machine, measure
from mpfs.merge.kernels.backend import kernels
from mpfs.objects import Budget
from mpfs.repository import Repository
from mpfs.testing.synthetic import Architecture

MIB = 1 << 20

COLD = Architecture(512, 12, 8, 4, 64, 1536, 16000)
"""About 46 million parameters, 92 MB in bf16."""

MANY = Architecture(256, 8, 8, 4, 32, 768, 8000)
"""About 8 million parameters, 17 MB in bf16."""

WIDE = Architecture(512, 8, 8, 4, 64, 1536, 12000)
"""About 31 million parameters: 15,000 blocks of 4 KiB."""


def merge_cold(repository: str, recipe: dict[str, object], budget: Budget) -> dict[str, float]:
    """Merge; what the disk read for it, less what loading the libraries and kernels read."""
    with Repository.open(repository) as repo:
        kernels()
        repo.plan({**recipe, "merge_method": "task_arithmetic"}, budget=Budget("bytes", 0), save=False)
    _drop_cache(repository)
    before = _disk_reads()
    started = time.perf_counter()
    with Repository.open(repository) as repo:
        report = repo.merge(recipe, "cold", budget=budget, reuse=False)
    return {
        "read": _disk_reads() - before,
        "expert": report.figures.expert_bytes_read,
        "base": report.figures.base_bytes_read,
        "full": report.figures.expert_bytes_full,
        "seconds": time.perf_counter() - started,
    }


def merge_warm(repository: str, recipe: dict[str, object], budget: Budget) -> dict[str, float]:
    """Merge, with everything loaded; the seconds and the bytes."""
    with Repository.open(repository) as repo:
        kernels()
        repo.merge(recipe, "warm", budget=budget, reuse=False)
        started = time.perf_counter()
        plan = repo.plan(recipe, budget=budget, save=False).plan
        planned = time.perf_counter()
        report = repo.merge(plan, "warm", reuse=False)
        return {
            "plan": planned - started,
            "merge": time.perf_counter() - planned,
            "expert": report.figures.expert_bytes_read,
            "base": report.figures.base_bytes_read,
            "full": report.figures.expert_bytes_full,
            "fidelity": report.fidelity_predicted,
        }


def plan_wide(repository: str, recipe: dict[str, object]) -> dict[str, float]:
    """Plan a merge at 10%, twice: the seconds of the second time, on the clock and of the CPU, and how many expert blocks there were."""
    with Repository.open(repository) as repo:
        seconds = busy = 0.0
        for _ in range(2):
            started, started_busy = time.perf_counter(), time.process_time()
            plan = repo.plan(recipe, budget=Budget("percent", 10), save=False).plan
            seconds, busy = time.perf_counter() - started, time.process_time() - started_busy
        blocks = sum(tensor.column_count * len(tensor.experts) for tensor in plan.tensors if tensor.experts)
        kept = sum(
            tensor.column_count * (len(plan.models) - 1)
            for tensor in plan.tensors
            if not tensor.experts and tensor.energy
        )
    return {"seconds": seconds, "busy": busy, "blocks": blocks + kept}


def main(arguments: list[str]) -> None:
    """Run and print tables."""
    parser = argparse.ArgumentParser(prog="benchmarks fidelity_scale", description=__doc__)
    parser.add_argument("--scratch", type=Path, help="where to work (default: a temporary directory)")
    parser.add_argument("--part", action="append", choices=["cold", "many", "wide"], help="only these")
    options = parser.parse_args(arguments)
    print(f"{machine()}\n")
    for name, part in (("cold", _cold), ("many", _many), ("wide", _wide)):
        if options.part and name not in options.part:
            continue
        scratch = Path(tempfile.mkdtemp(prefix="mpfs-scale-", dir=options.scratch))
        try:
            part(scratch)
        finally:
            shutil.rmtree(scratch)


def _make(scratch: Path, architecture: Architecture, experts: int, block_size: int) -> tuple[str, Family]:
    with Repository.create(scratch / "repository", block_size=block_size) as repository:
        return str(repository.path), synthetic(repository, scratch, architecture, experts)


def _cold(scratch: Path) -> None:
    path, family = _make(scratch, COLD, 4, 256 << 10)
    print("Cold cache: 4 experts of 92 MB, blocks of 256 KiB; MiB\n")
    print("| method | budget | all expert bytes | planned: expert | planned: base | disk read | of the plan |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for method, density in (("task_arithmetic", None), ("ties", 0.5)):
        for percent in (10.0, 50.0):
            value = measure(merge_cold, path, family.recipe(method, density), Budget("percent", percent)).value
            assert isinstance(value, dict)
            plan = value["expert"] + value["base"]
            print(
                f"| {method} | {percent:g}% | {value['full'] / MIB:.1f} | {value['expert'] / MIB:.1f} "
                f"| {value['base'] / MIB:.1f} | {value['read'] / MIB:.1f} | {value['read'] / plan:.3f} |",
                flush=True,
            )
    print()


def _many(scratch: Path) -> None:
    path, family = _make(scratch, MANY, 20, 64 << 10)
    print("More experts at one budget of 8 MiB: task_arithmetic, models of 17 MB, blocks of 64 KiB, warm\n")
    print("| experts | all expert MiB | read MiB | base MiB | plan s | merge s | fidelity |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for count in (2, 5, 10, 20):
        some = Family(family.name, family.experts[:count])
        value = measure(merge_warm, path, some.recipe("task_arithmetic"), Budget("bytes", 8 * MIB)).value
        assert isinstance(value, dict)
        print(
            f"| {count} | {value['full'] / MIB:.1f} | {value['expert'] / MIB:.2f} | {value['base'] / MIB:.1f} "
            f"| {value['plan']:.2f} | {value['merge']:.2f} | {value['fidelity']:.3f} |",
            flush=True,
        )
    print()


def _wide(scratch: Path) -> None:
    path, family = _make(scratch, WIDE, 20, 4 << 10)
    print("Planning at 10%: 20 experts in blocks of 4 KiB\n")
    print("| method | expert blocks | seconds | of CPU time | peak anonymous memory |")
    print("|---|---:|---:|---:|---:|")
    for method, density in (("task_arithmetic", None), ("ties", 0.5)):
        measured = measure(plan_wide, path, family.recipe(method, density))
        value = measured.value
        assert isinstance(value, dict)
        print(
            f"| {method} | {value['blocks']:,.0f} | {value['seconds']:.2f} | {value['busy']:.2f} | {measured.peak_anonymous // MIB} MiB |",
            flush=True,
        )
    print()


def _drop_cache(repository: str) -> None:
    """Write the store's file back and drop it from the page cache; the environment must be closed."""
    for file in Path(repository).glob("store*/data.mdb"):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _disk_reads() -> int:
    with open("/proc/self/io", encoding="ascii") as counters:
        for line in counters:
            if line.startswith("read_bytes:"):
                return int(line.split()[1])
    raise OSError("no read_bytes in /proc/self/io")


if __name__ == "__main__":
    main(sys.argv[1:])
