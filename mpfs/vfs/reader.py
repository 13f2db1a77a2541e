"""Reading a snapshot's files and tensors out of the store, verified, with read-ahead and without holding it up.

A read transaction lasts for one batch of blocks at most. The store asks the disk for exactly the blocks that are
read, so whoever reads in sequence says here what comes next.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import TYPE_CHECKING, NoReturn

import numpy as np
from numpy.typing import NDArray

from mpfs.errors import BadInputError, IntegrityError, NotFoundError
from mpfs.formats.messages import show
from mpfs.formats.safetensors import parse_header
from mpfs.objects import BlockId, File, ObjectId, Snapshot, Tensor, block_id, object_id
from mpfs.store import Store
from mpfs.store.blocks import RAW, BlockInfo
from mpfs.store.environment import Transaction
from mpfs.store.objects import DATABASE_OF, decode_object
from mpfs.vfs.layout import FileLayout, Segment, batches

if TYPE_CHECKING:
    import torch
    from _typeshed import WriteableBuffer

CHUNK_BYTES = 4 << 20
"""What a sequential read yields at a time. With the blocks at both ends it is one batch, and so copied once."""

BATCH_BYTES = 8 << 20
"""Bytes of blocks in one read transaction (a single larger block excepted): few enough to be in the CPU's cache still
when they are copied after they were verified."""

BATCH_BLOCKS = 1024
"""Blocks in one read transaction."""

AHEAD_BYTES = 16 << 20
"""How far ahead of a sequential read the disk is asked for blocks."""

_BATCH_OBJECTS = 256

_TORCH_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "U16": "uint16",
    "I16": "int16",
    "F16": "float16",
    "BF16": "bfloat16",
    "U32": "uint32",
    "I32": "int32",
    "F32": "float32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "C64": "complex64",
}
"""safetensors' dtypes by torch's names (safetensors 0.8, `safetensors.torch`). F4 and F6 have none there: torch packs
two F4 elements into one of its own, and has no F6."""


class SnapshotReader:
    """The files and tensors of a snapshot. Safe to use from many threads; tensors are looked up once.

    Args:
        store: where the blocks are.
        snapshot: what to read.
        name: what the user calls it (a ref, a commit id), for messages; by default the snapshot's id.
    """

    def __init__(self, store: Store, snapshot: Snapshot, name: str | None = None) -> None:
        self.store = store
        self.snapshot = snapshot
        self._name = name
        self._files = {file.path: file for file in snapshot.files}
        self._tensors: dict[ObjectId, Tensor] = {}
        self._layouts: dict[str, FileLayout] = {}

    @cached_property
    def name(self) -> str:
        """What the snapshot is called in messages."""
        return self._name if self._name is not None else object_id(self.snapshot.encode())

    def files(self) -> tuple[File, ...]:
        """Every file, sorted by path."""
        return self.snapshot.files

    def file(self, path: str) -> File:
        """The file at `path`.

        Raises:
            NotFoundError: there is none.
        """
        file = self._files.get(path)
        if file is None:
            raise NotFoundError(f"{self.name}: no file {show(path)}", snapshot=self.name, path=path)
        return file

    def __contains__(self, path: object) -> bool:
        return path in self._files

    def size(self, path: str) -> int:
        """Bytes of a file.

        Raises:
            NotFoundError: there is none.
        """
        return self.file(path).size

    def layout(self, path: str) -> FileLayout:
        """Where the bytes of a file lie.

        Raises:
            NotFoundError: there is no such file.
            IntegrityError: an object that the snapshot refers to is missing or damaged.
        """
        layout = self._layouts.get(path)
        if layout is None:
            file = self.file(path)
            ids = list(Snapshot((file,)).references())
            self._load_objects(ids)
            try:
                layout = FileLayout.of_file(file, {identity: self.tensor_object(identity) for identity in ids})
            except ValueError as error:
                raise IntegrityError(f"snapshot {self.name}: {error}", snapshot=self.name, path=path) from error
            self._layouts[path] = layout
        return layout

    def open(self, path: str) -> FileReader:
        """Open a file. There is nothing to close.

        Raises:
            NotFoundError: there is no such file.
            IntegrityError: an object that the snapshot refers to is missing or damaged.
        """
        return FileReader(self.store, self.layout(path), self.name)

    def tensor_object(self, identity: ObjectId) -> Tensor:
        """A tensor object that the snapshot refers to.

        Raises:
            IntegrityError: it is missing or damaged.
        """
        tensor = self._tensors.get(identity)
        if tensor is None:
            try:
                tensor = self.store.objects.get(Tensor, identity)
            except NotFoundError as error:
                raise IntegrityError(
                    f"snapshot {self.name}: tensor object {identity} is missing from the store",
                    id=identity,
                    snapshot=self.name,
                ) from error
            self._tensors[identity] = tensor
        return tensor

    def _load_objects(self, identities: Sequence[ObjectId]) -> None:
        """Get tensor objects that will be asked for, many in one transaction. What is missing is found out later."""
        wanted = [identity for identity in dict.fromkeys(identities) if identity not in self._tensors]
        for start in range(0, len(wanted), _BATCH_OBJECTS):
            batch = wanted[start : start + _BATCH_OBJECTS]
            with self.store.environment.read() as txn:
                found = [(identity, txn.get(DATABASE_OF[Tensor], bytes.fromhex(identity))) for identity in batch]
                data = [(identity, bytes(value)) for identity, value in found if value is not None]
            for identity, encoded in data:
                self._tensors[identity] = decode_object(Tensor, identity, encoded)

    def tensor(self, name: str) -> Tensor:
        """The tensor of this name: dtype, shape and blocks.

        Raises:
            NotFoundError: there is none.
            IntegrityError: its object is missing or damaged.
        """
        identity = self.snapshot.tensors.get(name)
        if identity is None:
            raise NotFoundError(f"{self.name}: no tensor {show(name)}", snapshot=self.name, tensor=name)
        return self.tensor_object(identity)

    def open_tensor(self, name: str) -> FileReader:
        """The bytes of one tensor as a file."""
        layout = FileLayout.of_parts(name, [(name, self.tensor(name))])
        return FileReader(self.store, layout, self.name)

    def tensor_bytes(self, name: str) -> bytes:
        """A tensor's raw little-endian bytes in C order.

        Raises:
            NotFoundError: there is no such tensor.
            IntegrityError: a block is missing or damaged.
        """
        reader = self.open_tensor(name)
        return reader.read_at(0, reader.size)

    def read_tensor(self, name: str) -> NDArray[np.uint8]:
        """A tensor's raw bytes, as a fresh, writable vector; copied once, out of the map."""
        reader = self.open_tensor(name)
        data = np.empty(reader.size, np.uint8)
        reader.read_into(0, data.data)
        return data

    def load_tensor(self, name: str) -> torch.Tensor:
        """A tensor as torch has it, on the CPU, with memory of its own.

        Raises:
            NotFoundError: there is no such tensor.
            BadInputError: torch has no such dtype.
            IntegrityError: a block is missing or damaged.
        """
        tensor = self.tensor(name)
        torch_dtype(tensor, name, self.name)
        return as_torch(self.read_tensor(name), tensor.dtype, tensor.shape)

    def metadata(self) -> dict[str, str]:
        """What the headers of the model's own safetensors files (those without a prefix) say under `__metadata__`,
        together; where they disagree, the first one.

        Raises:
            IntegrityError: a header is missing or damaged.
        """
        metadata: dict[str, str] = {}
        for file in self.snapshot.safetensors_files():
            if not file.prefix:
                raw = self.open(file.path).read_at(0, self.tensor_object(file.header).nbytes)
                found = parse_header(raw, file.size, source=f"{self.name}:{file.path}").metadata or {}
                metadata = {**found, **metadata}
        return metadata


