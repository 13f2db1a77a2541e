"""Options that several verbs take, and the parsers behind them."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from .sizes import Amount, parse_amount, parse_share, parse_size

if TYPE_CHECKING:
    from mpfs import Budget

_T = TypeVar("_T")


class Policy(StrEnum):
    """How blocks are chosen under a budget."""

    energy = "energy"
    layerwise = "layerwise"
    uniform = "uniform"
    random = "random"


class OnMismatch(StrEnum):
    """What to do where the models do not fit each other."""

    error = "error"
    crop = "crop"
    base = "base"


def parser(parse: Callable[[str], _T]) -> Callable[[str], _T]:
    """A parser whose ValueError reaches the user with its message and the option's name."""

    def parsed(text: str | _T) -> _T:
        if not isinstance(text, str):
            return text
        try:
            return parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error

    return parsed


def flag(*names: str, help: str) -> Any:  # noqa: A002  # typer's word for it
    """An option that is there or not."""
    return typer.Option(*names, help=help, metavar="", show_default=False)


SIZE = parser(parse_size)
SHARE = parser(parse_share)
AMOUNT = parser(parse_amount)

JsonOption = Annotated[bool, flag("--json", help="Print one JSON document instead of text.")]
BudgetOption = Annotated[
    Amount | None,
    typer.Option(
        "--budget",
        metavar="SIZE|N%",
        parser=AMOUNT,
        help="Read at most this much of the experts: 512MiB, 2GB, or 10% of what a full merge reads.",
    ),
]
FidelityOption = Annotated[
    float | None,
    typer.Option(
        "--fidelity",
        metavar="SHARE",
        parser=SHARE,
        help="Instead of a budget, a result: read as little as gets this close to the full merge, such as 0.95.",
    ),
]
PolicyOption = Annotated[
    Policy,
    typer.Option(
        "--policy",
        metavar="POLICY",
        show_default=False,
        help="How blocks are chosen under a budget: energy (the default) keeps the most change for the bytes; layerwise gives every tensor the same share; uniform and random are there to compare with.",
    ),
]
SeedOption = Annotated[
    int, typer.Option("--seed", metavar="N", help="For methods and policies that draw random numbers.")
]
MismatchOption = Annotated[
    OnMismatch,
    typer.Option(
        "--on-mismatch",
        metavar="error|crop|base",
        help="Where models do not fit each other: fail, cut vocabularies to what all have, or keep the base's tensor.",
    ),
]
MessageOption = Annotated[
    str | None, typer.Option("--message", "-m", metavar="TEXT", help="The commit's message; default: what was done.")
]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", metavar="N", min=1, help="Worker threads; default: one a CPU.")
]
NoReuseOption = Annotated[bool, flag("--no-reuse", help="Compute everything, even what an earlier merge has computed.")]
MemoryOption = Annotated[
    int, typer.Option("--memory", metavar="SIZE", parser=SIZE, show_default="1GiB", help="Most memory for the work.")
]
NoSpaceCheckOption = Annotated[
    bool, flag("--no-space-check", help="Start even if it seems that there is no room; what does not fit is undone.")
]

DeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="cpu|cuda",
        help="Let torch compute, there; default: compiled kernels on the CPU, and torch for methods without any.",
    ),
]


def budget_of(budget: Amount | None, fidelity: float | None) -> Budget | None:
    """The budget that --budget or --fidelity asks for; None for a full merge.

    Raises:
        UsageError: both are given.
    """
    from mpfs import Budget
    from mpfs.errors import UsageError

    if budget is not None and fidelity is not None:
        raise UsageError("--budget and --fidelity exclude each other: ask for bytes or for a result")
    if budget is not None:
        return Budget(budget.kind, budget.value)
    return None if fidelity is None else Budget("fidelity", fidelity)
