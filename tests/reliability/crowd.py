"""Several processes at work in one repository, killed or not: python crowd.py kill|stress DIRECTORY AMOUNT SEED

`kill`: rounds of three workers, each killed at an instant of its own, until AMOUNT were; after every round all that
must hold is checked. `stress`: four workers for AMOUNT seconds, and then the same checks. Prints a summary in JSON.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch  # noqa: F401
from numpy.typing import NDArray

import mpfs.ingest.commit
import mpfs.merge.commit
import mpfs.vfs.checkout  # noqa: F401
from mpfs.errors import LockedError, MPFSError, NotFoundError, RefConflictError
from mpfs.repository import Repository
from mpfs.stats import block_stats
from mpfs.store import Store
from mpfs.store.writer import Writer
from mpfs.testing.checkpoints import TensorContent, safetensors_bytes, write

BLOCK_SIZE = 4096
BATCH = 40_000
VARIANTS = 24
SHAPE = (100, 120)
WORKERS = 3
STRESS_WORKERS = 4


def variants(folder: Path) -> list[Path]:
    """Small checkpoints that differ in some of their blocks."""
    made = []
    for number in range(VARIANTS):
        tensors = []
        for index in range(3):
            values: NDArray[Any] = np.random.default_rng(index).standard_normal(SHAPE, np.float32)
            if number and index != number % 3:
                values = values + np.random.default_rng([number, index]).standard_normal(SHAPE, np.float32) / 50
            tensors.append(TensorContent(f"layer.{index}", "F32", SHAPE, values.astype("<f4").tobytes()))
        content = {"model.safetensors": safetensors_bytes(tensors), "config.json": b'{"n": %d}' % number}
        made.append(write(folder / f"variant-{number}", content))
    return made


class Worker:
    """Does one thing after the other, and says what is done."""

    def __init__(self, number: int, path: Path, sources: list[Path], report: int, seed: int) -> None:
        self.number = number
        self.sources = sources
        self.report = report
        self.random = random.Random(seed)
        self.repository = Repository.open(path, author=f"worker {number}")

    def once(self) -> str:
        """One random operation; its name."""
        operations: list[tuple[int, Callable[[], None]]] = [
            (6, self.import_own), (4, self.merge_own), (4, self.commit_shared), (4, self.move_refs),
            (2, self.collect), (2, self.compact), (3, self.read),
        ]  # fmt: skip
        (operation,) = self.random.choices([item for _, item in operations], [weight for weight, _ in operations])
        try:
            operation()
        except LockedError:
            return "locked"
        return operation.__name__

    def say(self, **message: Any) -> None:
        """Report that something is durable."""
        os.write(self.report, json.dumps(message).encode() + b"\n")

    def import_own(self) -> None:
        source = self.random.choice(self.sources)
        done = self.repository.import_checkpoint(source, f"own/{self.number}", threads=2)
        self.say(ref=f"own/{self.number}", commit=done.commit)

    def merge_own(self) -> None:
        weights = [round(self.random.random(), 3) for _ in range(2)]
        models = [{"model": f"expert/{i}", "parameters": {"weight": weights[i]}} for i in range(2)]
        recipe = {"merge_method": "task_arithmetic", "base_model": "base", "models": models, "dtype": "float32"}
        done = self.repository.merge(recipe, f"own/{self.number}", threads=2)
        self.say(ref=f"own/{self.number}", commit=done.commit)

    def commit_shared(self) -> None:
        """Everybody commits to one branch; who loses the race tries again."""
        source = self.random.choice(self.sources)
        while True:
            try:
                done = self.repository.import_checkpoint(source, "shared", threads=2)
            except RefConflictError:
                continue
            if done.new_commit:
                self.say(shared=done.commit)
            return

    def move_refs(self) -> None:
        name = f"moving/{self.number}"
        try:
            self.repository.remove_ref(name)
        except NotFoundError:
            self.repository.branch(name, "base")
        self.repository.branch(f"{name}-{self.random.randrange(10**9)}", "base")
        for ref in self.repository.refs():
            if ref.name.startswith(f"{name}-"):
                self.repository.reset(ref.name, "expert/0")
                self.repository.remove_ref(ref.name)

    def collect(self) -> None:
        self.repository.gc(reflog_days=0)

    def compact(self) -> None:
        self.repository.gc(reflog_days=0, compact=True)

    def read(self) -> None:
        """A read sees one commit, whole."""
        for ref in self.repository.refs():
            if ref.name.startswith("expert"):
                self.repository.load(ref.name)
        entries = self.repository.log("shared")
        assert len({item.identity for item in entries}) == len(entries)


def run_worker(work: Callable[[], None]) -> int:
    """Fork; the child's pid."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return pid


def check(path: Path, acknowledged: list[dict[str, str]], tips: dict[str, str]) -> dict[str, str]:
    """What must hold after all died; where the refs are."""
    with Repository.open(path) as repository:
        report = repository.fsck(read_data=True)
        assert report.ok, report.problems[:5]
        refs = {ref.name: ref.commit for ref in repository.refs()}
        assert {"base", "expert/0", "expert/1", "shared"} <= refs.keys()
        history = {item.identity for item in repository.log("shared")}
        for message in acknowledged:
            if "shared" in message:
                assert message["shared"] in history, f"an update of shared was lost: {message}"
        last = {message["ref"]: message["commit"] for message in acknowledged if "ref" in message}
        for name, commit in {**tips, **last}.items():
            if name.startswith("own/") and name in last:
                # The one that was said to be done, or the one after it.
                line = [item.identity for item in repository.log(name)]
                assert commit in line[:2], f"{name} should be at {commit} or its child: {line[:3]}"
            elif name.startswith("own/"):
                line = [item.identity for item in repository.log(name)]
                assert commit in line[:2], f"{name} was at {commit}: {line[:3]}"
        return refs


