"""A directory that appears whole or not at all: built aside, synced, and renamed into place.

The directory aside is locked (flock) while its maker lives. What a killed maker left is known by its name and by the
lock that nobody holds, and is removed by whoever next makes the same target.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import pwd
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mpfs.errors import LockedError, MPFSError, UsageError

_MARK = "mpfs-checkout"
_OLD_MARK = "mpfs-replaced"
_NAME_LENGTH = 100
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


def resolve_target(target: Path) -> Path:
    """The directory that `target` means: absolute, symbolic links followed."""
    return Path(os.path.realpath(target))


def check_target(target: Path, repository: Path, *, force: bool, protected: Iterable[Path] = ()) -> None:
    """Refuse a target that must not be made or replaced. It is one of `resolve_target`.

    It may be missing or an empty directory; with `force` also a directory with something in it, which is then
    replaced as a whole. Never in or above the open `repository`. Never replaced: the root; the home directory, the
    current directory and those that are `protected`, and what is above them; a mount point; a directory with a mount
    point or a repository (of MPFS or git) in it.

    Raises:
        UsageError: it may not be; the message says why.
    """

    def refuse(why: str) -> None:
        raise UsageError(f"{target}: {why}", target=str(target))

    real = Path(os.path.realpath(repository))
    if real == target or target in real.parents or real in target.parents:
        refuse(f"is in or above the repository {real}; choose a directory beside it")
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        refuse("is a file, not a directory; choose another name")
    if target == Path(target.root):
        refuse("is the root directory")
    kept = [(path, "protected directory") for path in protected]
    kept += [(path, "current directory") for path in _working_directory()]
    kept += [(path, "home directory") for path in _home()]
    for path, what in kept:
        real = Path(os.path.realpath(path))
        if real == target or target in real.parents:
            refuse(f"is the {what}, or above it; a checkout replaces its target, so choose a new directory")
    if any(point == target for point in _mount_points()) or os.path.ismount(target):
        refuse("is a mount point, which cannot be replaced; choose a directory inside it")
    if _is_empty(target):
        return
    if not force:
        refuse("exists and is not empty; choose another directory, or replace it with --force")
    for point in _mount_points():
        if target in point.parents:
            refuse(f"{point} is mounted in it; it is not replaced")
    for parent, directories, files in os.walk(target):
        if ".mpfs" in directories or (
            "config.json" in files and os.path.exists(os.path.join(parent, "store/data.mdb"))
        ):
            refuse(f"there is an MPFS repository in {parent}; it is not replaced, not even with --force")
        if ".git" in directories or ".git" in files:
            refuse(f"there is a git repository in {parent}; it is not replaced, not even with --force")


@contextmanager
def building(target: Path) -> Iterator[Path]:
    """A new directory beside `target` to build it in. It is removed at the end, unless `replace` has put it in place.

    Missing directories above the target are made, and removed again if the block fails.

    Raises:
        MPFSError: it cannot be made there.
    """
    made = _make_parents(target)
    try:
        recover(target)
        path, fd = _make_locked(target)
        try:
            yield path
        finally:
            # Complete or not: what is here now is not the target (see `replace`).
            shutil.rmtree(path, ignore_errors=True)
            os.close(fd)
    except BaseException:
        for directory in reversed(made):
            with suppress(OSError):
                directory.rmdir()
        raise


def replace(built: Path, target: Path) -> None:
    """Put a built directory in the place of `target`, which is missing, empty, or to be replaced.

    Where the system can, both change places in one step, and what was there is left where `built` was, to be removed.
    Elsewhere an old directory is renamed aside first; `recover` brings it back should the process die between.
    """
    if not os.path.lexists(target):
        os.rename(built, target)
    else:
        shutil.copymode(target, built)
        if _is_empty(target):
            # rename(2) replaces an empty directory, and fails if it no longer is.
            os.rename(built, target)
        elif not _exchange(built, target):
            aside = target.parent / f"{_prefix(target, _OLD_MARK)}{secrets.token_hex(4)}"
            os.rename(target, aside)
            try:
                os.rename(built, target)
            except BaseException:
                os.rename(aside, target)
                raise
            sync_directory(target.parent)
            shutil.rmtree(aside, ignore_errors=True)
    sync_directory(target.parent)


def recover(target: Path) -> None:
    """Clear away what makers of `target` that were killed have left; bring back a target that one had set aside."""
    replaced = [_beside(target, name) for name in _leftovers(target, _OLD_MARK)]
    for path in replaced:
        if os.path.lexists(target):
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.rename(path, target)
    for name in _leftovers(target, _MARK):
        path = _beside(target, name)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(fd)


def sync_directory(path: Path) -> None:
    """Make a directory's entries durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        # Some file systems have nothing to sync in a directory and say so.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def existing_parent(target: Path) -> Path:
    """The nearest directory above `target` that exists."""
    return next(parent for parent in target.parents if parent.exists())


def _make_parents(target: Path) -> list[Path]:
    missing = [parent for parent in target.parents if not parent.exists()]
    made: list[Path] = []
    for directory in reversed(missing):
        with suppress(FileExistsError):
            directory.mkdir()
            made.append(directory)
            sync_directory(directory.parent)
    return made


def _make_locked(target: Path) -> tuple[Path, int]:
    for _ in range(100):
        path = _beside(target, _prefix(target, _MARK) + secrets.token_hex(4))
        try:
            os.mkdir(path)
        except FileExistsError:
            continue
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        # Another process that clears up may have taken it for a leftover before it was locked.
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.path.samestat(os.stat(path), os.fstat(fd)):
                return path, fd
        os.close(fd)
    raise LockedError(f"{target}: no directory could be made beside it; others are at work on the same target")


def _prefix(target: Path, mark: str) -> str:
    name = target.name
    if len(name.encode("utf-8", "surrogateescape")) > _NAME_LENGTH:
        digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()
        name = f"{name[:20]}-{digest[:16]}"
    return f".{name}.{mark}-"


def _beside(target: Path, name: str) -> Path:
    return target.parent / name


def _leftovers(target: Path, mark: str) -> list[str]:
    prefix = _prefix(target, mark)
    length = len(prefix) + 8
    return sorted(name for name in os.listdir(target.parent) if name.startswith(prefix) and len(name) == length)


def _exchange(first: Path, second: Path) -> bool:
    """Let two directories change places, atomically; False where the system or the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    renameat2.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    if renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(second))


def _is_empty(directory: Path) -> bool:
    try:
        with os.scandir(directory) as entries:
            return next(entries, None) is None
    except OSError as error:
        raise MPFSError(f"{directory}: cannot be read: {error.strerror}") from error


def _working_directory() -> list[Path]:
    try:
        return [Path.cwd()]
    except OSError:
        return []


def _home() -> list[Path]:
    try:
        return [Path(pwd.getpwuid(os.getuid()).pw_dir)]
    except KeyError:
        return []


def _mount_points() -> list[Path]:
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
            fields = [line.split()[4] for line in mounts]
    except OSError:
        return []
    # The kernel writes space, tab, newline and backslash as octal escapes.
    return [Path(os.fsdecode(os.fsencode(text).decode("unicode_escape").encode("latin-1"))) for text in fields]
