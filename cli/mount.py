"""`mpfs mount`: every ref as a read-only directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from types import FrameType
from typing import Annotated

import typer

from .options import JsonOption, flag
from .output import Output
from .session import Session

_START_SECONDS = 30.0


def mount(
    ctx: typer.Context,
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Where to mount; an empty directory, made if it does not exist.")
    ],
    daemon: Annotated[
        bool, flag("--daemon", "-d", help="Return when it is mounted, and serve it from behind.")
    ] = False,
    allow_other: Annotated[bool, flag("--allow-other", help="Let other users in, too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Mount every branch and tag as a read-only directory.

    Commits are under .commits/ID. What is committed meanwhile appears at once; a file that is open stays what it was. It stays mounted until Ctrl-C, or until 'fusermount3 -u DIR'. It needs libfuse 3 ('apt-get install fuse3') and Linux.

        mpfs mount ./models
        mpfs mount ./models --daemon && ls ./models/main
        fusermount3 -u ./models
    """
    session = Session.of(ctx)
    out = session.output(as_json)
    with session.open() as repository:
        where = repository.check_mountpoint(directory)
        if not daemon:
            with _signals(), repository.mount(where, allow_other=allow_other, report=out.note) as mounted:
                _tell(out, where, os.getpid())
                sys.stdout.flush()
                out.note(f"mounted; to unmount press Ctrl-C, or run 'fusermount3 -u {where}'")
                try:
                    mounted.wait()
                except KeyboardInterrupt:
                    out.note("unmounting")
            return
        path = repository.path
    pid = _start(path, where, allow_other)
    _tell(out, where, pid)
    out.note(f"mounted by process {pid}; to unmount run 'fusermount3 -u {where}'")


def _tell(out: Output, where: Path, pid: int) -> None:
    if out.as_json:
        out.document({"mounted": str(where), "pid": pid})
    else:
        out.line(str(where))


@contextmanager
def _signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does, SIGINT too where a shell has it ignored; further ones wait
    until it is unmounted."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def stop(_: int, __: FrameType | None) -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = [(number, signal.signal(number, stop)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _start(repository: Path, where: Path, allow_other: bool) -> int:
    """Serve the mount from a process of its own; its id, once it is mounted.

    A fresh process, not a fork: an open LMDB environment must not cross one.
    """
    from mpfs.errors import MPFSError

    command = [sys.executable, "-m", "mpfs_cli.main", "-r", str(repository), "mount", str(where)]
    command += ["--allow-other"] if allow_other else []
    with TemporaryFile() as talk:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=talk, start_new_session=True
        )
        end = time.monotonic() + _START_SECONDS
        while process.poll() is None and time.monotonic() < end:
            if os.path.ismount(where):
                return process.pid
            time.sleep(0.02)
        process.kill()
        talk.seek(0)
        said = talk.read().decode(errors="replace").strip().rpartition("\n")[2].removeprefix("mpfs: ")
    raise MPFSError(said or f"{where}: the process that was to serve it did not start")
