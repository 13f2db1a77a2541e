"""Objects: tensors, snapshots, commits, plans and runs, stored under the SHA-256 of their canonical encoding."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, Final, Protocol, TypeVar

from mpfs.errors import IntegrityError, NotFoundError
from mpfs.objects import Commit, ObjectId, Plan, Run, Snapshot, Tensor, object_id
from mpfs.objects.ids import is_object_id
from mpfs.store.environment import Environment, Transaction
from mpfs.store.validate import validate


class StoredObject(Protocol):
    """What can be stored: anything with a canonical encoding."""

    def encode(self) -> bytes:
        """The canonical bytes."""


_T = TypeVar("_T", Commit, Plan, Run, Snapshot, Tensor)

_BATCH: Final = 1024
"""Objects that are read in one transaction."""

DATABASE_OF: dict[type, str] = {
    Tensor: "tensors",
    Snapshot: "snapshots",
    Commit: "commits",
    Plan: "plans",
    Run: "runs",
}


def put_object(txn: Transaction, item: StoredObject) -> ObjectId:
    """Store an object; its id."""
    data = item.encode()
    identity = object_id(data)
    txn.put(DATABASE_OF[type(item)], bytes.fromhex(identity), data)
    return identity


class ObjectReader:
    """Reads objects by id and verifies each against its id."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._lock = threading.Lock()
        self._remembering = 0
        self._known: dict[ObjectId, Any] = {}

    @contextmanager
    def remembering(self) -> Iterator[None]:
        """Within the `with` block, by whichever thread, tensors are read once: planning and running a merge need the same."""
        with self._lock:
            self._remembering += 1
        try:
            yield
        finally:
            with self._lock:
                self._remembering -= 1
                if not self._remembering:
                    self._known = {}

    def get(self, kind: type[_T], identity: ObjectId) -> _T:
        """The object of this kind with this id.

        Raises:
            NotFoundError: there is none.
            IntegrityError: its bytes are not what its id says.
        """
        return self.get_many(kind, [identity])[identity]

    def get_many(self, kind: type[_T], identities: Iterable[ObjectId]) -> dict[ObjectId, _T]:
        """The objects of this kind with these ids, by id: much faster than one by one.

        Raises:
            As `get`.
        """
        known = self._known if self._remembering and kind is Tensor else {}
        asked = list(identities)
        found: dict[ObjectId, _T] = {identity: known[identity] for identity in asked if identity in known}
        keys = {
            identity: bytes.fromhex(identity) if is_object_id(identity) else b""
            for identity in asked
            if identity not in found
        }
        wanted = iter(keys.items())
        while batch := list(islice(wanted, _BATCH)):
            with self._environment.read() as txn:
                values = txn.get_many(DATABASE_OF[kind], [key for _, key in batch if key])
            for identity, key in batch:
                data = values.get(key)
                if data is None:
                    raise NotFoundError(f"no {kind.__name__.lower()} {identity}", id=identity)
                found[identity] = known[identity] = decode_object(kind, identity, data)
        return found

    def require(self, kind: type[_T], identities: Iterable[ObjectId]) -> None:
        """Whether objects of this kind with these ids are there; none is read.

        Raises:
            NotFoundError: one is not.
        """
        with self._environment.read() as txn:
            for identity in identities:
                if not (is_object_id(identity) and txn.contains(DATABASE_OF[kind], bytes.fromhex(identity))):
                    raise NotFoundError(f"no {kind.__name__.lower()} {identity}", id=identity)

    def ids(self, kind: type, prefix: str = "") -> list[ObjectId]:
        """The ids of all objects of a kind that start with the hex digits `prefix`."""
        if not all(character in "0123456789abcdef" for character in prefix):
            return []
        even = prefix[: len(prefix) // 2 * 2]
        with self._environment.read() as txn:
            found = [key.hex() for key, _ in txn.scan(DATABASE_OF[kind], bytes.fromhex(even), values=False)]
        return [identity for identity in found if identity.startswith(prefix)]

    def run_of(self, commit: ObjectId) -> Run | None:
        """The record of the run that made a commit, if one did."""
        with self._environment.read() as txn:
            identity = txn.get("run_index", bytes.fromhex(commit))
            key = None if identity is None else bytes(identity).hex()
        return None if key is None else self.get(Run, key)


def decode_object(kind: type[_T], identity: ObjectId, data: bytes) -> _T:
    """Decode and verify.

    Raises:
        IntegrityError: the bytes are not what the id says, or not an object of this kind.
    """
    name = kind.__name__.lower()
    if object_id(data) != identity:
        raise IntegrityError(f"{name} {identity} is damaged: its bytes do not match its id", id=identity)
    try:
        item = kind.decode(data)
        validate(item)
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError) as error:
        raise IntegrityError(f"{name} {identity} is malformed: {error}", id=identity) from error
    return item
