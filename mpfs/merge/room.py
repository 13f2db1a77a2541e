"""How much a merge will write at the most, before it starts: what it computes, but for what earlier merges have computed."""

from __future__ import annotations

from collections.abc import Sequence

from mpfs.merge.engine import computed_bytes
from mpfs.merge.known import Known
from mpfs.objects import Plan
from mpfs.store import Store, Writer

_RESERVE = 16 << 20
"""Bytes, for LMDB's trees and for objects; they are few beside the blocks."""


def require_room(store: Store, writer: Writer, plans: Sequence[Plan], *, reuse: bool) -> None:
    """Refuse merges whose results would not fit, if no block that they compute is there already but those known.

    Only where all of the results together would not fit is it looked up which are known.

    Args:
        store, writer: where they would go.
        plans: of the merges.
        reuse: whether results of earlier merges are used.

    Raises:
        NoSpaceError: there is no room.
    """
    most = sum(computed_bytes(tensor) for plan in plans for tensor in plan.tensors if tensor.action == "compute")
    if most + most // 64 + _RESERVE > store.room():
        needed = sum(Known(plan, store, writer, reuse).outlook().disk_bytes for plan in plans)
        store.require_room(needed, "the merge (if none of the blocks that it computes is stored already)")
