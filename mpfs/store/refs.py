"""Refs: branches and tags, moved by compare-and-set, and the log of every move."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from mpfs.errors import IntegrityError, NotFoundError, RefConflictError, UsageError
from mpfs.objects import ObjectId
from mpfs.objects.encoding import decode, encode
from mpfs.objects.ids import is_object_id
from mpfs.store.environment import Environment, Transaction
from mpfs.store.seal import seal, unseal

RefKind: TypeAlias = Literal["branch", "tag"]

_KINDS: dict[RefKind, bytes] = {"branch": b"b", "tag": b"t"}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=,-]*(/[A-Za-z0-9_][A-Za-z0-9._=,-]*)*")
_MAX_LENGTH = 200

QUARANTINE = "quarantine/"
"""What the names of the refs begin with that `fsck --repair` gives to broken commits."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A name for a commit."""

    name: str
    kind: RefKind
    commit: ObjectId


@dataclass(frozen=True, slots=True)
class ReflogEntry:
    """One move of a ref: `old` is None when it was made, `new` when it was removed. `time`: seconds since 1970, UTC."""

    name: str
    sequence: int
    old: ObjectId | None
    new: ObjectId | None
    time: int
    author: str
    reason: str


def check_ref_name(name: str) -> str:
    """Return `name` if a ref may be called that.

    Raises:
        UsageError: it may not.
    """
    if not _NAME.fullmatch(name) or ".." in name or name.endswith(".") or len(name) > _MAX_LENGTH:
        raise UsageError(
            f"{name!r} cannot be a ref's name: use letters, digits, '.', '_', '-', '=', ',' and '/' between parts "
            f"(each part starts with a letter, a digit or '_'), at most {_MAX_LENGTH} characters"
        )
    if re.fullmatch(r"[0-9a-f]{64}", name):
        raise UsageError(f"{name!r} cannot be a ref's name: it reads as a commit id")
    return name


def get_ref(txn: Transaction, name: str) -> Ref | None:
    """The ref called `name`, if there is one."""
    key = name.encode("utf-8", "surrogatepass")  # what is not Unicode is the name of no ref
    value = txn.get("refs", key) if 0 < len(key) <= _MAX_LENGTH else None
    return None if value is None else decode_ref(key, bytes(value))


def set_ref(
    txn: Transaction,
    name: str,
    commit: ObjectId | None,
    *,
    expected: ObjectId | None,
    kind: RefKind,
    time: int,
    author: str,
    reason: str,
) -> None:
    """Move a ref from `expected` to `commit` (None: it does not exist) and log it.

    Raises:
        RefConflictError: it is not at `expected`, is of another kind, or its name collides with another ref's.
        NotFoundError: there is no such commit, or no such ref to remove.
    """
    key = check_ref_name(name).encode()
    current = get_ref(txn, name)
    found = None if current is None else current.commit
    if found != expected:
        was = "it does not exist" if found is None else f"it is at {found[:12]}"
        wanted = "not to exist" if expected is None else f"at {expected[:12]}"
        raise RefConflictError(
            f"ref {name} has moved: {was}, expected {wanted}; nothing was changed",
            ref=name,
            found=found,
            expected=expected,
        )
    if current is not None and current.kind != kind:
        raise RefConflictError(f"{name} is a {current.kind}, not a {kind}", ref=name)
    if commit is None and current is None:
        raise NotFoundError(f"no ref {name}", ref=name)
    if commit is not None and not (is_object_id(commit) and txn.contains("commits", bytes.fromhex(commit))):
        raise NotFoundError(f"ref {name} cannot point to {commit}: there is no such commit", id=commit)
    if commit is None:
        txn.delete("refs", key)
    else:
        if current is None:
            _refuse_nesting(txn, name)
        txn.put("refs", key, seal(key, _KINDS[kind] + bytes.fromhex(commit)))
    _append_log(txn, name, ReflogEntry(name, 0, expected, commit, time, author, reason))


def _refuse_nesting(txn: Transaction, name: str) -> None:
    # Refs are directories of the file system views: `a` and `a/b` cannot both be.
    parts = name.split("/")
    for depth in range(1, len(parts)):
        outer = "/".join(parts[:depth])
        if txn.get("refs", outer.encode()) is not None:
            raise RefConflictError(f"ref {name} cannot be: there is a ref {outer}", ref=name)
    for inner, _ in txn.scan("refs", f"{name}/".encode()):
        raise RefConflictError(f"ref {name} cannot be: there is a ref {inner.decode()}", ref=name)


