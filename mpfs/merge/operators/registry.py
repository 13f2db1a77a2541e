"""Finding a merge method by the name that recipes give it."""

from __future__ import annotations

import difflib

from mpfs.errors import NotFoundError
from mpfs.merge.operators.base import Operator
from mpfs.merge.operators.linear import Linear
from mpfs.merge.operators.task_vector import DareLinear, DareTies, TaskArithmetic, Ties

_OPERATORS: dict[str, Operator] = {
    operator.name: operator for operator in (Linear(), TaskArithmetic(), Ties(), DareLinear(), DareTies())
}


def operator_names() -> tuple[str, ...]:
    """The names of all methods, in alphabetical order."""
    return tuple(sorted(_OPERATORS))


def get_operator(name: str) -> Operator:
    """The method of this name; operators are stateless, so the instance is shared.

    Raises:
        NotFoundError: there is none; the message names the nearest one and all there are, and so do the details
            `name`, `nearest` (or None) and `available`.
    """
    try:
        return _OPERATORS[name]
    except KeyError:
        pass
    close = difflib.get_close_matches(name.lower().replace("-", "_"), operator_names(), n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise NotFoundError(
        f"no merge method is named {name!r}: {hint}there are {', '.join(operator_names())}",
        name=name,
        nearest=close[0] if close else None,
        available=list(operator_names()),
    )
