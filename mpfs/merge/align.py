"""Aligning the vocabularies of a merge's models: what a recipe's tokenizer and chat_template ask for.

Each model whose rows have to move becomes a derived one, as with adapters (docs/decisions/0010): rows are gathered into
the order of the output's vocabulary, so that nothing else in planning or merging knows of tokens. The model whose side
files the output takes gets the output's tokenizer files, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mpfs.errors import MismatchError, RecipeError
from mpfs.formats.tokenizer import MAX_FILE_BYTES, Files, Vocabulary, is_tokenizer_file, read_vocabulary, with_tokens
from mpfs.merge.architecture import is_head, vocabulary_tensors
from mpfs.merge.commit import load_model
from mpfs.merge.derived import Derivation, derive, stage_chunks
from mpfs.merge.gather import Source, gathered
from mpfs.merge.models import Aligned, Model, ModelTensor
from mpfs.merge.recipe import Recipe
from mpfs.merge.recipe.tokenizer import RecipeTokenizer
from mpfs.merge.tokenizer_files import (
    Changes,
    applied,
    config_changes,
    donated,
    is_wanted,
    template_changes,
)
from mpfs.merge.vocabulary import (
    Alignment,
    Member,
    Output,
    Rows,
    describe,
    is_identity,
    kept_rows,
    output_vocabulary,
    some,
)
from mpfs.objects import BlobFile, Input, ObjectId, Snapshot, Tensor
from mpfs.objects.dtypes import MERGEABLE, promote
from mpfs.store import Store, Writer

_VERSION = 1


@dataclass(frozen=True, slots=True)
class _Change:
    """How a tensor of a model is made anew: from rows of these models' tensors, in this dtype. `kept` of `old`'s first rows
    stay where they are."""

    old: Tensor
    rows: Rows
    padding: int
    sources: Mapping[int, tuple[str, ModelTensor]]
    dtype: str
    kept: int


def align(store: Store, recipe: Recipe, models: Sequence[Model], lenders: Sequence[Model], author: str) -> Aligned:
    """Align the vocabularies of models as a recipe asks that has a tokenizer or a chat template.

    Args:
        store: where they are.
        recipe: the checked recipe.
        models: its models, in the order of `recipe.model_names`.
        lenders: those of `recipe.tokenizer_models`, which only give tokens or rows.
        author: who derived models are by.

    Raises:
        RecipeError: tokens are asked for that no model has.
        MismatchError: there is no tokenizer, or rows cannot be put together.
        BadInputError: a tokenizer cannot be read.
        UsageError: the tokenizers library is not installed.
    """
    names = [model.ref.name for model in models]
    template = 0 if recipe.base is None else names.index(recipe.base)
    work = _Work(store, recipe, [*models, *lenders], len(models), template)
    changes: Changes = {}
    if recipe.tokenizer is not None:
        changes = work.align(recipe.tokenizer)
    if recipe.chat_template is not None:
        listed = [(names[index], work.files[index]) for index in work.order()]
        files = applied(work.files[template], changes)
        more, note = template_changes(recipe.chat_template, files, listed, names[template])
        changes |= more
        work.notes += [] if note is None else [note]
    changes = {path: new for path, new in changes.items() if work.files[template].get(path) != new}
    result = [work.derived(index, changes if index == template else {}, author) for index in range(len(models))]
    return Aligned(tuple(result), tuple(work.notes))


class _Work:
    """The models of one merge, of which the first `merged` are merged."""

    def __init__(self, store: Store, recipe: Recipe, models: Sequence[Model], merged: int, template: int) -> None:
        self.store = store
        self.recipe = recipe
        self.models = models
        self.merged = merged
        self.template = template
        self.files = [_files(store, model) for model in models]
        self.names = [
            vocabulary_tensors({name: item.tensor.shape for name, item in model.tensors.items()}, model.config)
            for model in models
        ]
        self.changed: list[dict[str, _Change]] = [{} for _ in models]
        self.notes: list[str] = []
        self._read: dict[bytes, Vocabulary | None] = {}
        self._alignments: dict[frozenset[int], Alignment] = {}

    # -- the output's vocabulary ----------------------------------------------------------------------------------

    def align(self, wanted: RecipeTokenizer) -> Changes:
        """Decide on every row; the changes in the template's files."""
        donor = self.template
        if wanted.named is not None:
            donor = next(index for index, model in enumerate(self.models) if model.ref.name == wanted.named)
        vocabularies = self._vocabularies(donor)
        others = [vocabularies[index] for index in self.order() if index != donor] if wanted.union else []
        output = output_vocabulary(vocabularies[donor], others, wanted.tokens, wanted.pad_to_multiple_of)
        members = [
            Member(model.ref.name, vocabularies[index], self._rows(index), index < self.merged)
            for index, model in enumerate(self.models)
        ]
        self._note_output(output, members, donor, wanted)
        base = None if self.recipe.base is None else self.template
        every = frozenset(range(len(members)))
        self._alignments = {every: Alignment(output, members, base, wanted.tokens)}
        problems = self._alignments[every].problems()
        if problems:
            lines = "; ".join(f"{item['path']}: {item['message']}" for item in problems)
            raise RecipeError(f"recipe: {lines}", problems=problems)
        for index in range(self.merged):
            self._align_model(index, output, members, base, wanted)
        changes = {} if donor == self.template else donated(self.files[self.template], self.files[donor])
        files = applied(self.files[self.template], changes)
        changes |= with_tokens(files, output.added, self.models[donor].ref.name)
        files = applied(files, changes)
        more, notes = config_changes(
            files,
            None if donor == self.template else self.files[donor],
            vocabularies[self.template],
            output.tokens,
            output.rows,
        )
        self.notes += notes
        return {**changes, **more}

    def _vocabularies(self, donor: int) -> list[Vocabulary]:
        """The models' vocabularies; one without a tokenizer is taken to have that of the template, or of the donor."""
        found = [self._vocabulary(index) for index in range(len(self.models))]
        stand_in = found[self.template] or found[donor]
        if found[donor] is None or stand_in is None:
            name = self.models[donor].ref.name
            raise MismatchError(f"{name} has no tokenizer files: import it with them, or take another tokenizer_source")
        lacking = [self.models[index].ref.name for index, item in enumerate(found) if item is None]
        if lacking:
            owner = self.models[self.template if found[self.template] else donor].ref.name
            self.notes.append(f"{', '.join(lacking)} without a tokenizer: taken to have the vocabulary of {owner}")
        return [item or stand_in for item in found]

    def _vocabulary(self, index: int) -> Vocabulary | None:
        files = {path: content for path, content in self.files[index].items() if is_tokenizer_file(path)}
        key = _digest(files)
        if key not in self._read:
            self._read[key] = read_vocabulary(files, self.models[index].ref.name)
        return self._read[key]

    def _rows(self, index: int) -> int:
        names = self.names[index]
        return self.models[index].tensors[names[0]].tensor.shape[0] if names else 0

    def _note_output(self, output: Output, members: Sequence[Member], donor: int, wanted: RecipeTokenizer) -> None:
        """How many tokens are from where."""
        new = [token.content for token in output.added if token.content not in output.donor.tokens]
        parts = [f"{len(output.donor.tokens):,} tokens of {members[donor].name}"]
        for index in self.order() if wanted.union else ():
            theirs = members[index].vocabulary.tokens
            taken = [token for token in new if token in theirs]
            parts += [f"{len(taken):,} new ones of {members[index].name} ({some(taken)})"] if taken else []
            new = [token for token in new if token not in theirs]
        parts += [f"{len(new):,} that the recipe lists ({some(new)})"] if new else []
        padding = f"; padded to {output.rows:,} rows" if output.padding else ""
        self.notes.append(f"tokenizer: {', '.join(parts)}{padding}")

    def order(self) -> list[int]:
        """The merged models, the template first."""
        return [self.template, *(index for index in range(self.merged) if index != self.template)]

    # -- rows -----------------------------------------------------------------------------------------------------

    def _align_model(
        self, index: int, output: Output, members: Sequence[Member], base: int | None, wanted: RecipeTokenizer
    ) -> None:
        model = self.models[index]
        told: dict[str, list[str]] = {}
        if not self.names[index]:
            self.notes.append(f"{model.ref.name}: no embedding or head was recognised, so no rows are moved")
        for name in (*self.names[index], *self._tied_heads(index)):
            stored = self._counterpart(index, index, name) or name
            tensor = model.tensors[stored]
            sources = {
                other: (source, item)
                for other in range(len(self.models))
                if (source := self._counterpart(other, index, name)) is not None
                and (item := self.models[other].tensors[source]).tensor.shape[1:] == tensor.tensor.shape[1:]
            }
            alignment = self._alignments.setdefault(
                frozenset(sources), Alignment(output, members, base, wanted.tokens, frozenset(sources))
            )
            rows = alignment.rows(index)
            problems = alignment.problems()
            if problems:
                raise MismatchError(f"{name} of {model.ref.name}: {problems[0]['path']}: {problems[0]['message']}")
            nobody = alignment.nobody()
            if nobody and index == self.template and name == self.names[index][0]:
                self.notes.append(
                    f"tokens that no model has a row for, and which get zeros: {some(nobody)}; a source under "
                    "tokenizer.tokens gives them another"
                )
            if stored != name and not (np.delete(rows, index, axis=0) >= 0).any():
                continue  # as the embedding that it is tied to
            if not is_identity(rows, index, output, tensor.tensor.shape[0]):
                self.changed[index][name] = self._change(index, name, rows, output.padding, sources)
                told.setdefault(describe(rows, index, members, output.padding), []).append(name)
        for text, listed in told.items():
            self.notes.append(f"{model.ref.name}: rows of {', '.join(listed)}: {text}")

    def _tied_heads(self, index: int) -> list[str]:
        """Heads that a model ties to its embedding while another stores one, from which rows may come."""
        heads = dict.fromkeys(
            name
            for other in range(self.merged)
            for name in self.names[other]
            if is_head(name) and name not in self.models[index].tensors
        )
        return [name for name in heads if self.models[index].stand_in(name) in self.names[index]]

    def _counterpart(self, other: int, index: int, name: str) -> str | None:
        """The tensor of another model that a model's vocabulary tensor corresponds to: of the same name or kind."""
        theirs, ours = self.models[other], self.models[index].architecture
        found = name if name in theirs.tensors else theirs.stand_in(name)
        if found is None and name == ours.embedding:
            found = theirs.architecture.embedding
        elif found is None and name == ours.head:
            found = theirs.architecture.head
        return found if found in self.names[other] else None

    def _change(
        self, index: int, name: str, rows: Rows, padding: int, sources: Mapping[int, tuple[str, ModelTensor]]
    ) -> _Change:
        used = {other: item for other, item in sources.items() if (rows[other] >= 0).any()}
        used = used or {index: sources[index]}  # nothing but zeros, in rows of its length
        own = sources[index][1].tensor
        dtype = own.dtype
        if set(used) - {index} or padding:
            # Rows that come from others are taken in the dtype that arithmetic runs in.
            merged = {item.tensor.dtype for other, (_, item) in sources.items() if other < self.merged}
            dtypes = merged | {item.tensor.dtype for _, item in used.values()} | {dtype}
            if not dtypes <= MERGEABLE:
                raise MismatchError(
                    f"{name} of {self.models[index].ref.name}: rows of {', '.join(sorted(dtypes))} cannot be put together"
                )
            dtype = self.recipe.dtype or promote(dtypes)
        kept = 0 if padding or dtype != own.dtype else kept_rows(rows, index)
        return _Change(own, rows, padding, used, dtype, kept)

    # -- models ---------------------------------------------------------------------------------------------------

    def derived(self, index: int, files: Changes, author: str) -> Model:
        """A model with its rows where they belong, and with these files."""
        model, changed = self.models[index], self.changed[index]
        if not changed and not files:
            return model
        others = {other for change in changed.values() for other in change.sources if other != index}
        lent = [
            Input("vocabulary", self.models[other].ref.name, self.models[other].ref.commit) for other in sorted(others)
        ]
        derivation = Derivation(
            name=f"{model.ref.name}-vocabulary",
            template=model.ref.commit,
            inputs=(Input("base", model.ref.name, model.ref.commit), *lent),
            what={
                "vocabulary": _VERSION,
                "tensors": {name: self._what(change) for name, change in changed.items()},
                "files": {
                    path: None if new is None else hashlib.sha256(new).hexdigest() for path, new in files.items()
                },
            },
            message=f"{model.ref.name} with the vocabulary of a merge",
        )

        def make(writer: Writer) -> Mapping[str, Tensor]:
            made = {name: self._made(change, writer) for name, change in changed.items()}
            return {name: item.tensor for name, item in model.tensors.items()} | made

        commit: ObjectId = derive(self.store, derivation, author, make, files)
        return load_model(self.store, model.ref.name, commit)

    def _what(self, change: _Change) -> dict[str, object]:
        rows = {self.models[other].ref.commit: _row_digest(change.rows[other]) for other in change.sources}
        names = {self.models[other].ref.commit: source for other, (source, _) in change.sources.items()}
        return {
            "rows": rows, "names": names, "count": change.rows.shape[1], "padding": change.padding,
            "dtype": change.dtype,
        }  # fmt: skip

    def _made(self, change: _Change, writer: Writer) -> Tensor:
        old = change.old
        sources: dict[int, Source] = {
            other: (item.tensor, f"{source} of {self.models[other].ref.name}")
            for other, (source, item) in change.sources.items()
        }
        shape = (change.rows.shape[1] + change.padding, *old.shape[1:])
        row = old.nbytes // old.shape[0] if old.shape[0] else 0
        whole = change.kept * row // old.block_size
        start = whole * old.block_size // row if row else 0
        chunks = gathered(change.rows, change.padding, sources, change.dtype, self.store.blocks, start=start)
        skip = whole * old.block_size - start * row
        return stage_chunks(
            _without(chunks, skip), change.dtype, shape, old.block_size, writer, kept=old.blocks[:whole]
        )


def _without(chunks: Iterator[bytes], skip: int) -> Iterator[bytes]:
    """Chunks without their first bytes, which lie within the first chunk."""
    for chunk in chunks:
        yield chunk[skip:]
        skip = 0


def _files(store: Store, model: Model) -> dict[str, bytes]:
    """A model's tokenizer files and configs."""
    found: dict[str, bytes] = {}
    for file in store.objects.get(Snapshot, model.ref.snapshot).files:
        if isinstance(file, BlobFile) and is_wanted(file.path) and file.size <= MAX_FILE_BYTES:
            content = store.objects.get(Tensor, file.content)
            found[file.path] = b"".join(store.blocks.read(block, file.path) for block in content.blocks)
    return found


def _digest(files: Files) -> bytes:
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path}\0{len(files[path])}\0".encode())
        digest.update(files[path])
    return digest.digest()


def _row_digest(rows: Rows) -> str:
    return hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest()
