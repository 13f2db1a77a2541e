"""The low-level interface of libfuse 3, as much of it as a read-only file system needs, through ctypes.

Why not a library: the Python bindings that install without a compiler (mfusepy among them) use libfuse's high-level
interface, which tells files apart by their paths. The kernel caches pages by file; so after a branch has moved, a file
that is still open at its path and the new one there would share their pages, and a map of the old one would change
under its reader. Here whoever implements `FileSystem` gives out the inode numbers. And data is handed to the kernel
straight from the store's map.

Only functions and structures are used that have not changed since libfuse 3.0. docs/virtual-file-system.md says which.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import shutil
import stat
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes.util import find_library
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mpfs.errors import MPFSError, NotFoundError

ROOT = 1
"""The inode number of the top directory."""

FOREVER = 1e6
"""Seconds that the kernel may believe what never changes."""

_LIBRARIES = ("libfuse3.so.3", "libfuse3.so.4")
_KEEP_CACHE = 1 << 2
_MAX_PIECES = 512
_MAX_READAHEAD = 1 << 20

_Pointer = ctypes.c_void_p
_Ino = ctypes.c_uint64


class FuseUnavailableError(MPFSError):
    """The machine cannot mount file systems in user space: libfuse 3, /dev/fuse or fusermount3 is missing."""


@dataclass(frozen=True, slots=True)
class Attributes:
    """What stat(2) tells. `size` in bytes, `time` in seconds since 1970."""

    ino: int
    directory: bool
    size: int
    time: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A name that was found. The kernel may use it for `timeout` seconds without asking again."""

    attributes: Attributes
    timeout: float


class FileSystem(Protocol):
    """What a read-only file system answers. Called from several threads; an OSError's errno goes to the caller.

    Every `lookup` that succeeds counts; `forget` gives counts back, and at zero the inode number is free again.
    """

    def lookup(self, parent: int, name: str) -> Entry:
        """Find a name in a directory."""

    def forget(self, ino: int, count: int) -> None:
        """The kernel no longer holds `count` of the lookups of an inode."""

    def attributes(self, ino: int) -> Entry:
        """The attributes of an inode, and for how long they hold."""

    def open(self, ino: int) -> int:
        """Open a file; a handle."""

    def read(self, handle: int, offset: int, size: int, reply: Callable[[Sequence[memoryview]], None]) -> None:
        """Call `reply` once, with the pieces of [offset, offset + size), fewer bytes only at the file's end."""

    def release(self, handle: int) -> None:
        """Close a handle."""

    def entries(self, ino: int) -> Sequence[tuple[str, int, bool]]:
        """The names in a directory, their inode numbers as far as they are known (else 0), and whether each is a
        directory."""


class _StatX86(ctypes.Structure):
    _fields_ = (
        ("st_dev", ctypes.c_uint64),
        ("st_ino", ctypes.c_uint64),
        ("st_nlink", ctypes.c_uint64),
        ("st_mode", ctypes.c_uint32),
        ("st_uid", ctypes.c_uint32),
        ("st_gid", ctypes.c_uint32),
        ("pad0", ctypes.c_uint32),
        ("st_rdev", ctypes.c_uint64),
        ("st_size", ctypes.c_int64),
        ("st_blksize", ctypes.c_int64),
        ("st_blocks", ctypes.c_int64),
        ("times", ctypes.c_int64 * 6),
        ("reserved", ctypes.c_int64 * 3),
    )


class _StatGeneric(ctypes.Structure):
    _fields_ = (
        ("st_dev", ctypes.c_uint64),
        ("st_ino", ctypes.c_uint64),
        ("st_mode", ctypes.c_uint32),
        ("st_nlink", ctypes.c_uint32),
        ("st_uid", ctypes.c_uint32),
        ("st_gid", ctypes.c_uint32),
        ("st_rdev", ctypes.c_uint64),
        ("pad0", ctypes.c_uint64),
        ("st_size", ctypes.c_int64),
        ("st_blksize", ctypes.c_int32),
        ("pad1", ctypes.c_int32),
        ("st_blocks", ctypes.c_int64),
        ("times", ctypes.c_int64 * 6),
        ("unused", ctypes.c_uint32 * 2),
    )


