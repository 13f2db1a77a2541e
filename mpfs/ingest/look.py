"""Looking at a source: which files the snapshot will have, and where their bytes come from. No weights are read.

Torch and .npz files have no bytes worth keeping but their tensors': those become safetensors files in their place.
"""

from __future__ import annotations

import stat
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from mpfs.errors import BadInputError, FormatError, NotFoundError
from mpfs.formats import gguf, huggingface, npz, onnx, safetensors, torch_file, training
from mpfs.formats.location import Location, opened
from mpfs.formats.messages import count, listing, show
from mpfs.formats.quantised import recognise
from mpfs.ingest.files import SourceFiles
from mpfs.ingest.incoming import SAFETENSORS, Incoming
from mpfs.ingest.lineage import parsed
from mpfs.ingest.pipeline import TensorJob
from mpfs.ingest.remote import RemoteTree, is_archive, open_archive
from mpfs.ingest.source import ArrayBytes, KnownBytes, MemoryBytes, SourceFile, TensorBytes
from mpfs.objects.dtypes import nbytes
from mpfs.vfs.layout import DEFAULT_METADATA, INDEX_PATH, SINGLE_PATH, synthesise_files

if TYPE_CHECKING:
    import torch

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
NPZ_SUFFIX = ".npz"
ONNX_SUFFIX = ".onnx"

_T = TypeVar("_T")

_TORCH_INDEX_SUFFIX = ".bin" + huggingface.INDEX_SUFFIX
_SAFETENSORS_NAMES = {
    "diffusion_pytorch_model.bin": "diffusion_pytorch_model.safetensors",
    "adapter_model.bin": "adapter_model.safetensors",
}
"""What loaders call a torch file's safetensors form, where that is not `model.safetensors`."""

_STATEMENTS = ("config.json", "adapter_config.json", "README.md")
_STATEMENT_BYTES = 1 << 20

_WRAPPERS = ("module.", "_orig_mod.", "model._orig_mod.", "module._orig_mod.")
"""What DataParallel and torch.compile put before every name."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What to take of torch and .npz files. `key` is the state dict's where there are several; `strip_prefix` is taken
    off the names that begin with it; `everything` says that what is beside the state dict is wanted, too."""

    key: str | None = None
    strip_prefix: str | None = None
    everything: bool = False


@dataclass(slots=True)
class Found:
    """What a source is made of. `skipped` are entries that are no weights; `sources` all files that were looked at, by
    path in the source; `notes` are for a person. `stated` are the contents of the files in which a model says what it is,
    by name."""

    incoming: list[Incoming] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    sources: dict[str, SourceFile] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    stated: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Named:
    """Tensors out of a file that is not kept as it is. `training` are those of the training's state, `values` its tree."""

    jobs: Mapping[str, TensorJob]
    file: SourceFile
    training: Mapping[str, TensorJob] = field(default_factory=dict)
    values: bytes | None = None


def look_at(source: Path | RemoteTree, choice: Choice, files: SourceFiles) -> Found:
    """Find out what a source is.

    Raises:
        NotFoundError: there is nothing at `source`, or nothing under the key.
        BadInputError: it is damaged, unsafe or no checkpoint; the subclasses tell which.
    """
    if isinstance(source, RemoteTree):
        location = source.file()
        if location is not None:
            return look_at_file(location, choice, files)
        return look_at_directory(str(source), huggingface.sort_out(str(source), *source.walk()), choice, files)
    try:
        mode = source.stat().st_mode
    except OSError as error:
        raise NotFoundError(f"{source}: {error.strerror or error}", file=str(source)) from error
    except ValueError as error:  # a name that no file can have
        raise NotFoundError(f"{str(source)!r}: {error}") from error
    if stat.S_ISDIR(mode):
        return look_at_directory(str(source), huggingface.scan(source), choice, files)
    if not stat.S_ISREG(mode):
        raise BadInputError(f"{source}: neither a directory nor a regular file", file=str(source))
    if is_archive(source):
        # The archive itself must not change, either.
        files.add(source)
        inside, left = open_archive(source)
        found = look_at(inside, choice, files)
        if left:
            found.notes.append(
                f"{source.name}: the model is in {inside.name}; {count(left, 'file')} outside of it left out"
            )
        return found
    return look_at_file(source, choice, files)


