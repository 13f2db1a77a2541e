"""The pair table: how two tensors of equal dtype and shape differ, exactly.

Each pair has up to two sealed records. One holds the squared distance of each two blocks that line up (little-endian
f64), the other how often the difference of two elements has which magnitude (`mpfs.store.histogram`); it is empty where
that would take too much room. Neither knows an order, so keys begin with the two tensors' ids, the smaller one first.
Records are made by imports with a base, by merges, and by `mpfs analyze`, and only ever make plans better: a damaged one
is as good as none, and gc drops those whose tensors go.

So a plan depends on what the table holds. Its *states*, one for the distances and one for the histograms, are random numbers
that change in every transaction that changes records of that kind: what was planned in the same states is what would
be planned now. One that is lost or damaged is as good as changed.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Final, TypeAlias

from mpfs.deferred import numpy as np
from mpfs.objects import ObjectId, Tensor
from mpfs.objects.dtypes import MERGEABLE
from mpfs.store.environment import Environment, Transaction
from mpfs.store.histogram import unpack_histogram
from mpfs.store.locks import repository_lock
from mpfs.store.seal import SEAL_SIZE, is_sealed, seal, unseal

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mpfs.store.store import Store

Pair: TypeAlias = tuple[ObjectId, ObjectId]

_BATCH: Final = 4096
"""Records that are read in one transaction."""
_ID_SIZE: Final = 32
HISTOGRAM: Final = b"h"
"""What a histogram's key has after the ids; that of the distances has nothing."""


_STATES: Final = {b"": b"pairs_distances", HISTOGRAM: b"pairs_histograms"}
"""Where states are kept in `meta`, by what the keys of the records end with."""


@dataclass(frozen=True, slots=True)
class PairStates:
    """The states of the pair table."""

    distances: str
    histograms: str


@dataclass(frozen=True, slots=True)
class PairRecord:
    """What is known of a pair: `distances`, 8 bytes a block, and the packed `histogram`; None for what is not."""

    distances: bytes | None = None
    histogram: bytes | None = None


class PairTable:
    """Looks records up."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def get(self, a: ObjectId, b: ObjectId) -> bytes | None:
        """The squared distances of the blocks of two tensors, 8 bytes each; None if they are not known."""
        return self._payload(_key(a, b))

    def get_many(self, pairs: Iterable[Pair]) -> dict[Pair, bytes]:
        """The same for many pairs; those of which nothing is known are left out."""
        keys = {pair: _key(*pair) for pair in pairs}
        found: dict[Pair, bytes] = {}
        wanted = iter(keys.items())
        while batch := list(islice(wanted, _BATCH)):
            with self._environment.read() as txn:
                values = txn.get_many("pairs", [key for _, key in batch])
            for pair, key in batch if values else ():
                value = values.get(key)
                if value is not None and is_sealed(key, value):
                    found[pair] = value[:-SEAL_SIZE]
        return found

    def has_histogram(self, a: ObjectId, b: ObjectId) -> bool:
        """Whether the magnitudes were counted, be it that the result was not worth keeping."""
        return self._payload(_key(a, b) + HISTOGRAM) is not None

    def histogram(self, a: ObjectId, b: ObjectId, numel: int) -> NDArray[np.int64] | None:
        """How often magnitudes occur among the differences of two tensors of so many elements, shape (BINS,); None if
        that is not known."""
        payload = self._payload(_key(a, b) + HISTOGRAM)
        return unpack_histogram(payload, numel) if payload else None

    def _payload(self, key: bytes) -> bytes | None:
        with self._environment.read() as txn:
            value = txn.get("pairs", key)
            return unseal(key, value, "pair") if value is not None and is_sealed(key, value) else None


def put_pairs(store: Store, records: Mapping[Pair, PairRecord]) -> None:
    """Store records; those of tensors that are no longer there are left out.

    Raises:
        NoSpaceError: the disk or the map is full.
    """
    if records:
        needed = pairs_size(records)
        with repository_lock(store.path / "lock", exclusive=False), store.environment.write(needed) as txn:
            put_pair_records(txn, records)


def pairs_size(records: Mapping[Pair, PairRecord]) -> int:
    """About how many bytes records take in the store."""
    payloads = [len(part or b"") for item in records.values() for part in (item.distances, item.histogram)]
    # Large values have pages of their own, small ones share them.
    return sum(size + (4096 if size > 1024 else 256) for size in payloads)


def put_pair_records(txn: Transaction, records: Mapping[Pair, PairRecord]) -> None:
    """The same within a transaction, under the caller's lock."""
    changed: set[bytes] = set()
    for (a, b), record in records.items():
        if txn.contains("tensors", bytes.fromhex(a)) and txn.contains("tensors", bytes.fromhex(b)):
            for suffix, payload in ((b"", record.distances), (HISTOGRAM, record.histogram)):
                key = _key(a, b) + suffix
                value = None if payload is None else seal(key, payload)
                if value is not None and value != bytes(txn.get("pairs", key) or b""):
                    txn.put("pairs", key, value)
                    changed.add(suffix)
    _renew(txn, changed)


