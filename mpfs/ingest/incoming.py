"""A file of the snapshot to be: what will be stored of it, and how it is described then."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mpfs.ingest.pipeline import TensorJob
from mpfs.ingest.source import ByteSource, SourceFile
from mpfs.objects import BlobFile, File, PartsFile, SafetensorsFile

SAFETENSORS = "safetensors"


@dataclass(frozen=True, slots=True)
class Incoming:
    """A file of the snapshot to be.

    A blob's `content` is all of it, and its `format` is None; another file's is its header, and `parts` follow: (name or
    None, tensor). `whole` is the source file whose bytes these are, from the first to the last, if there is one.
    """

    path: str
    content: ByteSource
    format: str | None = None
    prefix: str = ""
    parts: tuple[tuple[str | None, TensorJob], ...] = ()
    whole: SourceFile | None = None

    def jobs(self) -> Iterator[TensorJob]:
        """What is to be stored, in the order of the file's bytes."""
        digest = None if self.whole is None else self.whole.digest
        yield TensorJob("U8", (self.content.size,), self.content, digest)
        for _, job in self.parts:
            yield TensorJob(job.dtype, job.shape, job.source, digest)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.content.size + sum(job.nbytes for _, job in self.parts)

    def described(self, identities: Iterator[str]) -> File:
        """The file's description, from the ids of what `jobs` gave, in that order."""
        content = next(identities)
        if self.format is None:
            return BlobFile(self.path, self.size, content)
        parts = tuple((name, next(identities)) for name, _ in self.parts)
        if self.format != SAFETENSORS:
            return PartsFile(self.path, self.size, self.format, content, self.prefix, parts)
        entries = tuple((name, identity) for name, identity in parts if name is not None)
        return SafetensorsFile(self.path, self.size, content, self.prefix, entries)
