"""What each file of a directory in Hugging Face layout is: weights, and under which names, or a file to keep as it is.

No weights are read, only directories, safetensors headers, indexes and the first bytes of torch files.

Source of the layout: huggingface.co/docs/hub "Models", transformers' `modeling_utils` (file and index names),
diffusers' pipelines (one directory a component).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mpfs.errors import BadInputError, FormatError, UnsafeInputError
from mpfs.formats import neurochem, sniff, strict_json
from mpfs.formats.location import Location, opened
from mpfs.formats.messages import count, listing, show
from mpfs.formats.safetensors import MAX_HEADER_SIZE, Header, TensorEntry, read_header
from mpfs.formats.tree import FoundFile, walk

SAFETENSORS_SUFFIX = ".safetensors"
GGUF_SUFFIX = ".gguf"
TORCH_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pth.tar", ".pt.tar")
INDEX_SUFFIX = ".index.json"
SAFETENSORS_INDEX_SUFFIX = SAFETENSORS_SUFFIX + INDEX_SUFFIX

_PRIMARY = ("model", "diffusion_pytorch_model")
"""Stems of the file that is *the* model where several files stand side by side; earlier ones win."""
_PRIMARY_TORCH = ("pytorch_model.bin", "diffusion_pytorch_model.bin", "adapter_model.bin")
_TRAINER_FILES = frozenset({"optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt", "training_args.bin"})
UNFINISHED_SUFFIXES = (".incomplete", ".part", ".crdownload", ".partial", ".aria2")
_OTHER_WEIGHTS = (".h5", ".msgpack", ".tflite", ".npz", ".ot")


_SPLIT = re.compile(r"(?P<model>.+)-\d{5}-of-(?P<of>\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A file of weights.

    `path` is relative and posix, `location` absolute. A tensor's name in the checkpoint is `prefix` + its name in
    the file. `header` and `raw_header` (its bytes) are a safetensors file's, None and empty for another; a raw file of
    NeuroChem's has a header of one tensor, too.
    """

    path: str
    location: Location
    format: Literal["safetensors", "torch", "gguf", "onnx", "neurochem"]
    prefix: str
    header: Header | None = None
    raw_header: bytes = b""


@dataclass(frozen=True, slots=True)
class SideFile:
    """A file that is kept as it is. `path` is relative and posix, `location` absolute."""

    path: str
    location: Location


@dataclass(frozen=True, slots=True)
class Layout:
    """A scanned directory: its weights, its other files and what was skipped, each sorted by path."""

    root: str
    weights: tuple[WeightFile, ...]
    files: tuple[SideFile, ...]
    skipped: tuple[str, ...]


def scan(path: Path) -> Layout:
    """Say what each file of a directory is.

    All rules hold for each directory by itself; the weights of a sub-directory `unet` have the prefix `unet/`.

    - Every *.safetensors file is weights. The *primary* ones have no further prefix: the shards of the index, if
      there is one; else all, if no two have a tensor of the same name; else `model.safetensors` alone (in diffusers'
      directories `diffusion_pytorch_model.safetensors`). The others have the prefix `FILENAME:`.
    - Torch files are weights only in a directory without safetensors: pytorch_model.bin, or the shards of its
      index, or, in the root, the only *.pt, *.pth, *.bin or *.ckpt file.
    - GGUF files are weights only where there are neither of these in the root or below, and ONNX files only where there is no
      GGUF file either: of one model, also in splits, there is no further prefix; of several each has `FILENAME:`.
    - Where there is nothing of all this, the raw files that NeuroChem networks (*.nnf) name are weights.
    - Everything else is a side file, but for .git, .cache, .mpfs, *.lock and *.incomplete, which are skipped.

    Raises:
        NotFoundError: there is no such directory.
        BadInputError: it is not a directory, or has no weights.
        UnsafeInputError: an index names a file outside its directory.
        FormatError: a weight file or index is damaged, missing, unfinished or a git-lfs pointer; an index and its
            shards contradict each other; two tensors would have the same name; several torch files to choose from.
    """
    root = Path(path).absolute()
    found, skipped = walk(root)
    return sort_out(str(root), found, skipped)


