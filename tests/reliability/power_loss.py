"""A model of power loss: what a process wrote and synced, recorded by strace, and every state that a disk could be in.

Rules of the model, harsher than any common file system: bytes that were written are on the disk for certain only after
an fsync or fdatasync of the file that began after they were written (or at once, through a descriptor with O_DSYNC);
until then each write may be there, or not, or torn at a multiple of 512 bytes, whatever became of the others. An entry
of a directory (create, rename, unlink, mkdir, rmdir) is there for certain only after an fsync of the directory; until
then the pending ones may be there up to any point, in their order. lock.mdb is not looked at: LMDB makes it anew.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

CALLS = (
    "openat,lseek,write,writev,pwrite64,pwritev,fsync,fdatasync,sync_file_range,msync,rename,renameat,renameat2,unlink,unlinkat,mkdir,"
    "mkdirat,rmdir,ftruncate,close"
)
SECTOR = 512

_LINE = re.compile(r"^(\d+)\s+(.*)$")
_RESUMED = re.compile(r"^<\.\.\. (\w+) resumed>(.*)$")
_CALL = re.compile(r"^(\w+)\((.*)\)\s+=\s+(-?\d+)(.*)$", re.S)
_STRING = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_FD = re.compile(r"^(\d+)<((?:\\x[0-9a-f]{2}|[^>])*)>")


@dataclass
class Event:
    """One system call that matters. `number` is its place in the order in which calls ended; the calls before `start`
    had ended when it began."""

    kind: str
    path: str
    other: str = ""
    offset: int = 0
    data: bytes = b""
    sync: bool = False
    start: int = 0
    number: int = 0


def record(command: list[str], trace: Path, root: Path) -> list[Event]:
    """Run a command under strace; what it did below `root`."""
    options = ["-f", "-v", "--seccomp-bpf", "-y", "-xx", "-s", str(1 << 24), "-e", f"trace={CALLS}", "-o", str(trace)]
    subprocess.run(["strace", *options, *command], check=True, timeout=250)
    return list(_events(trace, str(root)))


def _events(trace: Path, root: str) -> Iterator[Event]:
    unfinished: dict[str, tuple[str, int]] = {}
    positions: dict[int, int] = {}
    synced: set[int] = set()
    count = 0
    with trace.open(encoding="ascii", errors="replace") as lines:
        for line in lines:
            match = _LINE.match(line.rstrip("\n"))
            if match is None:
                continue
            process, text = match.groups()
            start = count
            if text.endswith("<unfinished ...>"):
                unfinished[process] = text[: -len("<unfinished ...>")].rstrip(), count
                continue
            resumed = _RESUMED.match(text)
            if resumed is not None:
                begun, start = unfinished.pop(process)
                text = begun + resumed.group(2)
            call = _CALL.match(text)
            if call is None or int(call.group(3)) < 0:
                continue
            for event in _parse(call.group(1), call.group(2), int(call.group(3)), positions, synced):
                if event.path.startswith(root):
                    event.start, event.number = start, count
                    count += 1
                    yield event


def _parse(name: str, arguments: str, result: int, positions: dict[int, int], synced: set[int]) -> Iterator[Event]:
    strings = [bytes.fromhex(found.replace("\\x", "")) for found in _STRING.findall(arguments)]
    found = _FD.match(arguments)
    fd = int(found.group(1)) if found else -1
    path = _plain(found.group(2)) if found else ""
    if name == "openat":
        positions[result] = 0
        synced.discard(result)
        if "SYNC" in arguments.rpartition('"')[2]:
            synced.add(result)
        if "O_CREAT" in arguments.rpartition('"')[2]:
            yield Event("create", _absolute(arguments, strings[0]), data=b"T" if "O_TRUNC" in arguments else b"")
    elif name == "lseek":
        positions[fd] = result
    elif name in ("write", "writev"):
        data = b"".join(strings)[:result]
        assert len(data) == result, f"strace has cut a {name} short"
        at = positions.get(fd, 0)
        positions[fd] = at + result
        yield Event("write", path, offset=at, data=data, sync=fd in synced)
    elif name in ("pwrite64", "pwritev"):
        data = b"".join(strings)[:result]
        assert len(data) == result, f"strace has cut a {name} short"
        yield Event("write", path, offset=int(arguments.rpartition(",")[2]), data=data, sync=fd in synced)
    elif name in ("fsync", "fdatasync"):
        yield Event("sync", path)
    elif name.startswith("rename"):
        yield Event("rename", _absolute(arguments, strings[0]), _absolute(arguments, strings[1]))
    elif name.startswith(("unlink", "rmdir")):
        yield Event("remove", _absolute(arguments, strings[0]))
    elif name.startswith("mkdir"):
        yield Event("mkdir", _absolute(arguments, strings[0]))
    elif name in ("ftruncate", "sync_file_range", "msync") and not path.endswith("lock.mdb"):
        raise NotImplementedError(f"{name} of {path} is not part of the model")


def _plain(text: str) -> str:
    return bytes.fromhex(text.replace("\\x", "")).decode() if text.startswith("\\x") else text


def _absolute(arguments: str, name: bytes) -> str:
    if name.startswith(b"/"):
        return name.decode()
    found = re.match(r"^(?:AT_FDCWD|\d+)<([^>]*)>", arguments)
    assert found is not None, arguments[:200]
    return os.path.join(_plain(found.group(1)), name.decode())


@dataclass
class _File:
    durable: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, int, bytes]] = field(default_factory=list)


class Disk:
    """The state of a disk: what is durable, and what is not yet."""

    def __init__(self) -> None:
        self._entries: dict[str, _File | None] = {}
        self._durable: dict[str, _File | None] = {}
        self._pending: list[tuple[str, Event, _File | None]] = []

    def apply(self, event: Event) -> None:
        """Take one event."""
        if event.kind == "write":
            file = self._entries.get(event.path)
            if file is None:
                return  # removed or renamed meanwhile: nobody will read it
            if event.sync:
                _put(file.durable, event.offset, event.data)
            else:
                file.pending.append((event.number, event.offset, event.data))
        elif event.kind == "sync":
            self._sync(event)
        elif event.kind == "create" and event.path in self._entries:
            assert not event.data, f"{event.path} is cut short"
        else:
            made = _File() if event.kind == "create" else self._entries.get(event.path)
            self._pending.append((os.path.dirname(event.other or event.path), event, made))
            _change(self._entries, event, made)

    def _sync(self, event: Event) -> None:
        if event.path in self._entries and self._entries[event.path] is not None:
            file = self._entries[event.path]
            assert file is not None
            for number, offset, data in file.pending:
                if number < event.start:
                    _put(file.durable, offset, data)
            file.pending = [item for item in file.pending if item[0] >= event.start]
        else:
            # Entries of one directory; all before them as well, since the order is kept.
            last = max((i for i, item in enumerate(self._pending) if item[0] == event.path), default=-1)
            for _, done, made in self._pending[: last + 1]:
                if os.path.dirname(done.other or done.path) == event.path:
                    _change(self._durable, done, made)
            self._pending = [item for i, item in enumerate(self._pending) if i > last or item[0] != event.path]

    def states(self, source: random.Random, count: int) -> Iterator[tuple[str, dict[str, bytes | None]]]:
        """What could be found after a loss of power now: nothing, all, and some random parts of what is pending."""
        yield "least", self._state(0, lambda: False, source)
        yield "most", self._state(len(self._pending), lambda: True, source)
        for index in range(count):
            share = source.random()
            entries = source.randint(0, len(self._pending))
            yield f"random {index}", self._state(entries, lambda: source.random() < share, source)  # noqa: B023

    def _state(self, entries: int, lucky: object, source: random.Random) -> dict[str, bytes | None]:
        found = dict(self._durable)
        for _, event, made in self._pending[:entries]:
            _change(found, event, made)
        assert callable(lucky)
        result: dict[str, bytes | None] = {}
        for path, file in found.items():
            if file is None:
                result[path] = None
                continue
            content = bytearray(file.durable)
            for _, offset, data in file.pending:
                if lucky():
                    torn = not lucky() and source.random() < 0.3
                    size = source.randrange(0, len(data) + 1, SECTOR) if torn and len(data) > SECTOR else len(data)
                    _put(content, offset, data[:size])
            result[path] = bytes(content)
        return result


def _put(content: bytearray, offset: int, data: bytes) -> None:
    if len(content) < offset:
        content.extend(bytes(offset - len(content)))
    content[offset : offset + len(data)] = data


def _change(entries: dict[str, _File | None], event: Event, made: _File | None) -> None:
    if event.kind == "create":
        entries[event.path] = made
    elif event.kind == "mkdir":
        entries[event.path] = None
    elif event.kind == "remove":
        entries.pop(event.path, None)
    elif event.kind == "rename":
        for path in [path for path in entries if path == event.path or path.startswith(event.path + "/")]:
            entries[event.other + path[len(event.path) :]] = entries.pop(path)


def write_state(state: dict[str, bytes | None], root: str, target: Path) -> None:
    """Make a directory as the disk has it; an entry whose directory is not there is lost with it."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for path in sorted(state):
        if path == root or not path.startswith(root + "/") or path.endswith("lock.mdb"):
            continue
        place = target / path[len(root) + 1 :]
        content = state[path]
        if not place.parent.is_dir():
            continue
        if content is None:
            place.mkdir(exist_ok=True)
        else:
            place.write_bytes(content)


