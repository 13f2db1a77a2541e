"""A snapshot: git's tree. The immutable list of a checkpoint's files and, through them, of its tensors.

A safetensors file is kept as its header, byte for byte, and its tensors in the order of their data: the format
allows no holes, so header plus tensors is the file. A file of another format that holds tensors as they are is kept as
a run of parts, tensors and what lies between them (docs/decisions/0007). Every other file is a byte string.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath
from typing import TypeAlias

from mpfs.objects.encoding import Json, decode, encode
from mpfs.objects.ids import ObjectId

KIND = "snapshot"


@dataclass(frozen=True, slots=True)
class BlobFile:
    """A file that is kept as it is. `content` is a U8 tensor; `size` is in bytes."""

    path: str
    size: int
    content: ObjectId

    def references(self) -> Iterator[ObjectId]:
        """What the file is made of, in the order of its bytes."""
        yield self.content


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """A safetensors file. `header` is a U8 tensor of the first bytes, up to the data; `size` is in bytes.

    `tensors` are (name in this file, tensor id) in data order. In the snapshot a tensor is called `prefix` + name:
    the prefix is empty for the model itself, and keeps apart what sub-directories and variants hold.
    """

    path: str
    size: int
    header: ObjectId
    prefix: str
    tensors: tuple[tuple[str, ObjectId], ...]

    def references(self) -> Iterator[ObjectId]:
        """What the file is made of, in the order of its bytes."""
        yield self.header
        yield from (tensor for _, tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class PartsFile:
    """A file of another format that holds tensors as they are: a GGUF file. `size` is in bytes.

    The file is the bytes of its header, a U8 tensor, and of its `parts` one after the other: (name in this file, tensor
    id), where a part without a name is a U8 tensor of what lies between tensors (padding). Names are prefixed as in
    safetensors files.
    """

    path: str
    size: int
    format: str
    header: ObjectId
    prefix: str
    parts: tuple[tuple[str | None, ObjectId], ...]

    @property
    def tensors(self) -> tuple[tuple[str, ObjectId], ...]:
        """The parts that are tensors."""
        return tuple((name, tensor) for name, tensor in self.parts if name is not None)

    def references(self) -> Iterator[ObjectId]:
        """What the file is made of, in the order of its bytes."""
        yield self.header
        yield from (tensor for _, tensor in self.parts)


TensorFile: TypeAlias = SafetensorsFile | PartsFile
File: TypeAlias = BlobFile | SafetensorsFile | PartsFile


def check_path(path: str) -> str:
    """Return `path` if it can be a file's path in a snapshot: relative, plain, inside.

    Raises:
        ValueError: it is absolute, escapes, is empty or has an odd part.
    """
    pure = PurePosixPath(path)
    plain = path not in ("", ".") and str(pure) == path and not pure.is_absolute() and ".." not in pure.parts
    if not plain or "\0" in path or "\\" in path:
        raise ValueError(f"unsafe path in a snapshot: {path!r}")
    return path


@dataclass(frozen=True)
class Snapshot:
    """The files of a checkpoint, sorted by path."""

    files: tuple[File, ...]

    def __post_init__(self) -> None:
        paths = [check_path(file.path) for file in self.files]
        if paths != sorted(set(paths)):
            raise ValueError("a snapshot's paths must be sorted and unique")
        directories = {str(parent) for path in paths for parent in PurePosixPath(path).parents}
        if not directories.isdisjoint(paths):
            raise ValueError("a snapshot cannot have a file and a directory of one name")
        count = sum(len(file.tensors) for file in self.tensor_files())
        if len(self.tensors) != count:
            raise ValueError("a snapshot's tensor names must be unique")

    def safetensors_files(self) -> Iterator[SafetensorsFile]:
        """The safetensors files."""
        return (file for file in self.files if isinstance(file, SafetensorsFile))

    def tensor_files(self) -> Iterator[TensorFile]:
        """The files that hold tensors, of any format."""
        return (file for file in self.files if not isinstance(file, BlobFile))

    @cached_property
    def tensors(self) -> Mapping[str, ObjectId]:
        """Every tensor's id by its name in the snapshot, in file and data order."""
        return {file.prefix + name: tensor for file in self.tensor_files() for name, tensor in file.tensors}

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(file.size for file in self.files)

    def file(self, path: str) -> File | None:
        """The file at `path`, if there is one."""
        return next((file for file in self.files if file.path == path), None)

    def files_under(self, path: str) -> list[File]:
        """The files at or under `path` ("" for all), by path."""
        wanted = path.strip("/")
        return [file for file in self.files if not wanted or file.path == wanted or file.path.startswith(wanted + "/")]

    def outside(self, directory: str) -> Snapshot:
        """The same without the files in a directory, which ends in a slash."""
        kept = tuple(file for file in self.files if not file.path.startswith(directory))
        return self if len(kept) == len(self.files) else Snapshot(kept)

    def references(self) -> Iterator[ObjectId]:
        """Every tensor object that the snapshot needs, headers and side files included."""
        for file in self.files:
            yield from file.references()

    def encode(self) -> bytes:
        """The canonical encoding."""
        return encode({"kind": KIND, "files": [_file_json(file) for file in self.files]})

    @classmethod
    def decode(cls, data: bytes) -> Snapshot:
        """Read a snapshot back.

        Raises:
            ValueError: the bytes are not a snapshot object.
        """
        value = decode(data, KIND)
        try:
            return cls(tuple(_file_from_json(item) for item in value["files"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"malformed snapshot object: {error!r}") from error


def _file_json(file: File) -> Json:
    if isinstance(file, BlobFile):
        return {"type": "blob", "path": file.path, "size": file.size, "content": file.content}
    if isinstance(file, PartsFile):
        return {
            "type": "parts",
            "path": file.path,
            "size": file.size,
            "format": file.format,
            "header": file.header,
            "prefix": file.prefix,
            "parts": [list(pair) for pair in file.parts],
        }
    return {
        "type": "safetensors",
        "path": file.path,
        "size": file.size,
        "header": file.header,
        "prefix": file.prefix,
        "tensors": [list(pair) for pair in file.tensors],
    }


def _file_from_json(value: Json) -> File:
    if value["type"] == "blob":
        return BlobFile(value["path"], value["size"], value["content"])
    if value["type"] == "safetensors":
        tensors = tuple((name, tensor) for name, tensor in value["tensors"])
        return SafetensorsFile(value["path"], value["size"], value["header"], value["prefix"], tensors)
    if value["type"] == "parts":
        parts = tuple((name, tensor) for name, tensor in value["parts"])
        return PartsFile(value["path"], value["size"], value["format"], value["header"], value["prefix"], parts)
    raise ValueError(f"unknown file type {value['type']!r}")
