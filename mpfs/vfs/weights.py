"""A revision's weights as safetensors' `safe_open` shows a file's, over all its files at once, read straight from blocks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mpfs.formats.messages import show
from mpfs.objects import Tensor
from mpfs.objects.dtypes import BITS
from mpfs.vfs.reader import FileReader, SnapshotReader, as_torch, torch_dtype

if TYPE_CHECKING:
    from types import EllipsisType

    import torch

_Part: TypeAlias = "int | slice | EllipsisType"

_CHUNK_BYTES = 8 << 20
"""Bytes read at a time where whole rows are read to pick parts of them."""


class Weights(AbstractContextManager["Weights"]):
    """The tensors of a revision, each read when it is asked for. Safe to use from many threads; holds nothing open.

    What is returned has memory of its own: it is copied once, out of the store's map, and verified on its way. It
    cannot be the map's memory: a tensor's blocks do not lie next to each other in it, and a block's place is only its
    own during a read transaction, which must not last (a reader that holds one keeps gc's space from being used again).
    Without any copy there are `stream`, which hands out the map's buffers one by one, and for as long as one likes
    a mapped file of a mount, whose pages all its readers share.
    """

    def __init__(self, reader: SnapshotReader) -> None:
        self._reader = reader

    def keys(self) -> list[str]:
        """The tensors' names, sorted. Those in sub-directories have the sub-directory's name before theirs."""
        return sorted(self._reader.snapshot.tensors)

    def offset_keys(self) -> list[str]:
        """The tensors' names in the order in which they lie in the files: the fastest to read them in."""
        return list(self._reader.snapshot.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._reader.snapshot.tensors

    def __len__(self) -> int:
        return len(self._reader.snapshot.tensors)

    def metadata(self) -> dict[str, str]:
        """What the headers of the model's own files say under `__metadata__`; where they disagree, the first one."""
        return self._reader.metadata()

    def get_tensor(self, name: str) -> torch.Tensor:
        """A tensor, on the CPU.

        Raises:
            NotFoundError: there is no such tensor.
            BadInputError: torch has no such dtype.
            IntegrityError: a block is missing or damaged.
        """
        return self._reader.load_tensor(name)

    def get_slice(self, name: str) -> TensorSlice:
        """A tensor to take parts of: `get_slice(name)[10:20, :5]` reads the blocks that hold these, and no others.

        Raises:
            NotFoundError: there is no such tensor.
            BadInputError: torch has no such dtype.
        """
        tensor = self._reader.tensor(name)
        torch_dtype(tensor, name, self._reader.name)
        return TensorSlice(self._reader.open_tensor(name), tensor, name)

    def stream(self, name: str, write: Callable[[memoryview], object]) -> None:
        """Hand a tensor's raw bytes to `write`, block by block, without a copy; each buffer is valid during the call.

        Raises:
            NotFoundError: there is no such tensor.
            IntegrityError: a block is missing or damaged.
        """
        self._reader.open_tensor(name).copy_to(write)

    def load(self) -> dict[str, torch.Tensor]:
        """All tensors, each with memory of its own, tied ones, too."""
        return {name: self.get_tensor(name) for name in self._reader.snapshot.tensors}

    def __exit__(self, *_: object) -> None:
        """Nothing is open; it is here so that code written for `safe_open` runs."""


@dataclass(frozen=True, slots=True)
class _Pick:
    """What is taken of one dimension: `count` indices from `start` on, `step` apart."""

    start: int
    step: int
    count: int
    size: int

    @property
    def whole(self) -> bool:
        return self.step == 1 and self.count == self.size

    @property
    def slice(self) -> slice:
        return slice(self.start, self.start + self.count * self.step, self.step)


class TensorSlice:
    """A tensor that is not read yet. Take parts of it with integers and slices (steps must be positive) and `...`."""

    def __init__(self, reader: FileReader, tensor: Tensor, name: str) -> None:
        self._reader = reader
        self._tensor = tensor
        self._name = name

    def get_shape(self) -> list[int]:
        """The whole tensor's shape."""
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        """The dtype, as safetensors names it."""
        return self._tensor.dtype

    def __getitem__(self, index: _Part | tuple[_Part, ...]) -> torch.Tensor:
        """Read a part.

        Raises:
            IndexError: it is outside the tensor, or has too many dimensions.
            ValueError: a step is not positive.
            TypeError: an index that is neither an integer, a slice nor `...`.
            IntegrityError: a block is missing or damaged.
        """
        picks, kept = self._picks(index if isinstance(index, tuple) else (index,))
        item = BITS[self._tensor.dtype] // 8
        out = np.empty((*(pick.count for pick in picks), item), np.uint8)
        if out.size:
            self._gather(0, picks, out)
        shape = [pick.count for pick, keep in zip(picks, kept, strict=True) if keep]
        return as_torch(out.reshape(-1), self._tensor.dtype, shape)

    def _picks(self, parts: tuple[_Part, ...]) -> tuple[list[_Pick], list[bool]]:
        """What each dimension gives, and whether the result keeps that dimension."""
        shape = self._tensor.shape
        given = sum(part is not Ellipsis for part in parts)
        if given > len(shape) or len(parts) - given > 1:
            raise IndexError(f"{len(parts)} indices into {show(self._name)}, which has {len(shape)} dimensions")
        gap = next((place for place, part in enumerate(parts) if part is Ellipsis), len(parts))
        filled = [*parts[:gap], *[slice(None)] * (len(shape) - given), *parts[gap + 1 :]]
        picks, kept = [], []
        for axis, (part, size) in enumerate(zip(filled, shape, strict=True)):
            if isinstance(part, slice):
                start, stop, step = part.indices(size)
                if step <= 0:
                    raise ValueError(f"{show(self._name)}, dimension {axis}: a step of {step}; it must be positive")
                picks.append(_Pick(start, step, len(range(start, stop, step)), size))
            elif isinstance(part, int | np.integer) and not isinstance(part, bool):
                place = int(part) + size if part < 0 else int(part)
                if not 0 <= place < size:
                    raise IndexError(f"{show(self._name)}, dimension {axis}: index {part} of {size}")
                picks.append(_Pick(place, 1, 1, size))
            else:
                raise TypeError(f"{show(self._name)}: an index is an integer, a slice or ..., not {part!r}")
            kept.append(isinstance(part, slice))
        return picks, kept

    def _gather(self, offset: int, picks: list[_Pick], out: NDArray[np.uint8]) -> None:
        """Fill `out`, whose last axis is an element's bytes, with what is picked of the array that starts at `offset`."""
        inner = picks[1:]
        if all(pick.whole for pick in inner) and (not picks or picks[0].step == 1):
            row = prod(pick.size for pick in inner) * out.shape[-1]
            start = picks[0].start * row if picks else 0
            self._reader.read_into(offset + start, out.reshape(-1).data)
            return
        pick, item = picks[0], out.shape[-1]
        row = prod(part.size for part in inner) * item
        if row * pick.step >= self._tensor.block_size:
            # Between what is wanted of one row and of the next there are blocks that need not be read.
            for number in range(pick.count):
                self._gather(offset + (pick.start + number * pick.step) * row, inner, out[number])
            return
        # Every block in between holds something that is wanted: read on, and pick in memory.
        rows = max(1, _CHUNK_BYTES // (row * pick.step))
        within: Any = tuple(part.slice for part in inner)
        for number in range(0, pick.count, rows):
            some = min(rows, pick.count - number)
            span = (some - 1) * pick.step + 1
            data = np.empty((span, *(part.size for part in inner), item), np.uint8)
            self._reader.read_into(offset + (pick.start + number * pick.step) * row, data.reshape(-1).data)
            out[number : number + some] = data[:: pick.step][(slice(None), *within)]
