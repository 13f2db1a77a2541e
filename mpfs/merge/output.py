"""The files of a merged model: weights as safetensors, or in the template's own format where its header stays true;
everything else from the template model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mpfs.formats import safetensors
from mpfs.formats.training import DIRECTORY as TRAINING_STATE
from mpfs.merge.architecture import is_embedding
from mpfs.merge.config import config_with, parse_config, set_dtype, set_layers, set_tied, set_vocabulary
from mpfs.objects import BlobFile, File, ObjectId, PartsFile, SafetensorsFile, Snapshot, Tensor, object_id
from mpfs.objects.dtypes import MERGEABLE
from mpfs.stats.staging import stage_bytes
from mpfs.store import BlockReader, ObjectReader, Writer
from mpfs.vfs.layout import DEFAULT_METADATA, INDEX_PATH, SynthesisedFile, synthesise_files

_CONFIG = "config.json"


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
    layers: Sequence[int] | None = None,
    replaced: Mapping[str, bytes | None] | None = None,
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
        layers: which layer of its inputs each layer of the output was; None if as it is.
        replaced: contents of side files by path, in the place of the template's or besides them; None: there is none.
        objects, blocks: for reading the template's side files.
        writer: takes the blocks of new files.
        block_size: the repository's, in bytes.
    """
    template = template.outside(TRAINING_STATE)
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
    complete = merged.keys() == template.tensors.keys()
    for file in template.tensor_files():
        remade = _remade(file, merged, identities, objects) if complete and isinstance(file, PartsFile) else None
        if remade is not None:
            elsewhere.update(remade.prefix + name for name, _ in remade.tensors)
            between = [remade.header, *(tensor for name, tensor in remade.parts if name is None)]
            needed |= dict.fromkeys(objects.get(Tensor, identity) for identity in between)
            files.append(remade)
        elif file.prefix:
            names = [name for name, _ in file.tensors]
            elsewhere.update(file.prefix + name for name in names)
            described = [(name, merged[file.prefix + name].dtype, merged[file.prefix + name].shape) for name in names]
            raw, header = safetensors.build_header(described, DEFAULT_METADATA)
            order = tuple(entry.name for entry in header.entries)
            path = file.path if isinstance(file, SafetensorsFile) else f"{file.path}.safetensors"
            planned_file = SynthesisedFile(path, raw, order, len(raw) + header.data_size)
            files.append(weights(planned_file, file.prefix))
    left = [(name, tensor) for name, tensor in merged.items() if name not in elsewhere]
    planned = synthesise_files(left)
    if left or not files:
        files.extend(weights(planned_file, "") for planned_file in planned.files)
    if planned.index is not None:
        files.append(BlobFile(INDEX_PATH, len(planned.index), store(planned.index)))
    taken = {file.path for file in files}
    changed = dict(replaced or {})

    def true_config(content: bytes) -> bytes:
        return _true_config(content, template, merged, identities, out_dtype, layers, objects)

    for path, new in changed.items():
        if new is not None and path not in taken:
            content = true_config(new) if path == _CONFIG else new
            files.append(BlobFile(path, len(content), store(content)))
    taken |= set(changed)
    for side in template.files:
        if not isinstance(side, BlobFile) or side.path in taken or _is_root_index(side.path):
            continue
        stored = objects.get(Tensor, side.content)
        if side.path == _CONFIG:
            old = b"".join(blocks.read(block, side.path) for block in stored.blocks)
            new = true_config(old)
            if new != old:
                files.append(BlobFile(side.path, len(new), store(new)))
                continue
        needed[stored] = None
        files.append(side)
    return Assembled(Snapshot(tuple(sorted(files, key=lambda file: file.path))), tuple(needed))


def _remade(
    file: PartsFile, merged: Mapping[str, Tensor], identities: Mapping[str, ObjectId], objects: ObjectReader
) -> PartsFile | None:
    """A file of another format with the merged tensors in it; None if its header would not be true of them."""
    parts: list[tuple[str | None, ObjectId]] = []
    for name, identity in file.parts:
        if name is not None:
            old, new = objects.get(Tensor, identity), merged[file.prefix + name]
            if (old.dtype, old.shape) != (new.dtype, new.shape):
                return None
            identity = identities[file.prefix + name]
        parts.append((name, identity))
    return replace(file, parts=tuple(parts))


def _true_config(
    old: bytes,
    template: Snapshot,
    merged: Mapping[str, Tensor],
    identities: Mapping[str, ObjectId],
    out_dtype: str | None,
    layers: Sequence[int] | None,
    objects: ObjectReader,
) -> bytes:
    """The template's config.json, made to agree with the output."""
    config = parse_config(old)
    if config is None:
        return old
    dtype = out_dtype or _common_dtype(merged)
    if dtype is not None:
        set_dtype(config, dtype, add=out_dtype is not None)
    set_layers(config, template.tensors, identities, layers)
    set_tied(config, template.tensors, identities)
    rows = _vocabulary(template.tensors, merged, objects)
    if rows is not None:
        set_vocabulary(config, rows)
    return config_with(old, config)


def _vocabulary(before: Mapping[str, ObjectId], merged: Mapping[str, Tensor], objects: ObjectReader) -> int | None:
    """The rows of the embedding, if they are not as many as the template has; padding rows stay as they are told."""
    name = next((name for name in merged if is_embedding(name) and name in before), None)
    if name is None or len(merged[name].shape) != 2:
        return None
    rows = merged[name].shape[0]
    return None if objects.get(Tensor, before[name]).shape[:1] == (rows,) else rows


def _common_dtype(merged: Mapping[str, Tensor]) -> str | None:
    """The one dtype of all floating-point tensors, if there is one: a promotion has to show in config.json, too."""
    dtypes = {tensor.dtype for tensor in merged.values() if tensor.dtype in MERGEABLE}
    return next(iter(dtypes)) if len(dtypes) == 1 else None


def _is_root_index(path: str) -> bool:
    return "/" not in path and path.endswith((".safetensors.index.json", ".bin.index.json"))