_MACHINE = platform.machine()
_STATS = {"x86_64": _StatX86, "aarch64": _StatGeneric, "riscv64": _StatGeneric, "loongarch64": _StatGeneric}
_Stat: type[ctypes.Structure] = _STATS.get(_MACHINE, _StatX86)


class _Args(ctypes.Structure):
    _fields_ = (("argc", ctypes.c_int), ("argv", ctypes.POINTER(ctypes.c_char_p)), ("allocated", ctypes.c_int))


class _EntryParam(ctypes.Structure):
    _fields_ = (
        ("ino", ctypes.c_uint64),
        ("generation", ctypes.c_uint64),
        ("attr", _Stat),
        ("attr_timeout", ctypes.c_double),
        ("entry_timeout", ctypes.c_double),
    )


class _FileInfo(ctypes.Structure):
    # What the bits above the third mean has changed over the versions; these three have not.
    _fields_ = (
        ("flags", ctypes.c_int),
        ("bits", ctypes.c_uint32),
        ("padding", ctypes.c_uint64),
        ("fh", ctypes.c_uint64),
    )


class _ConnInfo(ctypes.Structure):
    _fields_ = (
        ("proto_major", ctypes.c_uint32),
        ("proto_minor", ctypes.c_uint32),
        ("max_write", ctypes.c_uint32),
        ("max_read", ctypes.c_uint32),
        ("max_readahead", ctypes.c_uint32),
    )


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("flags", ctypes.c_int),
        ("mem", ctypes.c_void_p),
        ("fd", ctypes.c_int),
        ("pos", ctypes.c_int64),
        ("later", ctypes.c_uint64 * 8),  # libfuse 3.17 has a further member
    )


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _Forget(ctypes.Structure):
    _fields_ = (("ino", ctypes.c_uint64), ("nlookup", ctypes.c_uint64))


_Info = ctypes.POINTER(_FileInfo)
_OnInit = ctypes.CFUNCTYPE(None, _Pointer, ctypes.POINTER(_ConnInfo))
_OnLookup = ctypes.CFUNCTYPE(None, _Pointer, _Ino, ctypes.c_char_p)
_OnForget = ctypes.CFUNCTYPE(None, _Pointer, _Ino, ctypes.c_uint64)
_OnForgetMany = ctypes.CFUNCTYPE(None, _Pointer, ctypes.c_size_t, ctypes.POINTER(_Forget))
_OnInode = ctypes.CFUNCTYPE(None, _Pointer, _Ino, _Info)
_OnRead = ctypes.CFUNCTYPE(None, _Pointer, _Ino, ctypes.c_size_t, ctypes.c_int64, _Info)

_USED: dict[str, Any] = {
    "init": _OnInit,
    "lookup": _OnLookup,
    "forget": _OnForget,
    "getattr": _OnInode,
    "open": _OnInode,
    "read": _OnRead,
    "release": _OnInode,
    "opendir": _OnInode,
    "readdir": _OnRead,
    "releasedir": _OnInode,
    "forget_multi": _OnForgetMany,
}
_ORDER = """
    init destroy lookup forget getattr setattr readlink mknod mkdir unlink rmdir symlink rename link open read write
    flush release fsync opendir readdir releasedir fsyncdir statfs setxattr getxattr listxattr removexattr access
    create getlk setlk bmap ioctl poll write_buf retrieve_reply forget_multi
"""


class _Operations(ctypes.Structure):
    _fields_ = tuple((name, _USED.get(name, ctypes.c_void_p)) for name in _ORDER.split())


