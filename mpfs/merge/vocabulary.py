"""Aligning vocabularies: which tokens a merged model has, and which row of which model each of its rows comes from.

Pure: vocabularies come in as mappings, row numbers go out as arrays. Semantics are mergekit's (docs/recipes.md).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mpfs.formats.tokenizer import AddedToken, Vocabulary
from mpfs.merge.recipe.tokenizer import TokenRule

_SHOWN = 5

Rows = NDArray[np.int64]
"""Row numbers; -1 for none."""


@dataclass(frozen=True, slots=True)
class Member:
    """A model with its vocabulary. `rows` are those that it has; tokens with larger ids have none.

    `merged` is False for a model that only lends rows to tokens.
    """

    name: str
    vocabulary: Vocabulary
    rows: int
    merged: bool = True


@dataclass(frozen=True, slots=True)
class Output:
    """The output's vocabulary: that of the `donor`, with `added` tokens (new ones in the order of their ids).

    `tokens` are ids by token. `size` is one more than the largest id; `padding` so many rows come after.
    """

    donor: Vocabulary
    tokens: Mapping[str, int]
    added: tuple[AddedToken, ...]
    size: int
    padding: int

    @property
    def rows(self) -> int:
        """Rows of the output's embedding."""
        return self.size + self.padding


def output_vocabulary(
    donor: Vocabulary, others: Iterable[Vocabulary], listed: Iterable[str], multiple: int | None
) -> Output:
    """The vocabulary of the output.

    The donor's tokens keep their ids. New tokens follow: plain ones of the others, model by model in the order of their
    ids, then the added ones (special tokens and the like), then those that the recipe lists. What any model has as an
    added token is one in the output.

    Args:
        donor: whose tokenizer it starts from.
        others: whose tokens are put to it, in order; none unless it is a union.
        listed: tokens that the recipe lists.
        multiple: the number of rows is rounded up to a multiple of this; None: it is not.
    """
    others = list(others)
    marked: dict[str, AddedToken] = {}
    for vocabulary in others:
        for content, token in vocabulary.added.items():
            if content not in donor.added:
                marked.setdefault(content, token)
    new: dict[str, AddedToken] = {}
    for vocabulary in others:
        for content in sorted(vocabulary.tokens, key=vocabulary.tokens.__getitem__):
            if content not in donor.tokens and content not in marked:
                new.setdefault(content, AddedToken(content))
    new |= marked
    for content in listed:
        if content not in donor.tokens:
            new.setdefault(content, AddedToken(content))
    tokens = dict(donor.tokens)
    size = donor.size
    for content in new:
        if content not in tokens:
            tokens[content] = size
            size += 1
    padding = -size % multiple if multiple else 0
    return Output(donor, tokens, tuple(new.values()), size, padding)


