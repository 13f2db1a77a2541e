"""Kernels as machine code on disk: numba compiles them once, and from then on llvmlite alone loads them.

numba has a cache of its own, but to load from it a process imports numba and sets its compiler up, which takes longer
than a small merge. Here a kernel is a function of numbers and arrays that returns nothing and allocates nothing; its
code, as numba makes it, needs nothing of numba's to run. It is kept in `__pycache__` beside its source, under a name
that changes with the source (and that of what it imports of MPFS), the versions, the processor and its features. Where
it cannot be kept, numba's cache is used, and where that cannot be either, the kernel is compiled by every process.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import re
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeAlias


@dataclass(frozen=True, slots=True)
class Array:
    """An argument that is an array, C-contiguous; `unaligned` ones may also be read-only."""

    element: str
    dimensions: int = 1
    unaligned: bool = False


Argument: TypeAlias = str | Array
"""A number's type ("u32", "u64", "i64", "f32" or "bool"), or an array."""

_NUMBERS: Final[dict[str, tuple[Any, Callable[[Any], Any]]]] = {
    "u32": (ctypes.c_uint32, int),
    "u64": (ctypes.c_uint64, int),
    "i64": (ctypes.c_int64, int),
    "f32": (ctypes.c_float, float),
    "bool": (ctypes.c_bool, bool),
}
_TYPES: Final = {
    "u16": "uint16",
    "i16": "int16",
    "u32": "uint32",
    "u64": "uint64",
    "i64": "int64",
    "f32": "float32",
    "f64": "float64",
    "bool": "boolean",
}
"""numba's names of the types."""

_IMPORT: Final = re.compile(rb"(?m)^from (mpfs\.[\w.]+) import ")
_SYMBOL: Final = "mpfs_kernel"
_CHECK_BYTES: Final = 32

_lock = threading.Lock()
_directory: Path | None = None
_listener: Callable[[str], None] | None = None


def on_compiling(listener: Callable[[str], None] | None) -> None:
    """Have somebody told, in words for a person, before the first kernel of this process is compiled; None: nobody."""
    global _listener
    _listener = listener


