"""What planning came to before: found by all that it is a function of; see docs/decisions/0021.

Only a hint: a plan is believed while it is in the store with all that it names, and is of the very models that are asked
for. What is learnt is handed to whoever runs the plan, to be written with its results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from mpfs.errors import IntegrityError, NotFoundError
from mpfs.merge.operators import Operator, get_operator
from mpfs.merge.recipe import Recipe
from mpfs.objects import Budget, Commit, ModelRef, ObjectId, Plan, Snapshot, Tensor, object_id
from mpfs.objects.encoding import Json, decode, encode
from mpfs.store import Store, reuse_key
from mpfs.store.pairs import PairStates, begin_pair_states, pair_states
from mpfs.store.reuse import PLANNED

if TYPE_CHECKING:
    from mpfs.merge.inputs import OnMismatch, TensorInputs
    from mpfs.merge.planner import Policy

PLANNER = 1
"""Raise it when the same inputs come to be planned otherwise: what was remembered before is not found then
(`tests/merge/test_remembered.py` notices)."""


@dataclass(frozen=True, slots=True)
class Worth:
    """What merging all of a tensor is worth; as in `mpfs.merge.planner.Choice`."""

    energy: float
    cosine: float | None


class Memory:
    """What is remembered of planning in a store.

    Args:
        store: where; None: nowhere.
        use: look things up; otherwise nothing is known.
        learn: for somebody who will write what is learnt: a store that does not tell the states of its pair table yet is
            made to.
    """

    def __init__(self, store: Store | None, *, use: bool = True, learn: bool = False) -> None:
        self._store = store
        self._use = use
        self._learn = learn
        self._states: PairStates | None = None
        self._learnt: dict[bytes, bytes] = {}

    def begin(self) -> None:
        """Before planning starts, and anything is looked up in the pair table."""
        if self._store is not None:
            self._states = begin_pair_states(self._store) if self._learn else pair_states(self._store)

    def take(self) -> Mapping[bytes, bytes]:
        """What was learnt since it was last asked for: entries of the reuse table."""
        taken, self._learnt = self._learnt, {}
        return taken

    def plan_key(
        self,
        recipe: Recipe,
        commits: Mapping[str, ObjectId],
        budget: Budget,
        policy: Policy,
        seed: int,
        on_mismatch: OnMismatch,
    ) -> bytes | None:
        """What the plan of a recipe of these models' commits is remembered under; None if it is not.

        It is not where models are derived from others on the way: that goes by branches, which anyone may move.
        """
        derives = recipe.tokenizer is not None or recipe.chat_template is not None or on_mismatch == "crop"
        if self._store is None or self._states is None or derives:
            return None
        value: Json = {
            "plan": PLANNER,
            "recipe": recipe.as_json(),
            "operator": get_operator(recipe.method).version,
            "commits": dict(commits),
            "budget": asdict(budget),
            "policy": policy,
            "seed": seed,
            "on_mismatch": on_mismatch,
            "block_size": self._store.info.block_size,
            "pairs": self._pairs(is_whole(recipe, budget)),
        }
        try:
            return reuse_key(value)
        except ValueError:  # a budget that is no number, which planning complains of
            return None

    def plan(self, key: bytes | None, recipe: Recipe, commits: Mapping[str, ObjectId]) -> Plan | None:
        """The plan that was remembered under a key, if it can still be run."""
        if key is None or self._store is None:
            return None
        objects = self._store.objects
        try:
            plan = objects.get(Plan, str(self._values([key])[key]["plan"]))
            snapshots = {name: objects.get(Commit, commit).snapshot for name, commit in commits.items()}
            models = tuple(ModelRef(name, commits[name], snapshots[name]) for name in recipe.model_names)
            if plan.models != models or encode(dict(plan.recipe)) != encode(recipe.as_json()):
                return None
            objects.require(Snapshot, set(snapshots.values()))
            objects.require(Tensor, {identity for tensor in plan.tensors for identity in tensor.inputs})
        except (KeyError, NotFoundError, IntegrityError):
            return None
        return plan

    def learn_plan(self, key: bytes | None, recipe: Recipe, plan: Plan) -> None:
        """Remember a recipe's plan under its key."""
        pairs = self._pairs(is_whole(recipe, plan.budget))
        self._put(key, {"plan": object_id(plan.encode()), "pairs": pairs})

    def worths(self, tensors: Sequence[TensorInputs], operator: Operator) -> dict[str, Worth]:
        """What merging all of a tensor is worth, by names, of those of which it is known."""
        keys = {inputs.name: self._worth_key(inputs, operator) for inputs in tensors}
        found = self._values([key for key in keys.values() if key is not None])
        worths = {name: _worth(found[key]) for name, key in keys.items() if key in found}
        return {name: worth for name, worth in worths.items() if worth is not None}

    def learn_worth(self, inputs: TensorInputs, operator: Operator, worth: Worth) -> None:
        """Remember what merging all of a tensor is worth."""
        self._put(
            self._worth_key(inputs, operator), {"worth": [worth.energy, worth.cosine], "pairs": self._pairs(True)}
        )

    def _worth_key(self, inputs: TensorInputs, operator: Operator) -> bytes | None:
        if self._states is None:
            return None
        return reuse_key(
            {
                "worth": PLANNER,
                "operator": [operator.name, operator.version],
                "shared": dict(inputs.parameters.shared),
                "experts": [dict(values) for values in inputs.parameters.experts],
                "inputs": [
                    None if inputs.base is None else inputs.base.identity,
                    *(item.identity for _, item in inputs.experts),
                ],
                "column_elements": inputs.column_elements,
                "pairs": self._pairs(True),
            }
        )

    def _pairs(self, whole: bool) -> list[str | None]:
        """The states that planning depends on: thresholds are only asked of histograms where something is left out."""
        states = self._states
        return [None, None] if states is None else [states.distances, None if whole else states.histograms]

    def _values(self, keys: Sequence[bytes]) -> dict[bytes, Json]:
        if self._store is None or not self._use:
            return {}
        found: dict[bytes, Json] = {}
        for key, value in self._store.reuse.values(keys).items():
            with suppress(ValueError):
                found[key] = decode(value, PLANNED)
        return found

    def _put(self, key: bytes | None, value: Json) -> None:
        if key is not None:
            self._learnt[key] = encode({"kind": PLANNED, **value})


def is_whole(recipe: Recipe, budget: Budget) -> bool:
    """Whether nothing bounds what is read, so that all is."""
    return budget.kind == "none" and not recipe.has_budgets


def _worth(value: Json) -> Worth | None:
    """What an entry says, if it is one of a tensor's."""
    try:
        energy, cosine = value["worth"]
        return Worth(float(energy), None if cosine is None else float(cosine))
    except (KeyError, TypeError, ValueError):
        return None
