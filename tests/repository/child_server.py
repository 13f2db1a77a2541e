"""Children that may be killed: a process with everything imported, which forks one child for each command.

The server opens no repository and computes nothing, so that a fork of it is as good as a new process, and takes
milliseconds. `Children` is the other end: it starts a server, gives commands and kills children at chosen instants.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

TIMEOUT = 60.0
"""Seconds after which a child that says nothing hangs."""


PATIENCE = 3.0
"""Seconds after which a person presses Ctrl-C once more."""

INTERRUPTED = 130


@dataclass(slots=True)
class Outcome:
    """What became of a child: its exit status (negative: the signal), and what it said before."""

    status: int
    messages: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def result(self) -> dict[str, Any]:
        """What the command returned; the test fails if it did not."""
        assert "result" in self.messages, self
        found: dict[str, Any] = self.messages["result"]
        return found


class Children:
    """Runs commands in children of a server process."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self._buffer = b""
        self._messages: list[dict[str, Any]] = []
        self._wait_for("started")

    def __enter__(self) -> Children:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.kill()
        self._server.wait()
        for stream in (self._server.stdin, self._server.stdout):
            if stream is not None:
                stream.close()

    def run(self, **command: object) -> Outcome:
        """Run a command to its end."""
        self.start(**command)
        return self.finish()

    def kill(self, delay: float | Callable[[], None], **command: object) -> Outcome:
        """Run a command and kill the child `delay` seconds after it has begun, or once a function has returned."""
        return self._signal(delay, signal.SIGKILL, command)

    def interrupt(self, delay: float | Callable[[], None], **command: object) -> Outcome:
        """As `kill`, but press Ctrl-C; again, should that not be enough."""
        return self._signal(delay, signal.SIGINT, command)

    def _signal(
        self, delay: float | Callable[[], None], sent: signal.Signals, command: Mapping[str, object]
    ) -> Outcome:
        self.start(**command)
        pid = self._wait_for("pid")["pid"]
        self._wait_for("begun")
        if callable(delay):
            delay()
        else:
            time.sleep(delay)
        # The server reaps a child only to tell about it; its number cannot be another's before that was read.
        os.kill(pid, sent)
        if sent == signal.SIGINT and not self._said("status", PATIENCE):
            os.kill(pid, sent)
        return self.finish()

    def start(self, **command: object) -> None:
        """Begin a command."""
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(command).encode() + b"\n")
        self._server.stdin.flush()

    def finish(self) -> Outcome:
        """Wait for the command that was begun."""
        self._wait_for("status")
        said: dict[str, Any] = {}
        for message in self._messages:
            said |= message
        self._messages.clear()
        assert self._server.stdin is not None
        self._server.stdin.write(b"\n")
        return Outcome(said["status"], said, said.get("seconds", 0.0))

    def _wait_for(self, key: str) -> dict[str, Any]:
        found = self._said(key, TIMEOUT)
        assert found is not None, f"the child hangs; it said {self._messages}"
        return found

    def _said(self, key: str, seconds: float) -> dict[str, Any] | None:
        """The message with this key; None if it does not come in time."""
        deadline = time.monotonic() + seconds
        while True:
            for message in self._messages:
                if key in message:
                    return message
            if not self._read(deadline):
                return None

    def _read(self, deadline: float) -> bool:
        assert self._server.stdout is not None
        ready, _, _ = select.select([self._server.stdout], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return False
        data = os.read(self._server.stdout.fileno(), 1 << 16)
        assert data, "the server is gone"
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        self._messages.extend(json.loads(line) for line in lines if line)
        return True


# -- the server -----------------------------------------------------------------------------------------------------


def _say(**message: object) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


def _serve() -> None:
    import numpy as np
    import torch  # noqa: F401

    import mpfs.ingest.commit
    import mpfs.merge.commit
    import mpfs.merge.sweep.run
    import mpfs.vfs.checkout  # noqa: F401
    from mpfs.stats import block_stats

    for dtype in ("F32", "BF16"):
        block_stats(np.zeros(256, np.float32).tobytes(), dtype, 0)
    _say(started=True)
    while line := sys.stdin.readline():
        child = os.fork()
        if child == 0:
            _child(json.loads(line))
        _say(pid=child)
        # Not reaped before the other end has read the status, or its number might be killed in another's place.
        found = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        assert found is not None
        killed = found.si_code != os.CLD_EXITED
        _say(status=-found.si_status if killed else found.si_status)
        sys.stdin.readline()
        os.waitpid(child, 0)


def _child(command: dict[str, Any]) -> None:
    from mpfs.errors import MPFSError
    from mpfs.store.writer import BATCH_BYTES, Writer

    status = 0
    try:
        Writer.__init__.__defaults__ = (command.pop("batch", BATCH_BYTES),)
        operation = OPERATIONS[command.pop("op")]
        _say(begun=True)
        started = time.monotonic()
        result = operation(**command)
        _say(result=dict(result), seconds=time.monotonic() - started)
    except MPFSError as error:
        _say(error=error.kind, message=error.message)
    except KeyboardInterrupt:
        _say(interrupted=True)
    except BaseException as error:
        _say(unforeseen=repr(error))
        status = 1
    finally:
        os._exit(status)


def _import(
    repo: str, source: str, ref: str, base: str | None = None, check_space: bool = True
) -> Mapping[str, object]:
    from mpfs.repository import Repository

    with Repository.open(repo) as repository:
        return repository.import_checkpoint(source, ref, base=base, check_space=check_space).as_json()


def _merge(
    repo: str, recipe: dict[str, Any], into: str, percent: float | None = None, check_space: bool = True
) -> Mapping[str, object]:
    from mpfs.objects import Budget
    from mpfs.repository import Repository

    with Repository.open(repo) as repository:
        budget = None if percent is None else Budget("percent", percent)
        return repository.merge(recipe, into, budget=budget, check_space=check_space).as_json()


def _sweep(repo: str, recipe: dict[str, Any], values: dict[str, list[Any]], into: str) -> Mapping[str, object]:
    from mpfs.repository import Repository

    with Repository.open(repo) as repository:
        return repository.sweep(recipe, values, into).as_json()


def _checks(repo: str) -> Mapping[str, object]:
    from mpfs.repository import Repository

    with Repository.open(repo) as repository:
        report = repository.fsck()
        refs = {ref.name: ref.commit for ref in repository.refs()}
        return {"problems": [str(problem) for problem in report.problems], "refs": refs}


def _memory(
    repo: str, imports: dict[str, str], recipe: dict[str, Any], into: str, values: dict[str, list[Any]] | None = None
) -> Mapping[str, object]:
    """Import and merge, or with `values` sweep, while a thread watches how much anonymous memory there is, in bytes."""
    from mpfs.repository import Repository

    peaks: dict[str, int] = {}
    done = threading.Event()
    phase = "start"

    def watch() -> None:
        while not done.is_set():
            peaks[phase] = max(peaks.get(phase, 0), anonymous_memory())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    peaks[phase] = anonymous_memory()
    watcher.start()
    times: dict[str, float] = {}
    with Repository.open(repo) as repository:
        for phase, source in imports.items():
            times[phase] = repository.import_checkpoint(source, phase).seconds
        phase = "merge"
        if values is None:
            figures = repository.merge(recipe, into).as_json()["run"]
        else:
            figures = repository.sweep(recipe, values, into).as_json()["run"]
        times[phase] = figures["seconds"]
    done.set()
    watcher.join()
    return {"peaks": peaks, "times": times, "computed": figures["blocks_computed"]}


def anonymous_memory() -> int:
    """This process's RssAnon, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc/self/status")


OPERATIONS: Mapping[str, Callable[..., Mapping[str, object]]] = {
    "import": _import,
    "merge": _merge,
    "sweep": _sweep,
    "checks": _checks,
    "memory": _memory,
}

_interrupts: list[int] = []


def _interrupt(number: int, frame: object) -> None:
    """As the command line does it: the first interrupt ends things in order, the second at once."""
    _interrupts.append(number)
    if len(_interrupts) > 1:
        os._exit(INTERRUPTED)
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGINT, _interrupt)
    _serve()
