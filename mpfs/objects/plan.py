"""A plan: a compiled merge. What is kept, what is computed, from which experts' blocks, at what predicted cost.

A plan is a pure function of the recipe, the input commits, the budget and the policy; its id depends on nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from math import prod
from typing import Literal, TypeAlias, cast

from mpfs.objects.dtypes import itemsize, nbytes
from mpfs.objects.encoding import Json, decode, encode
from mpfs.objects.ids import ObjectId

KIND = "plan"
VERSION = 1

NO_DELTA = "all experts equal the base"
"""The note of a tensor that no expert has changed."""

Scalar: TypeAlias = "bool | int | float"
Action: TypeAlias = Literal["keep", "compute"]


@dataclass(frozen=True, slots=True)
class ModelRef:
    """An input of the merge: what the recipe calls it, and what that was when the plan was made."""

    name: str
    commit: ObjectId
    snapshot: ObjectId


@dataclass(frozen=True, slots=True)
class Budget:
    """What was asked for. `kind` "none" reads everything, "bytes" and "percent" bound the expert bytes read (percent
    of what a merge without a budget reads), "fidelity" asks for the least bytes that reach `value`."""

    kind: Literal["none", "bytes", "percent", "fidelity"] = "none"
    value: float = 0.0


@dataclass(frozen=True, slots=True)
class Bound:
    """A budget of the recipe, and what became of it.

    `path` is where it stands in the recipe. It bounds what is read of one model (an index into the plan's) or of all
    (None), for the tensors whose name contains `filter` (None: all), less those that an earlier rule of `path` took.
    `full` is what a merge without budgets reads there, `limit` the most that may be read (None for a fidelity), and
    `planned` what the plan reads, in bytes of distinct blocks.
    """

    path: str
    model: int | None
    filter: str | None
    budget: Budget
    full: int
    limit: int | None
    planned: int


@dataclass(frozen=True, slots=True)
class Cost:
    """Predicted cost. Bytes are stored bytes of distinct blocks; blocks count the output's blocks.

    `expert_bytes_full` is what a merge without a budget reads of the experts, `expert_bytes_planned` the most that
    this plan reads of them, `base_bytes_read` what it reads of the base, `bytes_written` the most that it writes.
    """

    expert_bytes_full: int
    expert_bytes_planned: int
    base_bytes_read: int
    bytes_written: int
    blocks_kept: int
    blocks_computed: int


@dataclass(frozen=True, slots=True)
class Selection:
    """The columns of a tensor that are read from one expert, as sorted half-open ranges."""

    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, columns: Sequence[int]) -> Selection:
        """Compress sorted, distinct column indices."""
        ranges: list[tuple[int, int]] = []
        for column in columns:
            if ranges and ranges[-1][1] == column:
                ranges[-1] = (ranges[-1][0], column + 1)
            else:
                ranges.append((column, column + 1))
        return cls(tuple(ranges))

    def columns(self) -> Iterator[int]:
        """The column indices, ascending."""
        for start, stop in self.ranges:
            yield from range(start, stop)

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.ranges)


@dataclass(frozen=True, slots=True)
class Cut:
    """Where the largest magnitudes of a whole delta end, told by a histogram of all of it, read or not.

    `digit` is the leading 15 bits of the pattern of the last one's magnitude. `total` elements have these bits, and the
    `wanted` largest of them still belong to the largest.
    """

    digit: int
    wanted: int
    total: int


@dataclass(frozen=True, slots=True)
class PlanTensor:
    """One output tensor.

    A column is a run of `column_elements` elements (the last one shorter); it covers whole blocks of every input and
    of the output. With action "keep" the tensor is `base` as it is. With "compute", the columns listed in `columns`
    are computed and the others are the base's blocks. `experts` are (index into the plan's models, tensor id);
    `selections[i]` are the columns read from experts[i], `shared` and `parameters[i]` the method's parameters.
    `energy` is the estimated squared norm of the full weighted delta, `energy_left_out` that of what is not read
    (units: weights squared). `cosine` is the mean cosine between the experts' weighted deltas, taken in pairs: about 0
    where they have nothing to do with each other, negative where they conflict; None with fewer than two deltas.
    `cuts[i]` are the thresholds of experts[i] in its whole delta, as many as the method has, where a histogram of it was
    there when the plan was made and something of it is not read; empty where not, and `cuts` if no expert has any.
    `note` says why, where the reason is not the budget.
    """

    name: str
    action: Action
    dtype: str
    shape: tuple[int, ...]
    column_elements: int
    base: ObjectId | None
    experts: tuple[tuple[int, ObjectId], ...] = ()
    selections: tuple[Selection, ...] = ()
    columns: Selection = Selection(())
    shared: Mapping[str, Scalar] = field(default_factory=dict)
    parameters: tuple[Mapping[str, Scalar], ...] = ()
    energy: float = 0.0
    energy_left_out: float = 0.0
    cosine: float | None = None
    note: str | None = None
    cuts: tuple[tuple[Cut, ...], ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def inputs(self) -> list[ObjectId]:
        """The tensors that it is made of: the base, if there is one, and the experts."""
        return [*([] if self.base is None else [self.base]), *(identity for _, identity in self.experts)]

    @property
    def column_count(self) -> int:
        """Number of columns."""
        return -(-self.numel // self.column_elements)

    @property
    def bytes_computed(self) -> int:
        """The size of the columns that are computed."""
        if self.action == "keep" or not self.columns.ranges:
            return 0
        last = self.columns.ranges[-1][1] == self.column_count
        missing = self.column_count * self.column_elements - self.numel if last else 0
        return (len(self.columns) * self.column_elements - missing) * itemsize(self.dtype)

    @property
    def bytes_kept(self) -> int:
        """The size of what is the base's, and only referenced."""
        return nbytes(self.dtype, self.shape) - self.bytes_computed

    def as_json(self) -> Json:
        """The JSON form."""
        return {
            "name": self.name,
            "action": self.action,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "column_elements": self.column_elements,
            "base": self.base,
            "experts": [
                {
                    "model": model,
                    "tensor": tensor,
                    "columns": [list(item) for item in selection.ranges],
                    "parameters": dict(parameters),
                    **({"cuts": [[cut.digit, cut.wanted, cut.total] for cut in cuts]} if cuts else {}),
                }
                for (model, tensor), selection, parameters, cuts in zip(
                    self.experts, self.selections, self.parameters, self.cuts or [()] * len(self.experts), strict=True
                )
            ],
            "columns": [list(item) for item in self.columns.ranges],
            "parameters": dict(self.shared),
            "energy": self.energy,
            "energy_left_out": self.energy_left_out,
            "cosine": self.cosine,
            "note": self.note,
        }

    @classmethod
    def from_json(cls, value: Json) -> PlanTensor:
        """Read one back from its JSON form."""
        experts = value["experts"]
        return cls(
            name=value["name"],
            action=cast(Action, value["action"]),
            dtype=value["dtype"],
            shape=tuple(value["shape"]),
            column_elements=value["column_elements"],
            base=value["base"],
            experts=tuple((item["model"], item["tensor"]) for item in experts),
            selections=tuple(_selection(item["columns"]) for item in experts),
            columns=_selection(value["columns"]),
            shared=value["parameters"],
            parameters=tuple(item["parameters"] for item in experts),
            energy=value["energy"],
            energy_left_out=value["energy_left_out"],
            cosine=value["cosine"],
            note=value["note"],
            cuts=_cuts([item.get("cuts", []) for item in experts]),
        )


