"""Running a planned sweep: everything is computed together, then each result is committed by itself."""

from __future__ import annotations

import time as clock
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from mpfs.errors import MPFSError
from mpfs.merge.columns import column_blocks
from mpfs.merge.commit import describe_merge, publish_outcome
from mpfs.merge.delta import PlanInputs
from mpfs.merge.engine import Outcome
from mpfs.merge.operators import get_operator
from mpfs.merge.options import MergeOptions
from mpfs.merge.reports import PlanReport
from mpfs.merge.room import require_room
from mpfs.merge.sweep.plans import Planned, PlannedSweep
from mpfs.merge.sweep.report import SweepBytes, SweepReport, SweepVariant
from mpfs.merge.sweep.together import Together, execute_together
from mpfs.objects import BlockId, Figures, ObjectId, Plan, Selection, object_id
from mpfs.objects.encoding import encode
from mpfs.store import Store


def report_plans(sweep: PlannedSweep, store: Store) -> SweepReport:
    """What a sweep is going to read, each variant and all together."""
    planned = sweep.variants
    reads = _Reads(store)
    each = [reads.planned(item.plan) for item in planned]
    readers: dict[BlockId, int] = {}
    union: dict[BlockId, int] = {}
    for blocks in each:
        union.update(blocks)
        for block in blocks:
            readers[block] = readers.get(block, 0) + 1
    variants = tuple(
        SweepVariant(
            item.variant.values,
            item.title,
            item.ref,
            PlanReport(object_id(item.plan.encode()), item.plan),
            sum(size for block, size in blocks.items() if readers[block] > 1),
        )
        for item, blocks in zip(planned, each, strict=True)
    )
    apart = sum(sum(blocks.values()) for blocks in each)
    return SweepReport(variants, SweepBytes(sweep.full, sum(union.values()), apart), (*sweep.notes, *_notes(planned)))


class _Reads:
    """The expert blocks that plans read; what several of them have in common is found once."""

    def __init__(self, store: Store) -> None:
        self._objects = store.objects
        self._known: dict[tuple[ObjectId, ObjectId | None, int, Selection], dict[BlockId, int]] = {}

    def planned(self, plan: Plan) -> dict[BlockId, int]:
        """What a plan reads, with sizes."""
        blocks: dict[BlockId, int] = {}
        for tensor in plan.tensors:
            inputs = None
            for index, ((_, expert), selection) in enumerate(zip(tensor.experts, tensor.selections, strict=True)):
                key = (expert, tensor.base, tensor.column_elements, selection)
                if key not in self._known:
                    inputs = inputs or PlanInputs.load(self._objects, tensor)
                    self._known[key] = {
                        block: size
                        for column in selection.columns()
                        for block, size in column_blocks(
                            inputs.experts[index].tensor, column, tensor.column_elements, inputs.base
                        )
                    }
                blocks.update(self._known[key])
        return blocks


def run_sweep(
    sweep: PlannedSweep, store: Store, *, message: str | None, author: str, options: MergeOptions
) -> SweepReport:
    """Run plans together and commit each result to its branch; see `Repository.sweep`.

    Raises:
        NoSpaceError: there is no room for the results; those committed before stay.
    """
    started, started_at = clock.monotonic(), int(clock.time())
    planned = sweep.variants
    report = report_plans(sweep, store)
    variants = list(report.variants)
    with store.writer() as writer:
        if options.check_space:
            require_room(store, writer, [item.plan for item in planned], reuse=options.reuse)
        together = execute_together([item.plan for item in planned], store, writer, options)
        writer.flush()
        spent = clock.monotonic() - started
        shares = _shares(together)
        for index, (item, outcome) in enumerate(zip(planned, together.outcomes, strict=True)):
            if isinstance(outcome, Exception):
                variants[index] = replace(variants[index], error=outcome)
                continue
            begun = clock.monotonic()
            text = f"{item.title}: {message or describe_merge(item.plan)}"
            try:
                merge = publish_outcome(
                    store,
                    writer,
                    item.plan,
                    outcome,
                    item.ref,
                    item.tip,
                    message=text,
                    author=author,
                    options=options,
                    started_at=started_at,
                    seconds=partial(_seconds, spent * shares[index], begun),
                    variants=len(planned),
                )
            except MPFSError as error:
                variants[index] = replace(variants[index], error=error)
            else:
                variants[index] = replace(variants[index], merge=merge)
        figures = _figures(together, report.expert_bytes, writer.figures.bytes_written, clock.monotonic() - started)
    return replace(report, variants=tuple(variants), figures=figures)


def _seconds(before: float, begun: float) -> float:
    return before + clock.monotonic() - begun


def _shares(together: Together) -> list[float]:
    """Each plan's share of the time: by the bytes that it had read and written."""
    moved = [
        0 if isinstance(item, Exception) else item.expert_bytes_read + item.base_bytes_read + item.written.bytes_written
        for item in together.outcomes
    ]
    total = sum(moved)
    return [nbytes / total if total else 1 / len(moved) for nbytes in moved]


def _figures(together: Together, planned: SweepBytes, written: int, seconds: float) -> Figures:
    done = [item for item in together.outcomes if isinstance(item, Outcome)]
    return Figures(
        expert_bytes_full=planned.full,
        expert_bytes_planned=planned.planned,
        expert_bytes_read=together.expert_bytes_read,
        base_bytes_read=together.base_bytes_read,
        bytes_written=written,
        blocks_kept=sum(item.blocks_kept for item in done),
        blocks_computed=sum(item.blocks_computed for item in done),
        blocks_reused=sum(item.blocks_reused for item in done),
        blocks_deduplicated=sum(item.written.deduplicated_blocks for item in done),
        seconds=seconds,
        variants=len(together.outcomes),
    )


def _notes(planned: Sequence[Planned]) -> tuple[str, ...]:
    """What holds for all variants is said once; and which of them come to the same."""
    notes: dict[str, list[str]] = {}
    same: dict[str, list[str]] = {}
    for item in planned:
        for note in item.plan.notes:
            notes.setdefault(note, []).append(item.title)
        plan = item.plan
        content = {
            "kind": "content",
            "method": [
                plan.method,
                plan.work_dtype,
                plan.out_dtype,
                plan.seed if get_operator(plan.method).draws else 0,
            ],
            "tensors": [tensor.as_json() for tensor in plan.tensors],
        }
        same.setdefault(object_id(encode(content)), []).append(item.title)
    told = [note if len(titles) == len(planned) else f"{', '.join(titles)}: {note}" for note, titles in notes.items()]
    told += [
        f"{', '.join(titles)} come out the same: what is set has no part in it, or each model has a value of its own"
        for titles in same.values()
        if len(titles) > 1
    ]
    return tuple(told)
