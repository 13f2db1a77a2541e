"""Tensors out of torch.save files, without ever running code out of one.

Files are read by torch.load with weights_only=True and nothing else. What that refuses, MPFS refuses. torch does not
verify the checksums of its own zip archives, so they are verified here first. Of TorchScript programs, which torch would
compile, `mpfs.formats.torchscript` reads the tensors instead.

Formats: the zip archive of torch >= 1.6 (docs.pytorch.org, "Serialization semantics") and the bare pickles before
it. torch is imported inside the functions: importing this module is cheap.
"""

from __future__ import annotations

import os
import pickle
import re
import stat
import zipfile
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn, TypeGuard

from mpfs.errors import BadInputError, FormatError, MPFSError, NotFoundError, UnsafeInputError
from mpfs.formats import sniff, torchscript
from mpfs.formats.archive import check_members
from mpfs.formats.messages import count, is_unicode, show
from mpfs.formats.safetensors import METADATA_KEY
from mpfs.formats.training import TrainingState, take_apart
from mpfs.objects.dtypes import nbytes

if TYPE_CHECKING:
    import torch

MAX_DEPTH = 4
"""How many keys deep a state dict is looked for in a training checkpoint."""

MAX_EXPANDED_BYTES = 2**28
"""Bytes up to which a tensor may be larger than what the file stores of it (an expanded, stride-0 tensor)."""

ROOT = "."
"""The key that means the file's outermost mapping."""

_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "F4",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
"""torch's name of a dtype to safetensors' (safetensors 0.8, `safetensors.torch`)."""

_NOT_WEIGHTS = frozenset(
    {"optimizer", "optimizers", "optim", "optims", "scheduler", "schedulers", "scaler", "rng", "callbacks", "loops"}
)
"""Words in a key of a training checkpoint under which the trainer's state is kept, not the model's."""

_OPTIMIZER_KEYS = frozenset({"state", "param_groups"})
"""What torch.optim.Optimizer.state_dict() consists of, under whatever key it was put."""

_CHUNK = 2**20


