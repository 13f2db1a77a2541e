"""MPFS against mergekit 0.1.5, on a Qwen3-0.6B-shaped family in bf16: wall time, memory, bytes read, and the same bits.

Both run as a user runs them, one process a merge, sides alternating. mergekit writes a directory; MPFS merges out of
its repository and commits (`merge`), and checks the result out as well (`merge + checkout`). The floors are `cat` of
all inputs and `cp` + sync of one output. Warm means that a side's inputs were read just before it; cold, that the
kernel's caches were dropped. Experts are imported with `--base`, as the README does, which counts the magnitudes of their
deltas; with `--plain-imports` they are not, and the first merge that trims counts them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import yaml
from numpy.typing import NDArray

import mpfs
from benchmarks.bars import Group, draw
from benchmarks.measure import machine, median, spread, touch_free_memory
from mpfs.formats.safetensors import read_header
from mpfs.testing.synthetic import QWEN3_600M, QWEN3_TINY, Architecture, write_model

MERGEKIT_OPTIONS = ["--lazy-unpickle", "--no-copy-tokenizer", "--no-write-model-card", "--quiet"]
SAMPLE_SECONDS = 0.02
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Ran:
    """One run: wall seconds, peak of RssAnon in bytes, bytes read from the disk."""

    seconds: float
    peak_anonymous: int
    read_bytes: int


def run(command: list[str]) -> Ran:
    """Run a command to its end, and watch it.

    Raises:
        SystemExit: it failed.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith("OPENBLAS_")}
    touch_free_memory()
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)
    peak = read = 0
    errors: list[str] = []
    drain = threading.Thread(target=lambda: errors.append(process.stderr.read() if process.stderr else ""))
    drain.start()
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
            counters = Path(f"/proc/{process.pid}/io").read_text(encoding="ascii")
            peak = max(peak, int(status.partition("RssAnon:")[2].split()[0]) * 1024)
            read = max(read, int(counters.partition("\nread_bytes:")[2].split()[0]))
        except (OSError, IndexError, ValueError):
            pass  # it has just ended
        time.sleep(SAMPLE_SECONDS)
    seconds = time.perf_counter() - started
    drain.join()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}\n{''.join(errors)[-2000:]}")
    return Ran(seconds, peak, read)


def recipe(method: str, names: list[str], base: str, round_: int, density: object = 0.5) -> dict[str, object]:
    """The recipe that both get; models are named as each side names them. Each round's is another one, since MPFS does
    not write what its store has already."""
    shared: dict[str, object] = {"base_model": base}
    parameters: dict[str, object] = {"weight": round((1 - 0.01 * round_) / len(names), 6)}
    if method == "slerp":
        shared["parameters"] = {"t": round(0.4 - 0.01 * round_, 6)}
        parameters = {}
    elif method == "linear":
        shared = {}
    elif method != "task_arithmetic":
        parameters["density"] = density
    each = [dict(parameters) for _ in names]
    if method == "linear":
        # Its weights are made to sum to one, so that all of them together would change nothing.
        each[0]["weight"] = round((1 + 0.01 * round_) / len(names), 6)
    models: list[dict[str, object]] = [
        {"model": name, "parameters": own} for name, own in zip(names, each, strict=True)
    ]
    if method == "slerp":
        models.insert(0, {"model": base, "parameters": {}})
    return {"merge_method": method, **shared, "models": models, "dtype": "bfloat16"}


