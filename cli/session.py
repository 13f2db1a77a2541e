"""What all verbs share: the global options, and how they find the repository. Reads the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from .output import Output

if TYPE_CHECKING:
    from mpfs import Repository

REPOSITORY_VARIABLE = "MPFS_REPO"
AUTHOR_VARIABLE = "MPFS_AUTHOR"


@dataclass(frozen=True, slots=True)
class Session:
    """The global options of one run. `repository` is what -r names."""

    repository: str | None = None
    quiet: bool = False

    @classmethod
    def of(cls, ctx: typer.Context) -> Session:
        """The session that the verb with this context runs in."""
        found = ctx.find_object(cls)
        return cls() if found is None else found

    def output(self, as_json: bool) -> Output:
        """Where the verb prints."""
        return Output(quiet=self.quiet, as_json=as_json)

    def open(self) -> Repository:
        """Open the repository; use it in a `with` block.

        Raises:
            NotARepositoryError: there is none.
        """
        from mpfs import Repository

        return Repository.open(self.named() or find_repository(Path.cwd()), author=author())

    def named(self) -> str | None:
        """The repository that -r or $MPFS_REPO names, if one does."""
        return self.repository or os.environ.get(REPOSITORY_VARIABLE) or None


def author() -> str | None:
    """Who commits are by, if $MPFS_AUTHOR says so."""
    return os.environ.get(AUTHOR_VARIABLE) or None


def find_repository(start: Path) -> Path:
    """The nearest `.mpfs` in `start` or above it.

    Raises:
        NotARepositoryError: there is none.
    """
    from mpfs.errors import NotARepositoryError
    from mpfs.repository import REPOSITORY_NAME

    for directory in (start, *start.parents):
        if (directory / REPOSITORY_NAME / "config.json").is_file():
            return directory / REPOSITORY_NAME
    raise NotARepositoryError(
        f"no repository in {start} or above it: make one with 'mpfs init', "
        f"or name one with -r or ${REPOSITORY_VARIABLE}",
        path=str(start),
    )
