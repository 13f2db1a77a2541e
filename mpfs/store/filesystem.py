"""What lies under a repository: the kind of file system and its free space."""

from __future__ import annotations

import os
import re
import resource
import shutil
from pathlib import Path

from mpfs.errors import NoSpaceError, NotARepositoryError

_NETWORK_TYPES = re.compile(
    r"(nfs\d*|cifs|smb\d*|smbfs|9p|afs|ceph|lustre|gpfs|glusterfs|beegfs|orangefs|ncpfs"
    r"|fuse\.(sshfs|s3fs|gcsfuse|rclone|glusterfs|ceph|juicefs|goofys|davfs2?))"
)

_OCTAL = re.compile(r"\\([0-7]{3})")
"""How mountinfo writes white space and backslashes in a path."""

_RESERVE = 16 << 20
"""Bytes that must stay free, for LMDB's own pages and the file system's book-keeping."""


def file_system_type(path: Path) -> str:
    """The type of the file system that holds `path` (such as "ext4"), or "" where that cannot be told."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
            lines = mounts.readlines()
    except OSError:
        return ""
    target = os.path.realpath(path)
    best, kind = "", ""
    for line in lines:
        left, _, right = line.partition(" - ")
        mount_point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), left.split()[4])
        inside = target == mount_point or target.startswith(mount_point.rstrip("/") + "/")
        if inside and len(mount_point) >= len(best):
            best, kind = mount_point, right.split()[0]
    return kind


def refuse_network_file_system(path: Path) -> None:
    """LMDB's locks and shared map are unsafe on network file systems.

    Raises:
        NotARepositoryError: `path` lies on one.
    """
    kind = file_system_type(path)
    if _NETWORK_TYPES.fullmatch(kind):
        raise NotARepositoryError(
            f"{path}: lies on a network file system ({kind}), where LMDB can lose data; use a local disk, or allow it "
            "at your own risk with --allow-network-file-system",
            file_system=kind,
        )


def require_free_space(path: Path, needed: int, what: str) -> None:
    """Check before work starts that `needed` bytes fit on the disk that holds `path`.

    Raises:
        NoSpaceError: they do not.
    """
    free = shutil.disk_usage(path).free
    if needed + _RESERVE > free:
        raise NoSpaceError(
            f"{path}: {what} needs up to {needed + _RESERVE:,} bytes, {free:,} are free",
            needed=needed + _RESERVE,
            free=free,
        )


def room_to_grow(path: Path) -> int:
    """By how many bytes a file can grow: what is free on its disk, and what the process may write into one file."""
    try:
        size = path.stat().st_size
    except OSError:
        size = 0
    free = shutil.disk_usage(path.parent if path.parent.exists() else path.parent.parent).free
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return free if limit == resource.RLIM_INFINITY else max(0, min(free, limit - size))


def mapping_start(path: Path) -> int:
    """The memory address at which this process has mapped the beginning of a file; 0 where that cannot be told."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
            for line in maps:
                parts = line.rstrip("\n").split(maxsplit=5)
                if len(parts) == 6 and parts[5] == str(path) and int(parts[2], 16) == 0:
                    return int(parts[0].partition("-")[0], 16)
    except OSError:
        pass
    return 0