def require_fuse() -> ctypes.CDLL:
    """libfuse, with the functions that are used declared.

    Raises:
        FuseUnavailableError: something that mounting takes is missing; the message says what to install.
    """
    how = "install it with 'apt-get install fuse3' (Debian, Ubuntu), 'dnf install fuse3' or 'apk add fuse3'"
    if not sys.platform.startswith("linux") or sys.maxsize < 1 << 32 or _MACHINE not in _STATS:
        raise FuseUnavailableError(f"mounting works on 64-bit Linux only, not on {sys.platform} {_MACHINE}")
    library = None
    for name in (*_LIBRARIES, find_library("fuse3")):
        try:
            library = ctypes.CDLL(name) if name else None
        except OSError:
            continue
        if library is not None:
            break
    if library is None:
        raise FuseUnavailableError(f"libfuse 3 is not installed, which mounting needs; {how}")
    if not os.path.exists("/dev/fuse"):
        raise FuseUnavailableError(
            "/dev/fuse is missing: the kernel has no FUSE ('modprobe fuse'), or this container was not given the "
            "device ('docker run --device /dev/fuse --cap-add SYS_ADMIN')"
        )
    if os.geteuid() and shutil.which("fusermount3") is None:
        raise FuseUnavailableError(f"fusermount3 is not installed, which mounts for users who are not root; {how}")
    return _declare(library)


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    entry, file_info, stats = ctypes.POINTER(_EntryParam), _Info, ctypes.POINTER(_Stat)
    declarations: dict[str, tuple[list[Any], Any]] = {
        "fuse_session_new": ([ctypes.POINTER(_Args), _Pointer, ctypes.c_size_t, _Pointer], _Pointer),
        "fuse_session_mount": ([_Pointer, ctypes.c_char_p], ctypes.c_int),
        "fuse_session_unmount": ([_Pointer], None),
        "fuse_session_destroy": ([_Pointer], None),
        "fuse_session_exit": ([_Pointer], None),
        "fuse_session_exited": ([_Pointer], ctypes.c_int),
        "fuse_session_receive_buf": ([_Pointer, ctypes.POINTER(_Buffer)], ctypes.c_int),
        "fuse_session_process_buf": ([_Pointer, ctypes.POINTER(_Buffer)], None),
        "fuse_reply_err": ([_Pointer, ctypes.c_int], ctypes.c_int),
        "fuse_reply_none": ([_Pointer], None),
        "fuse_reply_entry": ([_Pointer, entry], ctypes.c_int),
        "fuse_reply_attr": ([_Pointer, stats, ctypes.c_double], ctypes.c_int),
        "fuse_reply_open": ([_Pointer, file_info], ctypes.c_int),
        "fuse_reply_buf": ([_Pointer, ctypes.c_char_p, ctypes.c_size_t], ctypes.c_int),
        "fuse_reply_iov": ([_Pointer, ctypes.POINTER(_Iovec), ctypes.c_int], ctypes.c_int),
        "fuse_add_direntry": (
            [_Pointer, _Pointer, ctypes.c_size_t, ctypes.c_char_p, stats, ctypes.c_int64],
            ctypes.c_size_t,
        ),
    }
    for name, (arguments, result) in declarations.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
    return library


