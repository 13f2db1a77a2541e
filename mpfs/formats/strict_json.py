"""JSON (RFC 8259) read without its usual leniency: no key twice, no NaN, no nesting that overflows the stack.

A repeated key means that two programs may read two different checkpoints out of one file, so it is refused at
every level, with the path to it. NaN and Infinity are Python's extension of JSON, not JSON.
"""

from __future__ import annotations

import json

from mpfs.formats.messages import show


def loads(text: str) -> object:
    """The value of a JSON text, built of dict, list, str, int, float, bool and None.

    Raises:
        ValueError: the text is not JSON, repeats a key, holds NaN or Infinity, an integer of more than 4,300
            digits, or is nested too deeply. The message says what and where, and names no file.
    """
    try:
        value: object = json.loads(text, object_pairs_hook=_object, parse_int=_number, parse_constant=_refuse_constant)
        repeated = _repeated_in(value)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
    if repeated is not None:
        *outer, key = repeated.path
        where = f" in {'.'.join(show(part) for part in outer)}" if outer else ""
        raise ValueError(f"the key {show(key)} appears more than once{where}")
    return value


class _Repeated:
    """Stands for an object with a repeated key until the whole path to it is known."""

    __slots__ = ("path",)

    def __init__(self, path: tuple[str, ...]) -> None:
        self.path = path


def _object(pairs: list[tuple[str, object]]) -> object:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                return _Repeated((key,))
            seen.add(key)
    for key, value in pairs:
        repeated = _repeated_in(value)
        if repeated is not None:
            return _Repeated((key, *repeated.path))
    return result


def _repeated_in(value: object) -> _Repeated | None:
    if isinstance(value, _Repeated):
        return value
    if isinstance(value, list):
        for item in value:
            repeated = _repeated_in(item)
            if repeated is not None:
                return repeated
    return None


def _number(digits: str) -> int | float:
    """An integer; -0 is the float, as it is for serde_json, which reads safetensors for everyone else."""
    return -0.0 if digits == "-0" else int(digits)


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")
