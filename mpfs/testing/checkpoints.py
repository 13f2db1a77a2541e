"""Checkpoints for tests: hypothesis strategies for valid ones, and ways to damage a safetensors file.

A checkpoint is a mapping from relative posix paths to contents; `write` puts it into a directory. What the strategies
make is valid and often odd: every dtype, 0-d and empty tensors, names in any script, headers whose keys come in any
order and whose padding is any, side files without content, sub-directories with weights of their own.

    @given(checkpoints())
    def test_it_comes_back(files: dict[str, bytes]) -> None: ...

    @pytest.mark.parametrize("damage", DAMAGES)
    def test_it_is_refused(damage: str) -> None:
        broken = DAMAGES[damage](content)

Needs hypothesis, which MPFS itself does not.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from mpfs.objects.dtypes import BITS, nbytes

COMPONENT = "component"
"""The sub-directory in which some checkpoints have weights of their own."""

_METADATA = "__metadata__"
_SHAPES: tuple[tuple[int, ...], ...] = (
    (),
    (0,),
    (2, 0),
    (1,),
    (2,),
    (4,),
    (3, 8),
    (8, 5, 2),
    (16, 40),
    (1100,),
    (4104,),
)
_WHITE_SPACE = (" ", "\n", "\t", "\r")


@dataclass(frozen=True, slots=True)
class TensorContent:
    """A tensor: its name in the file, dtype, shape and raw bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class Spelling:
    """How a header is written. `order` is a seed that shuffles keys; None leaves them in data order, metadata first."""

    order: int | None = None
    padding: str = ""
    separators: tuple[str, str] = (",", ":")
    ascii: bool = False


def safetensors_bytes(
    tensors: Sequence[TensorContent], metadata: Mapping[str, str] | None = None, spelling: Spelling | None = None
) -> bytes:
    """A safetensors file with these tensors in this order of their data."""
    how = spelling or Spelling()
    table: dict[str, Any] = {} if metadata is None else {_METADATA: dict(metadata)}
    offset = 0
    for tensor in tensors:
        end = offset + len(tensor.data)
        table[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    if how.order is not None:
        table = _reorder(table, tensors, random.Random(how.order))
    text = json.dumps(table, separators=how.separators, ensure_ascii=how.ascii) + how.padding
    return frame(text.encode()) + b"".join(tensor.data for tensor in tensors)


def frame(header: bytes) -> bytes:
    """A header's bytes with its length before them."""
    return len(header).to_bytes(8, "little") + header


def _reorder(table: dict[str, Any], tensors: Sequence[TensorContent], rng: random.Random) -> dict[str, Any]:
    keys = list(table)
    rng.shuffle(keys)
    # Where empty tensors lie at one offset the order of the keys is the order of the data.
    in_order = iter(tensor.name for tensor in tensors)
    keys = [key if key == _METADATA else next(in_order) for key in keys] if _has_empty(tensors) else keys
    return {key: _shuffled(table[key], rng) for key in keys}


def _has_empty(tensors: Sequence[TensorContent]) -> bool:
    return any(not tensor.data for tensor in tensors)


def _shuffled(value: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    keys = list(value)
    rng.shuffle(keys)
    return {key: value[key] for key in keys}


def write(directory: Path, files: Mapping[str, bytes]) -> Path:
    """Put a checkpoint into a directory, made if need be; the directory."""
    for path, content in files.items():
        target = directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    return directory


def read(directory: Path) -> dict[str, bytes]:
    """What is in a directory, as a checkpoint."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def index_bytes(shards: Mapping[str, Sequence[str]]) -> bytes:
    """The index of a sharded checkpoint: the shards' tensors by file name."""
    weight_map = {name: shard for shard, names in shards.items() for name in names}
    return json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}).encode()


# -- strategies -----------------------------------------------------------------------------------------------------


def tensor_names() -> st.SearchStrategy[str]:
    """Names of tensors: what models use, and anything else that JSON can say."""
    usual = st.sampled_from(
        [
            "model.embed_tokens.weight",
            "model.layers.0.mlp.gate_proj.weight",
            "lm_head.weight",
            "h.10.b",
            "重み",
            "a/b",
            "",
        ]
    )
    odd = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
    return (usual | odd).filter(lambda name: name != _METADATA and not name.startswith(f"{COMPONENT}/"))


@st.composite
def tensors(draw: st.DrawFn, name: str | None = None, dtype: str | None = None) -> TensorContent:
    """One tensor with random bits."""
    chosen = dtype if dtype is not None else draw(st.sampled_from(sorted(BITS)))
    shapes = [shape for shape in _SHAPES if BITS[chosen] * prod(shape) % 8 == 0]
    shape = draw(st.sampled_from(shapes))
    size = nbytes(chosen, shape)
    data = random.Random(draw(st.integers(0, 2**32 - 1))).randbytes(size)
    return TensorContent(name if name is not None else draw(tensor_names()), chosen, shape, data)


def tensor_lists(min_size: int = 0, max_size: int = 6) -> st.SearchStrategy[list[TensorContent]]:
    """Tensors of different names."""
    return st.lists(tensors(), min_size=min_size, max_size=max_size, unique_by=lambda tensor: tensor.name)


