"""Memory and time at the shapes of an 8B model: import of a base and two experts, and merges of them.

The shapes are Qwen3-8B's (hidden 4096, embeddings of 1.24 GB), with as many of its 36 layers as `--layers` says, since
the disk has to hold the store and one source. Each source is deleted once it is in the repository. What has to stay the
same whatever the size is the peak of anonymous memory.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

import mpfs
from benchmarks.measure import Measured, machine, measure
from benchmarks.throughput import import_model, merge
from mpfs.testing.synthetic import Architecture, write_model

MIB = 1 << 20


def shapes(layers: int) -> Architecture:
    """Qwen3-8B with so many layers."""
    return Architecture(4096, layers, 32, 8, 128, 12288, 151936)


def main(arguments: list[str]) -> None:
    """Run and print a table."""
    parser = argparse.ArgumentParser(prog="benchmarks large", description=__doc__)
    parser.add_argument("--layers", type=int, default=8, help="of the 36; each takes 0.39 GB a model")
    parser.add_argument("--scratch", type=Path, help="where to work (default: a temporary directory)")
    parser.add_argument("--json", type=Path, help="also write the raw figures here")
    options = parser.parse_args(arguments)
    scratch = Path(tempfile.mkdtemp(prefix="mpfs-large-", dir=options.scratch))
    ran: dict[str, Measured] = {}

    def note(name: str, measured: Measured) -> None:
        ran[name] = measured
        print(f"{name}: {measured.seconds:.2f} s, {measured.peak_anonymous // MIB} MiB", file=sys.stderr, flush=True)

    try:
        repository, source = str(scratch / "repository"), scratch / "source"
        mpfs.open(repository, create=True).close()
        nbytes = 0
        for expert in range(3):
            nbytes = write_model(source, shapes(options.layers), seed=1, expert=expert)
            base = "m0" if expert else None
            name = f"import{' --base' if base else ''} (m{expert})"
            note(name, measure(import_model, repository, str(source), f"m{expert}", base))
            shutil.rmtree(source)
        for name, method, percent in (
            ("ties, 10%", "ties", 10.0),
            ("ties", "ties", None),
            ("task_arithmetic", "task_arithmetic", None),
        ):
            branch = name.replace(", ", "-").replace("%", "")
            note(f"merge {name}", measure(merge, repository, method, branch, percent, False))
    finally:
        shutil.rmtree(scratch)
    print(f"{machine()}; one model is {nbytes:,} bytes ({options.layers} layers of 36)\n")
    print("| operation | seconds | GB/s of one model | peak anonymous memory |")
    print("|---|---:|---:|---:|")
    for name, one in ran.items():
        print(f"| {name} | {one.seconds:.1f} | {nbytes / one.seconds / 1e9:.2f} | {one.peak_anonymous // MIB} MiB |")
    if options.json is not None:
        raw = {name: [one.seconds, one.peak_anonymous] for name, one in ran.items()}
        options.json.write_text(json.dumps({"bytes": nbytes, "runs": raw}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