def drop_caches() -> None:
    """Forget what the kernel has cached of files (needs root)."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3\n", encoding="ascii")


def differing(a: Path, b: Path) -> tuple[int, int]:
    """How many elements of two bf16 checkpoints differ (0 and -0 count as equal), and how many there are."""
    left, right = _tensors(a), _tensors(b)
    if left.keys() != right.keys():
        raise SystemExit(f"{a} and {b} hold other tensors: {sorted(left.keys() ^ right.keys())[:5]}")
    unequal = total = 0
    for name, one in left.items():
        other = right[name]
        unequal += int(np.count_nonzero((one != other) & (((one | other) & 0x7FFF) != 0)))
        total += one.size
    return unequal, total


def _tensors(directory: Path) -> dict[str, NDArray[np.uint16]]:
    found: dict[str, NDArray[np.uint16]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        header, _ = read_header(file)
        for entry in header.entries:
            data = np.memmap(file, np.uint16, "r", header.data_offset + entry.start, (entry.nbytes // 2,))
            found[entry.name] = data
    return found


class Contest:
    """The two sides over one family of models."""

    def __init__(
        self,
        scratch: Path,
        mergekit: Path,
        experts: int,
        architecture: Architecture,
        models: Path,
        *,
        cold: bool,
        plain_imports: bool,
    ) -> None:
        self.scratch = scratch
        self.mergekit = mergekit
        self.cold = cold
        self.mpfs = [str(Path(sys.executable).with_name("mpfs")), "-q", "-r", str(scratch / "repository")]
        self.names = [f"m{number}" for number in range(experts + 1)]
        self.sources = [models / name for name in self.names]
        self.runs: dict[str, list[Ran]] = {}
        self.equal: dict[str, str] = {}
        with mpfs.open(scratch / "repository", create=True) as repo:
            for number, (name, source) in enumerate(zip(self.names, self.sources, strict=True)):
                if not source.exists():
                    write_model(source, architecture, seed=1, expert=number)
                repo.import_checkpoint(source, name, base=self.names[0] if number and not plain_imports else None)
                print(f"made and imported {name}", file=sys.stderr, flush=True)
        os.sync()
        self.data = next((scratch / "repository").rglob("data.mdb"))
        # What is imported lies before what will be merged.
        self.imported = self.data.stat().st_size

    def note(self, name: str, ran: Ran) -> None:
        """Remember a run, and tell."""
        self.runs.setdefault(name, []).append(ran)
        print(f"{name}: {ran.seconds:.2f} s, {ran.peak_anonymous // MIB} MiB", file=sys.stderr, flush=True)

    def prepare(self, inputs: list[Path]) -> None:
        """Bring the kernel's cache into the state that a run starts from."""
        if self.cold:
            drop_caches()
        else:
            subprocess.run(["cat", *inputs], check=True, stdout=subprocess.DEVNULL)

    def prepare_store(self) -> None:
        """The same for a run of MPFS: what was imported, and not what merges have added since, which may be more than
        fits into memory."""
        if self.cold:
            drop_caches()
        else:
            subprocess.run(["head", "-c", str(self.imported), self.data], check=True, stdout=subprocess.DEVNULL)

    def floors(self, count: int) -> None:
        """What the disk can do."""
        files = [source / "model.safetensors" for source in self.sources[: count + 1]]
        self.prepare(files)
        self.note(f"cat of the inputs, {count} experts", run(["cat", *map(str, files)]))
        copy = self.scratch / "copy"
        command = f"cp {files[0]} {copy} && sync {copy}"
        self.note("cp + sync of one model", run(["sh", "-c", command]))
        copy.unlink()

    def merge(self, method: str, count: int, budgets: list[int], round_: int) -> None:
        """One round (from 0) of a method with so many experts."""
        label = f"{method}, {count} experts" if count > 1 else f"{method}, 1 expert"
        mine, changed, theirs = (self.scratch / f"{name}.yml" for name in ("mine", "changed", "theirs"))
        base, experts = self.names[0], self.names[1 : count + 1]
        mine.write_text(yaml.safe_dump(recipe(method, experts, base, round_)), encoding="utf-8")
        paths = [str(source) for source in self.sources]
        same = recipe(method, paths[1 : count + 1], paths[0], round_)
        theirs.write_text(yaml.safe_dump(same), encoding="utf-8")
        out, expected = self.scratch / "out", self.scratch / "expected"
        self.prepare([source / "model.safetensors" for source in self.sources[: count + 1]])
        command = [str(self.mergekit.with_name("mergekit-yaml")), str(theirs), str(expected), *MERGEKIT_OPTIONS]
        self.note(f"{label}: mergekit", run(command))
        branch = label.replace(", ", "-").replace(" ", "-")
        self.prepare_store()
        self.note(f"{label}: mpfs merge", run([*self.mpfs, "merge", str(mine), "--into", branch, "--no-reuse"]))
        checkout = run([*self.mpfs, "checkout", branch, str(out)])
        last = self.runs[f"{label}: mpfs merge"][-1]
        peak = max(last.peak_anonymous, checkout.peak_anonymous)
        both = Ran(last.seconds + checkout.seconds, peak, last.read_bytes + checkout.read_bytes)
        self.note(f"{label}: mpfs merge + checkout", both)
        self.note(f"{label}: mpfs merge again", run([*self.mpfs, "merge", str(mine), "--into", f"{branch}-again"]))
        if "density" in str(mine.read_text(encoding="utf-8")):
            density = [{"filter": "layers.3.", "value": 0.4}, {"value": 0.5}]
            changed.write_text(yaml.safe_dump(recipe(method, experts, base, round_, density)), encoding="utf-8")
            command = [*self.mpfs, "merge", str(changed), "--into", f"{branch}-changed"]
            self.note(f"{label}: mpfs merge, one layer's density changed", run(command))
        unequal, total = differing(out, expected)
        self.equal[label] = f"{unequal:,} of {total:,} elements differ"
        print(f"{label}: {self.equal[label]}", file=sys.stderr, flush=True)
        shutil.rmtree(expected)
        shutil.rmtree(out)
        # linear and slerp have no base that could stand in for what a budget leaves out.
        for budget in budgets if method not in ("linear", "slerp") else []:
            self.prepare_store()
            command = [*self.mpfs, "merge", str(mine), "--into", f"{branch}-{budget}", "--no-reuse"]
            self.note(f"{label}: mpfs merge, budget {budget}%", run([*command, "--budget", f"{budget}%"]))

    def picture(self, path: Path) -> None:
        """Draw the medians of the merges."""
        groups: dict[str, list[tuple[str, float]]] = {}
        for name, runs in self.runs.items():
            label, colon, what = name.partition(": ")
            if colon:
                groups.setdefault(label, []).append((what, median([item.seconds for item in runs])))
        title = f"Seconds of a merge, {'cold' if self.cold else 'warm'} cache (logarithmic)"
        draw(path, title, "s", [Group(label, bars) for label, bars in groups.items()])

    def report(self, rounds: int) -> None:
        """Print a table: each row against mergekit's time for the same merge."""
        print(f"{machine()}; {'cold' if self.cold else 'warm'} cache; {rounds} rounds: median (range)\n")
        print("| operation | seconds | times faster than mergekit | peak anonymous memory | read from disk |")
        print("|---|---:|---:|---:|---:|")
        for name, runs in self.runs.items():
            seconds = [item.seconds for item in runs]
            peer = self.runs.get(f"{name.partition(':')[0]}: mergekit")
            ratio = "" if peer is None else f"{median([item.seconds for item in peer]) / median(seconds):.1f}"
            peak = max(item.peak_anonymous for item in runs) // MIB
            read = median([item.read_bytes for item in runs]) / MIB
            print(f"| {name} | {spread(seconds)} | {ratio} | {peak} MiB | {read:,.0f} MiB |")
        for name, text in self.equal.items():
            print(f"\n{name}: {text} from mergekit's result.")


