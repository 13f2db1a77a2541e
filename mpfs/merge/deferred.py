"""torch, imported by the first one who uses it: a merge that kernels or earlier results do whole never waits for it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
else:

    class _Deferred:
        """A module that is imported when something of it is first asked for; what was found is kept.

        For modules of the merge layer, whose reference implementations need torch while their kernels do not. Names of
        torch must then only be used inside functions and in annotations, which nothing evaluates. Safe to use from
        several threads: importing is, and the module's names do not change.
        """

        def __init__(self, name: str) -> None:
            self.__name__ = name

        def __getattr__(self, name: str) -> Any:
            value = getattr(import_module(self.__name__), name)
            setattr(self, name, value)
            return value

    torch = _Deferred("torch")
