"""Archives that unpack to more than any weights would: bounds that are checked before anything is unpacked.

A file of a few kilobytes can unpack to more than memory or the disk holds, in zip archives also by members that lie over
each other, so that the same bytes are there many times.
"""

from __future__ import annotations

import gzip
import os
import zipfile
from typing import IO

from mpfs.errors import FormatError, UnsafeInputError
from mpfs.formats.messages import show
from mpfs.formats.sniff import ZIP_MAGIC

MAX_RATIO = 200
"""How many times its size an archive may unpack to. Weights shrink to no less than a half; text to a tenth."""

HARMLESS_BYTES = 1 << 28
"""What any archive may unpack to, however much it was packed: zeros shrink to a thousandth."""

_ENCRYPTED = 0x1
_LOCAL_HEADER_BYTES = 30


def check_members(archive: zipfile.ZipFile, size: int, source: str) -> list[zipfile.ZipInfo]:
    """The members of an archive, once its directory was found plausible. Nothing is unpacked.

    Args:
        archive: the open archive.
        size: bytes of the archive's file.
        source: its name, for messages.

    Raises:
        FormatError: two members have one name, lie over each other, or are encrypted.
        UnsafeInputError: it would unpack to far more than it is.
    """
    members = archive.infolist()
    if len({member.filename for member in members}) != len(members):
        raise FormatError(f"{source}: the archive has two records of one name; it is damaged", file=source)
    if any(member.flag_bits & _ENCRYPTED for member in members):
        raise FormatError(
            f"{source}: the archive is encrypted; MPFS asks for no passwords, so unpack it first", file=source
        )
    if sum(member.compress_size for member in members) > size:
        raise FormatError(
            f"{source}: the archive's records are longer together than its {size:,} bytes: they lie over each other; it "
            "is damaged, or made to harm",
            file=source,
        )
    for member in members:
        if member.compress_type == zipfile.ZIP_STORED and member.file_size != member.compress_size:
            raise FormatError(
                f"{source}: {show(member.filename)} in it is stored as {member.compress_size:,} bytes, but said to be of "
                f"{member.file_size:,}; it is damaged",
                file=source,
            )
    refuse_bomb(sum(member.file_size for member in members), size, source)
    return members


def data_offset(file: IO[bytes], member: zipfile.ZipInfo) -> int:
    """Where a member's bytes start in an archive's file: the lengths before them may differ from those in the directory
    (APPNOTE 4.3.7).

    Raises:
        zipfile.BadZipFile: there is no member at its place.
    """
    file.seek(member.header_offset)
    head = file.read(_LOCAL_HEADER_BYTES)
    if len(head) < _LOCAL_HEADER_BYTES or not head.startswith(ZIP_MAGIC):
        raise zipfile.BadZipFile(f"no member at byte {member.header_offset:,}")
    lengths = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
    return member.header_offset + len(head) + lengths


def refuse_bomb(unpacked: int, size: int, source: str) -> None:
    """Raise UnsafeInputError if an archive of `size` bytes is not to be unpacked to (at least) `unpacked` bytes."""
    if unpacked > max(HARMLESS_BYTES, MAX_RATIO * size):
        raise UnsafeInputError(
            f"{source}: {size:,} bytes that unpack to {unpacked:,} or more, over {MAX_RATIO} times as many: no weights "
            "shrink so far, and unpacking it could fill memory or the disk; if you trust it, unpack it yourself",
            file=source,
            size=size,
            unpacked=unpacked,
        )


class BoundedGzip(gzip.GzipFile):
    """A gzip file that is not unpacked further than `refuse_bomb` allows."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, "rb")
        # What it gives is not compressed any more, whatever readers would guess from a name.
        self.name = ""
        self._path = str(path)
        self._packed = os.path.getsize(path)

    def read(self, size: int | None = -1) -> bytes:
        """As of any file.

        Raises:
            UnsafeInputError: it has been unpacked to far more than it is.
        """
        if size is None or size < 0:
            size = max(HARMLESS_BYTES, MAX_RATIO * self._packed)
        data = super().read(size)
        refuse_bomb(self.tell(), self._packed, self._path)
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """As of any file; going forward unpacks what is between.

        Raises:
            UnsafeInputError: as for `read`.
        """
        if whence == os.SEEK_SET:
            refuse_bomb(offset, self._packed, self._path)
        return super().seek(offset, whence)