def delete_pairs(txn: Transaction, keys: Iterable[bytes]) -> None:
    """Remove records by their keys, within a transaction."""
    _renew(txn, {key[2 * _ID_SIZE :] for key in keys if txn.delete("pairs", key)})


def new_states() -> dict[str, str]:
    """States for the `meta` database of a new repository."""
    return {key.decode(): uuid.uuid4().hex for key in _STATES.values()}


def pair_states(store: Store) -> PairStates | None:
    """The states of the pair table; None where they are not told.

    Who plans asks before looking anything up in the table: then a plan is never taken for one of a later state.
    """
    with store.environment.read() as txn:
        found = txn.get_many("meta", list(_STATES.values()))
    states = [found[key].decode(errors="replace") for key in _STATES.values() if key in found]
    return PairStates(*states) if len(states) == len(_STATES) else None


def begin_pair_states(store: Store) -> PairStates:
    """The states of the pair table, told from now on.

    Raises:
        NoSpaceError: the disk or the map is full.
    """
    known = pair_states(store)
    while known is None:
        with repository_lock(store.path / "lock", exclusive=False), store.environment.write() as txn:
            _renew(txn, _STATES)
        known = pair_states(store)
    return known


def _renew(txn: Transaction, suffixes: Iterable[bytes]) -> None:
    """Give the table new states, for records whose keys end so (by a damaged one, both)."""
    for suffix in suffixes:
        for key in [_STATES[suffix]] if suffix in _STATES else _STATES.values():
            txn.put("meta", key, uuid.uuid4().hex.encode())


def pair_problem(txn: Transaction, key: bytes, value: memoryview) -> str | None:
    """What is wrong with an entry, judged by itself and by the tensors that it names; None if nothing is."""
    if not is_sealed(key, value):
        return "it does not match its checksum"
    names = pair_of(key)
    if names is None:
        return "its key names no pair"
    if not all(txn.contains("tensors", bytes.fromhex(name)) for name in names):
        return "a tensor of it is not there"
    tensors = [_tensor(txn, name) for name in names]
    if tensors[0] is None or tensors[1] is None:
        return None  # damaged, and reported as that
    a, b = tensors[0], tensors[1]
    if (a.dtype, a.shape, a.block_size) != (b.dtype, b.shape, b.block_size) or a.dtype not in MERGEABLE:
        return "its tensors cannot be compared"
    payload = unseal(key, value, "pair")
    if key.endswith(HISTOGRAM, 2 * _ID_SIZE):
        sound = not payload or unpack_histogram(payload, a.numel) is not None
        return None if sound else "it is no histogram of so many elements"
    sound = len(payload) == 8 * len(a.blocks) and bool((np.frombuffer(payload, "<f8") >= 0.0).all())
    return None if sound else "it is not a distance for each block"


def pair_of(key: bytes) -> Pair | None:
    """The two tensors that a key names, the smaller id first; None if it is no key."""
    first, second, suffix = key[:_ID_SIZE], key[_ID_SIZE : 2 * _ID_SIZE], key[2 * _ID_SIZE :]
    sound = suffix in (b"", HISTOGRAM) and len(second) == _ID_SIZE and first < second
    return (first.hex(), second.hex()) if sound else None


def is_recorded(record: PairRecord, key: bytes, payload: bytes, numel: int) -> bool:
    """Whether a payload stored under one of a pair's keys is what the pair's record says."""
    wanted = record.histogram if key.endswith(HISTOGRAM, 2 * _ID_SIZE) else record.distances
    if wanted == payload:
        return True
    if wanted is None or not key.endswith(HISTOGRAM, 2 * _ID_SIZE):
        return False
    # Another zlib may have packed the same counts otherwise.
    counts = [unpack_histogram(packed, numel) for packed in (wanted, payload)]
    return counts[0] is not None and counts[1] is not None and bool((counts[0] == counts[1]).all())


def _tensor(txn: Transaction, name: ObjectId) -> Tensor | None:
    data = txn.get("tensors", bytes.fromhex(name))
    try:
        return None if data is None else Tensor.decode(bytes(data))
    except ValueError:
        return None


def _key(a: ObjectId, b: ObjectId) -> bytes:
    return bytes.fromhex(a + b if a < b else b + a)
