"""The verbs: where each one is, and how it becomes a command as soon as somebody asks for it.

A command line names one verb. Importing the others, and having typer read their signatures, took longer than most verbs
run, so each module is imported when its verb is asked for; a list of all verbs (`mpfs --help`) asks for all of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from .parameters import spare_conversion
from .session import Session

PANELS = {
    "Start": ("init", "import", "verify", "checkout", "export", "mount"),
    "Merge": ("plan", "merge", "sweep", "explain", "analyze"),
    "History": ("log", "show", "ls", "cat", "diff"),
    "Refs": ("branch", "tag", "reset", "reflog", "rm"),
    "Upkeep": ("stats", "fsck", "gc"),
}
"""The verbs, as `mpfs --help` lists them. A verb is the function of its name in the module of its name."""

_ELSEWHERE = {"import": ("import_", "import_checkpoint")}
"""Verbs whose name is none for a module: module and function."""

_JSON = "as_json"
_EVERYWHERE = frozenset({"repository", "quiet"})
"""Options of the program that each verb takes, too."""


class Verbs(TyperGroup):
    """All verbs."""

    def __init__(self, *, params: list[Any] | None = None, **attributes: Any) -> None:
        super().__init__(params=spare_conversion(params or ()), **attributes)
        self.commands: Any = _Commands()

    def get_help_option(self, ctx: Any) -> Any:
        return _help(super().get_help_option(ctx))


class _Commands(Mapping[str, Any]):
    """Commands by name, each loaded when it is looked up: names alone (what was meant by a typo?) load nothing."""

    def __init__(self) -> None:
        self._panels = {name: panel for panel, names in PANELS.items() for name in names}
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = _load(name, self._panels[name])
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._panels)

    def __len__(self) -> int:
        return len(self._panels)


def _load(name: str, panel: str) -> Any:
    """Import a verb's module, and make a command of its function."""
    module, function = _ELSEWHERE.get(name, (name, name))
    verb = getattr(import_module(f".{module}", __package__), function)
    alone = typer.Typer(add_completion=False, rich_markup_mode="rich")
    alone.command(name, cls=_Verb, help=paragraphs(verb.__doc__), rich_help_panel=panel)(verb)
    return typer.main.get_command(alone)


class _Verb(TyperCommand):
    """A verb. The options that stand before it may stand behind it as well; the type of --help is no news to anybody."""

    def __init__(self, name: str | None, *, params: list[Any] | None = None, **attributes: Any) -> None:
        super().__init__(name, params=spare_conversion(params or ()), **attributes)

    def get_help_option(self, ctx: Any) -> Any:
        return _help(super().get_help_option(ctx))

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


def paragraphs(docstring: str | None) -> str:
    """A docstring as help text: paragraphs on one line each, to be wrapped as wide as they are shown; examples (they
    are indented) as they are."""
    text = inspect.cleandoc(docstring or "")
    parts = [part if part.startswith(" ") else " ".join(part.split()) for part in text.split("\n\n")]
    return "\n\n".join(parts)


def _help(option: Any) -> Any:
    """typer's --help, like other flags."""
    if option is not None:
        option.metavar = ""
        spare_conversion([option])
    return option
