"""Comparing a source on disk with what was imported from it, by the manifest that the import left in its commit."""

from __future__ import annotations

import time as clock
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from mpfs.errors import NotFoundError
from mpfs.formats.tree import walk
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
    commit: str, manifest: tuple[ManifestFile, ...], source: Path, progress: Progress | None = None
) -> VerifyReport:
    """Read a source and compare it with a manifest.

    Args:
        commit: the commit's id, for the report.
        manifest: its files.
        source: what was imported, or a copy of it: a directory, or a file if that is what was imported.
        progress: told the bytes read, of all.

    Raises:
        NotFoundError: there is nothing at `source`; or the commit has no manifest, as it comes from no import.
        BadInputError: a file cannot be read, or changes meanwhile.
    """
    if not manifest:
        raise NotFoundError(f"commit {commit[:12]} has no list of source files: it was not made by an import")
    started = clock.monotonic()
    present = _files(source)
    # A file may have another name than the one that was imported.
    single = len(manifest) == 1 and not source.is_dir()
    problems: list[SourceProblem] = []
    due: list[tuple[ManifestFile, SourceFile]] = []
    for item in manifest:
        path = next(iter(present)) if single else item.path
        if path not in present:
            problems.append(SourceProblem("missing", item.path, f"{item.size:,} bytes were imported"))
            continue
        file = SourceFile(present.pop(path))
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
    problems.sort(key=lambda problem: problem.path)
    return VerifyReport(commit, len(manifest), total, clock.monotonic() - started, tuple(problems))


def _from(done: int, total: int, progress: Progress | None) -> Callable[[int], None] | None:
    if progress is None:
        return None
    tell = progress

    def read(count: int) -> None:
        tell(done + count, total)

    return read


def _files(source: Path) -> dict[str, Path]:
    if not source.exists():
        raise NotFoundError(f"{source}: there is nothing", file=str(source))
    if not source.is_dir():
        return {source.name: source}
    found, _ = walk(source)
    return {file.path: Path(str(file.location)) for file in found}
