"""The files of a merged model: weights as safetensors, everything else from the template model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from mpfs.formats import safetensors
from mpfs.objects import BlobFile, File, ObjectId, SafetensorsFile, Snapshot, Tensor, object_id
from mpfs.objects.dtypes import MERGEABLE
from mpfs.stats.staging import stage_bytes
from mpfs.store import BlockReader, ObjectReader, Writer
from mpfs.vfs.layout import DEFAULT_METADATA, INDEX_PATH, SynthesisedFile, synthesise_files

_CONFIG = "config.json"
_CONFIG_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


@dataclass(frozen=True, slots=True)
class Assembled:
    """A merged snapshot, and every tensor object that it needs."""

    snapshot: Snapshot
    tensors: tuple[Tensor, ...]


def assemble(
    template: Snapshot,
    merged: Mapping[str, Tensor],
    out_dtype: str | None,
    *,
    objects: ObjectReader,
    blocks: BlockReader,
    writer: Writer,
    block_size: int,
) -> Assembled:
    """Describe a merged model as files, staging the new ones.

    Args:
        template: the snapshot whose side files are taken over, and whose sub-directories' weights keep their files.
        merged: the output tensors by name in the snapshot, in order.
        out_dtype: the dtype that the recipe asked for, None if it did not. config.json is made to agree with it, or with
            the tensors.
        objects, blocks: for reading the template's side files.
        writer: takes the blocks of new files.
        block_size: the repository's, in bytes.
    """
    identities = {name: object_id(tensor.encode()) for name, tensor in merged.items()}
    needed: dict[Tensor, None] = dict.fromkeys(merged.values())

    def store(content: bytes) -> ObjectId:
        tensor = stage_bytes(writer, content, block_size)
        needed[tensor] = None
        return object_id(tensor.encode())

    def weights(planned: SynthesisedFile, prefix: str) -> SafetensorsFile:
        entries = tuple((name, identities[prefix + name]) for name in planned.tensors)
        header = store(planned.header)
        return SafetensorsFile(planned.path, planned.size, header, prefix, entries)

    files: list[File] = []
    elsewhere: set[str] = set()
    for file in template.safetensors_files():
        if file.prefix:
            names = [name for name, _ in file.tensors]
            elsewhere.update(file.prefix + name for name in names)
            described = [(name, merged[file.prefix + name].dtype, merged[file.prefix + name].shape) for name in names]
            raw, header = safetensors.build_header(described, DEFAULT_METADATA)
            order = tuple(entry.name for entry in header.entries)
            planned_file = SynthesisedFile(file.path, raw, order, len(raw) + header.data_size)
            files.append(weights(planned_file, file.prefix))
    planned = synthesise_files([(name, tensor) for name, tensor in merged.items() if name not in elsewhere])
    files.extend(weights(planned_file, "") for planned_file in planned.files)
    if planned.index is not None:
        files.append(BlobFile(INDEX_PATH, len(planned.index), store(planned.index)))
    taken = {file.path for file in files}
    for side in template.files:
        if not isinstance(side, BlobFile) or side.path in taken or _is_root_index(side.path):
            continue
        content = objects.get(Tensor, side.content)
        dtype = out_dtype or _common_dtype(merged)
        if side.path == _CONFIG and dtype is not None:
            old = b"".join(blocks.read(block, side.path) for block in content.blocks)
            new = config_with_dtype(old, dtype, add=out_dtype is not None)
            if new != old:
                files.append(BlobFile(side.path, len(new), store(new)))
                continue
        needed[content] = None
        files.append(side)
    return Assembled(Snapshot(tuple(sorted(files, key=lambda file: file.path))), tuple(needed))


def config_with_dtype(config: bytes, dtype: str, *, add: bool = True) -> bytes:
    """A config.json whose dtype field says `dtype`; byte for byte the same if it does already, or is no JSON object.

    transformers before 5 calls the field torch_dtype, later ones dtype: whichever is there is set. `add` says whether
    one that is not there is added.
    """
    try:
        value = json.loads(config)
    except (ValueError, RecursionError):
        return config
    if not isinstance(value, dict):
        return config
    names = [name for name in ("dtype", "torch_dtype") if name in value] or ["torch_dtype"] * add
    if all(value.get(name) == _CONFIG_NAMES[dtype] for name in names):
        return config
    for name in names:
        value[name] = _CONFIG_NAMES[dtype]
    return json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"


def _common_dtype(merged: Mapping[str, Tensor]) -> str | None:
    """The one dtype of all floating-point tensors, if there is one: a promotion has to show in config.json, too."""
    dtypes = {tensor.dtype for tensor in merged.values() if tensor.dtype in MERGEABLE}
    return next(iter(dtypes)) if len(dtypes) == 1 else None


def _is_root_index(path: str) -> bool:
    return "/" not in path and path.endswith((".safetensors.index.json", ".bin.index.json"))
