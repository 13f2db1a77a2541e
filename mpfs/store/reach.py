"""Who needs an object: the way up from blocks, tensors, snapshots and commits to the refs. For fsck's messages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from typing import TypeVar

from mpfs.errors import IntegrityError
from mpfs.objects import Commit, Plan, Run, Snapshot, Tensor
from mpfs.objects.ids import BLOCK_ID_SIZE
from mpfs.store.objects import DATABASE_OF, decode_object
from mpfs.store.refs import decode_ref, decode_reflog_entry
from mpfs.store.store import Store

_BATCH_OBJECTS = 64
_MAX_EXPLAINED = 10_000
_MAX_NAMED = 3


_Object = TypeVar("_Object", Commit, Plan, Run, Snapshot, Tensor)


class Reach:
    """Explains up to 10,000 objects, given as hex ids; other names are left alone. Reads nothing for none."""

    def __init__(self, store: Store, names: Iterable[str]) -> None:
        self._store = store
        self._explained = dict.fromkeys(list(filter(_is_hex, names))[:_MAX_EXPLAINED])
        self._blocks = {bytes.fromhex(name) for name in self._explained if len(name) == 2 * BLOCK_ID_SIZE}
        # Edges from what is referred to, to what refers to it. A snapshot's edges carry the tensor's name there.
        self._up: defaultdict[str, set[str]] = defaultdict(set)
        self._labels: dict[str, str] = {}
        self._affected: set[str] = set()
        self._tensor_names: dict[str, str] = {}
        if self._explained:
            self._read_objects(Tensor)
            # Of all tensors only those are of interest that are broken or hold a broken block.
            self._affected = self._explained.keys() | set().union(*self._up.values())
            self._read_objects(Snapshot)
            self._read_objects(Commit)
            self._read_objects(Plan)
            self._read_objects(Run)
            self._read_run_index()
            self._read_refs()

    def explain(self, name: str, detail: str) -> str:
        """`detail`, followed by the refs, snapshots and tensors that need the object called `name`."""
        if name not in self._explained:
            return detail
        reached: dict[str, None] = {}
        front = [name]
        while front:
            following = sorted(set().union(*(self._up[item] for item in front)) - reached.keys())
            reached.update(dict.fromkeys(following))
            front = following
        found: defaultdict[str, list[str]] = defaultdict(list)
        for item in [name, *reached]:
            kind, _, text = self._labels.get(item, "").partition(" ")
            if kind == "tensor":
                text = f"{self._tensor_names[item]} ({item[:12]})" if item in self._tensor_names else item[:12]
            if kind and (item != name or kind == "ref"):
                found[kind].append(text)
        if not found["ref"]:
            return f"{detail}; no ref reaches it"
        parts = [f"{kind} {_listed(found[kind])}" for kind in ("tensor", "snapshot", "ref") if found[kind]]
        return f"{detail}; affected: " + ", ".join(parts)

    def _read_objects(self, kind: type[_Object]) -> None:
        for _, batch in self._store.environment.batches(DATABASE_OF[kind], _BATCH_OBJECTS):
            for key, value in batch:
                identity = key.hex()
                self._labels[identity] = f"{kind.__name__.lower()} {identity[:12]}"
                with suppress(IntegrityError):
                    self._read_object(identity, decode_object(kind, identity, bytes(value)))

    def _read_object(self, identity: str, item: Tensor | Snapshot | Commit | Plan | Run) -> None:
        if isinstance(item, Tensor):
            for block in self._blocks.intersection(item.blocks):
                self._up[block.hex()].add(identity)
        elif isinstance(item, Snapshot):
            names = [(tensor, name) for name, tensor in item.tensors.items()]
            names += [(part, file.path) for file in item.files for part in file.references()]
            for tensor, name in names:
                if tensor in self._affected:
                    self._tensor_names.setdefault(tensor, name)
                    self._up[tensor].add(identity)
        elif isinstance(item, Commit):
            plan = () if item.plan is None else (item.plan,)
            for needed in (item.snapshot, *item.parents, *(one.commit for one in item.inputs), *plan):
                self._up[needed].add(identity)

    def _read_run_index(self) -> None:
        for _, batch in self._store.environment.batches("run_index"):
            for key, value in batch:
                self._up[bytes(value).hex()].add(key.hex())

    def _read_refs(self) -> None:
        for _, batch in self._store.environment.batches("refs"):
            for key, value in batch:
                try:
                    ref = decode_ref(key, bytes(value))
                except IntegrityError:
                    continue
                self._add_ref(ref.commit, ref.name)
        for _, batch in self._store.environment.batches("reflog"):
            for key, value in batch:
                try:
                    entry = decode_reflog_entry(key, bytes(value))
                except IntegrityError:
                    continue
                for commit in (entry.old, entry.new):
                    if commit is not None:
                        self._add_ref(commit, f"{entry.name} (its log)")

    def _add_ref(self, commit: str, name: str) -> None:
        self._up[commit].add(f"ref:{name}")
        self._labels[f"ref:{name}"] = f"ref {name}"


def _is_hex(name: str) -> bool:
    return len(name) in (2 * BLOCK_ID_SIZE, 64) and all(character in "0123456789abcdef" for character in name)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more
