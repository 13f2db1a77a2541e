"""The entry point `mpfs`: the verbs in one app, the global options, and exit codes for whatever happens."""

from __future__ import annotations

import inspect
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from gc import set_threshold
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from . import (
    analyze,
    branch,
    cat,
    checkout,
    diff,
    explain,
    export,
    fsck,
    gc,
    import_,
    init,
    log,
    ls,
    merge,
    mount,
    plan,
    reflog,
    reset,
    rm,
    show,
    stats,
    sweep,
    tag,
    verify,
)
from .failures import drop_stdout, report
from .options import JsonOption, flag
from .session import Session

_COLLECT = (100_000, 50, 100)
"""How many objects more than go are made between two searches for cycles, and how many searches between deeper ones."""

_EPILOG = "'mpfs VERB --help' explains a verb, with an example. docs/cli.md is the reference."


_JSON = "as_json"
_EVERYWHERE = frozenset({"repository", "quiet"})
"""Options of the program that each verb takes, too."""


class _Verb(TyperCommand):
    """A verb. The options that stand before it may stand behind it as well; the type of --help is no news to anybody."""

    def get_help_option(self, ctx: Any) -> Any:
        return _plain(super().get_help_option(ctx))

    def get_params(self, ctx: Any) -> Any:
        mine = super().get_params(ctx)
        known = {item.name for item in mine}
        everywhere = [item for item in ctx.find_root().command.params if item.name in _EVERYWHERE - known]
        return [*mine[:-1], *everywhere, *mine[-1:]]

    def invoke(self, ctx: Any) -> Any:
        before = ctx.find_root().params
        repository, quiet = ctx.params.pop("repository"), ctx.params.pop("quiet")
        session = Session.of(ctx)
        ctx.obj = replace(session, repository=repository or session.repository, quiet=quiet or session.quiet)
        if before.get(_JSON):
            if _JSON not in {item.name for item in self.params}:
                from mpfs.errors import UsageError

                raise UsageError(f"mpfs {self.name} prints no JSON: leave out --json")
            ctx.params[_JSON] = True
        return super().invoke(ctx)


class _Verbs(TyperGroup):
    """All verbs."""

    def get_help_option(self, ctx: Any) -> Any:
        return _plain(super().get_help_option(ctx))


def _plain(option: Any) -> Any:
    if option is not None:
        option.metavar = ""
    return option


app = typer.Typer(
    name="mpfs",
    cls=_Verbs,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    subcommand_metavar="VERB [ARGS]...",
    epilog=_EPILOG,
)

START, MERGE, HISTORY, REFS, UPKEEP = "Start", "Merge", "History", "Refs", "Upkeep"

_VERBS: tuple[tuple[str, str, Callable[..., None]], ...] = (
    (START, "init", init.init),
    (START, "import", import_.import_checkpoint),
    (START, "verify", verify.verify),
    (START, "checkout", checkout.checkout),
    (START, "export", export.export),
    (START, "mount", mount.mount),
    (MERGE, "plan", plan.plan),
    (MERGE, "merge", merge.merge),
    (MERGE, "sweep", sweep.sweep),
    (MERGE, "explain", explain.explain),
    (MERGE, "analyze", analyze.analyze),
    (HISTORY, "log", log.log),
    (HISTORY, "show", show.show),
    (HISTORY, "ls", ls.ls),
    (HISTORY, "cat", cat.cat),
    (HISTORY, "diff", diff.diff),
    (REFS, "branch", branch.branch),
    (REFS, "tag", tag.tag),
    (REFS, "reset", reset.reset),
    (REFS, "reflog", reflog.reflog),
    (REFS, "rm", rm.rm),
    (UPKEEP, "stats", stats.stats),
    (UPKEEP, "fsck", fsck.fsck),
    (UPKEEP, "gc", gc.gc),
)


def paragraphs(docstring: str | None) -> str:
    """A docstring as help text: paragraphs on one line each, to be wrapped as wide as they are shown; examples (they
    are indented) as they are."""
    text = inspect.cleandoc(docstring or "")
    parts = [part if part.startswith(" ") else " ".join(part.split()) for part in text.split("\n\n")]
    return "\n\n".join(parts)


for _panel, _name, _verb in _VERBS:
    app.command(_name, cls=_Verb, help=paragraphs(_verb.__doc__), rich_help_panel=_panel)(_verb)


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
        from importlib.metadata import PackageNotFoundError
        from importlib.metadata import version as installed

        try:
            number = installed("mpfs")
        except PackageNotFoundError:
            number = "unknown"
        sys.stdout.write(f"mpfs {number}\n")
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
    # Importing and planning make many objects and hardly any cycles: looking for those took a sixth of a short command.
    set_threshold(*_COLLECT)
    sys.exit(run(sys.argv[1:]))


def _interrupted(number: int, frame: FrameType | None) -> None:
    """Ctrl-C: clean up and end. A second one ends the process at once, which the store survives like any crash."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