def sort_out(root: str, found: Sequence[FoundFile], skipped: Sequence[str]) -> Layout:
    """As `scan`, from the files of a directory, or of something like one, that was walked. `root` names it."""
    directories: dict[str, list[FoundFile]] = defaultdict(list)
    for file in found:
        directory, slash, _ = file.path.rpartition("/")
        directories[directory + slash].append(file)
    _refuse_unfinished(root, [*skipped, *(file.path for file in directories[""])])
    weights: list[WeightFile] = []
    for prefix, files in directories.items():
        by_name = {file.path.removeprefix(prefix): file for file in files}
        weights.extend(_safetensors_weights(prefix, by_name) or _torch_weights(prefix, by_name))
    containers: tuple[Literal["gguf"], Literal["onnx"]] = ("gguf", "onnx")
    for kind in containers:
        if not weights:
            for prefix, files in directories.items():
                weights.extend(_container_weights(prefix, files, kind))
    if not weights:
        for prefix, files in directories.items():
            weights.extend(_neurochem_weights(prefix, files))
    if not weights:
        other = [file.path for file in found if file.path.endswith(_OTHER_WEIGHTS)]
        raise BadInputError(
            f"{root}: no weights found; looked for *.safetensors, *.gguf and *.onnx in it and below, for pytorch_model.bin or "
            f"its shards, and for one torch file (*{', *'.join(TORCH_SUFFIXES)}) in it"
            + (f"; of a directory MPFS does not read {listing(other)}" if other else ""),
            file=root,
        )
    _refuse_collisions(root, weights)
    taken = {weight.path for weight in weights}
    return Layout(
        root=root,
        weights=tuple(sorted(weights, key=lambda weight: weight.path)),
        files=tuple(SideFile(file.path, file.location) for file in found if file.path not in taken),
        skipped=tuple(skipped),
    )


def read_index(path: Location) -> dict[str, str]:
    """The `weight_map` of a sharded checkpoint's index: tensor name to the shard's file name, in the file's order.

    Raises:
        FormatError: the file is not such an index, or too large to be one (over MAX_HEADER_SIZE bytes).
        UnsafeInputError: it names a shard that is not in the index's own directory.
    """
    with opened(path) as (file, size):
        if size > MAX_HEADER_SIZE:
            raise FormatError(f"{path}: over {MAX_HEADER_SIZE:,} bytes are too many for an index", file=str(path))
        content = file.read()
    problem = sniff.foreign(content[: sniff.HEAD_SIZE])
    if problem is not None:
        raise FormatError(f"{path}: {problem}", file=str(path))
    try:
        index = strict_json.loads(content.decode("utf-8"))
    except ValueError as error:
        raise FormatError(f"{path}: the index is not valid JSON: {error}", file=str(path)) from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise FormatError(f"{path}: the index has no `weight_map` from tensor names to file names", file=str(path))
    for shard in weight_map.values():
        if shard in ("", ".", "..") or "/" in shard or "\\" in shard or "\0" in shard:
            raise UnsafeInputError(
                f"{path}: the index names the shard {show(shard)}, which is not a file beside it", file=str(path)
            )
    return weight_map


def _refuse_unfinished(root: str, paths: Iterable[str]) -> None:
    for path in paths:
        for suffix in UNFINISHED_SUFFIXES:
            stem = path.removesuffix(suffix)
            if stem != path and "/" not in path and stem.endswith((SAFETENSORS_SUFFIX, GGUF_SUFFIX, *TORCH_SUFFIXES)):
                raise FormatError(
                    f"{root}/{path}: this is an unfinished download of {show(stem)}; finish it, or remove the file",
                    file=f"{root}/{path}",
                )


def _safetensors_weights(prefix: str, by_name: Mapping[str, FoundFile]) -> list[WeightFile]:
    names = [name for name in by_name if name.endswith(SAFETENSORS_SUFFIX)]
    index = _choose_index(by_name)
    shards = _shards(by_name, index) if index else None
    headers = {name: read_header(by_name[name].location) for name in names}
    if index and shards:
        _check_shards(by_name[index].location, shards, {name: header for name, (header, _) in headers.items()})
        primary = set(shards.values())
    elif not names:
        return []
    else:
        primary = _primary(by_name, {name: header for name, (header, _) in headers.items()})
    return [
        WeightFile(
            path=by_name[name].path,
            location=by_name[name].location,
            format="safetensors",
            prefix=prefix if name in primary else f"{prefix}{name}:",
            header=headers[name][0],
            raw_header=headers[name][1],
        )
        for name in names
    ]