def torch_dtype(tensor: Tensor, name: str, revision: str) -> torch.dtype:
    """What torch calls a tensor's dtype.

    Raises:
        BadInputError: torch has no such dtype.
    """
    import torch

    dtype = getattr(torch, _TORCH_DTYPES.get(tensor.dtype, ""), None)
    if not isinstance(dtype, torch.dtype):
        raise BadInputError(
            f"{revision}: tensor {show(name)} is {tensor.dtype}, which torch cannot hold; its bytes can be read",
            tensor=name,
            dtype=tensor.dtype,
        )
    return dtype


def as_torch(data: NDArray[np.uint8], dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """A vector of raw bytes as a tensor that shares its memory."""
    import torch

    kind: torch.dtype = getattr(torch, _TORCH_DTYPES[dtype])
    if not data.size:
        return torch.empty(tuple(shape), dtype=kind)
    return torch.from_numpy(data).view(kind).reshape(tuple(shape))


def load_tensor(store: Store, snapshot: Snapshot, name: str) -> torch.Tensor:
    """One tensor of a snapshot; see `SnapshotReader.load_tensor`, which is cheaper for many."""
    return SnapshotReader(store, snapshot).load_tensor(name)


class FileReader:
    """Random and sequential access to one file. Holds nothing open; safe to use from many threads.

    A block is verified when this reader first meets it, and not again.
    """

    def __init__(self, store: Store, layout: FileLayout, snapshot: str) -> None:
        self.layout = layout
        self._store = store
        self._snapshot = snapshot
        self._verified: set[BlockId] = set()
        self._lock = threading.Lock()
        self._next = -1
        self._asked = (0, 0)

    @property
    def path(self) -> str:
        """The file's path in the snapshot."""
        return self.layout.path

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.layout.size

    def read_at(self, offset: int, size: int) -> bytes:
        """Bytes [offset, offset + size) of the file, fewer at its end.

        Raises:
            ValueError: an argument is negative.
            IntegrityError: a block is missing or damaged; the message names it, its tensor and the snapshot.
        """
        pieces: list[bytes] = []
        self.visit(offset, size, lambda batch: pieces.append(b"".join(batch)))
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def read_into(self, offset: int, buffer: WriteableBuffer) -> int:
        """Fill a writable, contiguous buffer from `offset` on; how many bytes there were.

        Raises:
            As `read_at`.
        """
        view = memoryview(buffer)
        if offset < 0:
            raise ValueError(f"cannot read at offset {offset}")
        stop = min(offset + view.nbytes, self.size)
        if offset >= stop:
            return 0
        target = view.cast("B")
        horizon = self._horizon(offset, stop)
        for batch in batches(self.layout.segments_in(offset, stop), BATCH_BYTES, BATCH_BLOCKS):
            self._prefetch(batch, horizon)
            if not self._copy(batch, target, offset):
                with ExitStack() as stack:
                    for segment, payload in zip(batch, self._payloads(stack, batch), strict=True):
                        _place(segment, payload, target, offset)
        return stop - offset

    def _copy(self, batch: Sequence[Segment], target: memoryview, offset: int) -> bool:
        """Copy a batch to where it belongs in `target`, which is the file from `offset` on; False if that did not go
        well. Block by block: one that was just verified is still in the CPU's cache when it is copied.
        """
        with self._store.environment.read() as txn:
            for segment in batch:
                payload = txn.get("blocks", segment.block)
                if payload is None or len(payload) != segment.size:
                    return False
                if segment.block not in self._verified:
                    if block_id(payload) != segment.block:
                        return False
                    self._verified.add(segment.block)
                _place(segment, payload, target, offset)
        return True

    def iter_chunks(self, start: int = 0, stop: int | None = None, *, batch: int = CHUNK_BYTES) -> Iterator[bytes]:
        """The file, or bytes [start, stop) of it, in chunks of `batch` bytes, the last one shorter, reading ahead.

        Raises:
            As `read_at`.
        """
        if batch <= 0:
            raise ValueError(f"chunks of {batch} bytes")
        end = self.size if stop is None else min(stop, self.size)
        self._next = start
        for offset in range(start, end, batch):
            yield self.read_at(offset, min(batch, end - offset))

    def copy_to(self, write: Callable[[memoryview], object], start: int = 0, stop: int | None = None) -> None:
        """Hand bytes [start, stop) of the file to `write`, in order, straight from the map's buffers.

        A buffer is valid during the call only. A read transaction is open meanwhile, for up to BATCH_BYTES: `write`
        must not wait for long, nor read the store.

        Raises:
            As `read_at`, and whatever `write` raises.
        """

        def visit(batch: list[memoryview]) -> None:
            for piece in batch:
                write(piece)

        self.visit(start, (self.size if stop is None else stop) - start, visit)

    def visit(self, offset: int, size: int, visit: Callable[[list[memoryview]], object]) -> None:
        """Call `visit` with the pieces of [offset, offset + size), batch by batch, straight from the map's buffers.

        A batch is BATCH_BYTES at most, or a single block. As with `copy_to`, its buffers are valid during the call.

        Raises:
            As `read_at`, and whatever `visit` raises.
        """
        if offset < 0 or size < 0:
            raise ValueError(f"cannot read {size} bytes at offset {offset}")
        stop = min(offset + size, self.size)
        if offset >= stop:
            return
        horizon = self._horizon(offset, stop)
        for batch in batches(self.layout.segments_in(offset, stop), BATCH_BYTES, BATCH_BLOCKS):
            self._prefetch(batch, horizon)
            with ExitStack() as stack:
                pieces = self._payloads(stack, batch)
                # Only the first and the last can be in part outside the range; the last first, if they are the same.
                pieces[-1] = pieces[-1][: min(batch[-1].size, stop - batch[-1].offset)]
                pieces[0] = pieces[0][max(0, offset - batch[0].offset) :]
                visit(pieces)

    def _horizon(self, offset: int, stop: int) -> int:
        """How far a read of [offset, stop) may look ahead: to the end of the file if it goes on where one stopped."""
        with self._lock:
            horizon = self.size if self._next == offset else stop
            self._next = stop
        return horizon

    def _prefetch(self, batch: Sequence[Segment], horizon: int) -> None:
        """Ask the disk for a batch and what follows it, up to `horizon`, as far as that was not just done."""
        start, needed = batch[0].offset, batch[-1].offset + batch[-1].size
        with self._lock:
            if not self._asked[0] <= start <= self._asked[1]:
                self._asked = (start, start)
            begin, end = self._asked[1], max(needed, min(horizon, needed + AHEAD_BYTES))
            # In a run of small reads most ask for nothing, and one now and then for a lot.
            if begin >= needed and end - begin < AHEAD_BYTES // 2:
                return
            wanted = list(self.layout.segments_in(begin, end))
            if wanted:
                self._asked = (self._asked[0], wanted[-1].offset + wanted[-1].size)
        blocks = [segment.block for segment in wanted if segment.block not in self._verified]
        if blocks:
            self._store.blocks.prefetch(blocks)

    def _payloads(self, stack: ExitStack, batch: Sequence[Segment]) -> list[memoryview]:
        """The verified payloads of a batch, valid until `stack` is left."""
        blocks = [segment.block for segment in batch]
        if self._verified.issuperset(blocks):
            payloads = _known(stack.enter_context(self._store.environment.read()), blocks)
            if payloads is not None:
                return payloads
            stack.close()
        try:
            payloads = stack.enter_context(self._store.blocks.view(blocks, f"snapshot {self._snapshot}"))
        except IntegrityError as error:
            self._blame(error, batch)
        for segment, payload in zip(batch, payloads, strict=True):
            if len(payload) != segment.size:
                problem = f"block {segment.block.hex()} has {len(payload):,} bytes, not {segment.size:,}"
                self._blame(IntegrityError(problem, block=segment.block.hex()), batch)
        self._verified.update(blocks)
        return payloads

    def _blame(self, error: IntegrityError, batch: Sequence[Segment]) -> NoReturn:
        """Raise `error` again with what the block belongs to."""
        block = error.details.get("block")
        segment = next((segment for segment in batch if segment.block.hex() == block), None)
        if segment is None:
            raise error
        where = f"snapshot {self._snapshot}"
        raise IntegrityError(
            f"{where}, {self.layout.where(segment)}: {error.message.removeprefix(f'{where}: ')}",
            block=block,
            snapshot=self._snapshot,
            path=self.path,
            tensor=segment.tensor,
        ) from error


def _place(segment: Segment, payload: memoryview, target: memoryview, offset: int) -> None:
    """Copy the part of a block that lies in `target`, which is the file from `offset` on."""
    begin = max(0, offset - segment.offset)
    end = min(segment.size, offset + len(target) - segment.offset)
    place = segment.offset + begin - offset
    target[place : place + end - begin] = payload[begin:end]


def _known(txn: Transaction, blocks: Sequence[BlockId]) -> list[memoryview] | None:
    """The payloads of blocks that were verified before, as they lie in the map; None if one is no longer so."""
    payloads = []
    for block in blocks:
        record, payload = txn.get("block_info", block), txn.get("blocks", block)
        if record is None or payload is None or BlockInfo.unpack(record).codec != RAW:
            return None
        payloads.append(payload)
    return payloads
