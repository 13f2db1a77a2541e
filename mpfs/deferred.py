"""What is imported by the first one who uses it: names of packages, and modules that take long to load.

A command or a program uses a part of MPFS, and importing all of it took longer than most commands run. So a package
offers its names without importing the modules that define them, and where numpy or torch are needed by one function of
many, the module waits for that function. Both are said here and nowhere else; tests/test_start.py says what must not
be loaded when. Safe to use from several threads: importing is, and what was found does not change.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any


def names(package: str, modules: Mapping[str, Sequence[str]]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` (PEP 562) for a package whose names come from its modules.

    The package also imports the names under `TYPE_CHECKING`, for type checkers, editors and the test of layers; a test
    compares the two. A name must not be that of a submodule: importing that would set it to the module.

    Args:
        package: its `__name__`.
        modules: the names that come from each module, by the module's full name. `found as offered` renames one.

    Returns:
        The two functions. What was found is kept in the package, so that each name is looked up once.
    """
    places = {}
    for module, listed in modules.items():
        for item in listed:
            name, _, offered = item.partition(" as ")
            places[offered or name] = (module, name)

    def find(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])
        value = _found(*places[name])
        setattr(sys.modules[package], name, value)
        return value

    def everything() -> list[str]:
        return sorted({*vars(sys.modules[package]), *places})

    return find, everything


def _found(module: str, name: str) -> Any:
    # Not import_module: what that imports is missing in `python -X importtime`, which shows what to defer.
    return getattr(__import__(module, fromlist=(name,)), name)


class Deferred:
    """A module that is imported when something of it is first asked for; what was found is kept.

    Names of it must only be used inside functions and in annotations, which nothing evaluates.
    """

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> Any:
        value = _found(self.__name__, name)
        setattr(self, name, value)
        return value


if TYPE_CHECKING:
    import numpy as numpy
else:
    numpy = Deferred("numpy")