def look_at_file(location: Location, choice: Choice, files: SourceFiles) -> Found:
    """As `look_at`, a single file."""
    name = location.name
    found = Found()
    if name.endswith(huggingface.UNFINISHED_SUFFIXES):
        raise FormatError(f"{location}: this is an unfinished download; finish it", file=str(location))
    found.sources[name] = files.add(location)
    if name.endswith((huggingface.SAFETENSORS_SUFFIX, huggingface.GGUF_SUFFIX, ONNX_SUFFIX)):
        _refuse_choice(str(location), choice, "this one is kept as it is")
        if name.endswith(huggingface.GGUF_SUFFIX):
            found.incoming.append(_gguf(name, location, "", files, found))
        elif name.endswith(ONNX_SUFFIX):
            found.incoming.append(_onnx(name, location, "", files, found))
        else:
            found.incoming.append(_safetensors(name, location, "", files))
    elif name.endswith(TORCH_SUFFIXES) or name.endswith(NPZ_SUFFIX):
        read = _npz if name.endswith(NPZ_SUFFIX) else _torch
        found.incoming += _converted({name: read(location, choice, files, found, "")}, "", SINGLE_PATH)
    else:
        raise BadInputError(
            f"{location}: not a checkpoint that MPFS knows; give a directory, or a .safetensors, .gguf, .onnx, .npz or torch "
            f"file ({', '.join(TORCH_SUFFIXES)})",
            file=str(location),
        )
    _note_quantised(found)
    return found


def look_at_directory(source: str, layout: huggingface.Layout, choice: Choice, files: SourceFiles) -> Found:
    """As `look_at`, a directory whose files were sorted out."""
    found = Found(skipped=list(layout.skipped))
    by_prefix: dict[str, dict[str, _Named]] = defaultdict(dict)
    for weights in layout.weights:
        found.sources[weights.path] = files.add(weights.location)
        if weights.format == "torch":
            where = f"{weights.path}: " if weights.prefix else ""
            named = _torch(weights.location, choice, files, found, where)
            by_prefix[weights.prefix][weights.path.removeprefix(weights.prefix)] = named
        elif weights.format == "onnx":
            found.incoming.append(_onnx(weights.path, weights.location, weights.prefix, files, found))
        elif weights.format == "gguf":
            found.incoming.append(_gguf(weights.path, weights.location, weights.prefix, files, found))
        else:
            known = None if weights.header is None else (weights.header, weights.raw_header)
            made = _safetensors(weights.path, weights.location, weights.prefix, files, known)
            found.incoming.append(made if weights.format == SAFETENSORS else replace(made, format=weights.format))
    if not by_prefix:
        _refuse_choice(source, choice, "there is none here")
    for prefix, states in by_prefix.items():
        found.incoming += _converted(states, prefix, _safetensors_name(states))
    taken = {item.path for item in found.incoming}
    for side in layout.files:
        file = found.sources[side.path] = files.add(side.location)
        directory, slash, name = side.path.rpartition("/")
        states = by_prefix.get(directory + slash, {})
        if states and name.endswith(_TORCH_INDEX_SUFFIX):
            # It describes torch shards, which this snapshot does not have as such.
            _check_shards(side.location, states, choice)
            found.skipped.append(side.path)
        elif side.path in taken:
            raise FormatError(f"{source}: {side.path} is in the way of the weights under the same name")
        else:
            found.incoming.append(Incoming(side.path, file.range(0, file.size), whole=file))
        if side.path in _STATEMENTS:
            with opened(side.location) as (stream, _):
                found.stated[side.path] = stream.read(_STATEMENT_BYTES)
    _note_quantised(found)
    return found


def _note_quantised(found: Found) -> None:
    """Say which of the model's weights are quantised."""
    tensors = {
        item.prefix + name: (job.dtype, job.shape)
        for item in found.incoming
        for name, job in item.parts
        if name is not None and item.format == SAFETENSORS
    }
    quantisation = recognise(tensors, parsed(found.stated.get("config.json", b"")))
    if quantisation is not None:
        found.notes.append(f"quantised weights are kept as they are, and cannot be merged: {quantisation}")


def _refuse_choice(source: str, choice: Choice, why: str) -> None:
    options = (("--key", choice.key), ("--strip-prefix", choice.strip_prefix), ("--all", choice.everything or None))
    for option, value in options:
        if value is not None:
            raise BadInputError(f"{source}: {option} is for torch files; {why}", file=source)