def _choose_index(by_name: Mapping[str, FoundFile]) -> str | None:
    indexes = [name for name in by_name if name.endswith(SAFETENSORS_INDEX_SUFFIX)]
    for stem in _PRIMARY:
        if stem + SAFETENSORS_INDEX_SUFFIX in indexes:
            return stem + SAFETENSORS_INDEX_SUFFIX
    if len(indexes) > 1:
        directory = str(by_name[indexes[0]].location).rpartition("/")[0]
        raise FormatError(
            f"{directory}: several indexes, {listing(indexes)}; keep one, or import the others from directories of "
            "their own",
            file=str(directory),
        )
    return indexes[0] if indexes else None


def _shards(by_name: Mapping[str, FoundFile], index: str) -> dict[str, str]:
    """An index's map, whose shards all exist."""
    shards = read_index(by_name[index].location)
    missing = sorted({shard for shard in shards.values() if shard not in by_name})
    if missing:
        location = by_name[index].location
        raise FormatError(
            f"{location}: the index lists {count(len(missing), 'shard')} that the directory lacks: {listing(missing)}; "
            "download them",
            file=str(location),
            missing=missing,
        )
    return shards


def _check_shards(index: Location, shards: Mapping[str, str], headers: Mapping[str, Header]) -> None:
    """Refuse an index that contradicts its shards, and shards that contradict each other."""
    foreign = sorted({shard for shard in shards.values() if shard not in headers})
    if foreign:
        raise FormatError(f"{index}: the index lists {listing(foreign)}, not safetensors by name", file=str(index))
    within = {name: {entry.name for entry in headers[name].entries} for name in set(shards.values())}
    absent = [name for name, shard in shards.items() if name not in within[shard]]
    if absent:
        raise FormatError(
            f"{index}: the index lists {count(len(absent), 'tensor')} that the named shard lacks: "
            f"{listing(absent)} ({show(absent[0])} should be in {show(shards[absent[0]])}); index and shards do not "
            "belong together, download them again",
            file=str(index),
            tensors=absent[:100],
        )
    twice = _in_several({name: headers[name] for name in sorted(within)})
    if twice:
        raise FormatError(
            f"{index}: more than one shard has {count(len(twice), 'tensor')} of the same name: {_spell(twice)}",
            file=str(index),
        )


def _primary(by_name: Mapping[str, FoundFile], headers: Mapping[str, Header]) -> set[str]:
    twice = _in_several(headers)
    if not twice:
        return set(headers)
    for stem in _PRIMARY:
        if stem + SAFETENSORS_SUFFIX in headers:
            return {stem + SAFETENSORS_SUFFIX}
    directory = str(by_name[next(iter(headers))].location).rpartition("/")[0]
    raise FormatError(
        f"{directory}: more than one file has {count(len(twice), 'tensor')} of the same name: {_spell(twice)}; none of the files is "
        "model.safetensors, so it is unclear which is the model: rename it so, or import the files one by one",
        file=str(directory),
        tensors=list(twice)[:100],
    )


def _in_several(headers: Mapping[str, Header]) -> dict[str, list[str]]:
    """The tensors that more than one file has, with the files' names."""
    owners: dict[str, list[str]] = defaultdict(list)
    for name, header in headers.items():
        for entry in header.entries:
            owners[entry.name].append(name)
    return {tensor: files for tensor, files in owners.items() if len(files) > 1}


def _spell(twice: Mapping[str, Sequence[str]]) -> str:
    files = sorted({name for owners in twice.values() for name in owners})
    return f"{listing(list(twice))} (files: {listing(files)})"


def _refuse_collisions(root: str, weights: Iterable[WeightFile]) -> None:
    """Refuse two tensors whose names are the same with their prefixes (`unet/a` in the root, `a` below `unet`)."""
    owners: dict[str, str] = {}
    for weight in weights:
        for entry in weight.header.entries if weight.header else ():
            name = weight.prefix + entry.name
            if owners.setdefault(name, weight.path) != weight.path:
                raise FormatError(
                    f"{root}: {show(owners[name])} and {show(weight.path)} both have a tensor {show(name)} (directories "
                    "count in its name); import them one by one",
                    file=str(root),
                    tensor=name,
                )


