"""How plans are run: what a merge and a sweep are asked for, beside what they merge. Importing it is cheap."""

from __future__ import annotations

import os
from dataclasses import dataclass

from mpfs.objects.progress import Progress

DEFAULT_MEMORY = 1 << 30
"""Bytes."""


@dataclass(frozen=True, slots=True)
class MergeOptions:
    """Options of running a plan, or several together.

    Args:
        reuse: look results up before computing them.
        verify_fidelity: afterwards read every expert in full and measure how close to the full merge the result came.
        memory: bound of anonymous memory, in bytes; fewer columns are in flight if it is small.
        threads: worker threads; default: the number of CPUs.
        progress: told the bytes of output done, of all.
        allow_nonfinite: publish a result even if it holds NaN or infinity.
        check_space: see first whether there is room for what will be computed.
        device: let torch compute, and do it there (see `check_device`); default: the kernels, or torch on the CPU.
    """

    reuse: bool = True
    verify_fidelity: bool = False
    memory: int = DEFAULT_MEMORY
    threads: int | None = None
    progress: Progress | None = None
    allow_nonfinite: bool = False
    check_space: bool = True
    device: str | None = None

    @property
    def workers(self) -> int:
        """Worker threads, as a number."""
        return self.threads or os.cpu_count() or 1