def _append_log(txn: Transaction, name: str, entry: ReflogEntry) -> None:
    prefix = name.encode() + b"\0"
    last = txn.last("reflog", prefix)
    sequence = 0 if last is None else int.from_bytes(last[0][len(prefix) :], "big") + 1
    value = {
        "kind": "reflog",
        "old": entry.old,
        "new": entry.new,
        "time": entry.time,
        "author": entry.author,
        "reason": entry.reason,
    }
    key = prefix + sequence.to_bytes(8, "big")
    txn.put("reflog", key, seal(key, encode(value)))


class RefReader:
    """Reads refs and their log."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def find(self, name: str) -> Ref | None:
        """The ref called `name`, if there is one."""
        with self._environment.read() as txn:
            return get_ref(txn, name)

    def get(self, name: str) -> Ref:
        """The ref called `name`.

        Raises:
            NotFoundError: there is none.
        """
        ref = self.find(name)
        if ref is None:
            raise NotFoundError(f"no ref {name}", ref=name)
        return ref

    def branch_tip(self, name: str) -> ObjectId | None:
        """Where the branch `name` is, None if it is still to be made.

        Raises:
            UsageError: no ref may be called that.
            RefConflictError: it is a tag; or it cannot be made, since it would be a directory of another ref, or in one.
        """
        ref = self.find(check_ref_name(name))
        if ref is None:
            with self._environment.read() as txn:
                _refuse_nesting(txn, name)
        if ref is not None and ref.kind != "branch":
            raise RefConflictError(f"{name} is a tag, and tags do not move; choose a branch", ref=name)
        return None if ref is None else ref.commit

    def all(self) -> list[Ref]:
        """Every ref, by name."""
        with self._environment.read() as txn:
            return [decode_ref(key, bytes(value)) for key, value in txn.scan("refs")]

    def log(self, name: str | None = None) -> list[ReflogEntry]:
        """Every logged move of one ref, or of all, oldest first."""
        with self._environment.read() as txn:
            return list(_scan_log(txn, b"" if name is None else name.encode("utf-8", "surrogatepass") + b"\0"))


def _scan_log(txn: Transaction, prefix: bytes) -> Iterator[ReflogEntry]:
    for key, data in txn.scan("reflog", prefix):
        yield decode_reflog_entry(key, bytes(data))


def decode_reflog_entry(key: bytes, stored: bytes) -> ReflogEntry:
    """Read a reflog record, as it is stored.

    Raises:
        IntegrityError: it is not one.
    """
    data = unseal(key, stored, f"reflog entry {key!r}")
    name, separator, sequence = key.partition(b"\0")
    try:
        value = decode(data, "reflog")
        entry = ReflogEntry(
            check_ref_name(name.decode()),
            int.from_bytes(sequence, "big"),
            value["old"],
            value["new"],
            value["time"],
            value["author"],
            value["reason"],
        )
        commits_are_ids = all(id_ is None or is_object_id(id_) for id_ in (entry.old, entry.new))
    except (ValueError, KeyError, TypeError, UsageError) as error:
        raise IntegrityError(f"reflog entry {key!r} is damaged: {error}") from error
    if not separator or len(sequence) != 8 or not commits_are_ids or not isinstance(entry.time, int):
        raise IntegrityError(f"reflog entry {key!r} is damaged")
    return entry


def decode_ref(key: bytes, stored: bytes) -> Ref:
    """Read a ref's record, as it is stored.

    Raises:
        IntegrityError: it is not one.
    """
    value = unseal(key, stored, f"ref {key.decode(errors='replace')}")
    kinds = {code: kind for kind, code in _KINDS.items()}
    try:
        name = check_ref_name(key.decode())
        kind = kinds[value[:1]]
    except (ValueError, KeyError, UsageError) as error:
        raise IntegrityError(f"ref {key!r} is damaged: {error}") from error
    if len(value) != 33:
        raise IntegrityError(f"ref {name} is damaged: its record has {len(value)} bytes, not 33", ref=name)
    return Ref(name, kind, value[1:].hex())
