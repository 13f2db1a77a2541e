"""Walking commits: names to commits, and commits to those that they came from."""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mpfs.errors import NotFoundError, UsageError
from mpfs.objects import Commit, ObjectId
from mpfs.objects.encoding import Json
from mpfs.objects.ids import is_object_id
from mpfs.store import ObjectReader, RefReader, check_ref_name

MIN_PREFIX = 4
_LISTED_REFS = 8
_REVISION = re.compile(r"(?P<name>.+?)(?:~(?P<back>[0-9]{1,9}))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A commit in a listing, with the refs that point at it."""

    identity: ObjectId
    commit: Commit
    refs: tuple[str, ...]

    def as_json(self) -> Json:
        """The JSON form; `time` is ISO 8601, UTC."""
        return {
            "commit": self.identity,
            "snapshot": self.commit.snapshot,
            "parents": list(self.commit.parents),
            "inputs": [item.as_json() for item in self.commit.inputs],
            "plan": self.commit.plan,
            "message": self.commit.message,
            "author": self.commit.author,
            "time": self.commit.iso_time,
            "source": self.commit.source,
            "refs": list(self.refs),
        }


def resolve(name: str, objects: ObjectReader, refs: RefReader) -> ObjectId:
    """The id of the commit that a revision names: a ref, a commit id or a unique prefix of one, each with `~N` for
    its N-th first parent.

    Raises:
        NotFoundError: nothing is called that.
        UsageError: the prefix is not unique, or too short.
    """
    match = _REVISION.fullmatch(name)
    if match is None:
        raise NotFoundError("an empty name names no commit")
    identity = _resolve_name(match["name"], objects, refs)
    for step in range(int(match["back"] or 0)):
        parents = objects.get(Commit, identity).parents
        if not parents:
            raise NotFoundError(f"{name}: going back by first parents, {match['name']} has only {step}", name=name)
        identity = parents[0]
    return identity


def _resolve_name(name: str, objects: ObjectReader, refs: RefReader) -> ObjectId:
    ref = refs.find(name) if _may_be_ref(name) else None
    if ref is not None:
        return ref.commit
    if re.fullmatch(r"[0-9a-f]{1,64}", name):
        if is_object_id(name):
            objects.get(Commit, name)
            return name
        if len(name) >= MIN_PREFIX:
            found = objects.ids(Commit, name)
            if len(found) == 1:
                return found[0]
            if found:
                raise UsageError(f"{name} is the beginning of {len(found)} commit ids; give more digits")
    known = [ref.name for ref in refs.all()]
    raise NotFoundError(
        f"no ref or commit is called {name}"
        + (f"; there are: {_listing(known)}" if known else "; the repository has no refs yet"),
        name=name,
    )


def _listing(names: list[str]) -> str:
    more = len(names) - _LISTED_REFS
    return ", ".join(names[:_LISTED_REFS]) + (f" and {more:,} more" if more > 0 else "")


def _may_be_ref(name: str) -> bool:
    """Whether to look for a ref: a revision may also be a path, or anything else that somebody has typed."""
    try:
        check_ref_name(name)
    except UsageError:
        return False
    return True


def ref_names(refs: RefReader) -> dict[ObjectId, tuple[str, ...]]:
    """The refs' names by the commit that they point at."""
    names: dict[ObjectId, tuple[str, ...]] = {}
    for ref in refs.all():
        names[ref.commit] = (*names.get(ref.commit, ()), ref.name)
    return names


def entry(identity: ObjectId, objects: ObjectReader, names: Mapping[ObjectId, tuple[str, ...]]) -> LogEntry:
    """One commit as a log entry."""
    return LogEntry(identity, objects.get(Commit, identity), names.get(identity, ()))


def ancestry(
    starts: Iterable[ObjectId], objects: ObjectReader, refs: RefReader, *, inputs: bool = True
) -> list[LogEntry]:
    """All commits that `starts` came from, themselves included: newest first, and none before one that came from it.

    Args:
        starts: commit ids.
        objects: for reading commits.
        refs: for the names of commits.
        inputs: follow what was merged (base and experts) as well as parents.
    """
    commits: dict[ObjectId, Commit] = {}
    pending = list(dict.fromkeys(starts))
    while pending:
        identity = pending.pop()
        if identity in commits:
            continue
        commits[identity] = commit = objects.get(Commit, identity)
        pending.extend(_origins(commit, inputs))
    waiting = dict.fromkeys(commits, 0)
    for commit in commits.values():
        for origin in _origins(commit, inputs):
            waiting[origin] += 1
    ready = [(-commits[identity].time, identity) for identity, count in waiting.items() if count == 0]
    heapq.heapify(ready)
    names = ref_names(refs)
    result = []
    while ready:
        _, identity = heapq.heappop(ready)
        result.append(LogEntry(identity, commits[identity], names.get(identity, ())))
        for origin in _origins(commits[identity], inputs):
            waiting[origin] -= 1
            if waiting[origin] == 0:
                heapq.heappush(ready, (-commits[origin].time, origin))
    return result


def _origins(commit: Commit, inputs: bool) -> tuple[ObjectId, ...]:
    """What a commit came from, each once."""
    merged = tuple(item.commit for item in commit.inputs) if inputs else ()
    return tuple(dict.fromkeys((*commit.parents, *merged)))
