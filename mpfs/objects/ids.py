"""Names of things: block ids and object ids, and how they are computed."""

from __future__ import annotations

import hashlib
import re
from typing import Any, TypeAlias

import xxhash

BlockId: TypeAlias = bytes
"""16 bytes: the big-endian XXH3-128 of a block's raw bytes."""

ObjectId: TypeAlias = str
"""64 lower-case hex digits: the SHA-256 of an object's canonical encoding."""

BLOCK_ID_SIZE = 16

_OBJECT_ID = re.compile(r"[0-9a-f]{64}")


def block_id(data: Any) -> BlockId:
    """The id of a block. It names the raw bytes, whatever codec stores them."""
    return xxhash.xxh3_128_digest(data)


def object_id(encoded: bytes) -> ObjectId:
    """The id of an object, from its canonical encoding."""
    return hashlib.sha256(encoded).hexdigest()


def is_object_id(text: str) -> bool:
    """Whether `text` is a full object id."""
    return _OBJECT_ID.fullmatch(text) is not None
