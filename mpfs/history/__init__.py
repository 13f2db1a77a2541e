"""History: how commits hang together, and what changed between two snapshots."""

from typing import TYPE_CHECKING

from mpfs.deferred import names

if TYPE_CHECKING:
    from mpfs.history.diff import Diff, TensorDiff, diff_snapshots
    from mpfs.history.explain import Explanation, TensorExplanation, explain_plan
    from mpfs.history.insight import Insight
    from mpfs.history.log import LogEntry, ancestry, entry, resolve
else:
    __getattr__, __dir__ = names(
        __name__,
        {
            "mpfs.history.diff": ("Diff", "TensorDiff", "diff_snapshots"),
            "mpfs.history.explain": ("Explanation", "TensorExplanation", "explain_plan"),
            "mpfs.history.insight": ("Insight",),
            "mpfs.history.log": ("LogEntry", "ancestry", "entry", "resolve"),
        },
    )

__all__ = [
    "Diff",
    "Explanation",
    "Insight",
    "LogEntry",
    "TensorDiff",
    "TensorExplanation",
    "ancestry",
    "diff_snapshots",
    "entry",
    "explain_plan",
    "resolve",
]