def main() -> None:
    """What is recorded: python power_loss.py ROOT SOURCES; each thing that is done is noted in ROOT/done."""
    from crowd import BATCH

    from mpfs.repository import Repository
    from mpfs.store.writer import Writer

    Writer.__init__.__defaults__ = (BATCH,)
    root, sources = Path(sys.argv[1]), sorted(Path(sys.argv[2]).iterdir())
    done = os.open(root / "done", os.O_WRONLY | os.O_CREAT, 0o666)

    def say(text: str) -> None:
        os.write(done, (text + "\n").encode())

    with Repository.create(root / "repo", block_size=4096, map_size=1 << 30, author="power") as repository:
        say("created -")
        for name, source in zip(("base", "expert", "gone"), sources, strict=False):
            say(f"{name} {repository.import_checkpoint(source, name, threads=1).commit}")
        models = [{"model": "expert", "parameters": {"weight": 0.5}}]
        recipe = {"merge_method": "task_arithmetic", "base_model": "base", "models": models, "dtype": "float32"}
        say(f"merged {repository.merge(recipe, 'merged', threads=1).commit}")
        repository.remove_ref("gone")
        say("gone -")
        repository.gc(reflog_days=0, compact=True)
        say(f"base {repository.import_checkpoint(sources[3], 'base', threads=1).commit}")
        say(f"new {repository.branch('new', 'merged').commit}")
        repository.gc(reflog_days=0)
        say(f"new {repository.reset('new', 'base').commit}")


if __name__ == "__main__":
    main()
