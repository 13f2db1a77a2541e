"""Measuring an operation in a process of its own: wall time, and the peak of its anonymous memory."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

_SAMPLE_SECONDS = 0.005

_TOUCHED = 4 << 30
"""Bytes of free memory that are touched before a run, at the most: more than any run takes of the page cache anew."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One run: seconds of wall time, peak of RssAnon in bytes, and what the operation returned."""

    seconds: float
    peak_anonymous: int
    value: object


def touch_free_memory() -> None:
    """Write to free memory, so that the host of a virtual machine gives it back before a run and not within it.

    A host may take pages that have not been used for a while; the first byte that is written to one then takes 10 µs, which
    made the same operation take two to three times as long, whichever came after a pause. Does nothing without /proc.
    """
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            free = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemFree:"))
    except (OSError, StopIteration):
        return
    size = min(_TOUCHED, free // 10 * 9) // mmap.PAGESIZE * mmap.PAGESIZE
    if size:
        with mmap.mmap(-1, size) as memory:
            memory[:: mmap.PAGESIZE] = bytes(size // mmap.PAGESIZE)


def measure(operation: Callable[..., object], *arguments: object) -> Measured:
    """Run a picklable operation in a fresh process. Time counts from when its modules are loaded.

    Raises:
        RuntimeError: the process failed.
    """
    touch_free_memory()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_child, args=(theirs, operation, arguments))
    child.start()
    theirs.close()
    try:
        result = ours.recv()
    except EOFError:
        result = None
    child.join()
    if not isinstance(result, Measured):
        raise RuntimeError(f"{operation.__name__} failed with exit code {child.exitcode}: {result}")
    return result


def _child(pipe: Connection, operation: Callable[..., object], arguments: Sequence[object]) -> None:
    peak = 0
    stop = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not stop.is_set():
            peak = max(peak, anonymous_memory())
            stop.wait(_SAMPLE_SECONDS)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    started = time.perf_counter()
    try:
        value = operation(*arguments)
        pipe.send(Measured(time.perf_counter() - started, max(peak, anonymous_memory()), value))
    except BaseException as error:
        pipe.send(repr(error))
        raise
    finally:
        stop.set()
        watcher.join()


def anonymous_memory() -> int:
    """This process's RssAnon, in bytes."""
    with open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    raise OSError("no RssAnon in /proc/self/status")


def median(values: Sequence[float]) -> float:
    """The median."""
    return statistics.median(values)


def spread(values: Sequence[float]) -> str:
    """The median and the range, for a table of seconds."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def machine() -> str:
    """A line about the machine."""
    model = "unknown CPU"
    with open("/proc/cpuinfo", encoding="utf-8") as info:
        for line in info:
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return f"{os.cpu_count()} CPUs ({model}), load {os.getloadavg()[0]:.1f}"