@dataclass(frozen=True, slots=True)
class StateDict:
    """A model's tensors out of a torch file.

    `tensors` are by name in the file's order, on the CPU, backed by the mapped file where it is a zip archive.
    `key` is the dotted path to them in the file, None if they are the outermost mapping. `skipped` are the dotted
    paths, from the outermost mapping, of everything else in the file: entries of the state dict that are no
    tensors, and what lies beside it (optimizer, epoch, …). `rest` is all that, if it was asked for; then `skipped` has
    only what could not be kept.
    """

    tensors: dict[str, torch.Tensor]
    key: str | None
    skipped: tuple[str, ...]
    rest: TrainingState | None = None


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A mapping in the file that holds tensors by name."""

    path: tuple[str, ...]
    mapping: Mapping[object, object]
    is_model: bool

    @property
    def key(self) -> str:
        return ".".join(self.path) or ROOT


def read_state_dict(path: str | os.PathLike[str], key: str | None = None, *, everything: bool = False) -> StateDict:
    """The state dict in a torch file; of a training checkpoint, the one mapping that holds a model's tensors.

    A state dict is a mapping with only str keys and at least one tensor among its values, at most MAX_DEPTH keys
    deep. Optimizer, scheduler and other trainer state is left aside, unless `key` names it. Reading costs one pass
    over the file, for its checksums.

    Args:
        path: a file that torch.save wrote.
        key: the dotted path of the state dict in the file, `.` for the outermost mapping; None takes the only one.
        everything: also take what is beside it.

    Raises:
        NotFoundError: there is no such file, or no state dict at `key`.
        BadInputError: the path is not a readable regular file; or there are several state dicts and no `key`.
        UnsafeInputError: the file could only be read by running code out of it.
        FormatError: the file is damaged, not torch's, holds no state dict, or one with a tensor that has no
            safetensors form (quantised, sparse, on the meta device, complex128, …).
    """
    source = os.fspath(path)
    root = _load(source)
    if isinstance(root, torchscript.Program):
        if key not in (None, ROOT):
            raise NotFoundError(
                f"{source}: there is no state dict at the key {show(key)}: this is a TorchScript program, which has one",
                file=source,
                key=key,
            )
        for full, tensor in root.tensors.items():
            _check_tensor(full, tensor, source)
        return StateDict(root.tensors, None, root.skipped)
    if not isinstance(root, Mapping):
        _fail(source, f"it holds {_kind(root)}, not a state dict (tensors by name); save model.state_dict() instead")
    chosen = _choose(_candidates(root), key, source)
    tensors: dict[str, torch.Tensor] = {}
    for name, value in chosen.mapping.items():
        if _is_tensor(value):
            _check_tensor(str(name), value, source)
            tensors[str(name)] = value.detach()
    where = ".".join(chosen.path) or None
    skipped = tuple(_left_out(root, chosen.path))
    if not everything or not skipped:
        return StateDict(tensors, where, skipped)
    try:
        rest = take_apart(root, chosen.mapping)
    except FormatError as error:
        _fail(source, error.message)
    for name, tensor in rest.tensors.items():
        _check_tensor(name, tensor, source)
    return StateDict(tensors, where, tuple(rest.left_out), rest)


def dtype_name(dtype: torch.dtype) -> str:
    """The safetensors name (a key of dtypes.BITS) of a torch dtype.

    Raises:
        FormatError: safetensors 0.8 has no such dtype.
    """
    name = _DTYPES.get(str(dtype).removeprefix("torch."))
    if name is None:
        raise FormatError(f"safetensors has no dtype for {dtype}; convert the tensor to another one first")
    return name


def tensor_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape that safetensors states for a tensor, in elements.

    It is the tensor's own, but for float4_e2m1fn_x2, whose last dimension torch counts in pairs.

    Raises:
        FormatError: a 0-d float4_e2m1fn_x2 tensor, whose two elements no shape can state.
    """
    shape = tuple(tensor.shape)
    if str(tensor.dtype) != "torch.float4_e2m1fn_x2":
        return shape
    if not shape:
        raise FormatError("a 0-d float4_e2m1fn_x2 tensor holds two elements, which no shape states; reshape it to [1]")
    return (*shape[:-1], shape[-1] * 2)


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """A CPU tensor's elements in row-major order as bytes, little-endian (the host's order, which MPFS needs to be so).

    No copy is made of a contiguous tensor: the view is read-only and keeps the tensor's memory alive. Any other
    is copied once. The view is flat, of unsigned bytes, and empty for an empty tensor.
    """
    import torch

    packed = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if packed.numel() == 0:
        return memoryview(b"")
    # Not reshape(-1): a tensor of one element counts as contiguous with any stride, and keeps it.
    flat = packed.as_strided((packed.numel(),), (1,))
    return flat.view(torch.uint8).numpy().data.toreadonly()


def _fail(source: str, problem: str, **details: object) -> NoReturn:
    raise FormatError(f"{source}: {problem}", file=source, **details)


def _load(source: str) -> object:
    """What torch.load makes of the file, or a TorchScript program, with every way in which it fails made one of ours."""
    try:
        if not stat.S_ISREG(os.stat(source).st_mode):
            raise BadInputError(f"{source}: not a regular file", file=source)
        with open(source, "rb") as file:
            head = file.read(sniff.HEAD_SIZE)
        if not sniff.is_torch_archive(head):
            problem = "this is no torch file: neither a zip archive nor a pickle of protocol 2 or above"
            _fail(source, sniff.foreign(head) or problem)
        sizes = _check_archive(source) if head.startswith(sniff.ZIP_MAGIC) else None
        if isinstance(sizes, torchscript.Program):
            return sizes
        root = _unpickle(source, sizes is not None)
    except FileNotFoundError:
        raise NotFoundError(f"{source}: no such file", file=source) from None
    except OSError as error:
        raise BadInputError(f"{source}: cannot be read: {error.strerror or error}", file=source) from error
    if sizes is not None:
        _check_storages(root, sizes, source)
    return root


