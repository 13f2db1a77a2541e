"""What earlier merges have computed: the keys that results are remembered by, looked up for many tensors at a time.

A tensor's results are remembered as a whole, by its inputs' ids (one look-up, and no input has to be read), and column by
column, by its inputs' blocks (so that what changes in one column leaves the others).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from mpfs.merge.delta import DeltaIterator, PlanInputs, ReadLedger, work_dtype
from mpfs.merge.left_out import left_out
from mpfs.merge.operators import LeftOut, Operator, Parameters, Prepared, TensorContext
from mpfs.merge.operators.base import FastPath
from mpfs.objects import BlockId, Plan, PlanTensor, Selection, Tensor
from mpfs.objects.dtypes import itemsize
from mpfs.objects.encoding import Json, decode
from mpfs.store import BlockReader, ObjectReader, StagedBlock, Store, reuse_key

_TENSORS = 1
"""Raise it when results of the same tensors come to be others for a reason that no operator's version tells, such as
how the size of what is left unread is estimated: nothing remembered by tensor is found then."""

_FIRST = 32
"""Tensors that are looked up first; where none of them is known, it is not worth looking on."""

_COLUMNS = 4096
"""Columns that are looked up together from then on."""


@dataclass(slots=True)
class Job:
    """A planned tensor at work: what its columns need. `description` is what their preparation depends on, besides
    blocks, and `digest` stands for what their results do."""

    tensor: PlanTensor
    operator: Operator
    context: TensorContext
    parameters: Parameters
    columns: DeltaIterator
    blocks: list[BlockId]
    remaining: int
    description: Json
    digest: str = ""
    prepared: Prepared = field(default_factory=dict)
    path: FastPath | None = None
    path_known: bool = False

    def span(self, column: int, block_size: int) -> tuple[int, int]:
        """The output blocks of a column, as a half-open range."""
        width = self.tensor.column_elements * itemsize(self.tensor.dtype) // block_size
        return column * width, min((column + 1) * width, len(self.blocks))

    def prepare(self, prepared: Prepared) -> None:
        """Take what preparing it came to."""
        self.prepared = prepared
        self.digest = reuse_key({**self.description, "prepared": dict(prepared)}).hex()


@dataclass(frozen=True, slots=True)
class Result:
    """A column's output: found (`reused`) or computed blocks, and the key to remember computed ones by."""

    key: bytes
    reused: tuple[BlockId, ...] | None
    staged: tuple[StagedBlock, ...] = ()


class Inputs(dict[str, PlanInputs]):
    """The tensor objects of a plan's tensors by their names, each read when it is first asked for: those of which all is
    known are not. Several threads may ask.

    Raises:
        NotFoundError: when it is made, if one of them is not in the store.
    """

    def __init__(self, plan: Plan, objects: ObjectReader) -> None:
        super().__init__()
        objects.require(Tensor, {identity for tensor in plan.tensors for identity in tensor.inputs})
        self._objects = objects
        self._tensors = {tensor.name: tensor for tensor in plan.tensors}

    def __missing__(self, name: str) -> PlanInputs:
        found = self[name] = PlanInputs.load(self._objects, self._tensors[name])
        return found