class Alignment:
    """Where the rows of each model come from, once they are in the order of the output's vocabulary."""

    def __init__(
        self,
        output: Output,
        members: Sequence[Member],
        base: int | None,
        rules: Mapping[str, TokenRule],
        owners: Collection[int] | None = None,
    ) -> None:
        """Set up.

        Args:
            output: the output's vocabulary.
            members: the models; the merged ones in the recipe's order.
            base: the index of the recipe's base among them: its rows stand in for what others lack.
            rules: the recipe's, by token.
            owners: those that have the tensor in question at all; None: every one.
        """
        self.output = output
        self.members = members
        self.base = base
        self.rules = {token: rule for token, rule in rules.items() if token in output.tokens}
        self._owners = [index for index in range(len(members)) if owners is None or index in owners]

    @cached_property
    def own(self) -> Rows:
        """The row that each member has of its own for each id; shape (members, size)."""
        own = np.full((len(self.members), self.output.size), -1, np.int64)
        contents = list(self.output.tokens)
        ids = np.fromiter(self.output.tokens.values(), np.int64, len(contents))
        known: dict[int, Rows] = {}
        for index in self._owners:
            member = self.members[index]
            theirs = member.vocabulary.tokens
            if id(theirs) not in known:
                known[id(theirs)] = np.fromiter((theirs.get(token, -1) for token in contents), np.int64, len(contents))
            found = known[id(theirs)]
            own[index, ids] = np.where(found < member.rows, found, -1)
        holes = np.flatnonzero(np.bincount(ids, minlength=self.output.size) == 0)
        for index in self._owners if len(holes) else ():
            # An id that no token has means the same only to those who share the vocabulary.
            member = self.members[index]
            if dict(member.vocabulary.tokens) == dict(self.output.donor.tokens):
                own[index, holes] = np.where(holes < member.rows, holes, -1)
        return own

    @cached_property
    def fill(self) -> Rows:
        """The rows that stand in for what a member lacks, and whose mean is taken if there are several.

        The base's; without it those of all merged members that have the token; what the recipe says instead.
        Shape (members, size).
        """
        fill = self.own.copy()
        fill[[index for index, member in enumerate(self.members) if not member.merged]] = -1
        if self.base is not None:
            theirs = fill[self.base] >= 0
            kept = fill[self.base].copy()
            fill[:, theirs] = -1
            fill[self.base] = kept
        for token, rule in self.rules.items():
            if rule.kind != "default":
                at = self.output.tokens[token]
                fill[:, at] = -1
                index, row = self._named(token, rule)
                if index is not None:
                    fill[index, at] = row
        return fill

    @cached_property
    def forced(self) -> NDArray[np.bool_]:
        """Which ids take what the recipe says in every member; shape (size,)."""
        forced = np.zeros(self.output.size, bool)
        forced[[self.output.tokens[token] for token, rule in self.rules.items() if rule.force]] = True
        return forced

    def rows(self, index: int) -> Rows:
        """The rows that make a member's: each of its rows is the mean of those of its column; shape (members, size)."""
        own = (self.own[index] >= 0) & ~self.forced
        rows = np.where(own, -1, self.fill)
        rows[index] = np.where(own, self.own[index], rows[index])
        return rows

    def problems(self) -> list[dict[str, str]]:
        """What cannot be done of what the recipe says of tokens: `path` and `message`."""
        found: list[dict[str, str]] = []
        for token, rule in self.rules.items():
            path = f"tokenizer.tokens.{token}"
            index, row = self._named(token, rule)
            if rule.kind == "default":
                if not (self.own[:, self.output.tokens[token]] >= 0).any():
                    told = "no model has this token: give it a source, such as {kind: zero} or a model_token"
                    found.append({"path": path, "message": told})
            elif rule.kind != "zero" and index is None:
                found.append({"path": f"{path}.source", "message": f"there is no model {rule.model}"})
            elif rule.kind != "zero" and row < 0 and index is not None:
                member = self.members[index]
                what = repr(rule.token or token) if rule.token_id is None else f"row {rule.token_id}"
                rows = f"{member.rows:,} rows"
                found.append({"path": f"{path}.source", "message": f"{rule.model} has no {what} (it has {rows})"})
        return found

    def nobody(self) -> list[str]:
        """The tokens that no model has a row for, and the recipe says nothing of: their rows are zero."""
        empty: NDArray[np.bool_] = np.all(self.fill < 0, axis=0)
        empty[[self.output.tokens[token] for token, rule in self.rules.items() if rule.kind == "zero"]] = False
        return [token for token, at in self.output.tokens.items() if empty[at]]

    def _named(self, token: str, rule: TokenRule) -> tuple[int | None, int]:
        """The member and row that a rule names; -1 if there is no such row."""
        index = next((at for at, member in enumerate(self.members) if member.name == rule.model), None)
        if index is None:
            return None, -1
        member = self.members[index]
        row = rule.token_id
        if row is None:
            row = member.vocabulary.tokens.get(rule.token or token, -1)
        return index, row if row < member.rows and index in self._owners else -1


def is_identity(rows: Rows, index: int, output: Output, before: int) -> bool:
    """Whether a member's rows stay as they are: `rows` as of `Alignment.rows`, `before` the rows that it has."""
    if before != output.rows or output.padding:
        return False
    return kept_rows(rows, index) == output.size


def kept_rows(rows: Rows, index: int) -> int:
    """How many of a member's first rows stay where they are."""
    others = np.delete(rows, index, axis=0)
    same = (rows[index] == np.arange(rows.shape[1])) & (others < 0).all(0)
    moved = np.flatnonzero(~same)
    return int(moved[0]) if len(moved) else rows.shape[1]


def describe(rows: Rows, index: int, members: Sequence[Member], padding: int) -> str:
    """Where a member's rows come from, for a person."""
    count = (rows >= 0).sum(0)
    parts = [f"{int(((rows[index] >= 0) & (count == 1)).sum()):,} of its own"]
    for other, member in enumerate(members):
        taken = int(((rows[other] >= 0) & (count == 1)).sum())
        if other != index and taken:
            parts.append(f"{taken:,} of {member.name}")
    parts += [f"{int((count > 1).sum()):,} means"] * bool((count > 1).any())
    parts += [f"{int((count == 0).sum()):,} zero"] * bool((count == 0).any())
    parts += [f"{padding:,} of padding"] * bool(padding)
    return ", ".join(parts)


def some(tokens: Sequence[str]) -> str:
    """A few tokens, for a person."""
    shown = ", ".join(repr(token) for token in tokens[:_SHOWN])
    return shown if len(tokens) <= _SHOWN else f"{shown} and {len(tokens) - _SHOWN:,} more"
