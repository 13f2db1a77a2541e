"""Applying a PEFT adapter, or an explicit delta, to a model: a derived model of which only what changes is computed.

The change is computed some rows at a time, in float32 (float64 for float64 weights), added, and rounded once to the
model's dtype; PEFT rounds the change first, so that its 16-bit weights may differ in the last place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mpfs.errors import BadInputError, MismatchError
from mpfs.formats.peft import CONFIG_PATH, Adapter, LowRank, Replacement, read_adapter
from mpfs.merge.architecture import is_head
from mpfs.merge.deferred import torch
from mpfs.merge.derived import Derivation, derive, read_rows, rows_at_a_time, stage_chunks
from mpfs.merge.models import Model
from mpfs.merge.numeric import to_bytes, to_torch, torch_dtype
from mpfs.objects import Input, ObjectId, Tensor
from mpfs.objects.dtypes import MERGEABLE
from mpfs.store import BlockReader, Store, Writer

_VERSION = 1


def with_adapter(store: Store, name: str, model: Model, adapter: Model, author: str) -> ObjectId:
    """The commit of a model with an adapter applied.

    Args:
        store: where it is kept.
        name: what the recipe calls the two together.
        model, adapter: the two; the adapter's `config` is its adapter_config.json.
        author: who the commit is by.

    Raises:
        BadInputError: it is no adapter, or one that does not fit the model.
    """
    if not adapter.config:
        raise BadInputError(f"{name}: {adapter.ref.name} is no adapter: it has no {CONFIG_PATH}")
    shapes = {key: item.tensor.shape for key, item in model.tensors.items()}
    new = [key for key in ("lm_head.weight",) if is_head(key) and model.stand_in(key) is not None]
    try:
        found = read_adapter(
            adapter.config, {key: item.tensor.shape for key, item in adapter.tensors.items()}, shapes, new
        )
    except BadInputError as error:
        raise BadInputError(f"{name}: {error.message}", **error.details) from error
    work = _Work(model, adapter, found, store.blocks, store.info.block_size)
    work.check(name)
    derivation = Derivation(
        name=name,
        template=model.ref.commit,
        inputs=(
            Input("base", model.ref.name, model.ref.commit),
            Input("adapter", adapter.ref.name, adapter.ref.commit),
        ),
        what={"adapter": _VERSION},
        message=f"{model.ref.name} with the adapter {adapter.ref.name}",
    )
    return derive(store, derivation, author, work.run)


class _Work:
    """One adapter at work on one model."""

    def __init__(self, model: Model, adapter: Model, found: Adapter, blocks: BlockReader, block_size: int) -> None:
        self.model = model
        self.adapter = adapter
        self.found = found
        self.blocks = blocks
        self.block_size = block_size

    def check(self, name: str) -> None:
        """Only floating-point weights can be adapted."""
        targets = [item.target for item in self.found.low_rank]
        targets += [item.target for item in self.found.replacements if item.scale is not None]
        sources = [part for item in self.found.low_rank for part in (item.down, item.up)]
        tensors = [self.model.tensors[target] for target in targets if target in self.model.tensors]
        tensors += [self.adapter.tensors[source] for source in sources]
        wrong = sorted({item.tensor.dtype for item in tensors} - MERGEABLE)
        if wrong:
            raise BadInputError(f"{name}: {', '.join(wrong)} weights cannot be adapted; dequantise them first")

    def run(self, writer: Writer) -> Mapping[str, Tensor]:
        """All tensors of the result, staged."""
        result = {name: item.tensor for name, item in self.model.tensors.items()}
        for change in self.found.low_rank:
            old = result[change.target]
            chunks = self._changed(change, old)
            result[change.target] = stage_chunks(chunks, old.dtype, old.shape, self.block_size, writer)
        for replacement in self.found.replacements:
            result[replacement.target] = self._replaced(replacement, result.get(replacement.target), writer)
        return result

    def _changed(self, change: LowRank, old: Tensor) -> Iterator[bytes]:
        wide = "F64" if old.dtype == "F64" else "F32"
        down, up = self._whole(change.down, wide), self._whole(change.up, wide)
        # The rows of the stored weight are those of `left`·`right`.
        left, right = (down.T.contiguous(), up.T.contiguous()) if change.transposed else (up, down)
        step = rows_at_a_time(old)

        def changed(start: int, data: bytearray) -> torch.Tensor:
            before = to_torch(data, old.dtype, wide).reshape(-1, old.shape[1])
            return before + (left[start : start + len(before)] @ right) * change.scale

        chunks = read_rows(old, self.blocks, f"{change.target} of {self.model.ref.name}", step)
        if change.magnitude is None:
            for start, data in chunks:
                yield to_bytes(changed(start, data).reshape(-1), old.dtype)
            return
        wanted = self._whole(change.magnitude, wide).reshape(-1)
        if not change.transposed:
            for start, data in chunks:
                rows = changed(start, data)
                length = torch.linalg.vector_norm(rows.double(), dim=1).to(torch_dtype(wide))
                factor = (wanted[start : start + len(rows)] / length).reshape(-1, 1)
                yield to_bytes((rows * factor).reshape(-1), old.dtype)
            return
        squares = torch.zeros(old.shape[1], dtype=torch.float64)
        for start, data in chunks:
            squares += changed(start, data).double().square().sum(0)
        factor = (wanted / squares.sqrt().to(torch_dtype(wide))).reshape(1, -1)
        for start, data in read_rows(old, self.blocks, f"{change.target} of {self.model.ref.name}", step):
            yield to_bytes((changed(start, data) * factor).reshape(-1), old.dtype)

    def _whole(self, name: str, dtype: str) -> torch.Tensor:
        """A small tensor of the adapter."""
        tensor = self.adapter.tensors[name].tensor
        data = bytearray().join(
            self.blocks.read(block, f"{name} of {self.adapter.ref.name}") for block in tensor.blocks
        )
        return to_torch(data, tensor.dtype, dtype).reshape(tensor.shape)

    def _replaced(self, item: Replacement, old: Tensor | None, writer: Writer) -> Tensor:
        new = self.adapter.tensors[item.source].tensor
        if item.scale is None and (old is None or old.dtype == new.dtype or not {old.dtype, new.dtype} <= MERGEABLE):
            return new
        dtype = new.dtype if old is None else old.dtype
        wide = "F64" if "F64" in (dtype, new.dtype) else "F32"
        where = f"{item.source} of {self.adapter.ref.name}"
        chunks: Iterator[torch.Tensor] = (
            to_torch(data, new.dtype, wide) for _, data in read_rows(new, self.blocks, where, rows_at_a_time(new))
        )
        if item.scale is not None and old is not None:
            # A bias, which is small.
            data = bytearray().join(self.blocks.read(block, item.target) for block in old.blocks)
            chunks = iter([to_torch(data, old.dtype, wide) + torch.cat(list(chunks)) * item.scale])
        return stage_chunks((to_bytes(x, dtype) for x in chunks), dtype, new.shape, self.block_size, writer)


def with_delta(store: Store, name: str, model: Model, delta: Model, author: str) -> ObjectId:
    """The commit of a model plus a checkpoint that holds differences to it, tensor by tensor.

    Raises:
        MismatchError: the delta has tensors that the model has not, or of other shapes.
    """
    problems = []
    for key, item in delta.tensors.items():
        ours = model.tensors.get(key)
        if ours is None:
            problems.append(f"{key} matches no tensor of {model.ref.name}")
        elif ours.tensor.shape != item.tensor.shape:
            problems.append(f"{key} is {list(item.tensor.shape)}, in {model.ref.name} {list(ours.tensor.shape)}")
        elif not {ours.tensor.dtype, item.tensor.dtype} <= MERGEABLE and ours.identity != item.identity:
            problems.append(f"{key} is {item.tensor.dtype}, which cannot be added")
    if problems:
        shown = "; ".join(problems[:5]) + (f" and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise MismatchError(f"{name}: {shown}", problems=problems)
    derivation = Derivation(
        name=name,
        template=model.ref.commit,
        inputs=(Input("base", model.ref.name, model.ref.commit), Input("delta", delta.ref.name, delta.ref.commit)),
        what={"delta": _VERSION},
        message=f"{model.ref.name} plus the delta {delta.ref.name}",
    )

    def make(writer: Writer) -> Mapping[str, Tensor]:
        result = {key: item.tensor for key, item in model.tensors.items()}
        for key, item in delta.tensors.items():
            if item.tensor.dtype in MERGEABLE:
                chunks = _sum(result[key], item.tensor, store.blocks, key)
                old = result[key]
                result[key] = stage_chunks(chunks, old.dtype, old.shape, store.info.block_size, writer)
        return result

    return derive(store, derivation, author, make)


def _sum(old: Tensor, delta: Tensor, blocks: BlockReader, name: str) -> Iterator[bytes]:
    wide = "F64" if "F64" in (old.dtype, delta.dtype) else "F32"
    step = min(rows_at_a_time(old), rows_at_a_time(delta))
    pairs = zip(read_rows(old, blocks, name, step), read_rows(delta, blocks, name, step), strict=True)
    for (_, ours), (_, theirs) in pairs:
        yield to_bytes(to_torch(ours, old.dtype, wide) + to_torch(theirs, delta.dtype, wide), old.dtype)