class Session:
    """A mounted file system: threads that answer the kernel, until it is unmounted.

    Args:
        files: what is mounted.
        mountpoint: an existing directory.
        options: mount options, such as "allow_other".
        threads: how many answer.
        report: told, in words, of failures that are not the caller's: damage, bugs.

    Raises:
        FuseUnavailableError: see `require_fuse`.
        MPFSError: the system refuses to mount there; libfuse has said why on stderr.
    """

    def __init__(
        self,
        files: FileSystem,
        mountpoint: str,
        *,
        options: Sequence[str] = (),
        threads: int = 4,
        report: Callable[[str], object] = lambda message: None,
    ) -> None:
        self._files = files
        self._report = report
        self._library = require_fuse()
        self._listings: dict[int, Sequence[tuple[str, int, bool]]] = {}
        self._listing = 0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._running = threads
        arguments = [b"mpfs", b"-o", ",".join(["ro", "default_permissions", *options]).encode()]
        argv = (ctypes.c_char_p * len(arguments))(*arguments)
        args = _Args(len(arguments), argv, 0)
        self._operations = self._callbacks()
        self._session = self._library.fuse_session_new(
            ctypes.byref(args), ctypes.byref(self._operations), ctypes.sizeof(self._operations), None
        )
        if not self._session:
            raise MPFSError(f"{mountpoint}: libfuse does not accept the mount options {', '.join(options)}")
        if self._library.fuse_session_mount(self._session, os.fsencode(mountpoint)):
            self._library.fuse_session_destroy(self._session)
            raise MPFSError(f"{mountpoint}: cannot be mounted there", path=mountpoint)
        self._threads = [
            threading.Thread(target=self._serve, name=f"mpfs-mount-{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is unmounted by somebody else, for at most `timeout` seconds; whether it is."""
        return self._ended.wait(timeout)

    def close(self) -> None:
        """Unmount. Files that are still open fail from then on."""
        if self._session is None:
            return
        self._library.fuse_session_exit(self._session)
        self._library.fuse_session_unmount(self._session)
        for thread in self._threads:
            thread.join(2)
        if not any(thread.is_alive() for thread in self._threads):
            self._library.fuse_session_destroy(self._session)
        self._session = None

    def _serve(self) -> None:
        session, library = self._session, self._library
        buffer = _Buffer()
        try:
            while not library.fuse_session_exited(session):
                received = library.fuse_session_receive_buf(session, ctypes.byref(buffer))
                if received == -errno.EINTR:
                    continue
                if received <= 0:
                    break
                library.fuse_session_process_buf(session, ctypes.byref(buffer))
        finally:
            ctypes.CDLL(None).free(ctypes.c_void_p(buffer.mem))
            with self._lock:
                self._running -= 1
                if not self._running:
                    self._ended.set()

    def _callbacks(self) -> _Operations:
        library = self._library

        def on_init(_: int, connection: Any) -> None:
            connection.contents.max_readahead = max(connection.contents.max_readahead, _MAX_READAHEAD)

        def on_lookup(request: int, parent: int, name: bytes) -> None:
            def answer() -> None:
                entry = self._files.lookup(parent, os.fsdecode(name))
                parameters = _EntryParam(entry.attributes.ino, 0, _stat(entry.attributes), entry.timeout, entry.timeout)
                if library.fuse_reply_entry(request, ctypes.byref(parameters)):
                    self._files.forget(entry.attributes.ino, 1)

            self._answer(request, answer)

        def on_forget(request: int, ino: int, count: int) -> None:
            self._files.forget(ino, count)
            library.fuse_reply_none(request)

        def on_forget_multi(request: int, count: int, items: Any) -> None:
            for index in range(count):
                self._files.forget(items[index].ino, items[index].nlookup)
            library.fuse_reply_none(request)

        def on_getattr(request: int, ino: int, _: Any) -> None:
            def answer() -> None:
                entry = self._files.attributes(ino)
                library.fuse_reply_attr(request, ctypes.byref(_stat(entry.attributes)), entry.timeout)

            self._answer(request, answer)

        def on_open(request: int, ino: int, info: Any) -> None:
            def answer() -> None:
                if info.contents.flags & os.O_ACCMODE != os.O_RDONLY:
                    raise OSError(errno.EROFS, os.strerror(errno.EROFS))
                info.contents.fh = self._files.open(ino)
                info.contents.bits |= _KEEP_CACHE
                if library.fuse_reply_open(request, info):
                    self._files.release(info.contents.fh)

            self._answer(request, answer)

        def on_read(request: int, _: int, size: int, offset: int, info: Any) -> None:
            def reply(pieces: Sequence[memoryview]) -> None:
                if len(pieces) > _MAX_PIECES:
                    pieces = [memoryview(b"".join(pieces))]
                vectors = (_Iovec * max(1, len(pieces)))()
                for vector, piece in zip(vectors, pieces, strict=False):
                    vector.base, vector.length = _address(piece), len(piece)
                library.fuse_reply_iov(request, vectors, len(pieces))

            self._answer(request, lambda: self._files.read(info.contents.fh, offset, size, reply))

        def on_release(request: int, _: int, info: Any) -> None:
            self._files.release(info.contents.fh)
            library.fuse_reply_err(request, 0)

        def on_opendir(request: int, ino: int, info: Any) -> None:
            def answer() -> None:
                listing = [(".", ino, True), ("..", 0, True), *self._files.entries(ino)]
                with self._lock:
                    self._listing += 1
                    handle = self._listing
                    self._listings[handle] = listing
                info.contents.fh = handle
                if library.fuse_reply_open(request, info):
                    self._listings.pop(handle, None)

            self._answer(request, answer)

        def on_readdir(request: int, _: int, size: int, offset: int, info: Any) -> None:
            self._answer(request, lambda: self._list(request, size, offset, info.contents.fh))

        def on_releasedir(request: int, _: int, info: Any) -> None:
            self._listings.pop(info.contents.fh, None)
            library.fuse_reply_err(request, 0)

        functions: dict[str, Any] = {
            "init": on_init,
            "lookup": on_lookup,
            "forget": on_forget,
            "forget_multi": on_forget_multi,
            "getattr": on_getattr,
            "open": on_open,
            "read": on_read,
            "release": on_release,
            "opendir": on_opendir,
            "readdir": on_readdir,
            "releasedir": on_releasedir,
        }
        return _Operations(**{name: _USED[name](function) for name, function in functions.items()})

    def _list(self, request: int, size: int, offset: int, handle: int) -> None:
        buffer = ctypes.create_string_buffer(size)
        used = 0
        listing = self._listings.get(handle, ())
        for number in range(offset, len(listing)):
            name, ino, directory = listing[number]
            attributes = _stat(Attributes(ino or 0xFFFFFFFF, directory, 0, 0))
            where = ctypes.addressof(buffer) + used
            needed = self._library.fuse_add_direntry(
                request, where, size - used, os.fsencode(name), ctypes.byref(attributes), number + 1
            )
            if needed > size - used:
                break
            used += needed
        self._library.fuse_reply_buf(request, buffer.raw[:used], used)

    def _answer(self, request: int, answer: Callable[[], None]) -> None:
        """Answer a request, with an error if that fails. No exception may reach libfuse."""
        try:
            answer()
        except OSError as error:
            self._library.fuse_reply_err(request, error.errno or errno.EIO)
        except NotFoundError:
            self._library.fuse_reply_err(request, errno.ENOENT)
        except BaseException as error:
            self._library.fuse_reply_err(request, errno.EIO)
            with suppress(Exception):  # whoever listened may be gone
                self._report(error.message if isinstance(error, MPFSError) else f"internal error: {error!r}")


def _stat(attributes: Attributes) -> Any:
    mode = stat.S_IFDIR | 0o555 if attributes.directory else stat.S_IFREG | 0o444
    return _Stat(
        st_ino=attributes.ino,
        st_mode=mode,
        st_nlink=2 if attributes.directory else 1,
        st_uid=os.getuid(),
        st_gid=os.getgid(),
        st_size=attributes.size,
        st_blksize=_MAX_READAHEAD,
        st_blocks=-(-attributes.size // 512),
        times=(ctypes.c_int64 * 6)(attributes.time, 0, attributes.time, 0, attributes.time, 0),
    )


def _address(piece: memoryview) -> int:
    """Where a buffer's bytes are."""
    return int(np.frombuffer(piece, np.uint8).__array_interface__["data"][0]) if len(piece) else 0
