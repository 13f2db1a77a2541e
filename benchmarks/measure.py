"""Measuring an operation in a process of its own: wall time, and the peak of its anonymous memory."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

_SAMPLE_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class Measured:
    """One run: seconds of wall time, peak of RssAnon in bytes, and what the operation returned."""

    seconds: float
    peak_anonymous: int
    value: object


def measure(operation: Callable[..., object], *arguments: object) -> Measured:
    """Run a picklable operation in a fresh process. Time counts from when its modules are loaded.

    Raises:
        RuntimeError: the process failed.
    """
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
