"""Arguments and options that have nothing to convert, and so need not wait for what converts them.

typer converts every value with a pydantic adapter that it builds on the way, even None and defaults. Importing pydantic
and building the adapters takes a tenth of a second, a third of what a short verb takes in all. Here a value that is
what the verb wants already (None, a default, text for text) is handed over as it is; all others are left to typer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from typer.core import TyperArgument, TyperOption


class _Argument(TyperArgument):
    def process_value(self, ctx: Any, value: Any) -> Any:
        return _handed_over(self, ctx, value) if _is_ready(self, value) else super().process_value(ctx, value)


class _Option(TyperOption):
    def process_value(self, ctx: Any, value: Any) -> Any:
        return _handed_over(self, ctx, value) if _is_ready(self, value) else super().process_value(ctx, value)


def spare_conversion(parameters: Iterable[Any]) -> list[Any]:
    """Parameters that typer made, so that they convert only what has to be."""
    found = list(parameters)
    for item in found:
        # typer makes them, and takes no class for them from anybody.
        if type(item) is TyperArgument:
            item.__class__ = _Argument
        elif type(item) is TyperOption:
            item.__class__ = _Option
    return found


def _is_ready(parameter: Any, value: Any) -> bool:
    """Whether there is nothing to convert and nothing to complain about."""
    described = getattr(parameter, "type_descriptor", None)  # older typers lack it, and need no pydantic either
    if described is None or parameter.multiple or parameter.nargs != 1:
        return False
    if value is None:
        return not parameter.required
    # Text is all that a command line can give: whatever else there is comes from the verb's own signature.
    return type(value) is described.annotation and (type(value) is not str or described.parameter_info.parser is None)


def _handed_over(parameter: Any, ctx: Any, value: Any) -> Any:
    """What is done with a value after it is converted."""
    return value if parameter.callback is None else parameter.callback(ctx, parameter, value)
