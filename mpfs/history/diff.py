"""What changed between two snapshots: by ids for what is equal, by sketches or by the blocks for what is not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Literal, TypeAlias

import numpy as np

from mpfs.objects import BlobFile, BlockId, ObjectId, Snapshot, Tensor
from mpfs.objects.dtypes import BITS, MERGEABLE
from mpfs.objects.encoding import Json
from mpfs.objects.progress import Progress
from mpfs.stats import as_bits, decode, delta_summary
from mpfs.stats.decode import Bits
from mpfs.stats.stored import block_records
from mpfs.store import BlockReader, ObjectReader

Status: TypeAlias = Literal["identical", "changed", "added", "removed", "reshaped", "retyped"]
_PIECE = 1 << 20
"""Elements that are decoded at a time."""

STATUSES: tuple[Status, ...] = ("identical", "changed", "added", "removed", "reshaped", "retyped")


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """How one tensor differs from A to B.

    `relative_l2` is |b - a| / |a|, `cosine` that of a and b, `max_abs` the largest |b - a|; all None where there is no
    number to give. `estimated` says that they come from sketches. `elements_changed` counts elements whose bits
    differ. `same_as` names the tensor of the other snapshot that is the same under another name.
    """

    name: str
    status: Status
    blocks_changed: int
    blocks_total: int
    relative_l2: float | None = None
    cosine: float | None = None
    max_abs: float | None = None
    elements_changed: int | None = None
    estimated: bool = False
    before: str | None = None
    after: str | None = None
    same_as: str | None = None

    def as_json(self) -> Json:
        """The JSON form."""
        return {
            "name": self.name,
            "status": self.status,
            "blocks_changed": self.blocks_changed,
            "blocks_total": self.blocks_total,
            "relative_l2": self.relative_l2,
            "cosine": self.cosine,
            "max_abs": self.max_abs,
            "elements_changed": self.elements_changed,
            "estimated": self.estimated,
            "before": self.before,
            "after": self.after,
            "same_as": self.same_as,
        }


@dataclass(frozen=True, slots=True)
class Diff:
    """The differences of two snapshots: tensors in order of name, and side files by what happened to them."""

    tensors: tuple[TensorDiff, ...]
    files_added: tuple[str, ...]
    files_removed: tuple[str, ...]
    files_changed: tuple[str, ...]

    @property
    def summary(self) -> dict[str, int]:
        """How many tensors are in each state."""
        return {status: sum(item.status == status for item in self.tensors) for status in STATUSES}

    @property
    def is_empty(self) -> bool:
        """Whether the snapshots have the same tensors and side files."""
        return all(item.status == "identical" for item in self.tensors) and not (
            self.files_added or self.files_removed or self.files_changed
        )

    def as_json(self) -> Json:
        """The JSON form."""
        return {
            "summary": self.summary,
            "tensors": [item.as_json() for item in self.tensors],
            "files": {
                "added": list(self.files_added),
                "removed": list(self.files_removed),
                "changed": list(self.files_changed),
            },
        }


def diff_snapshots(
    a: Snapshot,
    b: Snapshot,
    objects: ObjectReader,
    blocks: BlockReader,
    *,
    exact: bool = False,
    progress: Progress | None = None,
) -> Diff:
    """Compare two snapshots.

    Args:
        a, b: before and after.
        objects, blocks: for reading them.
        exact: read the blocks that differ; otherwise no block is read, and numbers are estimates from sketches.
        progress: told the tensors done, of all.

    Raises:
        IntegrityError: something that a snapshot refers to is missing or damaged.
    """
    names = sorted(set(a.tensors) | set(b.tensors))
    owners = _names(a), _names(b)
    result = []
    for done, name in enumerate(names):
        first, second = a.tensors.get(name), b.tensors.get(name)
        result.append(_diff_tensor(name, first, second, owners, objects, blocks, exact))
        if progress is not None:
            progress(done + 1, len(names))
    before, after = _blobs(a), _blobs(b)
    return Diff(
        tuple(result),
        tuple(sorted(set(after) - set(before))),
        tuple(sorted(set(before) - set(after))),
        tuple(sorted(path for path in set(before) & set(after) if before[path] != after[path])),
    )


def _diff_tensor(
    name: str,
    first: ObjectId | None,
    second: ObjectId | None,
    owners: tuple[Mapping[ObjectId, str], Mapping[ObjectId, str]],
    objects: ObjectReader,
    blocks: BlockReader,
    exact: bool,
) -> TensorDiff:
    a = None if first is None else objects.get(Tensor, first)
    b = None if second is None else objects.get(Tensor, second)
    if a is None or b is None:
        present = a or b
        assert present is not None  # the name comes from one of the two
        total = len(present.blocks)
        same = owners[0 if a is None else 1].get(first or second or "")
        status: Status = "added" if a is None else "removed"
        return TensorDiff(name, status, total, total, before=_describe(a), after=_describe(b), same_as=same)
    total = max(len(a.blocks), len(b.blocks))
    if first == second:
        return TensorDiff(name, "identical", 0, total, 0.0, 1.0, 0.0, 0, before=_describe(a), after=_describe(b))
    if a.shape != b.shape or a.dtype != b.dtype:
        kind: Status = "reshaped" if a.shape != b.shape else "retyped"
        return TensorDiff(name, kind, total, total, before=_describe(a), after=_describe(b))
    changed = [index for index in range(total) if a.blocks[index] != b.blocks[index]]
    described = f"{a.dtype} {list(a.shape)}"
    if exact:
        measured = _Measure(a.dtype)
        measured.read(a, b, changed, blocks, name)
        norms = _squared_norm(a, blocks), _squared_norm(b, blocks)
        return measured.result(name, len(changed), total, norms, described)
    if a.dtype not in MERGEABLE:
        return TensorDiff(name, "changed", len(changed), total, before=described, after=described)
    summary = delta_summary(block_records(blocks, a), block_records(blocks, b))
    return TensorDiff(
        name,
        "changed",
        len(changed),
        total,
        relative_l2=summary.relative_l2(),
        cosine=summary.cosine(),
        estimated=True,
        before=described,
        after=described,
    )


class _Measure:
    """Exact figures over the blocks of two tensors that differ, in float64."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.squared = 0.0
        self.max_abs = 0.0
        self.elements = 0

    def read(self, a: Tensor, b: Tensor, changed: Iterable[int], blocks: BlockReader, name: str) -> None:
        for index in changed:
            pair: list[BlockId] = [a.blocks[index], b.blocks[index]]
            with blocks.view(pair, name) as (before, after):
                self._compare(before, after)

    def _compare(self, before: memoryview, after: memoryview) -> None:
        if BITS[self.dtype] % 8:
            return
        old, new = as_bits(before, self.dtype), as_bits(after, self.dtype)
        self.elements += int(np.count_nonzero(old != new))
        if self.dtype in MERGEABLE:
            for start in range(0, old.size, _PIECE):
                self._measure(old[start : start + _PIECE], new[start : start + _PIECE])

    def _measure(self, old: Bits, new: Bits) -> None:
        with np.errstate(invalid="ignore", over="ignore"):
            delta = np.abs(decode(new, self.dtype) - decode(old, self.dtype))
            finite = delta[np.isfinite(delta)]
            self.squared += float(np.dot(finite, finite))
        self.max_abs = max(self.max_abs, float(finite.max(initial=0.0)))

    def result(self, name: str, changed: int, total: int, norms: tuple[float, float], described: str) -> TensorDiff:
        elements = None if BITS[self.dtype] % 8 else self.elements
        if self.dtype not in MERGEABLE:
            return TensorDiff(
                name, "changed", changed, total, elements_changed=elements, before=described, after=described
            )
        a, b = norms
        relative = cosine = None
        # A square may leave the range of float64; then there is no number to give.
        if isfinite(self.squared):
            if a > 0.0 or self.squared == 0.0:
                relative = sqrt(self.squared / a) if a > 0.0 else 0.0
            if a > 0.0 and b > 0.0:
                cosine = (a + b - self.squared) / (2.0 * sqrt(a) * sqrt(b))
        return TensorDiff(
            name,
            "changed",
            changed,
            total,
            relative_l2=relative,
            cosine=None if cosine is None else max(-1.0, min(1.0, cosine)),
            max_abs=self.max_abs,
            elements_changed=elements,
            before=described,
            after=described,
        )


def _squared_norm(tensor: Tensor, blocks: BlockReader) -> float:
    """|x|^2 over finite elements, from the statistics, which hold it exactly; 0 for what has no norm."""
    if tensor.dtype not in MERGEABLE:
        return 0.0
    return float(np.cumsum(block_records(blocks, tensor)["sum_squares"])[-1]) if tensor.blocks else 0.0


def _names(snapshot: Snapshot) -> dict[ObjectId, str]:
    """The first name of each tensor, by id."""
    names: dict[ObjectId, str] = {}
    for name, identity in snapshot.tensors.items():
        names.setdefault(identity, name)
    return names


def _describe(tensor: Tensor | None) -> str | None:
    return None if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


def _blobs(snapshot: Snapshot) -> dict[str, ObjectId]:
    return {file.path: file.content for file in snapshot.files if isinstance(file, BlobFile)}
