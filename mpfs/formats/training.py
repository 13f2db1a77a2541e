"""What a training checkpoint holds besides the model: its tensors by their path, and everything else as JSON.

The tree is that of the whole file, so that the object which was saved can be built again (`rebuild`). JSON stands for
itself: null, booleans, numbers, texts, lists, and objects whose keys are texts. What JSON has not is an object with the key
`$`, which says what it is:

- `{"$": "tensor", "name": N}` and `{"$": "model", "name": N}`: a tensor of the training state, or of the model;
- `{"$": "tuple", "items": […]}`, also `set` and `torch.Size`; `{"$": "dict", "items": [[key, value], …]}`;
- `{"$": "float", "value": "nan"}`, also `inf` and `-inf`; `{"$": "complex", "value": [re, im]}`; `{"$": "bytes", "value": HEX}`;
- `{"$": "torch.dtype", "value": "float32"}`, `{"$": "torch.device", "value": "cuda:0"}`;
- `{"$": "left out", "type": T}`: an object of another type, which is lost.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mpfs.errors import FormatError
from mpfs.formats import strict_json

if TYPE_CHECKING:
    import torch

DIRECTORY = "training_state/"
"""Where it is in a snapshot, and what stands before its tensors' names."""

TENSORS_PATH = DIRECTORY + "tensors.safetensors"
VALUES_PATH = DIRECTORY + "values.json"

MAX_VALUES = 1_000_000
"""The most values that are kept. A list that holds a list twice, that holds a list twice, … has no end."""

_MAX_DEPTH = 100
_TAG = "$"


