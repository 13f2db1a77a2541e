"""Adding a checkpoint of differences, once it is imported, to the model that they are differences to."""

from __future__ import annotations

import time as clock
from dataclasses import replace

from mpfs.ingest.commit import ImportReport
from mpfs.merge.adapter import with_delta
from mpfs.merge.commit import load_model
from mpfs.objects import Commit, ObjectId
from mpfs.store import Store

DELTAS = "deltas/"
"""What the branches begin with that differences are kept on."""


def add_delta(store: Store, report: ImportReport, ref: str, name: str, base: ObjectId, author: str) -> ImportReport:
    """Move a branch to the sum of a model and differences to it.

    Args:
        store: where all is.
        report: of the differences' import.
        ref: the branch of the sum.
        name, base: the model.
        author: who the commit is by.

    Raises:
        MismatchError: the differences have tensors that the model has not, or of other shapes.
        RefConflictError: `ref` is a tag, or moved meanwhile.
    """
    model, delta = load_model(store, name, base), load_model(store, report.ref, report.commit)
    commit = with_delta(store, ref, model, delta, author)
    tip = store.refs.branch_tip(ref)
    if tip != commit:
        reason = f"import: {name} plus {report.ref}"
        store.move_ref(ref, commit, expected=tip, kind="branch", time=int(clock.time()), author=author, reason=reason)
    return replace(
        report,
        commit=commit,
        ref=ref,
        snapshot=store.objects.get(Commit, commit).snapshot,
        tensors=len(model.tensors),
        new_commit=tip != commit,
        notes=(*report.notes, f"the sum of {name} and {report.ref}, where the differences are kept"),
    )
