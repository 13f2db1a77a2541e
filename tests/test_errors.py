"""The error tree is a contract: programs match on `kind`, shells on the exit code, handlers on the class."""

from __future__ import annotations

import json
import pickle

import pytest

from mpfs import errors
from mpfs.errors import MPFSError, RecipeError

# class name: (kind, exit code, parent's name). A change here is a change for every user: CHANGELOG it.
TREE = {
    "MPFSError": ("error", 1, "Exception"),
    "UsageError": ("usage", 2, "MPFSError"),
    "NotARepositoryError": ("not_a_repository", 10, "MPFSError"),
    "UnsupportedFormatError": ("unsupported_format", 10, "NotARepositoryError"),
    "LockedError": ("locked", 11, "MPFSError"),
    "RefConflictError": ("ref_conflict", 12, "MPFSError"),
    "NotFoundError": ("not_found", 13, "MPFSError"),
    "InfeasibleError": ("infeasible", 14, "MPFSError"),
    "BudgetInfeasibleError": ("budget_infeasible", 14, "InfeasibleError"),
    "FidelityInfeasibleError": ("fidelity_infeasible", 14, "InfeasibleError"),
    "NoSpaceError": ("no_space", 15, "MPFSError"),
    "BadInputError": ("bad_input", 65, "MPFSError"),
    "FormatError": ("format", 65, "BadInputError"),
    "UnsafeInputError": ("unsafe_input", 65, "BadInputError"),
    "RecipeError": ("recipe", 65, "BadInputError"),
    "MismatchError": ("mismatch", 65, "BadInputError"),
    "NonFiniteError": ("nonfinite", 65, "BadInputError"),
    "IntegrityError": ("integrity", 90, "MPFSError"),
}


def subclasses(cls: type[MPFSError]) -> list[type[MPFSError]]:
    """`cls` and all classes of mpfs.errors below it."""
    below = [found for child in cls.__subclasses__() for found in subclasses(child)]
    return [cls, *below] if cls.__module__ == errors.__name__ else below


CLASSES = subclasses(MPFSError)
every_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)


def make(cls: type[MPFSError]) -> MPFSError:
    details: dict[str, object] = {"ref": "main", "bytes": 12, "names": ["a", "b"], "nested": {"x": None, "y": 0.5}}
    if issubclass(cls, RecipeError):
        details["problems"] = [{"path": "models[1].parameters.weight", "message": "is not a number"}]
    return cls("what is wrong, and what to do", **details)


def test_tree_is_as_pinned() -> None:
    found = {cls.__name__: (cls.kind, cls.exit_code, *(parent.__name__ for parent in cls.__bases__)) for cls in CLASSES}
    assert found == TREE


def test_every_exception_of_the_module_is_in_the_tree() -> None:
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, BaseException) and value.__module__ == errors.__name__
    }
    assert defined == set(TREE)


def test_kinds_are_unique() -> None:
    kinds = [cls.kind for cls in CLASSES]
    assert len(set(kinds)) == len(kinds)


@every_class
def test_kind_is_set_by_the_class_itself(cls: type[MPFSError]) -> None:
    assert "kind" in vars(cls)
    assert cls.kind == cls.kind.lower()
    assert cls.kind.replace("_", "").isalpha()


@every_class
def test_exit_code_fits_a_shell_and_is_no_other_outcome(cls: type[MPFSError]) -> None:
    assert 0 < cls.exit_code < 126
    assert cls.exit_code not in (errors.PROBLEMS_FOUND_EXIT_CODE, errors.INTERRUPTED_EXIT_CODE)


def test_exit_codes_of_other_outcomes() -> None:
    assert errors.PROBLEMS_FOUND_EXIT_CODE == 3
    assert errors.INTERRUPTED_EXIT_CODE == 130


@every_class
def test_docstring_is_its_own_sentence(cls: type[MPFSError]) -> None:
    assert cls.__doc__
    summary = cls.__doc__.strip().splitlines()[0]
    assert summary[0].isupper()
    assert summary.endswith(".")
    assert all(cls.__doc__ != parent.__doc__ for parent in cls.__mro__[1:])


@every_class
def test_str_is_the_message(cls: type[MPFSError]) -> None:
    assert str(make(cls)) == make(cls).message == "what is wrong, and what to do"


@every_class
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickling_keeps_class_message_and_details(cls: type[MPFSError], protocol: int) -> None:
    error = make(cls)
    back = pickle.loads(pickle.dumps(error, protocol))
    assert type(back) is cls
    assert back.message == error.message
    assert back.details == error.details
    assert str(back) == str(error)


@every_class
def test_as_dict_is_json(cls: type[MPFSError]) -> None:
    error = make(cls)
    back = json.loads(json.dumps(error.as_dict(), allow_nan=False))
    assert back == {"kind": cls.kind, "message": error.message, **error.details}


def test_recipe_error_always_lists_problems() -> None:
    assert RecipeError("bad").as_dict()["problems"] == []
    problem = {"path": "models", "message": "is empty"}
    assert RecipeError("bad", problems=(problem,)).as_dict()["problems"] == [problem]
