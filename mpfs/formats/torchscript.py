"""Parameters and buffers out of TorchScript archives, without the loader that would compile their code.

An archive of torch.jit.save (torch >= 1.4) is a zip: `data.pkl` pickles the tree of modules, `data/N` are storages, and
`code/__torch__/….py` says of each class which attributes are parameters and buffers. The pickle is read here by a machine
that only describes: it knows the opcodes that torch writes, and calls nothing. Of the code, two lists of names are read,
as text.

Source: torch/csrc/jit/serialization/pickler.cpp and python_print.cpp (torch 2.13), looked at through the archives they make.
"""

from __future__ import annotations

import ast
import os
import pickletools
import re
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, cast

from mpfs.errors import FormatError, UnsafeInputError
from mpfs.formats.archive import data_offset
from mpfs.formats.messages import count, show

if TYPE_CHECKING:
    import torch

MAX_PICKLE_BYTES = 1 << 24
"""The longest data.pkl that is read. A model of a thousand tensors has 300 kB."""

MAX_CODE_BYTES = 1 << 26
"""The most code, unpacked, that is searched for names of parameters."""

MAX_NAMES = 1_000_000
"""The most attributes that modules can have together: those of a module that is used twice count twice."""

_MAX_DEPTH = 100
_MAX_DIMENSIONS = 64

_STORAGES = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "UInt16": "uint16",
    "UInt32": "uint32",
    "UInt64": "uint64",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
    "Float8_e4m3fn": "float8_e4m3fn",
    "Float8_e5m2": "float8_e5m2",
    "Float8_e4m3fnuz": "float8_e4m3fnuz",
    "Float8_e5m2fnuz": "float8_e5m2fnuz",
    "Float8_e8m0fnu": "float8_e8m0fnu",
}
"""How torch's pickler calls the storage of a dtype, without `torch.` before it and `Storage` behind."""

_KNOWN = re.compile(
    r"__torch__\..+|torch\.\w+Storage|torch\._utils\._rebuild_\w+|torch\.jit\._pickle\.\w+|torch\.device"
)
_CLASS = re.compile(r"class (\w+)\((\w*)\):")
_LIST = re.compile(r"  __(?:parameters|buffers)__ = (\[.*\])")


@dataclass(frozen=True, slots=True)
class Program:
    """A program's parameters and buffers by dotted name, on the CPU, backed by the mapped file; and the dotted paths of
    tensors and submodules that are neither."""

    tensors: dict[str, torch.Tensor]
    skipped: tuple[str, ...]


def is_program(names: Iterable[str]) -> bool:
    """Whether a zip archive with these members is TorchScript's."""
    parts = {name.partition("/")[2] for name in names}
    return "constants.pkl" in parts or any(part.startswith("code/") for part in parts)


def read_program(path: str | os.PathLike[str], archive: zipfile.ZipFile) -> Program:
    """The parameters and buffers of a program.

    Names are those of `state_dict()` of the module that was compiled; TorchScript does not remember which buffers were
    not persistent, so those are there too.

    Args:
        path: the file.
        archive: the same, open, its members checked (`mpfs.formats.archive`) and those of tensors stored plain.

    Raises:
        UnsafeInputError: its pickle names something that no program of torch's has.
        FormatError: it is damaged, or holds no parameters.
    """
    return _Reader(os.fspath(path), archive).read()


@dataclass(slots=True)
class _Object:
    """An instance: the qualified name of its class, and its attributes."""

    kind: str
    state: Any = None


@dataclass(frozen=True, slots=True)
class _Call:
    """Something that a function was to make."""

    function: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Global:
    """A class or function by its qualified name."""

    name: str


_MARK = object()


class _DamagedError(ValueError):
    """What cannot be; the message says what."""