def _cuts(experts: Sequence[Sequence[Sequence[int]]]) -> tuple[tuple[Cut, ...], ...]:
    found = tuple(tuple(Cut(digit, wanted, total) for digit, wanted, total in cuts) for cuts in experts)
    return found if any(found) else ()


def _selection(ranges: Sequence[Sequence[int]]) -> Selection:
    return Selection(tuple((start, stop) for start, stop in ranges))


@dataclass(frozen=True)
class Plan:
    """A compiled merge.

    `models` are all inputs in the recipe's order; `base` and `template` index into them: the common ancestor, if the
    method has one, and the model whose side files (config, tokenizer) the result takes. `work_dtype` is the dtype
    that the recipe asks arithmetic to run in, None for the inputs' own; `out_dtype` likewise for the result.
    `notes` are things that a person should know about the fit of the models. `renamed` has, by a model's name, those of
    its tensors that are called otherwise in the output: its names to the output's. `bounds` are the recipe's own
    budgets, which hold besides `budget`. `fidelity_predicted` is
    1 - |M_budget - M_full| / |M_full - base|, estimated (1 for a plan without a budget).
    """

    method: str
    compat: str
    recipe: Mapping[str, object]
    models: tuple[ModelRef, ...]
    base: int | None
    template: int
    work_dtype: str | None
    out_dtype: str | None
    seed: int
    block_size: int
    budget: Budget
    policy: str
    tensors: tuple[PlanTensor, ...]
    cost: Cost
    fidelity_predicted: float
    notes: tuple[str, ...] = ()
    renamed: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    bounds: tuple[Bound, ...] = ()

    @property
    def bytes_kept(self) -> int:
        """The size of what is the base's, and only referenced."""
        return sum(tensor.bytes_kept for tensor in self.tensors)

    def as_json(self) -> Json:
        """The JSON form: what the canonical encoding encodes."""
        return {
            "kind": KIND,
            "version": VERSION,
            "method": self.method,
            "compat": self.compat,
            "recipe": dict(self.recipe),
            "models": [asdict(model) for model in self.models],
            "base": self.base,
            "template": self.template,
            "work_dtype": self.work_dtype,
            "out_dtype": self.out_dtype,
            "seed": self.seed,
            "block_size": self.block_size,
            "budget": asdict(self.budget),
            "policy": self.policy,
            "tensors": [tensor.as_json() for tensor in self.tensors],
            "cost": asdict(self.cost),
            "fidelity_predicted": self.fidelity_predicted,
            "notes": list(self.notes),
            # Only where there are any, so that plans without keep the ids that they had before there was the key.
            **({"renamed": {model: dict(names) for model, names in self.renamed.items()}} if self.renamed else {}),
            **({"bounds": [asdict(bound) for bound in self.bounds]} if self.bounds else {}),
        }

    def encode(self) -> bytes:
        """The canonical encoding."""
        return self._encoded

    @cached_property
    def _encoded(self) -> bytes:
        """It is long, and asked for several times: a merge's card, commit and run name the plan."""
        return encode(self.as_json())

    @classmethod
    def decode(cls, data: bytes) -> Plan:
        """Read a plan back, from the store or from a file.

        Raises:
            ValueError: the bytes are not a plan, or one of a newer version.
        """
        value = decode(data, KIND)
        if value.get("version") != VERSION:
            raise ValueError(f"plan version {value.get('version')!r} is not supported (this MPFS reads {VERSION})")
        try:
            return cls(
                method=value["method"],
                compat=value["compat"],
                recipe=value["recipe"],
                models=tuple(ModelRef(**item) for item in value["models"]),
                base=value["base"],
                template=value["template"],
                work_dtype=value["work_dtype"],
                out_dtype=value["out_dtype"],
                seed=value["seed"],
                block_size=value["block_size"],
                budget=Budget(**value["budget"]),
                policy=value["policy"],
                tensors=tuple(PlanTensor.from_json(item) for item in value["tensors"]),
                cost=Cost(**value["cost"]),
                fidelity_predicted=value["fidelity_predicted"],
                notes=tuple(value["notes"]),
                renamed={model: dict(names) for model, names in value.get("renamed", {}).items()},
                bounds=tuple(Bound(**{**item, "budget": Budget(**item["budget"])}) for item in value.get("bounds", [])),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"malformed plan: {error!r}") from error
