"""Finding the numbers behind a plan: its candidates are weighed again from statistics; no block is read.

They are those of the plan itself as long as the repository's statistics are the same as when it was made.
"""

from __future__ import annotations

from math import sqrt

import numpy as np
from numpy.typing import NDArray

from mpfs.history.insight import CurvePoint, Insight, Share, TensorShares
from mpfs.merge.commit import load_model
from mpfs.merge.election import elects
from mpfs.merge.inputs import fit
from mpfs.merge.operators import get_operator
from mpfs.merge.planner import POLICIES, rank
from mpfs.merge.recipe import recipe_from_mapping
from mpfs.merge.weighing import Weighed, Weigher
from mpfs.objects import Plan, PlanTensor
from mpfs.store import Store
from mpfs.store.pairs import PairTable


def find_insight(store: Store, plan: Plan) -> Insight:
    """The numbers behind a plan.

    Raises:
        NotFoundError: one of its models is not in the repository any more.
    """
    recipe = recipe_from_mapping(plan.recipe)
    operator = get_operator(plan.method)
    models = [load_model(store, model.name, model.commit) for model in plan.models]
    fitted = fit(recipe, models, operator, "base")
    weigher = Weigher(store.blocks, PairTable(store.environment))
    weighed = {item.inputs.name: item for item in weigher.weigh(fitted.tensors, operator)}
    experts = [index for index in range(len(plan.models)) if index != plan.base]
    place = {model: number for number, model in enumerate(experts)}
    gram = np.zeros((len(experts), len(experts)))
    tensors = []
    for planned in plan.tensors:
        item = weighed.get(planned.name)
        if item is None:
            continue
        read = _read_of(planned, item)
        shares: list[Share | None] = [None] * len(experts)
        rows = [place.get(model) for model, _ in item.inputs.experts]
        total = np.cumsum(item.candidates.gram, axis=0)[-1] if len(item.candidates.gram) else None
        scale = _scale(total) if elects(operator) else 1.0
        for i, row in enumerate(rows):
            if row is None:
                continue
            energy = scale * item.candidates.gram[:, i, i]
            cost = item.candidates.cost[:, i]
            chosen = read[:, i]
            shares[row] = Share(
                float(energy.sum()), float(energy[chosen].sum()), int(cost.sum()), int(cost[chosen].sum())
            )
            for j, other in enumerate(rows):
                if other is not None and total is not None:
                    gram[row, other] += scale * total[i, j]
        tensors.append(TensorShares(planned.name, tuple(shares)))
    free = [item.candidates for item in weighed.values() if item.inputs.base is not None]
    curves: dict[str, tuple[CurvePoint, ...]] = {}
    if any(item.cost.any() for item in free):
        for policy in POLICIES:
            points = rank(free, policy=policy, seed=plan.seed).curve()
            curves[policy] = tuple(CurvePoint(nbytes, fidelity) for nbytes, fidelity in points)
    return Insight(
        experts=tuple(plan.models[index].name for index in experts),
        tensors=tuple(tensors),
        conflict=_cosines(gram),
        curves=curves,
        chosen=CurvePoint(plan.cost.expert_bytes_planned, plan.fidelity_predicted),
    )


def _scale(total: NDArray[np.float64] | None) -> float:
    """What makes the experts' energies add up to that of the change.

    Where signs are elected the planner's weights are such that the deltas' sum is as large as the change. Of deltas that
    nearly cancel as a sum, which elected ones do not, it takes weights far larger than what an expert has in the change.
    """
    trace = 0.0 if total is None else float(np.cumsum(np.diagonal(total))[-1])
    return max(0.0, float(np.cumsum(total)[-1]) / trace) if total is not None and trace > 0.0 else 1.0


def _read_of(planned: PlanTensor, item: Weighed) -> NDArray[np.bool_]:
    """What the plan reads, (C, E); the plan's experts are the fitted ones, or none where the tensor is kept."""
    read: NDArray[np.bool_] = np.zeros_like(item.candidates.cost, dtype=np.bool_)
    for index, selection in enumerate(planned.selections):
        for start, stop in selection.ranges:
            read[start:stop, index] = True
    return read & (item.candidates.cost > 0)


def _cosines(gram: NDArray[np.float64]) -> tuple[tuple[float | None, ...], ...]:
    norms = [sqrt(max(0.0, float(gram[i, i]))) for i in range(len(gram))]
    return tuple(
        tuple(
            max(-1.0, min(1.0, float(gram[i, j]) / (first * second))) if first > 0.0 and second > 0.0 else None
            for j, second in enumerate(norms)
        )
        for i, first in enumerate(norms)
    )
