"""Files that an earlier import has read: known again by where they are and when they changed last, as git does.

An entry is written with the file's last blocks, so an import that is interrupted finds the files that it had finished.
It is a memory and no more: it counts only while every block that it names is in the store, and only for a file that had
not been touched for a while when it was read (a later change could have the same time stamp otherwise).
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

from mpfs.ingest.incoming import Incoming
from mpfs.ingest.source import SourceFile
from mpfs.objects import Tensor
from mpfs.objects.encoding import encode
from mpfs.store import Store, Writer, reuse_key, stats_key

KIND = "known_file"

SETTLED_NS = 2_000_000_000
"""Nanoseconds for which a file must not have changed. File systems' time stamps are up to 2 s coarse."""


@dataclass(frozen=True, slots=True)
class KnownFile:
    """A file's tensors in the order of `Incoming.jobs`, and its SHA-256."""

    tensors: tuple[Tensor, ...]
    sha256: str


def look_up(store: Store, item: Incoming) -> KnownFile | None:
    """What is known of a file, if it and the store are still as they were."""
    if item.whole is None or not item.size:
        return None
    key = _key(item.whole, store.info.block_size)
    raw = store.reuse.values([key]).get(key)
    if raw is None:
        return None
    try:
        value = json.loads(raw)
        tensors = tuple(Tensor.decode(encode(part)) for part in value["parts"])
        sha256 = value["sha256"]
    except (ValueError, KeyError, TypeError):
        return None
    jobs = [(job.dtype, job.shape) for job in item.jobs()]
    if [(tensor.dtype, tensor.shape) for tensor in tensors] != jobs or not isinstance(sha256, str):
        return None
    return KnownFile(tensors, sha256) if _are_stored(store, tensors) else None


def remember(writer: Writer, block_size: int, item: Incoming, tensors: list[Tensor], sha256: str) -> None:
    """Remember a file that was read whole, all of whose blocks are staged."""
    if item.whole is None or not item.size or not item.whole.settled_before(time.time_ns() - SETTLED_NS):
        return
    parts = [json.loads(tensor.encode()) for tensor in tensors]
    writer.put_reuse(_key(item.whole, block_size), encode({"kind": KIND, "sha256": sha256, "parts": parts}))


def _key(file: SourceFile, block_size: int) -> bytes:
    return reuse_key({"kind": KIND, "path": file.identity, "stamp": list(file.stamp), "block_size": block_size})


def _are_stored(store: Store, tensors: tuple[Tensor, ...]) -> bool:
    with store.environment.read() as txn:
        for tensor in tensors:
            for index, block in enumerate(tensor.blocks):
                if not txn.contains("block_info", block):
                    return False
                if not txn.contains("stats", stats_key(block, tensor.dtype, tensor.block_start(index))):
                    return False
    return True
