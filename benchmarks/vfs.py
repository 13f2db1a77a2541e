"""The virtual file system, measured: `python benchmarks/vfs.py [--model DIR] [--json]`.

Without --model a checkpoint of Qwen3-0.6B's shapes (1.2 GB in bf16) is made. "Warm" means that everything was read
before. Each figure is the best of several rounds, and what is compared is read by turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import fsspec  # type: ignore[import-untyped]
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from mpfs.repository import Repository
from mpfs.testing.synthetic import QWEN3_600M, write_model
from mpfs.vfs.libfuse import FuseUnavailableError, require_fuse

BUFFER = 4 << 20
TENSOR = "model.layers.10.mlp.gate_proj.weight"
GOALS = {
    "fsspec_of_plain_file": (">=", 0.7),
    "mount_of_plain_file": (">=", 0.4),
    "tensor_ms": ("<", 20.0),
    "open_1000_tensors_ms": ("<", 50.0),
    "opens_leaked_descriptors": ("<", 1.0),
    "opens_leaked_reader_slots": ("<", 1.0),
    "opens_grown_kib": ("<", 2048.0),
}


def read_all(path: object, opener: Callable[..., object] = open) -> float:
    """Bytes a second of a sequential read into one buffer."""
    buffer = bytearray(BUFFER)
    started, total = time.perf_counter(), 0
    with opener(path, "rb") as file:  # type: ignore[attr-defined]
        while count := file.readinto(buffer):
            total += count
    return total / (time.perf_counter() - started)


def best_ms(call: Callable[[], object], rounds: int) -> float:
    """Milliseconds of the fastest of several calls, after one that does not count."""
    call()
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return 1000 * min(times)


def sequential(repository: Repository, model: Path, scratch: Path, rounds: int) -> dict[str, float]:
    """A plain file, fsspec and the mount."""
    plain_path = model / "model.safetensors"
    system = fsspec.filesystem("mpfs", repo=str(repository.path))
    figures = {"plain_file_gbs": 0.0, "fsspec_gbs": 0.0}
    read_all(plain_path), read_all("qwen/model.safetensors", system.open)
    for _ in range(rounds):
        figures["plain_file_gbs"] = max(figures["plain_file_gbs"], read_all(plain_path) / 1e9)
        figures["fsspec_gbs"] = max(figures["fsspec_gbs"], read_all("qwen/model.safetensors", system.open) / 1e9)
    figures["fsspec_of_plain_file"] = figures["fsspec_gbs"] / figures["plain_file_gbs"]
    try:
        require_fuse()
    except FuseUnavailableError as error:
        print(f"THE MOUNT IS NOT MEASURED: {error}", file=sys.stderr)
        return figures
    root = scratch / "mnt"
    command = [sys.executable, "-m", "mpfs_cli.main", "-q", "-r", str(repository.path), "mount", str(root)]
    subprocess.run([*command, "--daemon"], check=True, stdout=subprocess.DEVNULL)
    try:
        mounted = root / "qwen/model.safetensors"
        figures["mount_first_read_gbs"] = read_all(mounted) / 1e9
        plain, warm = 0.0, 0.0
        for _ in range(rounds):
            plain = max(plain, read_all(plain_path))
            warm = max(warm, read_all(mounted))
        figures["mount_gbs"], figures["mount_of_plain_file"] = warm / 1e9, warm / plain

        def one_tensor() -> None:
            with safe_open(mounted, framework="pt") as file:
                file.get_tensor(TENSOR).sum()

        figures["mount_safe_open_tensor_ms"] = best_ms(one_tensor, rounds)
    finally:
        subprocess.run(["fusermount3", "-u", "-z", str(root)], check=True)
    return figures


def tensors(repository: Repository, scratch: Path, rounds: int) -> dict[str, float]:
    """One tensor of a large model; opening a snapshot of many."""
    many = scratch / "many"
    many.mkdir()
    save_file(
        {f"layer.{number}.weight": torch.full((16, 16), float(number)) for number in range(1000)},
        many / "m.safetensors",
    )
    repository.import_checkpoint(many / "m.safetensors", "many")

    def open_many() -> None:
        reader = repository.reader("many")
        reader.open(reader.files()[0].path).read_at(0, 100)

    def part() -> None:
        repository.open_weights("qwen").get_slice("model.embed_tokens.weight")[1000:1001]

    return {
        "tensor_ms": best_ms(lambda: repository.tensor("qwen", TENSOR), rounds),
        "slice_of_311_mb_ms": best_ms(part, rounds),
        "open_1000_tensors_ms": best_ms(open_many, rounds),
    }


def opens(repository: Repository, count: int) -> dict[str, float]:
    """What is left after many opens: descriptors, LMDB reader slots, anonymous memory."""
    system = fsspec.filesystem("mpfs", repo=str(repository.path))
    path = f"many/{repository.ls('many')[0].path}"

    def state() -> tuple[int, int, int]:
        status = Path("/proc/self/status").read_text()
        memory = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))
        slots = repository._store.environment._env.readers().count("\n")
        return len(os.listdir("/proc/self/fd")), slots, memory

    def rounds(number: int) -> None:
        for _ in range(number):
            with system.open(path) as file:
                file.read(100)
            repository.reader("qwen").open("config.json").read_at(0, 10)

    rounds(1000)
    before = state()
    started = time.perf_counter()
    rounds(count)
    seconds = time.perf_counter() - started
    after = state()
    names = ("opens_leaked_descriptors", "opens_leaked_reader_slots", "opens_grown_kib")
    return {
        **{name: float(b - a) for name, a, b in zip(names, before, after, strict=True)},
        "opens_us": seconds / count / 2 * 1e6,
    }


def main() -> int:
    """Measure, print, and say whether the goals are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint of Qwen3-0.6B's shapes; default: one is made")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--opens", type=int, default=10_000)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        model = arguments.model
        if model is None:
            model = scratch / "model"
            write_model(model, QWEN3_600M, seed=0)
        with Repository.create(scratch / "repository") as repository:
            repository.import_checkpoint(model, "qwen")
            figures = tensors(repository, scratch, arguments.rounds)
            figures |= sequential(repository, model, scratch, arguments.rounds)
            figures |= opens(repository, arguments.opens)
            with suppress(KeyError):
                fsspec.get_filesystem_class("mpfs").clear_instance_cache()
    missed = [
        name
        for name, (sign, goal) in GOALS.items()
        if name in figures and not (figures[name] >= goal if sign == ">=" else figures[name] < goal)
    ]
    if arguments.json:
        print(json.dumps({"figures": figures, "missed": missed}, indent=2))
    else:
        for name, value in figures.items():
            sign, goal = GOALS.get(name, ("", 0.0))
            print(f"{name:28} {value:10.3f}  {f'goal {sign} {goal:g}' if sign else ''}".rstrip())
        print("missed: " + ", ".join(missed) if missed else "all goals met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