def spellings() -> st.SearchStrategy[Spelling]:
    """Ways to write a header."""
    return st.builds(
        Spelling,
        order=st.none() | st.integers(0, 1000),
        padding=st.text(st.sampled_from(_WHITE_SPACE), max_size=9),
        separators=st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " :\t")]),
        ascii=st.booleans(),
    )


def metadata() -> st.SearchStrategy[dict[str, str] | None]:
    """What may be under `__metadata__`."""
    text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    return st.none() | st.just({"format": "pt"}) | st.dictionaries(text, text, max_size=4)


def side_files() -> st.SearchStrategy[dict[str, bytes]]:
    """Files that are no weights, some in sub-directories, some empty, some larger than a small block."""
    names = st.sampled_from(
        [
            "config.json",
            "tokenizer.json",
            "README.md",
            ".gitattributes",
            "1_Pooling/config.json",
            "a b/ü/ñ.txt",
            "-x",
            "x\ny",
        ]
    )
    content = st.binary(max_size=60) | st.integers(1, 3).map(lambda blocks: b"line\n" * (1000 * blocks))
    return st.dictionaries(names, content, max_size=5)


@st.composite
def checkpoints(draw: st.DrawFn) -> dict[str, bytes]:
    """A directory in Hugging Face layout."""
    files = draw(side_files())
    content = draw(tensor_lists())
    shards = draw(st.integers(1, min(3, max(1, len(content)))))
    if shards == 1 and draw(st.booleans()):
        files["model.safetensors"] = safetensors_bytes(content, draw(metadata()), draw(spellings()))
    else:
        names = [f"model-{number + 1:05d}-of-{shards:05d}.safetensors" for number in range(shards)]
        parts = {name: content[number::shards] for number, name in enumerate(names)}
        for name, part in parts.items():
            files[name] = safetensors_bytes(part, draw(metadata()), draw(spellings()))
        listed = {name: [tensor.name for tensor in part] for name, part in parts.items()}
        files["model.safetensors.index.json"] = index_bytes(listed)
    if draw(st.integers(0, 3)) == 0:
        files[f"{COMPONENT}/model.safetensors"] = safetensors_bytes(draw(tensor_lists(max_size=3)))
    return files


# -- damage ---------------------------------------------------------------------------------------------------------


def _edited(edit: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    """A damage that changes the header's JSON and leaves the data."""

    def damage(content: bytes) -> bytes:
        end = 8 + int.from_bytes(content[:8], "little")
        table = json.loads(content[8:end])
        edit(table)
        return frame(json.dumps(table).encode()) + content[end:]

    return damage


def _largest(table: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of the largest tensor."""
    entries = [entry for name, entry in table.items() if name != _METADATA]
    found: dict[str, Any] = max(entries, key=lambda entry: entry["data_offsets"][1] - entry["data_offsets"][0])
    return found


def _twice(content: bytes) -> bytes:
    end = 8 + int.from_bytes(content[:8], "little")
    table = json.loads(content[8:end])
    name = next(name for name in table if name != _METADATA)
    text = content[8:end].decode().rstrip()
    return frame(f"{text[:-1]},{json.dumps(name)}:{json.dumps(table[name])}}}".encode()) + content[end:]


DAMAGES: Mapping[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut in the length": lambda content: content[:5],
    "cut in the header": lambda content: content[: 8 + int.from_bytes(content[:8], "little") // 2],
    "cut in the data": lambda content: content[:-1],
    "stray bytes": lambda content: content + b"\0\0\0\0",
    "length too large": lambda content: (2**40).to_bytes(8, "little") + content[8:],
    "length of 2^63": lambda content: (2**63).to_bytes(8, "little") + content[8:],
    "not UTF-8": lambda content: content[:9] + b"\xff" + content[10:],
    "not JSON": lambda content: content[:8] + b"[" + content[9:],
    "a key twice": _twice,
    "unknown dtype": _edited(lambda table: _largest(table).update(dtype="F7")),
    "shape too large": _edited(lambda table: _largest(table).update(shape=[1000, 1000, 1000])),
    "shape overflows": _edited(lambda table: _largest(table).update(shape=[2**62, 4])),
    "negative shape": _edited(lambda table: _largest(table).update(shape=[-1])),
    "offsets beyond the end": _edited(lambda table: _largest(table).update(data_offsets=[0, 2**50])),
    "offsets reversed": _edited(lambda table: _largest(table)["data_offsets"].reverse()),
    "hole": _edited(
        lambda table: _largest(table).update(data_offsets=[x + 8 for x in _largest(table)["data_offsets"]])
    ),
    "no offsets": _edited(lambda table: _largest(table).pop("data_offsets")),
    "metadata of numbers": _edited(lambda table: table.update({_METADATA: {"step": 1}})),
    "git-lfs pointer": lambda content: (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"
    ),
    "web page": lambda content: b"<!DOCTYPE html><html><body>Access denied</body></html>",
    "zip archive": lambda content: b"PK\x03\x04" + content,
}
"""Ways to break a valid safetensors file that holds at least one tensor that is not empty; by what is wrong then.
No reader may take the result for a checkpoint."""
