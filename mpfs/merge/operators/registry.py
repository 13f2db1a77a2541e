"""Finding a merge method by the name that recipes give it."""

from __future__ import annotations

import difflib
from importlib.metadata import EntryPoint, entry_points

from mpfs.errors import NotFoundError, UsageError
from mpfs.merge.operators.arcee_fusion import ArceeFusion
from mpfs.merge.operators.base import Operator
from mpfs.merge.operators.breadcrumbs import Breadcrumbs, BreadcrumbsTies
from mpfs.merge.operators.della import Della, DellaLinear
from mpfs.merge.operators.karcher import Karcher
from mpfs.merge.operators.linear import Linear
from mpfs.merge.operators.model_stock import ModelStock
from mpfs.merge.operators.multislerp import MultiSlerp
from mpfs.merge.operators.nearswap import NearSwap
from mpfs.merge.operators.nuslerp import NuSlerp
from mpfs.merge.operators.passthrough import Passthrough
from mpfs.merge.operators.ram import Ram, RamPlus
from mpfs.merge.operators.sce import Sce
from mpfs.merge.operators.slerp import Slerp
from mpfs.merge.operators.task_vector import DareLinear, DareTies, TaskArithmetic, Ties

GROUP = "mpfs.operators"
"""The entry points through which a package adds methods: the method's name = its class."""

_OPERATORS: dict[str, Operator] = {
    operator.name: operator
    for operator in (
        Linear(),
        Slerp(),
        NuSlerp(),
        MultiSlerp(),
        Karcher(),
        TaskArithmetic(),
        Ties(),
        DareLinear(),
        DareTies(),
        Breadcrumbs(),
        BreadcrumbsTies(),
        Della(),
        DellaLinear(),
        ModelStock(),
        Sce(),
        NearSwap(),
        ArceeFusion(),
        Ram(),
        RamPlus(),
        Passthrough(),
    )
}

_LOADED: dict[tuple[str, str], Operator] = {}
"""Methods of other packages, by name and the class's place, once they were asked for."""


def own_parameters() -> frozenset[str]:
    """The names of all parameters of MPFS's own methods, which are mergekit's; no other package is imported."""
    return frozenset(parameter.name for operator in _OPERATORS.values() for parameter in operator.parameters)


def operator_names() -> tuple[str, ...]:
    """The names of all methods, other packages' too, in alphabetical order."""
    return tuple(sorted({*_OPERATORS, *(point.name for point in entry_points(group=GROUP))}))


def get_operator(name: str) -> Operator:
    """The method of this name; operators are stateless, so the instance is shared.

    A name that MPFS has no method for is looked up among the entry points of group `mpfs.operators`, and only then is
    that package imported.

    Raises:
        NotFoundError: there is none; the message names the nearest one and all there are, and so do the details
            `name`, `nearest` (or None) and `available`.
        UsageError: a package says that it has it, but cannot be loaded or gives something else.
    """
    try:
        return _OPERATORS[name]
    except KeyError:
        pass
    for point in entry_points(group=GROUP, name=name):
        return _load(point)
    close = difflib.get_close_matches(name.lower().replace("-", "_"), operator_names(), n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise NotFoundError(
        f"no merge method is named {name!r}: {hint}there are {', '.join(operator_names())}",
        name=name,
        nearest=close[0] if close else None,
        available=list(operator_names()),
    )


def _load(point: EntryPoint) -> Operator:
    key = (point.name, point.value)
    if key in _LOADED:
        return _LOADED[key]
    try:
        found = point.load()
        operator = found() if isinstance(found, type) else found
    except Exception as error:  # Whatever a foreign module raises when it is imported.
        raise UsageError(f"the merge method {point.name} ({point.value}) cannot be loaded: {error}") from error
    if not isinstance(operator, Operator) or operator.name != point.name:
        raise UsageError(f"{point.value} is not an Operator named {point.name}")
    return _LOADED.setdefault(key, operator)
