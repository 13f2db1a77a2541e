"""What a directory's name in a view of a repository can mean: a ref, or a commit."""

from __future__ import annotations

import re

from mpfs.errors import UsageError
from mpfs.objects import Commit, ObjectId
from mpfs.store import Store, check_ref_name

MIN_PREFIX = 8
"""Fewest hex digits of a commit's id that are taken for one."""

COMMIT_PREFIX = re.compile(rf"[0-9a-f]{{{MIN_PREFIX},64}}")


def can_be_ref(name: str) -> bool:
    """Whether a ref may be called that: most paths are no such names, and some are too long to be looked up."""
    try:
        check_ref_name(name)
    except UsageError:
        return False
    return True


def find_commits(store: Store, prefix: str) -> list[ObjectId]:
    """The commits whose ids begin with at least MIN_PREFIX hex digits."""
    return store.objects.ids(Commit, prefix) if COMMIT_PREFIX.fullmatch(prefix) else []
