"""From an exception to what the user sees of it: one clear line on stderr (or a JSON document), and an exit code."""

from __future__ import annotations

import os
import sys
import traceback

import typer

from .output import clean, to_json

DEBUG_VARIABLE = "MPFS_DEBUG"

BROKEN_PIPE_EXIT_CODE = 141
"""128 + SIGPIPE, as a shell reports it of a program that wrote to a pipe that nobody reads."""


def report(error: BaseException, *, as_json: bool) -> int:
    """Tell the user, and return the exit code."""
    from mpfs.errors import INTERRUPTED_EXIT_CODE, MPFSError

    if isinstance(error, MPFSError):
        return _tell(error.exit_code, error.as_dict(), _lines(error), as_json)
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return _tell(INTERRUPTED_EXIT_CODE, {"kind": "interrupted", "message": "interrupted"}, ["interrupted"], as_json)
    if hasattr(error, "format_message"):  # a usage error of click or of typer's copy of it
        message = _usage_message(error)
        return _tell(2, {"kind": "usage", "message": message}, [message], as_json)
    if isinstance(error, OSError):
        message = _os_message(error)
        return _tell(1, {"kind": "error", "message": message}, [message], as_json)
    if isinstance(error, MemoryError):
        message = "out of memory; nothing was published"
        return _tell(1, {"kind": "error", "message": message}, [message], as_json)
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exception(error)
    what = " ".join(f"{type(error).__name__}: {error}".split())
    message = f"internal error: {what} (run with {DEBUG_VARIABLE}=1 for a traceback)"
    return _tell(1, {"kind": "internal", "message": message}, [message], as_json)


def drop_stdout() -> int:
    """Nobody reads stdout any more: write to nothing from now on, and say so by the exit code only."""
    try:
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, sys.stdout.fileno())
        os.close(descriptor)
    except (OSError, ValueError, AttributeError):
        pass
    return BROKEN_PIPE_EXIT_CODE


def _tell(code: int, details: dict[str, object], lines: list[str], as_json: bool) -> int:
    if as_json and sys.stdout is not None:
        sys.stdout.write(to_json({"error": details}) + "\n")
    elif sys.stderr is not None:
        sys.stderr.write("".join(f"mpfs: {clean(line)}\n" for line in lines))
    return code


def _lines(error: Exception) -> list[str]:
    """The message; of a recipe with several problems one line for each, with its key path."""
    from mpfs.errors import MPFSError, RecipeError

    message = error.message if isinstance(error, MPFSError) else str(error)
    if isinstance(error, RecipeError):
        problems = error.details.get("problems")
        if isinstance(problems, list) and len(problems) > 1:
            each = [f"{item['path']}: {item['message']}" for item in problems]
            where = message.removesuffix("; ".join(each)).rstrip(": ")
            return [f"{where}: {line}" if where != message.rstrip(": ") else line for line in each]
    return message.splitlines() or [type(error).__name__]


def _usage_message(error: BaseException) -> str:
    message = " ".join(str(getattr(error, "format_message")()).split()).rstrip(".")  # noqa: B009  # duck-typed
    context = getattr(error, "ctx", None)
    path = getattr(context, "command_path", "mpfs")
    message = message[:1].lower() + message[1:]
    return f"{message} (see '{path} --help')"


def _os_message(error: OSError) -> str:
    reason = error.strerror or str(error) or type(error).__name__
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    return f"{' -> '.join(names)}: {reason}" if names else reason
