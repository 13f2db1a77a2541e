"""Comparing a source with what was imported from it, by the manifest that the import left in its commit."""

from __future__ import annotations

import time as clock
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from mpfs.errors import NotFoundError
from mpfs.formats.location import Location
from mpfs.formats.tree import walk
from mpfs.ingest.files import source_files
from mpfs.ingest.remote import RemoteTree, is_archive, open_archive
from mpfs.ingest.source import SourceFile
from mpfs.objects import ManifestFile
from mpfs.objects.encoding import Json
from mpfs.objects.progress import Progress

ProblemKind: TypeAlias = Literal["missing", "extra", "size", "sha256"]


@dataclass(frozen=True, slots=True)
class SourceProblem:
    """A file that is not as it was imported: gone, new, or of another size or content."""

    kind: ProblemKind
    path: str
    detail: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What a comparison has found. `bytes` were read."""

    commit: str
    files: int
    bytes: int
    seconds: float
    problems: tuple[SourceProblem, ...]

    @property
    def ok(self) -> bool:
        """Whether every file is as it was."""
        return not self.problems

    def as_json(self) -> Json:
        """The JSON form."""
        problems = [{"kind": item.kind, "path": item.path, "detail": item.detail} for item in self.problems]
        return {
            "ok": self.ok,
            "commit": self.commit,
            "checked": {"files": self.files, "bytes": self.bytes},
            "seconds": self.seconds,
            "problems": problems,
        }


def verify(
    commit: str, manifest: tuple[ManifestFile, ...], source: Path | RemoteTree, progress: Progress | None = None
) -> VerifyReport:
    """Read a source, streaming, and compare it with a manifest.

    Args:
        commit: the commit's id, for the report.
        manifest: its files.
        source: what was imported, or a copy of it: a directory, an archive, or a file if that is what was imported.
        progress: told the bytes read, of all.

    Raises:
        NotFoundError: there is nothing at `source`; or the commit has no manifest, as it comes from no import.
        BadInputError: a file cannot be read, or changes meanwhile.
    """
    if not manifest:
        raise NotFoundError(f"commit {commit[:12]} has no list of source files: it was not made by an import")
    started = clock.monotonic()
    problems: list[SourceProblem] = []
    due: list[tuple[ManifestFile, SourceFile]] = []
    with source_files() as files:
        if isinstance(source, Path) and source.is_file():
            files.add(source)  # an archive must not change while it is read, either
        present, single = _locations(source)
        # A file may have another name than the one that was imported.
        single = single and len(manifest) == 1
        for item in manifest:
            path = next(iter(present)) if single else item.path
            if path not in present:
                problems.append(SourceProblem("missing", item.path, f"{item.size:,} bytes were imported"))
                continue
            file = files.add(present.pop(path))
            if file.size != item.size:
                problems.append(
                    SourceProblem("size", item.path, f"it has {file.size:,} bytes, imported were {item.size:,}")
                )
            else:
                due.append((item, file))
        problems += [SourceProblem("extra", path, "it was not there when it was imported") for path in present]
        total, done = sum(item.size for item, _ in due), 0
        for item, file in due:
            found = file.sha256(_from(done, total, progress))
            done += item.size
            if found != item.sha256:
                problems.append(SourceProblem("sha256", item.path, f"it is {found}, imported was {item.sha256}"))
        files.check_unchanged()
    problems.sort(key=lambda problem: problem.path)
    return VerifyReport(commit, len(manifest), total, clock.monotonic() - started, tuple(problems))


def _from(done: int, total: int, progress: Progress | None) -> Callable[[int], None] | None:
    if progress is None:
        return None
    tell = progress

    def read(count: int) -> None:
        tell(done + count, total)

    return read


def _locations(source: Path | RemoteTree) -> tuple[dict[str, Location], bool]:
    """The files of a source by path, as an import finds them, and whether it is a single file."""
    if isinstance(source, Path):
        if not source.exists():
            raise NotFoundError(f"{source}: there is nothing", file=str(source))
        if source.is_dir():
            return {file.path: file.location for file in walk(source)[0]}, False
        if not is_archive(source):
            return {source.name: source}, True
        source, _ = open_archive(source)
    file = source.file()
    if file is not None:
        return {file.name: file}, True
    return {found.path: found.location for found in source.walk()[0]}, False