@dataclass(slots=True)
class TrainingState:
    """What is beside the model. `tensors` are by dotted path, in the file's order; `tree` is the whole file's, as JSON's
    types; `left_out` are the paths of what could not be kept."""

    tree: Any = None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def values(self, names: Mapping[str, str]) -> bytes:
        """The tree as a JSON file. `names` are what the model's tensors are called in the snapshot, by those in the file."""
        return json.dumps(_with_names(self.tree, names), indent=1, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def take_apart(root: object, model: Mapping[object, object]) -> TrainingState:
    """Take a training checkpoint apart.

    Args:
        root: what torch.load made of it.
        model: the mapping in it that is the model, whose tensors are left where they are.

    Raises:
        FormatError: it holds itself, or more than MAX_VALUES values. The message names no file.
    """
    work = _Work(model)
    work.state.tree = work.taken(root, ())
    return work.state


class _Work:
    def __init__(self, model: Mapping[object, object]) -> None:
        self.state = TrainingState()
        self._model = model
        self._seen = 0
        self._open: set[int] = set()

    def taken(self, value: object, path: tuple[str, ...]) -> Any:
        """A value as JSON."""
        self._seen += 1
        if self._seen > MAX_VALUES:
            raise FormatError(f"it holds more than {MAX_VALUES:,} values besides tensors")
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {_TAG: "float", "value": str(value)}
        if isinstance(value, complex):
            return {_TAG: "complex", "value": [str(value.real), str(value.imag)]}
        if isinstance(value, bytes | bytearray):
            return {_TAG: "bytes", "value": value.hex()}
        if isinstance(value, Mapping | list | tuple | AbstractSet):
            return self._container(value, path)
        return self._torch(value, path)

    def _container(self, value: Any, path: tuple[str, ...]) -> Any:
        if id(value) in self._open or len(path) > _MAX_DEPTH:
            raise FormatError(f"{'.'.join(path)} holds itself, or is more than {_MAX_DEPTH} deep")
        self._open.add(id(value))
        try:
            if isinstance(value, Mapping):
                return self._mapping(value, path)
            items = [self.taken(item, (*path, str(index))) for index, item in enumerate(value)]
            if isinstance(value, list):
                return items
            kind = "torch.Size" if type(value).__name__ == "Size" else "tuple" if isinstance(value, tuple) else "set"
            return {_TAG: kind, "items": items}
        finally:
            self._open.discard(id(value))

    def _mapping(self, value: Mapping[Any, Any], path: tuple[str, ...]) -> Any:
        def item_of(key: object, item: object) -> Any:
            if value is self._model and isinstance(key, str) and _is_tensor(item):
                return {_TAG: "model", "name": key}
            return self.taken(item, (*path, str(key)))

        pairs = [(key, item_of(key, item)) for key, item in value.items()]
        if all(isinstance(key, str) for key in value) and _TAG not in value:
            return dict(pairs)
        return {_TAG: "dict", "items": [[self.taken(key, (*path, "key")), item] for key, item in pairs]}

    def _torch(self, value: object, path: tuple[str, ...]) -> Any:
        import torch

        if isinstance(value, torch.Tensor):
            name = plain = ".".join(path) or "tensor"
            number = 1
            while name in self.state.tensors:
                number += 1
                name = f"{plain}~{number}"
            self.state.tensors[name] = value.detach()
            return {_TAG: "tensor", "name": name}
        if isinstance(value, torch.dtype):
            return {_TAG: "torch.dtype", "value": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {_TAG: "torch.device", "value": str(value)}
        self.state.left_out.append(".".join(path))
        return {_TAG: "left out", "type": type(value).__qualname__}


def rebuild(values: bytes, tensor: Callable[[str], Any]) -> Any:
    """The object that was saved, from its tree. What was left out is None.

    Args:
        values: the JSON file.
        tensor: gives a tensor by its name in the snapshot.

    Raises:
        FormatError: it is no such file.
    """
    try:
        return _rebuilt(strict_json.loads(values.decode("utf-8")), tensor)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"{VALUES_PATH} is none that MPFS wrote: {error}", file=VALUES_PATH) from error


def _rebuilt(value: Any, tensor: Callable[[str], Any]) -> Any:
    if isinstance(value, list):
        return [_rebuilt(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: _rebuilt(item, tensor) for key, item in value.items()}
    return _MAKERS[value[_TAG]](value, tensor)


def _items(value: Any, tensor: Callable[[str], Any]) -> list[Any]:
    return [_rebuilt(item, tensor) for item in value["items"]]


def _of_torch(value: Any, tensor: Callable[[str], Any]) -> Any:
    import torch

    kind, text = value[_TAG], value["value"]
    if kind == "torch.device":
        return torch.device(text)
    found = getattr(torch, text)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{text} is no dtype")
    return found


def _size(value: Any, tensor: Callable[[str], Any]) -> Any:
    import torch

    return torch.Size(value["items"])


_MAKERS: Mapping[str, Callable[[Any, Callable[[str], Any]], Any]] = {
    "tensor": lambda value, tensor: tensor(DIRECTORY + value["name"]),
    "model": lambda value, tensor: tensor(value["name"]),
    "tuple": lambda value, tensor: tuple(_items(value, tensor)),
    "set": lambda value, tensor: set(_items(value, tensor)),
    "dict": lambda value, tensor: {_rebuilt(key, tensor): _rebuilt(item, tensor) for key, item in value["items"]},
    "float": lambda value, tensor: float(value["value"]),
    "complex": lambda value, tensor: complex(*map(float, value["value"])),
    "bytes": lambda value, tensor: bytes.fromhex(value["value"]),
    "torch.Size": _size,
    "torch.dtype": _of_torch,
    "torch.device": _of_torch,
    "left out": lambda value, tensor: None,
}


def _with_names(value: Any, names: Mapping[str, str]) -> Any:
    """A tree whose model's tensors are called as in the snapshot."""
    if isinstance(value, list):
        return [_with_names(item, names) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get(_TAG) == "model":
        return {_TAG: "model", "name": names.get(value["name"], value["name"])}
    return {key: _with_names(item, names) for key, item in value.items()}


def _is_tensor(value: object) -> bool:
    import torch

    return isinstance(value, torch.Tensor)