def main(arguments: list[str]) -> None:
    """Run and print tables."""
    parser = argparse.ArgumentParser(prog="benchmarks peers", description=__doc__)
    parser.add_argument("--mergekit", type=Path, required=True, help="the python of an environment with mergekit 0.1.5")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--experts", type=int, nargs="+", default=[2])
    parser.add_argument("--methods", nargs="+", default=["linear", "task_arithmetic", "ties", "dare_ties"])
    parser.add_argument("--budgets", type=int, nargs="*", default=[10])
    parser.add_argument("--cold", action="store_true", help="drop the kernel's caches before each run (needs root)")
    parser.add_argument("--plain-imports", action="store_true", help="import the experts without --base")
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the benchmark itself")
    parser.add_argument("--scratch", type=Path, help="where to work (default: a temporary directory)")
    parser.add_argument("--models", type=Path, help="where the models m0, m1, … are, or are made and left")
    parser.add_argument("--json", type=Path, help="also write the raw figures here")
    parser.add_argument("--picture", type=Path, help="also draw the medians, as SVG, here")
    options = parser.parse_args(arguments)
    scratch = Path(tempfile.mkdtemp(prefix="mpfs-peers-", dir=options.scratch))
    try:
        architecture = QWEN3_TINY if options.tiny else QWEN3_600M
        models = options.models or scratch / "models"
        contest = Contest(
            scratch,
            options.mergekit,
            max(options.experts),
            architecture,
            models,
            cold=options.cold,
            plain_imports=options.plain_imports,
        )
        for round_ in range(options.rounds):
            for count in options.experts:
                contest.floors(count)
            for method in options.methods:
                for count in options.experts if method != "slerp" else [1]:
                    contest.merge(method, count, options.budgets, round_)
        contest.report(options.rounds)
        if options.json is not None:
            raw = {name: [asdict(item) for item in runs] for name, runs in contest.runs.items()}
            about = {
                "machine": machine(),
                "cold": options.cold,
                "plain_imports": options.plain_imports,
                "versions": versions(options.mergekit),
            }
            options.json.write_text(json.dumps({**about, "runs": raw}, indent=1) + "\n", encoding="utf-8")
        if options.picture is not None:
            contest.picture(options.picture)
    finally:
        shutil.rmtree(scratch)


def versions(mergekit: Path) -> dict[str, str]:
    """The versions of what takes part."""
    asked = "import importlib.metadata as m; print(*(m.version(p) for p in ('mergekit', 'torch', 'safetensors')))"
    answer = subprocess.run([str(mergekit), "-c", asked], check=True, capture_output=True, text=True).stdout.split()
    theirs = dict(zip(("mergekit", "mergekit's torch", "mergekit's safetensors"), answer, strict=True))
    return {"mpfs": mpfs.__version__, "python": sys.version.split()[0], **theirs}


if __name__ == "__main__":
    main(sys.argv[1:])