class _Machine:
    """Reads a pickle of torch's serializer into dicts, lists, tuples, numbers and texts, and the three classes above."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        """What the pickle describes.

        Raises:
            UnsafeInputError: it names a class or function that is not of torch's programs; the message has no file.
            ValueError, IndexError, TypeError, KeyError: it is no such pickle.
        """
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                (result,) = self.stack
                return result
            step = _STEPS.get(opcode.name)
            if step is None:
                raise _DamagedError(f"the opcode {opcode.name}")
            step(self, argument)
        raise _DamagedError("no end")

    def pop_to_mark(self) -> list[Any]:
        at = len(self.stack) - 1
        while self.stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise _DamagedError("no mark")
        items = self.stack[at + 1 :]
        del self.stack[at:]
        return items

    def pop(self, number: int) -> list[Any]:
        if len(self.stack) < number:
            raise _DamagedError("an empty stack")
        items = self.stack[len(self.stack) - number :]
        del self.stack[len(self.stack) - number :]
        return items

    def find(self, argument: str) -> None:
        name = argument.replace(" ", ".")
        if name != "collections.OrderedDict" and not _KNOWN.fullmatch(name):
            raise UnsafeInputError(name, **{"global": name})
        self.stack.append(_Global(name))

    def call(self) -> None:
        function, arguments = self.pop(2)
        if not isinstance(function, _Global) or not isinstance(arguments, tuple):
            raise _DamagedError("a call of what is no function")
        if function.name == "collections.OrderedDict":
            self.stack.append({})
        elif function.name.startswith("torch.jit._pickle."):
            # They give back their argument, as a list of some type.
            self.stack.append(arguments[0])
        else:
            self.stack.append(_Call(function.name, arguments))

    def new(self) -> None:
        kind, arguments = self.pop(2)
        if not isinstance(kind, _Global) or arguments != ():
            raise _DamagedError("an instance of what is no class")
        self.stack.append(_Object(kind.name))

    def build(self) -> None:
        instance, state = self.pop(2)
        if not isinstance(instance, _Object):
            raise _DamagedError("a state of what is no instance")
        instance.state = state
        self.stack.append(instance)

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise _DamagedError("entries of what is no dict")
        target.update(zip(items[::2], items[1::2], strict=True))

    def append(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise _DamagedError("items of what is no list")
        target.extend(items)

    def persistent(self) -> None:
        (described,) = self.pop(1)
        if not isinstance(described, tuple):
            raise _DamagedError("a storage that is none")
        self.stack.append(_Call("storage", described))


def _pushed(value: Any) -> Any:
    return lambda machine, argument: machine.stack.append(value())


def _given(machine: _Machine, argument: Any) -> None:
    machine.stack.append(argument)


def _tuple_of(number: int) -> Any:
    return lambda machine, argument: machine.stack.append(tuple(machine.pop(number)))


_STEPS: Mapping[str, Any] = {
    "PROTO": lambda machine, argument: None,
    "FRAME": lambda machine, argument: None,
    "MARK": _pushed(lambda: _MARK),
    "NONE": _pushed(lambda: None),
    "NEWTRUE": _pushed(lambda: True),
    "NEWFALSE": _pushed(lambda: False),
    "EMPTY_DICT": _pushed(dict),
    "EMPTY_LIST": _pushed(list),
    "EMPTY_TUPLE": _pushed(tuple),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"), _given),
    **dict.fromkeys(("BINSTRING", "SHORT_BINSTRING", "BINUNICODE8"), _given),
    "TUPLE": lambda machine, argument: machine.stack.append(tuple(machine.pop_to_mark())),
    **{f"TUPLE{number}": _tuple_of(number) for number in (1, 2, 3)},
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), lambda machine, at: machine.memo.__setitem__(at, machine.stack[-1])),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda machine, at: machine.stack.append(machine.memo[at])),
    "GLOBAL": lambda machine, argument: machine.find(argument),
    "REDUCE": lambda machine, argument: machine.call(),
    "NEWOBJ": lambda machine, argument: machine.new(),
    "BUILD": lambda machine, argument: machine.build(),
    "BINPERSID": lambda machine, argument: machine.persistent(),
    "SETITEM": lambda machine, argument: machine.set_items(machine.pop(2)),
    "SETITEMS": lambda machine, argument: machine.set_items(machine.pop_to_mark()),
    "APPEND": lambda machine, argument: machine.append(machine.pop(1)),
    "APPENDS": lambda machine, argument: machine.append(machine.pop_to_mark()),
}
"""What each opcode does that torch's serializer writes."""


