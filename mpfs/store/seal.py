"""Sealed records: values that nothing else vouches for carry a checksum of their key and their bytes.

Blocks and objects are named by a hash of what they are. A ref's name, a log entry, a statistic or a remembered result
is not; so each is stored with the XXH3-64 of its key, followed by its payload, at its end. Rot in one is then found
when it is read, and is never the input of anything.
"""

from __future__ import annotations

from collections.abc import Mapping

import xxhash

from mpfs.errors import IntegrityError

SEAL_SIZE = 8


def seal(key: bytes, payload: bytes) -> bytes:
    """The value to store: the payload and its checksum."""
    return payload + _checksum(key, payload)


def unseal(key: bytes, value: bytes | memoryview, what: str) -> bytes:
    """The payload of a stored value.

    Raises:
        IntegrityError: key and value do not belong together.
    """
    whole = bytes(value)
    payload = whole[:-SEAL_SIZE]
    if len(whole) < SEAL_SIZE or whole[-SEAL_SIZE:] != _checksum(key, payload):
        raise IntegrityError(f"{what} is damaged: its checksum does not match")
    return payload


def unseal_all(records: Mapping[bytes, bytes]) -> tuple[dict[bytes, bytes], bytes | None]:
    """The payloads of many stored values by key, and the first key whose value does not belong to it, if there is one."""
    checksum = xxhash.xxh3_64_digest
    payloads: dict[bytes, bytes] = {}
    for key, whole in records.items():
        payload = whole[:-SEAL_SIZE]
        if len(whole) < SEAL_SIZE or checksum(key + payload) != whole[-SEAL_SIZE:]:
            return payloads, key
        payloads[key] = payload
    return payloads, None


def is_sealed(key: bytes, value: bytes | memoryview) -> bool:
    """Whether key and value belong together."""
    return bytes(value[-SEAL_SIZE:]) == _checksum(key, bytes(value[:-SEAL_SIZE]))


def _checksum(key: bytes, payload: bytes) -> bytes:
    return xxhash.xxh3_64_digest(key + payload)