class Reusing:
    """A plan about to be run in a store, whose results may be known. `inputs` are its tensors' by their names."""

    def __init__(
        self, plan: Plan, store: Store, operator: Operator, inputs: dict[str, PlanInputs], ledger: ReadLedger
    ) -> None:
        self.plan = plan
        self.store = store
        self.operator = operator
        self.inputs = inputs
        self.ledger = ledger
        self.reader: BlockReader = store.blocks
        self.reuse = True
        self.device = "cpu"
        self._left_out: dict[str, tuple[tuple[LeftOut, ...], ...]] = {}

    def begin(self, tensor: PlanTensor) -> Job:
        """A tensor that is not prepared yet."""
        inputs = self.inputs[tensor.name]
        work = work_dtype(self.plan, inputs)
        context = TensorContext(
            name=tensor.name,
            numel=tensor.numel,
            work=work,
            seed=self.plan.seed,
            expert_keys=expert_keys(self.plan, tensor),
            left_out=self._unread(tensor),
            shape=tensor.shape,
            cuts=tensor.cuts,
        )
        parameters = Parameters(tensor.shared, tensor.parameters)
        columns = DeltaIterator(self.plan, tensor, inputs, self.reader, self.ledger, work, self.device)
        nbytes = tensor.numel * itemsize(tensor.dtype)
        blocks = [b""] * -(-nbytes // self.plan.block_size)
        if inputs.base is not None and inputs.base.tensor.dtype == tensor.dtype:
            blocks = list(inputs.base.tensor.blocks)
        count = len(tensor.columns)
        description = self._description(tensor, inputs, context)
        return Job(tensor, self.operator, context, parameters, columns, blocks, count, description)

    def known_whole(self, tensors: Sequence[PlanTensor]) -> dict[str, tuple[BlockId, ...]]:
        """By their names those of these tensors of which earlier merges have computed all: the blocks of their columns."""
        if not self.reuse:
            return {}
        found = self.store.reuse.blocks_of([self.tensor_key(tensor) for tensor in tensors])
        return {
            tensor.name: blocks
            for tensor, blocks in zip(tensors, found, strict=True)
            if blocks is not None and len(blocks) == sum(stop - start for start, stop in output_runs(tensor, self.plan))
        }

    def tensor_key(self, tensor: PlanTensor) -> bytes:
        """The key of all that is computed of a tensor. What it is made of is named by ids, from which the rest follows:
        dtypes, blocks, and what preparing comes to."""
        value: Json = {
            "tensor": _TENSORS,
            "operator": self.operator.name,
            "version": self.operator.version,
            "shared": dict(tensor.shared),
            "experts": [dict(values) for values in tensor.parameters],
            "inputs": [tensor.base, *(identity for _, identity in tensor.experts)],
            "columns": [_ranges(tensor.columns), *map(_ranges, tensor.selections)],
            "cuts": _cuts(tensor),
            "work": self.plan.work_dtype,
            "out": [tensor.dtype, *tensor.shape],
            "column_elements": tensor.column_elements,
            "block_size": self.plan.block_size,
            **self._more(tensor),
        }
        return reuse_key(value)

    def _more(self, tensor: PlanTensor) -> Json:
        """What else a result depends on, if it does."""
        value: Json = {}
        if self.device != "cpu":
            value["device"] = self.device.partition(":")[0]
        if self.operator.draws:
            value["random"] = [self.plan.seed, tensor.name, list(expert_keys(self.plan, tensor))]
        return value

    def _unread(self, tensor: PlanTensor) -> tuple[tuple[LeftOut, ...], ...]:
        """What is left unread of each expert, for those that prepare: nothing else asks for it."""
        if type(self.operator).prepare is Operator.prepare:
            return tuple(() for _ in tensor.experts)
        if tensor.name not in self._left_out:
            self._left_out[tensor.name] = left_out(self.store, tensor, self.inputs[tensor.name])
        return self._left_out[tensor.name]

    def preparation(self, job: Job) -> bytes | None:
        """The key of what a tensor's preparation comes to; None where there is nothing to prepare."""
        if type(job.operator).prepare is Operator.prepare or not job.tensor.experts:
            return None
        description = {
            **job.description,
            "prepare": [[column, *self._input_blocks(job, column)] for column in job.tensor.columns.columns()],
            "left_out": [[[run.numel, run.rms] for run in runs] for runs in job.context.left_out],
        }
        if job.tensor.cuts:
            description["cuts"] = _cuts(job.tensor)
        return reuse_key(description)

    def prepared(self, keys: Sequence[bytes]) -> dict[bytes, Prepared]:
        """Preparations that are known from earlier merges, by their keys."""
        found = self.store.reuse.values(keys) if self.reuse else {}
        return {key: dict(decode(value, "prepared")["values"]) for key, value in found.items()}

    def _description(self, tensor: PlanTensor, inputs: PlanInputs, context: TensorContext) -> Json:
        """What a result depends on, besides its blocks."""
        value: Json = {
            "operator": self.operator.name,
            "version": self.operator.version,
            "shared": dict(tensor.shared),
            "experts": [dict(values) for values in tensor.parameters],
            # Blocks are named by their bytes alone: which numbers these are is up to the dtype.
            "dtypes": [None if inputs.base is None else inputs.base.tensor.dtype]
            + [expert.tensor.dtype for expert in inputs.experts],
            "work": context.work,
            "out": tensor.dtype,
            "numel": tensor.numel,
            "column_elements": tensor.column_elements,
            "block_size": self.plan.block_size,
            **self._more(tensor),
        }
        if self.operator.by_rows:
            value["shape"] = list(tensor.shape)
        return value

    def _input_blocks(self, job: Job, column: int) -> tuple[str | None, list[str | None]]:
        return _hex(job.columns.base_blocks(column)), [_hex(run) for run in job.columns.expert_blocks(column)]

    def look_up(self, job: Job, columns: Iterable[int]) -> list[Result]:
        """Columns' keys, and their results if they are known from an earlier merge."""
        [found] = self._look_up([(job, columns)])
        return found

    def _look_up(self, asked: Sequence[tuple[Job, Iterable[int]]]) -> list[list[Result]]:
        keys: list[list[bytes]] = []
        for job, columns in asked:
            keys.append([])
            for column in columns:
                base, inputs = self._input_blocks(job, column)
                start = column * job.tensor.column_elements
                keys[-1].append(reuse_key({"tensor": job.digest, "start": start, "base": base, "inputs": inputs}))
        flat = list(chain.from_iterable(keys))
        found = iter(self.store.reuse.blocks_of(flat) if self.reuse else [None] * len(flat))
        return [[Result(key, next(found)) for key in own] for own in keys]

    def known(self, tensors: Sequence[PlanTensor]) -> Iterator[tuple[Job, list[Result]]]:
        """The first of these tensors whose preparation is known, and all their columns' results as far as they are.

        Not all that are known: where none of many tensors is, looking for the rest would take longer than it is worth.
        """
        rest = list(tensors)
        while rest and self.reuse:
            some, columns = 0, 0
            while some < len(rest) and (some < _FIRST or columns < _COLUMNS):
                columns += len(rest[some].columns)
                some += 1
            batch, rest = rest[:some], rest[some:]
            jobs = [self.begin(tensor) for tensor in batch]
            keys = [self.preparation(job) for job in jobs]
            prepared = self.prepared([key for key in keys if key is not None])
            ready: list[Job] = []
            for job, key in zip(jobs, keys, strict=True):
                if key is None or key in prepared:
                    job.prepare({} if key is None else prepared[key])
                    ready.append(job)
            results = self._look_up([(job, job.tensor.columns.columns()) for job in ready])
            yield from zip(ready, results, strict=True)
            if all(result.reused is None for own in results for result in own):
                return


def expert_keys(plan: Plan, tensor: PlanTensor) -> tuple[str, ...]:
    """What random draws tell the experts of a tensor apart by: the recipe's names.

    A snapshot's id would not do: it depends on the block size, which must not change a merge.
    """
    return tuple(plan.models[model].name for model, _ in tensor.experts)


def output_runs(tensor: PlanTensor, plan: Plan) -> list[tuple[int, int]]:
    """The output blocks that are computed of a tensor, as half-open ranges in order."""
    size = itemsize(tensor.dtype)
    width, count = tensor.column_elements * size // plan.block_size, -(-tensor.numel * size // plan.block_size)
    return [(start * width, min(stop * width, count)) for start, stop in tensor.columns.ranges]


def _ranges(selection: Selection) -> list[list[int]]:
    return [list(pair) for pair in selection.ranges]


def _cuts(tensor: PlanTensor) -> list[list[list[int]]]:
    return [[[cut.digit, cut.wanted, cut.total] for cut in cuts] for cuts in tensor.cuts]


def _hex(blocks: tuple[BlockId, ...] | None) -> str | None:
    return None if blocks is None else b"".join(blocks).hex()
