"""History: how commits hang together, and what changed between two snapshots."""

from mpfs.history.diff import Diff, TensorDiff, diff_snapshots
from mpfs.history.explain import Explanation, TensorExplanation, explain_plan
from mpfs.history.insight import Insight
from mpfs.history.log import LogEntry, ancestry, entry, resolve

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
