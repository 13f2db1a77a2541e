"""The canonical encoding of objects: JSON with one spelling per value.

Keys sorted, no white space, UTF-8 without escapes that JSON does not demand, no NaN or infinity; floats in the
shortest form that reads back as the same double (what Python's `repr` and JavaScript's `JSON.stringify` agree on
for the values that occur here). Equal values therefore have equal bytes, on every machine.
"""

from __future__ import annotations

import json
from typing import Any, TypeAlias, cast

Json: TypeAlias = "dict[str, Any]"

# Made once: json.dumps makes one for each call, and an import makes 60,000 calls for 20,000 tensors.
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def encode(value: Json) -> bytes:
    """The canonical bytes of a JSON object.

    Raises:
        ValueError: the value holds NaN or an infinity.
    """
    return _ENCODER.encode(value).encode("utf-8")


def decode(data: bytes, kind: str) -> Json:
    """Read an object back and check that it is of the expected `kind`.

    Raises:
        ValueError: the bytes are not a JSON object of that kind.
    """
    try:
        value = json.loads(str(data, "utf-8"))  # json would try to tell other encodings apart
    except (UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"not a JSON object but {type(value).__name__}")
    if value.get("kind") != kind:
        raise ValueError(f"expected a {kind}, found {value.get('kind')!r}")
    return cast(Json, value)
