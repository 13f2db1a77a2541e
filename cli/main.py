"""The entry point `mpfs`: the global options before the verbs, and exit codes for whatever happens."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from gc import freeze, set_threshold
from types import FrameType
from typing import Annotated

import typer

from .failures import drop_stdout, report
from .options import JsonOption, flag
from .session import Session
from .verbs import Verbs, paragraphs

_COLLECT = (100_000, 50, 100)
"""How many objects more than go are made between two searches for cycles, and how many searches between deeper ones."""

_LIBRARIES = {"OPENBLAS_NUM_THREADS": "1", "PYDANTIC_DISABLE_PLUGINS": "1"}
"""What libraries are told, unless the user tells them something else: numpy's BLAS, which has nothing large to do here, is
not to start a thread for each core that spins for a tenth of a second, and pydantic not to search all that is installed."""

_EPILOG = "'mpfs VERB --help' explains a verb, with an example. docs/cli.md is the reference."

app = typer.Typer(
    name="mpfs",
    cls=Verbs,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    subcommand_metavar="VERB [ARGS]...",
    epilog=_EPILOG,
)


def _global(
    ctx: typer.Context,
    repository: Annotated[
        str | None,
        typer.Option(
            "--repository",
            "-r",
            metavar="REPO",
            help="The repository; default: $MPFS_REPO, else the nearest .mpfs here or above.",
        ),
    ] = None,
    quiet: Annotated[
        bool, flag("--quiet", "-q", help="No progress and no notes; where a commit is made, print its id only.")
    ] = False,
    as_json: JsonOption = False,
    version: Annotated[bool, flag("--version", help="Print the version.")] = False,
) -> None:
    """Store, merge and compare model weights, with git's habits.

    A checkpoint is imported once. Merges read only the expert blocks that a budget allows, and become commits.

        mpfs init
        mpfs import ./base-model --as base
        mpfs import ./expert-a --as a --base base
        mpfs import ./expert-b --as b --base base
        mpfs merge recipe.yml --into merged --budget 20%
        mpfs checkout merged ./out
    """
    if version:
        from mpfs import __version__

        sys.stdout.write(f"mpfs {__version__}\n")
        raise typer.Exit
    ctx.obj = Session(repository=repository, quiet=quiet)
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
        raise typer.Exit(2)


app.callback(invoke_without_command=True, help=paragraphs(_global.__doc__))(_global)


def run(arguments: Sequence[str]) -> int:
    """Run one command line, without the program's name; the exit code comes back."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    as_json = "--json" in options
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    command = typer.main.get_command(app)
    code = 0
    try:
        try:
            with command.make_context("mpfs", list(arguments)) as context:
                command.invoke(context)
        except typer.Exit as done:
            code = done.exit_code
        except BrokenPipeError:
            raise
        except BaseException as error:
            if isinstance(error, SystemExit):
                raise
            code = report(error, as_json=as_json)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        return drop_stdout()
    except OSError as error:  # stdout is a full disk
        drop_stdout()
        return report(error, as_json=False)
    return code


def main() -> None:
    """The console script."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)
    for name, value in _LIBRARIES.items():
        os.environ.setdefault(name, value)
    # Importing and planning make many objects and hardly any cycles: looking for those took a sixth of a short command.
    set_threshold(*_COLLECT)
    code = run(sys.argv[1:])
    # What is left goes with the process. Looking for cycles in it on the way out took a sixth of a short command.
    freeze()
    sys.exit(code)


def _interrupted(number: int, frame: FrameType | None) -> None:
    """Ctrl-C: clean up and end. A second one ends the process at once, which the store survives like any crash."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
