"""A tensor made of rows of others: copied, averaged or zero, in bounded memory whatever their order.

The result is made some rows at a time. For each such window every source is read once, in the order of its blocks, so
that rows which lie all over it cost a few passes and not a block each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mpfs.merge.conversion import TYPES, Stored, converted
from mpfs.merge.vocabulary import Rows
from mpfs.objects import Tensor
from mpfs.objects.dtypes import itemsize
from mpfs.store import BlockReader

WINDOW_BYTES = 64 << 20
"""About how much of the result is made at a time."""

_READ_BYTES = 4 << 20

Source: TypeAlias = "tuple[Tensor, str]"
"""A tensor, and what it is called in messages."""


def gathered(
    rows: Rows,
    padding: int,
    sources: Mapping[int, Source],
    dtype: str,
    blocks: BlockReader,
    *,
    start: int = 0,
    window_bytes: int = WINDOW_BYTES,
) -> Iterator[bytes]:
    """The bytes of the result, in chunks.

    Means are taken as mergekit does: one source after the other is added in `dtype`, and the sum divided. Rows of
    padding are the mean of all others, summed in float64.

    Args:
        rows: for each source (first axis) the row that goes into each row of the result, -1 for none.
        padding: rows that come after those.
        sources: the tensors, by their index in `rows`; all have rows of one length.
        dtype: of the result. Rows of a source of another are converted (both must be mergeable then).
        blocks: for reading them.
        start: the first row of the result that is wanted; 0 if there is padding.
        window_bytes: how much of the result is made at a time.
    """
    width = _width(next(iter(sources.values()))[0])
    step = max(1, window_bytes // max(1, width * itemsize(dtype)))
    sums = np.zeros(width, np.float64)
    for low in range(start, rows.shape[1], step):
        window = _window(rows[:, low : low + step], sources, dtype, blocks, width)
        if padding:
            for part in range(0, len(window), _rows_in(_READ_BYTES, width, dtype)):
                piece = window[part : part + _rows_in(_READ_BYTES, width, dtype)]
                sums += converted(piece.reshape(-1), dtype, "F64").reshape(piece.shape).sum(0)
        yield window.tobytes()
    if padding:
        mean = sums / max(1, rows.shape[1])
        row = converted(mean, "F64", dtype).tobytes()
        together = _rows_in(_READ_BYTES, width, dtype)
        for low in range(0, padding, together):
            yield row * min(together, padding - low)


def _rows_in(size: int, width: int, dtype: str) -> int:
    return max(1, size // max(1, width * itemsize(dtype)))


def _window(rows: Rows, sources: Mapping[int, Source], dtype: str, blocks: BlockReader, width: int) -> Stored:
    """Some rows of the result; shape (rows, width)."""
    count = (rows >= 0).sum(0)
    result: Stored = np.zeros((rows.shape[1], width), _stored(dtype))
    begun = np.zeros(rows.shape[1], bool)
    for index, (tensor, where) in sources.items():
        for at, values in _read(rows[index], tensor, blocks, where):
            _put(result, begun, at, converted(values.reshape(-1), tensor.dtype, dtype).reshape(values.shape), dtype)
    many = np.flatnonzero(count > 1)
    if len(many):
        result[many] = _rounded(_wide(result[many], dtype) / count[many, None].astype(_working(dtype)), dtype)
    return result


def _put(result: Stored, begun: NDArray[np.bool_], at: NDArray[np.int64], values: Stored, dtype: str) -> None:
    """Put rows where there are none yet, add them where there are."""
    first = ~begun[at]
    result[at[first]] = values[first]
    rest = at[~first]
    if len(rest):
        with np.errstate(over="ignore", invalid="ignore"):
            result[rest] = _rounded(_wide(result[rest], dtype) + _wide(values[~first], dtype), dtype)
    begun[at] = True


def _wide(values: Stored, dtype: str) -> Stored:
    return converted(values.reshape(-1), dtype, _WORK[dtype]).reshape(values.shape)


def _rounded(values: Stored, dtype: str) -> Stored:
    return converted(values.reshape(-1), _WORK[dtype], dtype).reshape(values.shape)


_WORK = {"BF16": "F32", "F16": "F32", "F32": "F32", "F64": "F64"}
"""What a sum in a dtype is computed in before it is rounded to it."""


def _working(dtype: str) -> np.dtype[Any]:
    return TYPES[_WORK[dtype]]


def _read(rows: Rows, tensor: Tensor, blocks: BlockReader, where: str) -> Iterator[tuple[NDArray[np.int64], Stored]]:
    """The rows of a tensor that are wanted, in the order of the tensor: (places in `rows`, values)."""
    places = np.flatnonzero(rows >= 0)
    places = places[np.argsort(rows[places], kind="stable")]
    wanted = rows[places]
    width = _width(tensor)
    size = width * itemsize(tensor.dtype)
    span = max(1, _READ_BYTES // max(1, size))
    at = 0
    while at < len(wanted):
        first = int(wanted[at])
        end = int(np.searchsorted(wanted, first + span))
        last = int(wanted[end - 1])
        data = _bytes(tensor, first * size, (last + 1) * size, blocks, where)
        table = np.frombuffer(data, _stored(tensor.dtype)).reshape(last + 1 - first, width)
        yield places[at:end], table[wanted[at:end] - first]
        at = end


def _bytes(tensor: Tensor, start: int, stop: int, blocks: BlockReader, where: str) -> bytearray:
    size = tensor.block_size
    first = start // size
    names: Sequence[bytes] = tensor.blocks[first : -(-stop // size)]
    blocks.prefetch(names)
    data = bytearray().join(blocks.read(name, where) for name in names)
    return data[start - first * size : stop - first * size]


def _width(tensor: Tensor) -> int:
    """Elements of a row; a vector has rows of one."""
    return tensor.numel // tensor.shape[0] if tensor.shape[0] else 0


def _stored(dtype: str) -> np.dtype[Any]:
    """numpy's type for a dtype; for one that is only copied, bytes in their number."""
    return TYPES[dtype] if dtype in TYPES else np.dtype(f"V{itemsize(dtype)}")
