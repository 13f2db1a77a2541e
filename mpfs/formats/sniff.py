"""What a file is by its first bytes, whatever its name says.

Used to tell a person what stands where weights were expected: a git-lfs pointer, a web page, another format.
"""

from __future__ import annotations

HEAD_SIZE = 512
"""Bytes from the start of a file that are enough for every function here."""

ZIP_MAGIC = b"PK\x03\x04"
"""A zip archive (APPNOTE 4.3.7); torch.save has written one since torch 1.6."""

EMPTY_ZIP_MAGIC = b"PK\x05\x06"
"""A zip archive with nothing in it."""

PICKLE_MAGIC = b"\x80"
"""The PROTO opcode that opens every pickle of protocol 2 and above; torch.save before 1.6 wrote one."""

_XET_START = b"# xet version"
_LFS_START = b"version https://git-lfs.github.com/spec/"
_OTHER_FORMATS = (
    (b"GGUF", "a GGUF file"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file (Keras or TensorFlow weights)"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\x93NUMPY", "a single NumPy array, which has no name; save it with numpy.savez (.npz)"),
    (b"Rar!\x1a\x07", "a RAR archive"),
    (b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive"),
    (b"\xfd7zXZ", "an xz archive"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive"),
)


def is_lfs_pointer(head: bytes) -> bool:
    """Whether a file that starts with these bytes is a git-lfs pointer (git-lfs pointer spec v1)."""
    return head.startswith(_LFS_START)


def is_torch_archive(head: bytes) -> bool:
    """Whether a file that starts with these bytes may be torch.save's: a zip archive or a pickle."""
    return head.startswith((ZIP_MAGIC, PICKLE_MAGIC))


def foreign(head: bytes) -> str | None:
    """What a file certainly is instead of weights, and what to do about it; None if that is not known.

    Args:
        head: the first HEAD_SIZE bytes of the file, or all of a shorter one.

    Returns:
        A clause that follows "FILE: ", such as "this is a git-lfs pointer, fetch the file first: git lfs pull".
    """
    if not head:
        return "the file is empty; download or copy it again"
    if is_lfs_pointer(head):
        return "this is a git-lfs pointer, fetch the file first: git lfs pull"
    if head.startswith(_XET_START):
        return "this is a xet pointer, fetch the file first: git xet checkout, or hf download"
    if not head.strip(b"\0"):
        return "it begins with zeros only: a download that reserved its space and did not finish; download it again"
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if text.startswith((b'{"error"', b"{'error'")):
        return "this is a server's error message saved under the name of a weight file; download the file itself"
    if text.startswith((b"<!doctype", b"<html", b"<head", b"<?xml", b"<error")):
        return (
            "this is a web page saved under the name of a weight file (a login or error page of the server?); "
            "download the file itself"
        )
    for magic, name in _OTHER_FORMATS:
        if head.startswith(magic):
            return f"this is {name}; MPFS reads safetensors, torch, GGUF and .npz files, by their suffixes"
    if head[257:262] == b"ustar":
        return "this is a tar archive (torch before 0.2 saved such, too); unpack it, or save it with a newer torch"
    return None
