"""Small checkpoints, published by hand: what ingestion and merging do, without them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from mpfs.objects import (
    BlobFile,
    Budget,
    Commit,
    Cost,
    Figures,
    Input,
    ModelRef,
    ObjectId,
    Plan,
    PlanTensor,
    Run,
    SafetensorsFile,
    Snapshot,
    Tensor,
    block_id,
    object_id,
)
from mpfs.store import RefMove, StagedBlock, Store, Writer, check

NOW = 1_700_000_000
DAY = 86400
STATS = b"s" * 64
ROOT = Path(__file__).resolve().parents[2]


def staged(data: bytes, dtype: str = "U8", first_element: int = 0) -> StagedBlock:
    """A block ready to be stored."""
    return StagedBlock(block_id(data), data, dtype, first_element, STATS)


def stage(
    writer: Writer, data: bytes, block_size: int, dtype: str = "U8", shape: Sequence[int] | None = None
) -> Tensor:
    """Stage a tensor's blocks; the tensor."""
    pieces = [data[i : i + block_size] for i in range(0, len(data), block_size)]
    tensor = Tensor(dtype, tuple(shape or [len(data)]), block_size, tuple(map(block_id, pieces)))
    for index, piece in enumerate(pieces):
        writer.put_block(staged(piece, dtype, tensor.block_start(index)))
    return tensor


def tensor_id(tensor: Tensor) -> ObjectId:
    """The tensor's id."""
    return object_id(tensor.encode())


def checkpoint(writer: Writer, weights: dict[str, bytes], block_size: int) -> tuple[list[Tensor], Snapshot]:
    """Stage a checkpoint of F32 vectors with one side file: its tensors and snapshot."""
    header = stage(writer, b"header of " + ",".join(weights).encode(), block_size)
    config = stage(writer, b'{"model_type": "test"}', block_size)
    tensors = [stage(writer, data, block_size, "F32", [len(data) // 4]) for data in weights.values()]
    size = header.nbytes + sum(tensor.nbytes for tensor in tensors)
    pairs = tuple((name, tensor_id(tensor)) for name, tensor in zip(weights, tensors, strict=True))
    files = (
        BlobFile("config.json", config.nbytes, tensor_id(config)),
        SafetensorsFile("model.safetensors", size, tensor_id(header), "", pairs),
    )
    return [header, config, *tensors], Snapshot(files)


def plan_of(inputs: Sequence[tuple[ObjectId, ObjectId, ObjectId]], note: str = "") -> Plan:
    """A plan over (commit, snapshot, tensor) triples, the first of which is the base."""
    base, *experts = inputs
    tensor = PlanTensor(
        "w", "keep", "F32", (1024,), 1024, base[2], tuple((i + 1, item[2]) for i, item in enumerate(experts)),
        selections=tuple(PlanTensor("", "keep", "F32", (), 1, None).columns for _ in experts),
        parameters=tuple({} for _ in experts),
    )  # fmt: skip
    models = tuple(ModelRef(f"m{i}", commit, snapshot) for i, (commit, snapshot, _) in enumerate(inputs))
    return Plan(
        "linear", "none", {"note": note}, models, 0, 0, None, None, 0, 4096, Budget(), "energy", (tensor,),
        Cost(0, 0, 0, 0, 0, 0), 1.0,
    )  # fmt: skip


def publish(
    store: Store,
    weights: dict[str, bytes],
    *,
    ref: str = "main",
    expected: ObjectId | None = None,
    parents: Sequence[ObjectId] = (),
    inputs: Sequence[ObjectId] = (),
    plan: Plan | None = None,
    time: int = NOW,
    message: str = "test",
) -> ObjectId:
    """Publish a checkpoint; the commit's id. With a plan there is a run."""
    with store.writer() as writer:
        tensors, snapshot = checkpoint(writer, weights, store.info.block_size)
        commit = Commit(
            object_id(snapshot.encode()),
            tuple(parents),
            tuple(Input("expert", f"i{i}", item) for i, item in enumerate(inputs)),
            None if plan is None else object_id(plan.encode()),
            message,
            "tester",
            time,
        )

        def run(identity: ObjectId) -> Run:
            return Run(identity, commit.plan or "", time, Figures(seconds=1.5))

        return writer.publish(
            tensors=tensors,
            snapshot=snapshot,
            commit=commit,
            move=RefMove(ref, expected, "branch", "test"),
            plan=plan,
            run=run if plan is not None else None,
        )


def merge(
    store: Store, base: ObjectId, expert: ObjectId, *, ref: str = "merged", seed: int = 9, time: int = NOW
) -> ObjectId:
    """Publish a commit with a plan and a run, made of two others."""
    triples = []
    for commit in (base, expert):
        snapshot = store.objects.get(Commit, commit).snapshot
        triples.append((commit, snapshot, next(iter(store.objects.get(Snapshot, snapshot).tensors.values()))))
    weights = {"w": data(seed)}
    return publish(store, weights, ref=ref, parents=[base], inputs=[base, expert], plan=plan_of(triples), time=time)


def remove(store: Store, ref: str, *, time: int = NOW) -> None:
    """Remove a branch."""
    store.move_ref(ref, None, expected=store.refs.get(ref).commit, kind="branch", time=time, author="t", reason="rm")


def data(seed: int, size: int = 10_000) -> bytes:
    """Bytes that depend on the seed alone, a whole number of float32."""
    return seed.to_bytes(8, "big") * (size // 8)


def unlike(seed: int, size: int) -> bytes:
    """Bytes in which no two blocks are alike."""
    return seed.to_bytes(4, "big") + os.urandom(size - 4)


def counts(store: Store) -> dict[str, int]:
    """Number of keys, by database."""
    names = ("blocks", "block_info", "stats", "tensors", "snapshots", "commits", "plans", "runs", "run_index", "reflog")
    with store.environment.read() as txn:
        return {name: txn.count(name) for name in names}


def assert_clean(store: Store, *, read_data: bool = True) -> None:
    """No problems."""
    problems = check(store, read_data=read_data).problems
    if problems:
        raise AssertionError(f"{len(problems)} problems, the first of which are {problems[:3]}")


def python(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a Python process that can import mpfs and this module."""
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
