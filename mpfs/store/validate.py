"""What an object must be beyond what its decoder looks at: a forged one must fail here, and not somewhere inside.

Whoever can write into a repository can store any bytes under their right hash. The decoders check the outline; here
every field's type and range is checked, so that code that works with objects can rely on them.
"""

from __future__ import annotations

from dataclasses import astuple
from itertools import pairwise

from mpfs.objects import BlobFile, Commit, Plan, Run, Snapshot, Tensor
from mpfs.objects.dtypes import BITS
from mpfs.objects.ids import is_object_id
from mpfs.objects.plan import PlanTensor, Selection

_MAX_DIMENSIONS = 64
_MAX_BLOCK_SIZE = 64 << 20
_MAX_TEXT = 1 << 20
_MAX_TIME = 253_402_300_799
"""The end of the year 9999."""


def validate(item: Commit | Plan | Run | Snapshot | Tensor) -> None:
    """Check an object that was read from the store.

    Raises:
        ValueError: a field is not what it can be.
    """
    if isinstance(item, Tensor):
        _tensor(item)
    elif isinstance(item, Snapshot):
        _snapshot(item)
    elif isinstance(item, Commit):
        _commit(item)
    elif isinstance(item, Plan):
        _plan(item)
    else:
        _ids(item.commit, item.plan)
        _integer(item.started, "time", _MAX_TIME)
        for value in astuple(item.figures):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise ValueError(f"a figure is {value!r}")


def _tensor(item: Tensor) -> None:
    _dtype(item.dtype)
    _shape(item.shape)
    _integer(item.block_size, "block size", _MAX_BLOCK_SIZE)


def _snapshot(item: Snapshot) -> None:
    for file in item.files:
        _text(file.path)
        _integer(file.size, "size")
        if isinstance(file, BlobFile):
            _ids(file.content)
        else:
            _ids(*file.references())
            _text(file.prefix)
            for name, _ in file.tensors:
                _text(name)


def _commit(item: Commit) -> None:
    _ids(item.snapshot, *item.parents, *(one.commit for one in item.inputs))
    for text in (item.message, item.author, *(text for one in item.inputs for text in (one.name, one.role))):
        _text(text)
    if item.plan is not None:
        _ids(item.plan)
    if item.source is not None:
        _text(item.source)
    _integer(item.time, "time", _MAX_TIME)


def _plan(item: Plan) -> None:
    for text in (item.method, item.compat, item.policy, *item.notes):
        _text(text)
    for renamed in item.renamed.values():
        for name in (*renamed, *renamed.values()):
            _text(name)
    for model in item.models:
        _text(model.name)
        _ids(model.commit, model.snapshot)
    _integer(item.block_size, "block size", 1 << 40)
    _integer(item.template, "template", len(item.models) - 1)
    if item.base is not None:
        _integer(item.base, "base", len(item.models) - 1)
    for dtype in (item.work_dtype, item.out_dtype):
        if dtype is not None:
            _dtype(dtype)
    if not isinstance(item.seed, int) or not isinstance(item.recipe, dict):
        raise ValueError("seed or recipe makes no sense")
    if item.budget.kind not in ("none", "bytes", "percent", "fidelity"):
        raise ValueError(f"a budget of kind {str(item.budget.kind)[:80]!r}")
    for value in (item.budget.value, item.fidelity_predicted, *astuple(item.cost)):
        _number(value)
    for tensor in item.tensors:
        _plan_tensor(tensor, len(item.models))


def _plan_tensor(item: PlanTensor, models: int) -> None:
    _text(item.name)
    _dtype(item.dtype)
    _shape(item.shape)
    _integer(item.column_elements, "column", 1 << 62)
    if item.column_elements < 1 or item.action not in ("keep", "compute"):
        raise ValueError(f"tensor {item.name!r} has no columns, or no action")
    if item.base is not None:
        _ids(item.base)
    for model, tensor in item.experts:
        _integer(model, "model", models - 1)
        _ids(tensor)
    for selection in (item.columns, *item.selections):
        _selection(selection, item.column_count)
    for cut in (cut for cuts in item.cuts for cut in cuts):
        _integer(cut.digit, "digit", (1 << 15) - 1)
        _integer(cut.total, "total", item.numel)
        _integer(cut.wanted, "wanted", cut.total)
    for mapping in (item.shared, *item.parameters):
        if not isinstance(mapping, dict):
            raise ValueError("parameters are no mapping")
        for value in mapping.values():
            if not isinstance(value, bool | str | None):
                _number(value)
    for value in (item.energy, item.energy_left_out, *(() if item.cosine is None else (item.cosine,))):
        _number(value)


def _selection(selection: Selection, columns: int) -> None:
    for start, stop in selection.ranges:
        _integer(start, "column", columns)
        _integer(stop, "column", columns)
        if start >= stop:
            raise ValueError("a range of columns is empty")
    if any(before[1] > after[0] for before, after in pairwise(selection.ranges)):
        raise ValueError("ranges of columns are not in order")


def _ids(*values: object) -> None:
    for value in values:
        if not isinstance(value, str) or not is_object_id(value):
            raise ValueError(f"{str(value)[:80]!r} is not an id")


def _text(value: object) -> None:
    if not isinstance(value, str) or len(value) > _MAX_TEXT:
        raise ValueError("a text is missing, or too long")


def _dtype(value: object) -> None:
    if not isinstance(value, str) or value not in BITS:
        raise ValueError(f"unknown dtype {str(value)[:80]!r}")


def _shape(shape: tuple[object, ...]) -> None:
    if len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"a tensor of {len(shape)} dimensions")
    for dimension in shape:
        _integer(dimension, "dimension", 1 << 62)


def _integer(value: object, what: str, limit: int = 1 << 62) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= limit:
        raise ValueError(f"{what} {str(value)[:80]} is out of range")


def _number(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{str(value)[:80]!r} is not a number")
