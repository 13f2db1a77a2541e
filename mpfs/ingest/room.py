"""Whether a checkpoint will fit, before anything of it is written.

What is in the store already takes no room, so the size of the source is only an upper bound. Where it does not fit, a
local source is read once more and its blocks are named: then it is known what is new. A remote one is not: reading it
twice may take hours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path

from mpfs.ingest.pipeline import TensorJob, name_blocks
from mpfs.ingest.remote import RemoteTree
from mpfs.objects import BlockId
from mpfs.store import Store
from mpfs.store.blocks import footprint

_RESERVE = 16 << 20
"""Bytes, for LMDB's trees and for objects; they are few beside the blocks."""


def require_room(store: Store, source: Path | RemoteTree, size: int, measure: Callable[[], int]) -> None:
    """Refuse an import that cannot fit.

    Args:
        store: where it would go.
        source: what it would be of.
        size: bytes that would be stored, were none of them there already.
        measure: finds out how many bytes are not there; asked only if it matters.

    Raises:
        NoSpaceError: a local source does not fit, which is certain; or a remote one would not if all of it were new.
    """
    if size + size // 64 + _RESERVE <= store.room():
        return
    if isinstance(source, RemoteTree):
        store.require_room(size, f"importing {source} (if nothing of it is stored already)")
    else:
        store.require_room(measure(), f"importing {source}, without what is stored already,")


def unstored_bytes(store: Store, jobs: Iterable[TensorJob], threads: int | None) -> int:
    """Read tensors and find out how many bytes their blocks would take in the store, at the least."""
    new: dict[BlockId, int] = {}
    with closing(name_blocks(store.info.block_size, jobs, threads=threads)) as named:
        for block, size in named:
            if block not in new and store.blocks.info(block) is None:
                new[block] = footprint(size)
    return sum(new.values())
