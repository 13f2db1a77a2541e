"""torch, imported by the first one who uses it: a merge that kernels or earlier results do whole never waits for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpfs.deferred import Deferred

if TYPE_CHECKING:
    import torch as torch
else:
    torch = Deferred("torch")