def _unpickle(source: str, is_zip: bool) -> object:
    import torch

    try:
        # mmap is for zip archives only; torch reads a bare pickle into memory.
        root: object = torch.load(source, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        # torch's own message advises weights_only=False, which no one should do with a file from elsewhere.
        names = re.search(r"GLOBAL (\S+)", str(error))
        if names is None and "allowlisted" not in str(error):
            operand = re.search(r"Unsupported operand \d+", str(error))
            _fail(
                source,
                f"torch cannot read it as weights ({operand.group().lower() if operand else _first_line(error)}): it is "
                "damaged, or a pickle that torch.save did not write; save the tensors again with torch.save or as "
                "safetensors",
            )
        raise UnsafeInputError(
            f"{source}: it holds Python objects{f' ({names.group(1)})' if names else ''} that could only be read by "
            "running code out of the file, which MPFS never does; where it comes from, save it again as safetensors "
            "or as a plain state dict",
            file=source,
            **({"global": names.group(1)} if names else {}),
        ) from None
    except (OSError, MemoryError, MPFSError):
        raise
    except Exception as error:
        # Damage surfaces in torch's unpickler as almost any exception: KeyError, EOFError, UnicodeDecodeError, …
        _fail(source, f"it is damaged, or no torch file ({_first_line(error)}); download or copy it again")
    return root


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__


def _check_archive(source: str) -> set[int] | torchscript.Program:
    """Check a zip archive: that it is torch's, stores its tensors uncompressed, and that its checksums hold.

    Returns the sizes in bytes of the records of tensor data; or the program, if it is TorchScript's.
    """
    try:
        with zipfile.ZipFile(source) as archive:
            records = check_members(archive, os.path.getsize(source), source)
            is_program = torchscript.is_program(archive.namelist())
            if "data.pkl" not in {name.partition("/")[2] for name in archive.namelist()}:
                _fail(source, "this is a zip archive, but not one that torch.save wrote (it has no data.pkl)")
            for record in records:
                is_code = is_program and record.filename.partition("/")[2].startswith(("code/", "extra/"))
                if record.compress_type != zipfile.ZIP_STORED and not is_code:
                    _fail(source, f"{show(record.filename)} in it is compressed; torch stores it plain. Save it again")
                # torch can be told to write no checksums; it then writes 0.
                if record.CRC:
                    with archive.open(record) as stream:
                        while stream.read(_CHUNK):
                            pass
            if is_program:
                return torchscript.read_program(source, archive)
    except (
        zipfile.BadZipFile,
        EOFError,
        NotImplementedError,
        ValueError,
        RuntimeError,
        UnicodeError,
        zlib.error,
    ) as error:
        _fail(source, f"the archive is damaged or was cut off ({_first_line(error)}); download or copy it again")
    return {record.file_size for record in records if "/data/" in record.filename}


def _check_storages(root: object, sizes: set[int], source: str) -> None:
    """Refuse a tensor whose memory is not one record: torch maps as many bytes as the pickle says, unchecked."""
    for candidate in _candidates(root) if isinstance(root, Mapping) else ():
        for name, value in candidate.mapping.items():
            if not _is_tensor(value) or not _is_plain(value):
                continue
            stored = value.untyped_storage().nbytes()
            if stored and stored not in sizes:
                _fail(
                    source,
                    f"tensor {show(name)} claims {count(stored, 'byte')} of storage, but no record in the archive is "
                    "that long; it is damaged",
                    tensor=str(name),
                )


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor has one dense storage on the CPU."""
    return str(tensor.layout) == "torch.strided" and tensor.device.type == "cpu"


def _check_tensor(name: str, tensor: torch.Tensor, source: str) -> None:
    if name == METADATA_KEY or not is_unicode(name):
        _fail(source, f"tensor {show(name)} has a name that no safetensors file can hold; rename it", tensor=name)
    if tensor.device.type == "meta":
        _fail(source, f"tensor {show(name)} is on the meta device: it has a shape, but no data", tensor=name)
    if not _is_plain(tensor):
        kind = str(tensor.layout).removeprefix("torch.")
        _fail(source, f"tensor {show(name)} is {kind}, not dense; save it with to_dense()", tensor=name)
    if tensor.is_quantized:
        _fail(source, f"tensor {show(name)} is quantised ({tensor.dtype}); save it with dequantize()", tensor=name)
    try:
        size = nbytes(dtype_name(tensor.dtype), tensor_shape(tensor))
    except FormatError as error:
        _fail(source, f"tensor {show(name)}: {error.message}", tensor=name)
    if size > max(MAX_EXPANDED_BYTES, tensor.untyped_storage().nbytes()):
        _fail(
            source,
            f"tensor {show(name)} is an expanded one of {size:,} bytes, of which the file holds "
            f"{tensor.untyped_storage().nbytes():,}; save it with contiguous() if it is meant",
            tensor=name,
        )


def _is_trainer_state(key: str) -> bool:
    return not _NOT_WEIGHTS.isdisjoint(re.split(r"[^a-z]+", key.lower()))


def _candidates(root: Mapping[object, object]) -> list[_Candidate]:
    """All mappings with str keys and a tensor, nearest first; each once, however many keys or cycles lead to it."""
    found: list[_Candidate] = []
    reached = {id(root)}
    queue = deque([_Candidate((), root, True)])
    while queue:
        here = queue.popleft()
        if not all(isinstance(key, str) for key in here.mapping):
            continue
        if _tensor_count(here):
            # A generator's state beside the model does not make a model of what holds both.
            weights = any(_is_tensor(value) and not _is_trainer_state(str(key)) for key, value in here.mapping.items())
            found.append(replace(here, is_model=here.is_model and weights))
        for key, value in here.mapping.items() if len(here.path) < MAX_DEPTH else ():
            if isinstance(value, Mapping) and id(value) not in reached:
                reached.add(id(value))
                is_model = here.is_model and not _is_trainer_state(str(key)) and not value.keys() >= _OPTIMIZER_KEYS
                queue.append(_Candidate((*here.path, str(key)), value, is_model))
    return found


def _choose(candidates: list[_Candidate], key: str | None, source: str) -> _Candidate:
    models = [candidate for candidate in candidates if candidate.is_model]
    listed = "; ".join(f"{show(one.key)} ({count(_tensor_count(one), 'tensor')})" for one in models or candidates)
    if key is not None:
        found = [candidate for candidate in candidates if candidate.key == (key or ROOT)]
        if not found:
            there = f"the file has {listed}" if listed else "the file has none at all"
            raise NotFoundError(
                f"{source}: there is no state dict at the key {show(key)}; {there}", file=source, key=key
            )
        if len(found) > 1:
            raise BadInputError(f"{source}: the key {show(key)} is ambiguous, as keys have dots in them", file=source)
        return found[0]
    if not models:
        rest = f", only the state of a trainer: {listed}; choose with --key if that is meant" if listed else ""
        _fail(source, f"it holds no state dict, that is, no mapping with tensors by name{rest}")
    if len(models) > 1:
        raise BadInputError(
            f"{source}: it holds {len(models)} state dicts; choose one with --key: {listed}",
            file=source,
            candidates={one.key: _tensor_count(one) for one in models},
        )
    return models[0]


def _tensor_count(candidate: _Candidate) -> int:
    return sum(_is_tensor(value) for value in candidate.mapping.values())


def _left_out(root: Mapping[object, object], path: tuple[str, ...]) -> Iterator[str]:
    """Dotted paths of what is beside the mapping at `path`, then of the entries in it that are no tensors."""
    mapping = root
    for depth, part in enumerate(path):
        yield from (".".join((*path[:depth], str(key))) for key in mapping if key != part)
        inner = mapping[part]
        if not isinstance(inner, Mapping):
            return
        mapping = inner
    yield from (".".join((*path, str(key))) for key, value in mapping.items() if not _is_tensor(value))


def _is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    import torch

    return isinstance(value, torch.Tensor)


def _kind(value: object) -> str:
    return "one bare tensor" if _is_tensor(value) else f"a Python {type(value).__name__}"
