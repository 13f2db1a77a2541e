"""Models that are made from others before a merge: cut to a common vocabulary, or with an adapter or a delta applied.

Each is a commit of its own under `derived/`, named by a digest of what it was made from, so that it is made once. What
does not change is only referenced; see docs/decisions/0010-derived-models.md.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mpfs.errors import NotFoundError
from mpfs.merge.output import assemble
from mpfs.objects import BlockId, Commit, Input, ObjectId, Snapshot, Tensor, object_id
from mpfs.objects.dtypes import itemsize
from mpfs.objects.encoding import Json, encode
from mpfs.stats.staging import stage_block
from mpfs.store import BlockReader, RefMove, Store, Writer

PREFIX = "derived/"
"""What the branches of derived models begin with."""

CHUNK_BYTES = 4 << 20
"""About how much of a tensor is worked on at a time."""


@dataclass(frozen=True, slots=True)
class Derivation:
    """What a model is made from. `what` tells ways of making one apart, with all that the result depends on."""

    name: str
    template: ObjectId
    inputs: tuple[Input, ...]
    what: Json
    message: str

    @property
    def ref(self) -> str:
        """The branch of the result."""
        made_from = {"inputs": [item.commit for item in self.inputs], "template": self.template, "what": self.what}
        digest = hashlib.sha256(encode({"kind": "derivation", **made_from})).hexdigest()[:16]
        clean = re.sub(r"[^A-Za-z0-9]+", "-", self.name).strip("-") or "model"
        return f"{PREFIX}{clean[-60:].strip('-')}-{digest}"


def derive(
    store: Store,
    derivation: Derivation,
    author: str,
    make: Callable[[Writer], Mapping[str, Tensor]],
    files: Mapping[str, bytes | None] | None = None,
) -> ObjectId:
    """The commit of a derived model: as it was made before, or made now.

    It is as old as the newest of what it was made from, so that its id does not depend on when it is made.

    Args:
        store: where it is kept.
        derivation: what it is made from.
        author: who the commit is by.
        make: stages what is new, and gives all tensors of the result by name.
        files: contents of side files that are not the template's; None: there is none.
    """
    try:
        return store.refs.get(derivation.ref).commit
    except NotFoundError:
        pass
    template = store.objects.get(Snapshot, store.objects.get(Commit, derivation.template).snapshot)
    with store.writer() as writer:
        assembled = assemble(
            template,
            make(writer),
            None,
            replaced=files,
            objects=store.objects,
            blocks=store.blocks,
            writer=writer,
            block_size=store.info.block_size,
        )
        commit = Commit(
            snapshot=object_id(assembled.snapshot.encode()),
            parents=(),
            inputs=derivation.inputs,
            plan=None,
            message=derivation.message,
            author=author,
            time=max(store.objects.get(Commit, item.commit).time for item in derivation.inputs),
        )
        return writer.publish(
            tensors=assembled.tensors,
            snapshot=assembled.snapshot,
            commit=commit,
            move=RefMove(derivation.ref, None, "branch", "derive"),
        )


def cut_rows(tensor: Tensor, rows: int, blocks: BlockReader, writer: Writer) -> Tensor:
    """The first rows of a tensor: its own blocks, and a new one if the cut is within a block."""
    shape = (rows, *tensor.shape[1:])
    size = rows * (tensor.nbytes // tensor.shape[0])
    whole, rest = divmod(size, tensor.block_size)
    kept = tensor.blocks[:whole]
    if rest:
        data = bytes(blocks.read(tensor.blocks[whole], "a tensor that is cut"))[:rest]
        staged = stage_block(data, tensor.dtype, tensor.block_start(whole))
        writer.put_block(staged)
        kept = (*kept, staged.block)
    return Tensor(tensor.dtype, shape, tensor.block_size, kept)


def read_rows(tensor: Tensor, blocks: BlockReader, where: str, rows: int) -> Iterator[tuple[int, bytearray]]:
    """A tensor's bytes, `rows` rows at a time: (index of the first row, their bytes). A vector has rows of one element."""
    count = tensor.shape[0] if tensor.shape else 1
    width = tensor.nbytes // count if count else 0
    held = bytearray()
    source = iter(tensor.blocks)
    for start in range(0, count, rows):
        wanted = min(rows, count - start) * width
        while len(held) < wanted:
            held += blocks.read(next(source), where)
        yield start, held[:wanted]
        del held[:wanted]


def rows_at_a_time(tensor: Tensor) -> int:
    """How many rows make a chunk."""
    count = tensor.shape[0] if tensor.shape else 1
    return max(1, CHUNK_BYTES * count // max(1, tensor.nbytes))


def stage_chunks(
    chunks: Iterable[bytes],
    dtype: str,
    shape: tuple[int, ...],
    block_size: int,
    writer: Writer,
    *,
    kept: Sequence[BlockId] = (),
) -> Tensor:
    """Stage a tensor whose bytes come in chunks of any length, after those of blocks that are `kept`."""
    held = bytearray()
    names = list(kept)
    per_block = block_size // itemsize(dtype)

    def put(data: bytes) -> None:
        staged = stage_block(data, dtype, len(names) * per_block)
        writer.put_block(staged)
        names.append(staged.block)

    for chunk in chunks:
        held += chunk
        while len(held) >= block_size:
            put(bytes(held[:block_size]))
            del held[:block_size]
    if held:
        put(bytes(held))
    return Tensor(dtype, shape, block_size, tuple(names))