class _Linked:
    """Machine code that can be called. Gives up the interpreter lock meanwhile; safe to use from several threads."""

    def __init__(self, address: int, arguments: Sequence[Argument], owner: object) -> None:
        flat: list[Any] = [ctypes.c_void_p, ctypes.c_void_p]
        for argument in arguments:
            if isinstance(argument, Array):
                # As numba passes an array: owner, parent, size, item size, data, shape, strides.
                flat += [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 2 + [ctypes.c_void_p]
                flat += [ctypes.c_int64] * (2 * argument.dimensions)
            else:
                flat.append(_NUMBERS[argument][0])
        self._call = ctypes.CFUNCTYPE(ctypes.c_int32, *flat)(address)
        self._convert = [None if isinstance(argument, Array) else _NUMBERS[argument][1] for argument in arguments]
        self._owner = owner
        self._nothing = (ctypes.c_void_p * 2)()
        self._returned = (
            ctypes.addressof(self._nothing),
            ctypes.addressof(self._nothing) + ctypes.sizeof(ctypes.c_void_p),
        )

    def __call__(self, *values: Any) -> None:
        flat: list[Any] = list(self._returned)
        for value, convert in zip(values, self._convert, strict=True):
            if convert is None:
                data = value.__array_interface__["data"][0]
                flat += (None, None, value.size, value.itemsize, data, *value.shape, *value.strides)
            else:
                flat.append(convert(value))
        if self._call(*flat):
            raise RuntimeError("a kernel failed")


def keep_in(directory: Path | None) -> None:
    """Keep code in a directory; None: in `__pycache__`, beside the kernels' sources."""
    global _directory
    _directory = directory


def kernel(module: str, function: str, arguments: Sequence[Argument]) -> Callable[..., None]:
    """A compiled kernel.

    Args:
        module: the dotted name of the module that has it; it is only imported, and numba with it, to compile.
        function: its name there.
        arguments: what it takes.

    Returns:
        A function of these arguments.

    Raises:
        ImportError: it has to be compiled, and numba is not there, or switched off.
    """
    with _lock:
        path = _path(module, function, arguments)
        if path is not None:
            with contextlib.suppress(Exception):  # damaged, or not for this machine after all: it is made anew
                return _link(_read(path), arguments)
        return _compile(path, module, function, arguments)


def _path(module: str, function: str, arguments: Sequence[Argument]) -> Path | None:
    """Where the code is kept; None where llvmlite cannot tell what it would be for."""
    try:
        import llvmlite.binding as llvm  # type: ignore[import-untyped,unused-ignore]

        spec = find_spec(module)
        if spec is None or spec.origin is None or find_spec("numba") is None:
            return None
        source = Path(spec.origin)
        made_for = (
            *(version("numba"), version("llvmlite"), llvm.get_process_triple(), llvm.get_host_cpu_name()),
            *(llvm.get_host_cpu_features().flatten(), function, repr(arguments)),
        )
        digest = hashlib.sha256(_sources(module) + "\n".join(made_for).encode()).hexdigest()[:24]
        return (_directory or source.parent / "__pycache__") / f"{source.stem}.{function}.{digest}.o"
    except Exception:  # no source beside the module, an llvmlite of another make
        return None


@cache
def _sources(module: str) -> bytes:
    """The source of a module and of what it imports of MPFS, once each."""
    found: dict[str, bytes] = {}
    coming = [module]
    while coming:
        name = coming.pop()
        spec = None if name in found else find_spec(name)
        if spec is not None and spec.origin is not None:
            found[name] = Path(spec.origin).read_bytes()
            coming += [match.decode() for match in _IMPORT.findall(found[name])]
    return b"".join(found[name] for name in sorted(found))


def _read(path: Path) -> bytes:
    data = path.read_bytes()
    code, check = data[:-_CHECK_BYTES], data[-_CHECK_BYTES:]
    if hashlib.sha256(code).digest() != check:
        raise ValueError(f"{path} is damaged")
    return code


def _write(path: Path, code: bytes) -> None:
    """Whole or not at all, also where other processes do the same."""
    path.parent.mkdir(exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(code + hashlib.sha256(code).digest())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _machine() -> Any:
    import llvmlite.binding as llvm

    with contextlib.suppress(RuntimeError):  # newer llvmlites initialise themselves, and say so
        llvm.initialize()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        codemodel="jitdefault",
        jit=True,
    )


def _link(code: bytes, arguments: Sequence[Argument]) -> _Linked:
    import llvmlite.binding as llvm

    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    address = engine.get_function_address(_SYMBOL)
    if not address:
        raise ValueError("the code has no kernel")
    return _Linked(address, arguments, engine)


def _compile(path: Path | None, module: str, function: str, arguments: Sequence[Argument]) -> Callable[..., None]:
    import numba  # type: ignore[import-untyped,unused-ignore]  # old versions ship no types
    from numba import types

    if getattr(numba.config, "DISABLE_JIT", False):
        raise ImportError("numba's compiler is switched off")
    global _listener
    if _listener is not None:
        listener, _listener = _listener, None
        listener("compiling kernels for this machine, once: this takes some seconds")
    source = getattr(import_module(module), function)

    def type_of(argument: Argument) -> Any:
        if isinstance(argument, str):
            return getattr(types, _TYPES[argument])
        element = getattr(types, _TYPES[argument.element])
        loose = argument.unaligned
        return types.Array(element, argument.dimensions, "C", readonly=loose, aligned=not loose)

    signature = types.void(*map(type_of, arguments))
    njit: Any = numba.njit
    options: dict[str, Any] = {"nogil": True, "fastmath": False, "error_model": "numpy"}
    if path is not None:
        with contextlib.suppress(Exception):  # no writable place, a full disk, a numba that makes it otherwise
            code = _code_of(njit(signature, no_cpython_wrapper=True, **options)(source))
            linked = _link(code, arguments)
            _write(path, code)
            return linked
    try:
        found: Callable[..., None] = njit(signature, cache=True, **options)(source)
    except Exception:  # whatever it is, that cache is optional, too
        found = njit(signature, **options)(source)
    return found


def _code_of(dispatcher: Any) -> bytes:
    """The machine code of what numba compiled: of the function itself, without the ways to call it from Python."""
    import llvmlite.binding as llvm

    [signature] = dispatcher.signatures
    name = dispatcher.overloads[signature].fndesc.llvm_func_name
    text = dispatcher.inspect_llvm(signature)
    # Arrays come without an owner, so there is nothing to count; what allocates cannot run without numba.
    text = re.sub(r"(?m)^ *(?:tail )?call void @NRT_(?:incref|decref)\(.*\n", "", text)
    text = re.sub(r"(?ms)^define [^\n]*@\"?(?:cfunc\.|NRT_)[^\n]*\{\n.*?^\}\n", "", text)
    text = text.replace(f'@"{name}"', f"@{_SYMBOL}").replace(f"@{name}(", f"@{_SYMBOL}(")
    if "@NRT_" in re.sub(r"(?m)^declare .*$", "", text):
        raise ValueError("a kernel must not allocate")
    code: bytes = _machine().emit_object(llvm.parse_assembly(text))
    return code