def _safetensors(
    path: str,
    location: Location,
    prefix: str,
    files: SourceFiles,
    known: tuple[safetensors.Header, bytes] | None = None,
) -> Incoming:
    file = files.add(location)
    header, raw = known or safetensors.read_header(location)
    _refuse_changed(file, header.data_offset + header.data_size, file.size)
    parts = tuple(
        (
            entry.name,
            TensorJob(entry.dtype, entry.shape, file.range(header.data_offset + entry.start, entry.nbytes)),
        )
        for entry in header.entries
    )
    return Incoming(path, KnownBytes(file, raw), SAFETENSORS, prefix, parts, file)


def _gguf(path: str, location: Location, prefix: str, files: SourceFiles, found: Found) -> Incoming:
    file = files.add(location)
    header, raw = gguf.read_header(location)
    if header.quantised:
        kinds = ", ".join(f"{kind} {number}" for kind, number in Counter(header.quantised.values()).most_common())
        found.notes.append(
            f"{path}: {count(len(header.quantised), 'tensor')} of {len(header.entries):,} quantised ({kinds}): kept as they "
            "are, and cannot be merged"
        )
    _refuse_changed(file, header.file_size, file.size)
    return Incoming(
        path, KnownBytes(file, raw), "gguf", prefix, tuple(_with_gaps(header.entries, header.size, file)), file
    )


def _onnx(path: str, location: Location, prefix: str, files: SourceFiles, found: Found) -> Incoming:
    file = files.add(location)
    model = onnx.read_model(location)
    _refuse_changed(file, model.file_size, file.size)
    if model.left:
        found.notes.append(
            f"{path}: {count(len(model.left), 'initialiser')} kept as bytes of the file, not as tensors (data in other files, "
            f"or not a run of numbers): {listing(model.left)}"
        )
    entries = sorted(model.entries, key=lambda entry: (entry.start, entry.end))
    first = entries[0].start
    return Incoming(path, file.range(0, first), "onnx", prefix, tuple(_with_gaps(entries, first, file)), file)


def _with_gaps(
    entries: Sequence[gguf.Entry | safetensors.TensorEntry], at: int, file: SourceFile
) -> Iterator[tuple[str | None, TensorJob]]:
    """The tensors of a file from a byte of it on, with what is between, before and after them."""

    def gap(end: int) -> Iterator[tuple[None, TensorJob]]:
        if end > at:
            yield None, TensorJob("U8", (end - at,), file.range(at, end - at))

    for entry in entries:
        yield from gap(entry.start)
        yield entry.name, TensorJob(entry.dtype, entry.shape, file.range(entry.start, entry.nbytes))
        at = entry.end
    yield from gap(file.size)


def _refuse_changed(file: SourceFile, expected: int, size: int) -> None:
    if expected != size:
        raise FormatError(f"{file.path}: changed while it was being imported; import it again", file=str(file.path))


def _torch(location: Location, choice: Choice, files: SourceFiles, found: Found, where: str) -> _Named:
    path = files.local(location)
    file = files.add(path)
    state = torch_file.read_state_dict(path, choice.key, everything=choice.everything)
    found.skipped.extend(where + entry for entry in state.skipped)
    named = _stripped(state.tensors, choice, location, found)
    jobs = {name: _torch_job(tensor, file, name) for name, tensor in named.items()}
    if state.rest is None:
        return _Named(jobs, file)
    rest = {name: _torch_job(tensor, file, name) for name, tensor in state.rest.tensors.items()}
    return _Named(jobs, file, rest, state.rest.values(dict(zip(state.tensors, named, strict=True))))


def _torch_job(tensor: torch.Tensor, file: SourceFile, name: str) -> TensorJob:
    dtype, shape = torch_file.dtype_name(tensor.dtype), torch_file.tensor_shape(tensor)
    return TensorJob(dtype, shape, TensorBytes(tensor, nbytes(dtype, shape), file, name))


def _npz(location: Location, choice: Choice, files: SourceFiles, found: Found, where: str) -> _Named:
    if choice.key is not None:
        raise BadInputError(f"{location}: --key chooses within torch files; an .npz archive has no state dicts")
    path = files.local(location)
    file = files.add(path)
    arrays = _stripped({array.name: array for array in npz.read_arrays(path)}, choice, location, found)
    return _Named({name: TensorJob(a.dtype, a.shape, ArrayBytes(a, path, file)) for name, a in arrays.items()}, file)