def read_all(reader: int) -> list[dict[str, str]]:
    """All whole lines of a pipe whose writers are gone."""
    data = b""
    while piece := os.read(reader, 1 << 16):
        data += piece
    return [json.loads(line) for line in data.split(b"\n")[:-1]]


def tidy(path: Path) -> dict[str, str]:
    """Give up what has piled up; the refs that are left."""
    with Repository.open(path) as repository:
        for ref in repository.refs():
            if ref.name.startswith(("own/", "moving/")):
                repository.remove_ref(ref.name)
        repository.gc(reflog_days=0, compact=True)
        names = sorted(item.name for item in path.iterdir())
        assert len(names) == 3, names
        assert repository.fsck(read_data=True).ok
        return {ref.name: ref.commit for ref in repository.refs()}


def new_repository(path: Path, sources: list[Path]) -> None:
    """A base and two experts."""
    with Repository.create(path, block_size=BLOCK_SIZE, map_size=256 << 20, author="crowd") as repository:
        for number, name in enumerate(("base", "expert/0", "expert/1", "shared")):
            repository.import_checkpoint(sources[number], name)


def kill(folder: Path, amount: int, seed: int) -> dict[str, Any]:
    """Rounds of workers, all of which are killed."""
    source = random.Random(seed)
    path, sources = folder / "repo", variants(folder / "sources")
    new_repository(path, sources)
    tips: dict[str, str] = {}
    kills = rounds = done = 0
    while kills < amount:
        rounds += 1
        reader, writer = os.pipe()
        children = []
        for number in range(WORKERS):

            def work(number: int = number, first: int = source.randrange(1 << 60)) -> None:
                worker = Worker(number, path, sources, writer, first)  # noqa: B023
                while True:
                    worker.once()

            children.append(run_worker(work))
        os.close(writer)
        source.shuffle(children)
        for child in children:
            time.sleep(source.uniform(0.0, 0.16))
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "a worker ended by itself"
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            kills += 1
        acknowledged = read_all(reader)
        os.close(reader)
        done += len(acknowledged)
        tips = check(path, acknowledged, tips)
        if rounds % 12 == 0:
            tips = tidy(path)
    tidy(path)
    return {"kills": kills, "rounds": rounds, "acknowledged": done}


def stress(folder: Path, seconds: int, seed: int) -> dict[str, Any]:
    """Four workers for some time."""
    path, sources = folder / "repo", variants(folder / "sources")
    new_repository(path, sources)
    tidy(path)
    before = _size(path)
    records = _records(path)
    reader, writer = os.pipe()
    deadline = time.monotonic() + seconds
    children = []
    for number in range(STRESS_WORKERS):

        def work(number: int = number) -> None:
            worker = Worker(number, path, sources, writer, seed + number)
            counts: Counter[str] = Counter()
            warm = time.monotonic() + seconds / 3
            start: tuple[int, int] | None = None
            while time.monotonic() < deadline:
                counts[worker.once()] += 1
                if start is None and time.monotonic() > warm:
                    start = _resources()
            worker.say(counts=dict(counts), start=start or _resources(), end=_resources())
            worker.repository.close()

        children.append(run_worker(work))
    os.close(writer)
    messages = read_all(reader)
    statuses = [os.waitpid(child, 0)[1] for child in children]
    assert statuses == [0] * STRESS_WORKERS, statuses
    check(path, [message for message in messages if "counts" not in message], {})
    finished: list[Any] = [message for message in messages if "counts" in message]
    total: Counter[str] = Counter()
    for item in finished:
        total.update(item["counts"])
        (memory, files), (memory_after, files_after) = item["start"], item["end"]
        assert files_after <= files + 2, f"descriptors leak: {item}"
        assert memory_after < memory + (96 << 10), f"memory leaks: {item}"
    with Repository.open(path) as repository:
        repository.remove_ref("shared")
        repository.import_checkpoint(sources[3], "shared")
    tidy(path)
    after = _size(path)
    # LMDB leaves pages up to three quarters empty where much was removed; of records there must be no more than before.
    assert _records(path) == records, f"{records} before"
    assert after < 2 * before, f"space leaks: {before:,} bytes before, {after:,} after"
    return {"operations": dict(total), "file_bytes": [before, after]}


def _size(path: Path) -> int:
    return sum(item.stat().st_size for item in path.rglob("data.mdb"))


def _records(path: Path) -> dict[str, int]:
    """Number of blocks and objects."""
    with Store.open(path).environment.read() as txn:
        names = ("blocks", "block_info", "stats", "tensors", "snapshots", "commits", "plans", "runs", "run_index")
        return {name: txn.count(name) for name in names}


def _resources() -> tuple[int, int]:
    """Anonymous memory in KiB (the map, which grows with the store, is not ours), and open files."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("RssAnon:")[2].split()[0]), len(os.listdir("/proc/self/fd"))


def main() -> None:
    """Run."""
    Writer.__init__.__defaults__ = (BATCH,)
    block_stats(np.zeros(256, np.float32).tobytes(), "F32", 0)
    mode, folder, amount, seed = sys.argv[1:]
    act = {"kill": kill, "stress": stress}[mode]
    try:
        print(json.dumps(act(Path(folder), int(amount), int(seed))), flush=True)
    except MPFSError as error:
        print(f"seed {seed}: {error.kind}: {error.message}", file=sys.stderr)
        raise


if __name__ == "__main__":
    main()