def _container_weights(prefix: str, files: Sequence[FoundFile], kind: Literal["gguf", "onnx"]) -> list[WeightFile]:
    """The GGUF or ONNX files of a directory: one model (or the splits of one) without a further prefix; else each with
    its own."""
    models: dict[str, list[FoundFile]] = defaultdict(list)
    for file in files:
        name = file.path.removeprefix(prefix)
        if name.endswith(f".{kind}"):
            split = _SPLIT.fullmatch(name)
            models[split["model"] if split else name].append(file)
    for model, parts in models.items():
        split = _SPLIT.fullmatch(parts[0].path.removeprefix(prefix))
        if split and len(parts) != int(split["of"]):
            location = parts[0].location
            raise FormatError(
                f"{location}: {show(model)} has {split['of']} splits, of which {len(parts)} are here; download the others",
                file=str(location),
            )
    return [
        WeightFile(part.path, part.location, kind, prefix if len(models) == 1 else f"{prefix}{model}:")
        for model, parts in models.items()
        for part in parts
    ]


def _neurochem_weights(prefix: str, files: Sequence[FoundFile]) -> Iterator[WeightFile]:
    """The raw files that the descriptions of NeuroChem networks in a directory name."""
    by_name = {file.path.removeprefix(prefix): file for file in files}
    owners: dict[str, str] = {}
    for description in (name for name in by_name if name.endswith(neurochem.SUFFIX)):
        where = by_name[description].location
        for parameter in neurochem.read_network(where):
            file = by_name.get(parameter.file)
            if file is None:
                raise FormatError(f"{where}: its file {show(parameter.file)} is missing; download it", file=str(where))
            with opened(file.location) as (_, size):
                if size != parameter.nbytes:
                    raise FormatError(
                        f"{file.location}: has {count(size, 'byte')}, where {show(parameter.shape)} in {description} takes "
                        f"{parameter.nbytes:,}; copy it again",
                        file=str(file.location),
                    )
            if owners.setdefault(parameter.file, description) != description:
                raise FormatError(
                    f"{where}: {owners[parameter.file]} has its file {show(parameter.file)}, too", file=str(where)
                )
            entry = TensorEntry(parameter.name, neurochem.DTYPE, parameter.shape, 0, parameter.nbytes)
            yield WeightFile(file.path, file.location, "neurochem", prefix, Header((entry,), None, 0))


def _torch_weights(prefix: str, by_name: Mapping[str, FoundFile]) -> list[WeightFile]:
    return [
        WeightFile(by_name[name].path, by_name[name].location, "torch", prefix)
        for name in sorted(set(_torch_names(prefix, by_name)))
    ]


def _torch_names(prefix: str, by_name: Mapping[str, FoundFile]) -> Iterable[str]:
    for name in _PRIMARY_TORCH:
        shards = set()
        if name in by_name:
            shards = {name}
        elif name + INDEX_SUFFIX in by_name:
            shards = set(_shards(by_name, name + INDEX_SUFFIX).values())
        for shard in sorted(shards):
            _head(by_name[shard].location)
        if shards:
            return shards
    if prefix:
        return []
    candidates = list(_root_candidates(by_name))
    if len(candidates) > 1:
        directory = str(by_name[candidates[0]].location).rpartition("/")[0]
        raise FormatError(
            f"{directory}: several torch files and no index that says which belong together: {listing(candidates)}; "
            "import one of them by its own path",
            file=str(directory),
            candidates=candidates,
        )
    return candidates


def _root_candidates(by_name: Mapping[str, FoundFile]) -> Iterator[str]:
    for name, file in by_name.items():
        if not name.endswith(TORCH_SUFFIXES) or name in _TRAINER_FILES or name.startswith("rng_state"):
            continue
        # .bin is anybody's suffix: what is no torch file is not a broken one.
        if sniff.is_torch_archive(_head(file.location, lfs_only=name.endswith(".bin"))):
            yield name


def _head(location: Location, *, lfs_only: bool = False) -> bytes:
    """A torch file's first bytes; refused if they are a git-lfs pointer's or (but for `lfs_only`) foreign."""
    with opened(location) as (file, _):
        head = file.read(sniff.HEAD_SIZE)
    problem = None if sniff.is_torch_archive(head) else sniff.foreign(head)
    if problem is not None and (sniff.is_lfs_pointer(head) or not lfs_only):
        raise FormatError(f"{location}: {problem}", file=str(location))
    return head