def _stripped(tensors: Mapping[str, _T], choice: Choice, location: Location, found: Found) -> dict[str, _T]:
    """The tensors, their names without the prefix that is to go."""
    drop = choice.strip_prefix
    if not drop:
        wrapper = next((one for one in _WRAPPERS if tensors and all(name.startswith(one) for name in tensors)), None)
        if wrapper is not None:
            found.notes.append(
                f"{location.name}: every tensor's name begins with {show(wrapper)}, which a training wrapper put there; "
                f"--strip-prefix {wrapper} takes it off"
            )
        return dict(tensors)
    kept: dict[str, _T] = {}
    for name, tensor in tensors.items():
        if kept.setdefault(name.removeprefix(drop), tensor) is not tensor:
            raise BadInputError(
                f"{location}: without {show(drop)} two tensors would be called {show(name.removeprefix(drop))}",
                file=str(location),
                tensor=name,
            )
    if not any(name.startswith(drop) for name in tensors):
        raise BadInputError(
            f"{location}: no tensor's name begins with {show(drop)}; there are {listing(list(tensors))}",
            file=str(location),
        )
    return kept


def _converted(states: Mapping[str, _Named], prefix: str, name: str) -> list[Incoming]:
    """The safetensors files for the tensors of torch files or archives."""
    jobs: dict[str, TensorJob] = {}
    for state in states.values():
        for tensor_name, job in state.jobs.items():
            if tensor_name in jobs:
                where = state.file.path
                raise FormatError(
                    f"{where}: tensor {show(tensor_name)} is in another shard as well", tensor=tensor_name
                )
            jobs[tensor_name] = job
    planned = synthesise_files(list(jobs.items()))
    incoming = []
    for file in planned.files:
        path = prefix + (name if file.path == SINGLE_PATH else file.path)
        header = MemoryBytes(file.header, f"header of {path}")
        parts = tuple((key, jobs[key]) for key in file.tensors)
        incoming.append(Incoming(path, header, SAFETENSORS, prefix, parts))
    if planned.index is not None:
        incoming.append(Incoming(prefix + INDEX_PATH, MemoryBytes(planned.index, prefix + INDEX_PATH)))
    return incoming + _training(states, prefix)


def _training(states: Mapping[str, _Named], prefix: str) -> list[Incoming]:
    """The files for the state of a training."""
    held = [state for state in states.values() if state.values is not None]
    if not held:
        return []
    if len(held) > 1 or prefix:
        raise BadInputError(
            f"{held[-1].file.path}: --all is for one torch file with a model; import each by its own path",
            file=str(held[-1].file.path),
        )
    (state,) = held
    incoming = [Incoming(training.VALUES_PATH, MemoryBytes(state.values or b"", training.VALUES_PATH))]
    if state.training:
        raw, header = safetensors.build_header(
            [(name, job.dtype, job.shape) for name, job in state.training.items()], DEFAULT_METADATA
        )
        parts = tuple((entry.name, state.training[entry.name]) for entry in header.entries)
        content = MemoryBytes(raw, f"header of {training.TENSORS_PATH}")
        incoming.append(Incoming(training.TENSORS_PATH, content, SAFETENSORS, training.DIRECTORY, parts))
    return incoming


def _safetensors_name(states: Mapping[str, _Named]) -> str:
    """What the safetensors file of a directory's torch files is called."""
    (name, *others) = states
    return SINGLE_PATH if others else _SAFETENSORS_NAMES.get(name, SINGLE_PATH)


def _check_shards(index: Location, states: Mapping[str, _Named], choice: Choice) -> None:
    """Refuse torch shards without a tensor that their index says they have."""
    shards = huggingface.read_index(index)
    if set(shards.values()) != set(states):
        return  # of other files than those that the weights come from
    drop = choice.strip_prefix or ""
    absent = [name for name, shard in shards.items() if name.removeprefix(drop) not in states[shard].jobs]
    if absent:
        raise FormatError(
            f"{index}: the index lists {count(len(absent), 'tensor')} that the named shard lacks: {listing(absent)} "
            f"({show(absent[0])} should be in {show(shards[absent[0]])}); index and shards do not belong together, "
            "download them again",
            file=str(index),
            tensors=absent[:100],
        )
