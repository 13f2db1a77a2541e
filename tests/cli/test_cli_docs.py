"""docs/cli.md mentions every verb, option, exit code and environment variable, and no verb that is not there."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from mpfs_cli import failures, main, session

import mpfs.errors

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "cli.md").read_text("utf-8")
GROUP: Any = typer.main.get_command(main.app)
VERBS: dict[str, Any] = GROUP.commands


def section(verb: str) -> str:
    """The part of the page about one verb."""
    match = re.search(rf"^### `?mpfs {verb}\b.*?(?=^##)", PAGE + "\n## end", re.MULTILINE | re.DOTALL)
    assert match, f"docs/cli.md has no section on {verb}"
    return match[0]


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_every_verb_has_its_options_and_an_example(verb: str) -> None:
    text = section(verb)
    options = [name for parameter in VERBS[verb].params for name in parameter.opts if name.startswith("-")]
    assert [name for name in options if not re.search(rf"(?<![\w-]){name}(?![\w-])", text)] == []
    assert f"$ mpfs {verb}" in text or f"$ mpfs -q {verb}" in text


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_every_verb_has_help_with_an_example(verb: str) -> None:
    command = VERBS[verb]
    assert f"    mpfs {verb}" in command.help
    first = command.help.split("\n")[0]
    assert first.endswith(".")
    assert len(first) <= 64, "the list of verbs shows it on one line"
    assert all(parameter.help for parameter in command.params)


def test_the_page_has_no_verb_that_is_not_there() -> None:
    assert set(re.findall(r"^### `?mpfs (\w+)", PAGE, re.MULTILINE)) == set(VERBS)


def test_global_options_exit_codes_and_variables() -> None:
    options = [name for parameter in GROUP.params for name in parameter.opts]
    for name in [*options, session.REPOSITORY_VARIABLE, session.AUTHOR_VARIABLE, failures.DEBUG_VARIABLE, "NO_COLOR"]:
        assert f"`{name}`" in PAGE or f"`${name}`" in PAGE, name
    classes = [
        item for _, item in inspect.getmembers(mpfs.errors, inspect.isclass) if issubclass(item, mpfs.errors.MPFSError)
    ]
    for code in {item.exit_code for item in classes} | {0, 3, 130, failures.BROKEN_PIPE_EXIT_CODE}:
        assert f"| {code} |" in PAGE, code
    for item in classes:
        assert f"`{item.kind}`" in PAGE, item.kind