class _Reader:
    """One archive."""

    def __init__(self, source: str, archive: zipfile.ZipFile) -> None:
        self._source = source
        self._archive = archive
        # The directory in which everything is is called as the file was.
        self._members = {member.filename.partition("/")[2]: member for member in archive.infolist()}
        self._storages: dict[str, torch.UntypedStorage] = {}
        self._mapped: torch.UntypedStorage | None = None

    def read(self) -> Program:
        order = self._content("byteorder", 16) if "byteorder" in self._members else b"little"
        if order != b"little":
            self._fail("it was saved on a big-endian machine; save it again on a little-endian one")
        try:
            root = _Machine().run(self._content("data.pkl", MAX_PICKLE_BYTES))
        except UnsafeInputError as error:
            raise UnsafeInputError(
                f"{self._source}: its pickle names {show(error.message)}, which no TorchScript program needs: this could run "
                "code in whoever loads it with pickle; MPFS does not read it",
                file=self._source,
                **error.details,
            ) from None
        except (ValueError, IndexError, TypeError, KeyError, OverflowError) as error:
            self._fail(f"its data.pkl makes no sense ({type(error).__name__}: {error}); it is damaged")
        program = self._walk(root, self._classes())
        if not program.tensors:
            constants = sum(name.startswith("constants/") for name in self._members)
            frozen = (
                f"; its {count(constants, 'tensor')} of constants have no names (torch.jit.freeze)" if constants else ""
            )
            self._fail(f"this TorchScript program has no parameters{frozen}; save the module's state_dict() instead")
        return program

    def _walk(self, root: object, classes: Mapping[str, frozenset[str] | None]) -> Program:
        tensors: dict[str, torch.Tensor] = {}
        skipped: list[str] = []
        made: dict[int, torch.Tensor] = {}
        names = 0
        queue: list[tuple[tuple[str, ...], object]] = [((), root)]
        while queue:
            path, module = queue.pop()
            if not isinstance(module, _Object) or type(module.state) is not dict or module.kind not in classes:
                if not path:
                    self._fail("its data.pkl holds no module; it is damaged, or was not saved by torch.jit.save")
                skipped.append(".".join(path))
                continue
            if len(path) > _MAX_DEPTH:
                self._fail(f"its modules are more than {_MAX_DEPTH} deep; it is damaged")
            names += 1 + len(module.state)
            if names > MAX_NAMES:
                self._fail(f"its modules have more than {MAX_NAMES:,} attributes; it is damaged, or made to harm")
            wanted = classes[module.kind]
            inner: list[tuple[tuple[str, ...], object]] = []
            for name, value in module.state.items():
                if not isinstance(name, str):
                    self._fail(f"an attribute of {module.kind} is called {show(name)}; it is damaged")
                here = (*path, name)
                if isinstance(value, _Object):
                    inner.append((here, value))
                elif _is_tensor(value) and (wanted is None or name in wanted):
                    full = ".".join(here)
                    if full in tensors:
                        self._fail(f"there are two tensors {show(full)}", tensor=full)
                    if id(value) not in made:
                        made[id(value)] = self._tensor(full, value)
                    tensors[full] = made[id(value)]
                elif _is_tensor(value) or isinstance(value, list | dict):
                    skipped.append(".".join(here))
            queue.extend(reversed(inner))
        return Program(tensors, tuple(skipped))

    def _classes(self) -> dict[str, frozenset[str] | None]:
        """The modules' classes, with the names of their parameters and buffers; None where the code has no such lists."""
        found: dict[str, frozenset[str] | None] = {}
        total = 0
        for name in self._members:
            if not (name.startswith("code/") and name.endswith(".py")):
                continue
            text = self._content(name, MAX_CODE_BYTES - total)
            total += len(text)
            place = name.removeprefix("code/").removesuffix(".py").replace("/", ".")
            current = ""
            for line in text.decode("utf-8", "replace").splitlines():
                begin = _CLASS.fullmatch(line)
                if begin:
                    current = f"{place}.{begin[1]}" if begin[2] == "Module" else ""
                    if current:
                        found[current] = None
                    continue
                listed = _LIST.fullmatch(line) if current else None
                if listed:
                    found[current] = (found[current] or frozenset()) | self._names(listed[1], current)
        return found

    def _names(self, text: str, kind: str) -> frozenset[str]:
        try:
            names = ast.literal_eval(text)
            return frozenset(name for name in names if isinstance(name, str))
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            self._fail(f"the code of {kind} has a list of parameters that makes no sense; it is damaged")

    def _content(self, name: str, limit: int) -> bytes:
        member = self._members.get(name)
        if member is None:
            self._fail(f"it has no {name}; it is damaged, or older than torch 1.4")
        if member.file_size > limit:
            self._fail(
                f"its {name} has {member.file_size:,} bytes, and MPFS reads {limit:,}; it is damaged, or made to harm"
            )
        with self._archive.open(member) as stream:
            return stream.read()

    def _tensor(self, name: str, call: _Call) -> torch.Tensor:
        """A tensor that a pickle describes, on the mapped file."""
        import torch

        if call.function != "torch._utils._rebuild_tensor_v2":
            kind = call.function.rpartition("_rebuild_")[2]
            self._fail(f"tensor {show(name)} is of a kind that MPFS does not read ({kind}); save it dense", tensor=name)
        try:
            storage, offset, shape, stride, *_ = call.arguments
            _, kind, key, _, length = storage.arguments
            dtype = getattr(torch, _STORAGES[kind.name.removeprefix("torch.").removesuffix("Storage")])
            numbers = (offset, length, *shape, *stride)
            plain = all(type(number) is int and 0 <= number < 2**62 for number in numbers)
            if not plain or len(shape) != len(stride) or len(shape) > _MAX_DIMENSIONS or not isinstance(key, str):
                raise _DamagedError("its shape")
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            self._fail(f"tensor {show(name)} is described in a way that makes no sense ({error})", tensor=name)
        last = offset + sum((dim - 1) * step for dim, step in zip(shape, stride, strict=True))
        if 0 not in shape and last >= length:
            self._fail(
                f"tensor {show(name)} reaches to element {last:,} of a storage of {length:,}; it is damaged",
                tensor=name,
            )
        data = self._storage(name, key, length * dtype.itemsize)
        return torch.empty(0, dtype=dtype).set_(data, offset, shape, stride)

    def _storage(self, name: str, key: str, size: int) -> torch.UntypedStorage:
        member = self._members.get(f"data/{key}")
        if member is None or member.compress_type != zipfile.ZIP_STORED or member.file_size != size:
            self._fail(
                f"tensor {show(name)} claims {count(size, 'byte')} of storage, but there is no record {show(f'data/{key}')} "
                "that is that long; it is damaged",
                tensor=name,
            )
        if key not in self._storages:
            whole = self._whole()
            start = self._data_offset(member)
            if start + size > whole.nbytes():
                self._fail(f"the record {show(f'data/{key}')} reaches past the end of the file; it is damaged")
            self._storages[key] = whole[start : start + size]
        return self._storages[key]

    def _data_offset(self, member: zipfile.ZipInfo) -> int:
        if self._archive.fp is None:
            raise ValueError("the archive is closed")
        return data_offset(self._archive.fp, member)

    def _whole(self) -> torch.UntypedStorage:
        """The file, mapped."""
        import torch

        if self._mapped is None:
            size = os.path.getsize(self._source)
            self._mapped = cast("torch.UntypedStorage", torch.UntypedStorage.from_file(self._source, False, size))
        return self._mapped

    def _fail(self, problem: str, **details: object) -> NoReturn:
        raise FormatError(f"{self._source}: {problem}", file=self._source, **details)


def _is_tensor(value: object) -> bool:
    return isinstance(value, _Call) and value.function.startswith("torch._utils._rebuild_")
