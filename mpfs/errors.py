"""The error tree: what can go wrong, grouped by what a caller would do about it.

Every error that MPFS raises on purpose is an `MPFSError`. Its class fixes a stable `kind` (a word for
programs) and an `exit_code` (for shells); the instance carries one message for a person (what is wrong,
where, what to do) and `details`, JSON values that programs may read. tests/test_errors.py pins the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class MPFSError(Exception):
    """Any failure that MPFS foresees."""

    kind: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, **details: object) -> None:
        super().__init__(message)
        self.message = message
        self.details = details

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions are rebuilt from `args`; keep the details when one crosses a process boundary.
        return (_rebuild, (type(self), self.message, self.details))

    def as_dict(self) -> dict[str, object]:
        """The JSON form: `kind`, `message` and the details."""
        return {**self.details, "kind": self.kind, "message": self.message}


def _rebuild(cls: type[MPFSError], message: str, details: dict[str, object]) -> MPFSError:
    return cls(message, **details)


class UsageError(MPFSError):
    """The call itself is wrong: an option, a size or a name that cannot be meant."""

    kind = "usage"
    exit_code = 2


class NotARepositoryError(MPFSError):
    """There is no repository where one was looked for, or this version cannot open it."""

    kind = "not_a_repository"
    exit_code = 10


class UnsupportedFormatError(NotARepositoryError):
    """The repository was written by a newer MPFS."""

    kind = "unsupported_format"


class LockedError(MPFSError):
    """Another process holds a lock that this operation needs; try again later."""

    kind = "locked"
    exit_code = 11


class RefConflictError(MPFSError):
    """A ref moved, appeared or vanished while the operation ran; look at it and try again."""

    kind = "ref_conflict"
    exit_code = 12


class NotFoundError(MPFSError):
    """A ref, object, tensor or file that was named does not exist."""

    kind = "not_found"
    exit_code = 13


class InfeasibleError(MPFSError):
    """No plan meets what was asked for."""

    kind = "infeasible"
    exit_code = 14


class BudgetInfeasibleError(InfeasibleError):
    """The merge cannot be done with so few expert bytes."""

    kind = "budget_infeasible"


class FidelityInfeasibleError(InfeasibleError):
    """The merge cannot come so close to the full one."""

    kind = "fidelity_infeasible"


class NoSpaceError(MPFSError):
    """The disk or the LMDB map is full; nothing was published."""

    kind = "no_space"
    exit_code = 15


class BadInputError(MPFSError):
    """What was given to read is damaged, unsupported or contradictory."""

    kind = "bad_input"
    exit_code = 65


class FormatError(BadInputError):
    """A checkpoint file is not what its format allows."""

    kind = "format"


class UnsafeInputError(BadInputError):
    """A checkpoint that could only be read by running code out of it, or that names files outside itself."""

    kind = "unsafe_input"


class RecipeError(BadInputError):
    """A recipe has mistakes; all that can be known before work starts are in `problems`.

    Each problem is a mapping with `path` (the key path, such as `models[1].parameters.weight`) and `message`.
    """

    kind = "recipe"

    def __init__(self, message: str, *, problems: Sequence[dict[str, str]] = (), **details: object) -> None:
        super().__init__(message, problems=list(problems), **details)


class MismatchError(BadInputError):
    """The models of a merge do not fit each other: shapes, names or dtypes."""

    kind = "mismatch"


class NonFiniteError(BadInputError):
    """The result of a merge holds NaN or infinity; nothing was published."""

    kind = "nonfinite"


class IntegrityError(MPFSError):
    """Stored bytes are not what their id says, or an object that must exist is gone."""

    kind = "integrity"
    exit_code = 90


PROBLEMS_FOUND_EXIT_CODE = 3
"""What `fsck` and `diff --exit-code` exit with when they ran well and found something."""

INTERRUPTED_EXIT_CODE = 130
"""128 + SIGINT, as shells report it."""
