"""Aligning vocabularies, without a store: the output's tokens, the rows of each model, and how recipes ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from merge_cases import problems_of

from mpfs.formats.tokenizer import AddedToken, Vocabulary
from mpfs.merge.architecture import vocabulary_tensors
from mpfs.merge.conversion import TYPES, converted
from mpfs.merge.gather import gathered
from mpfs.merge.recipe import Recipe, recipe_from_mapping
from mpfs.merge.recipe.tokenizer import RuleKind, TokenRule
from mpfs.merge.vocabulary import Alignment, Member, Output, is_identity, kept_rows, output_vocabulary
from mpfs.objects import Tensor
from mpfs.stats.staging import stage_block
from mpfs.store import BlockReader, Store

WORDS = "abcdefgh"
KINDS: tuple[RuleKind, ...] = get_args(RuleKind)


@st.composite
def vocabularies(draw: st.DrawFn) -> Vocabulary:
    """Some words in some order, some of them added tokens."""
    words = draw(st.lists(st.sampled_from(WORDS), unique=True, min_size=1))
    added = draw(st.sets(st.sampled_from(words)))
    tokens = {word: index for index, word in enumerate(words)}
    return Vocabulary(tokens, {word: AddedToken(word, special=draw(st.booleans())) for word in words if word in added})


@given(st.lists(vocabularies(), min_size=1, max_size=4), st.booleans(), st.none() | st.integers(1, 9))
def test_the_output_has_every_token_once(found: list[Vocabulary], union: bool, multiple: int | None) -> None:
    donor, *others = found
    output = output_vocabulary(donor, others if union else [], ["new", "a"], multiple)
    wanted = {token for vocabulary in (found if union else [donor]) for token in vocabulary.tokens} | {"new", "a"}
    assert set(output.tokens) == wanted
    assert sorted(output.tokens.values()) == list(range(output.size)) == list(range(len(wanted)))
    assert {token: output.tokens[token] for token in donor.tokens} == dict(donor.tokens)
    assert output.padding < (multiple or 1)
    assert not multiple or output.rows % multiple == 0
    added = {token.content for token in output.added}
    assert added >= wanted - set(donor.tokens)
    if union:
        assert added >= {token for vocabulary in others for token in vocabulary.added} - set(donor.added)
    new = [token.content for token in output.added if token.content not in donor.tokens]
    assert [output.tokens[token] for token in new] == list(range(donor.size, output.size))


@st.composite
def alignments(draw: st.DrawFn) -> tuple[Alignment, list[Member]]:
    """A merge's vocabularies, some with fewer rows than tokens."""
    found = draw(st.lists(vocabularies(), min_size=1, max_size=4))
    members = [
        Member(
            f"m{index}",
            vocabulary,
            draw(st.integers(0, len(vocabulary.tokens) + 2)),
            merged=index == 0 or draw(st.booleans()),
        )
        for index, vocabulary in enumerate(found)
    ]
    base = draw(st.none() | st.just(0))
    output = output_vocabulary(found[0], found[1:], (), None)
    rules: dict[str, TokenRule] = {}
    for token in draw(st.sets(st.sampled_from(sorted(output.tokens)), max_size=3)):
        kind: RuleKind = draw(st.sampled_from(KINDS))
        name = draw(st.sampled_from([member.name for member in members]))
        number = draw(st.integers(0, 3)) if kind == "model_token" else None
        model = name if kind in ("model", "model_token") else None
        rules[token] = TokenRule(kind, model, None, number, force=kind != "default" and draw(st.booleans()))
    return Alignment(output, members, base, rules), members


def rows_by_hand(alignment: Alignment, members: Sequence[Member], index: int, token: str) -> list[tuple[int, int]]:
    """The rows that make one row of a model, by the rules of docs/recipes.md."""

    def own(at: int) -> int:
        row = members[at].vocabulary.tokens.get(token, -1)
        return row if row < members[at].rows else -1

    rule = alignment.rules.get(token, TokenRule())
    if own(index) >= 0 and not rule.force:
        return [(index, own(index))]
    if rule.kind == "zero":
        return []
    if rule.kind != "default":
        at = next(at for at, member in enumerate(members) if member.name == rule.model)
        row = own(at) if rule.token_id is None else (rule.token_id if rule.token_id < members[at].rows else -1)
        return [(at, row)] if row >= 0 else []
    if alignment.base is not None and own(alignment.base) >= 0:
        return [(alignment.base, own(alignment.base))]
    return [(at, own(at)) for at, member in enumerate(members) if member.merged and own(at) >= 0]


@given(alignments())
def test_rows_are_what_the_rules_say(case: tuple[Alignment, list[Member]]) -> None:
    alignment, members = case
    for index in range(len(members)):
        rows = alignment.rows(index)
        for token, at in alignment.output.tokens.items():
            found = [(other, int(row)) for other, row in enumerate(rows[:, at]) if row >= 0]
            assert found == rows_by_hand(alignment, members, index, token)
    nobody = {
        token
        for token in alignment.output.tokens
        if not any(member.merged and 0 <= member.vocabulary.tokens.get(token, -1) < member.rows for member in members)
        and alignment.rules.get(token, TokenRule()).kind == "default"
    }
    assert set(alignment.nobody()) - set(alignment.rules) == nobody - set(alignment.rules)
    told = {item["path"] for item in alignment.problems()}
    for token, rule in alignment.rules.items():
        if rule.kind in ("model", "model_token"):
            missing = not alignment.fill[:, alignment.output.tokens[token]].max() >= 0
            assert (f"tokenizer.tokens.{token}.source" in told) == missing


@given(vocabularies())
def test_one_vocabulary_moves_nothing(vocabulary: Vocabulary) -> None:
    members = [Member(name, vocabulary, vocabulary.size) for name in ("x", "y")]
    output = output_vocabulary(vocabulary, [vocabulary], (), None)
    assert output.tokens == vocabulary.tokens
    assert not output.added
    for index in (0, 1):
        rows = Alignment(output, members, 0, {}).rows(index)
        assert is_identity(rows, index, output, vocabulary.size)
        assert not is_identity(rows, index, output, vocabulary.size + 1)
        assert kept_rows(rows, index) == vocabulary.size


def test_ids_that_no_token_has() -> None:
    """Those who share the vocabulary keep such rows; the others get the base's."""
    gaps, plain = Vocabulary({"a": 0, "b": 3}, {}), Vocabulary({"b": 0, "a": 1}, {})
    output = output_vocabulary(gaps, [plain], (), None)
    assert output.size == 4
    members = [Member("g", gaps, 5), Member("h", gaps, 4), Member("p", plain, 2)]
    alignment = Alignment(output, members, 0, {})
    assert alignment.rows(0).tolist() == [[0, 1, 2, 3], [-1] * 4, [-1] * 4]
    assert alignment.rows(1).tolist() == [[-1] * 4, [0, 1, 2, 3], [-1] * 4]
    assert alignment.rows(2).tolist() == [[-1, 1, 2, -1], [-1] * 4, [1, -1, -1, 0]]


# -- gathering rows ---------------------------------------------------------------------------------------------------


def stored(store: Store, values: np.ndarray[Any, Any], dtype: str) -> Tensor:
    data, size = values.tobytes(), store.info.block_size
    names = []
    with store.writer() as writer:
        for at in range(0, len(data), size):
            block = stage_block(data[at : at + size], dtype, at // TYPES[dtype].itemsize)
            writer.put_block(block)
            names.append(block.block)
        writer.flush()
    return Tensor(dtype, values.shape, size, tuple(names))


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F64"])
@pytest.mark.parametrize("width", [(), (37,), (1500,)])
def test_gathered_rows(tmp_path: Path, dtype: str, width: tuple[int, ...]) -> None:
    """Copies, means and zeros, of tensors of two dtypes, against plain arithmetic; however much is made at a time."""
    rng = np.random.default_rng(3)
    other = {"BF16": "BF16", "F16": "F16", "F32": "BF16", "F64": "F32"}[dtype]
    with closing(Store.create(tmp_path / "store", block_size=4096, map_size=1 << 26)) as store:
        values, sources = {}, {}
        for index, kind in enumerate((dtype, other, dtype)):
            raw = rng.normal(size=(50, *width)).astype(np.float32)
            values[index] = converted(raw.reshape(-1), "F32", kind).reshape(raw.shape)
            sources[index] = (stored(store, values[index], kind), "a test")
            values[index] = converted(values[index].reshape(-1), kind, dtype).reshape(raw.shape)
        rows = np.full((3, 70), -1, np.int64)
        for place in range(70):
            for index in rng.permutation(3)[: rng.integers(0, 4)]:
                rows[index, place] = rng.integers(0, 50)
        wanted = np.zeros((70, *width), TYPES[dtype])
        work = "F64" if dtype == "F64" else "F32"

        def wide(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            return converted(x.reshape(-1), dtype, work)

        for place in range(70):
            parts = [values[index][rows[index, place]] for index in range(3) if rows[index, place] >= 0]
            for at, part in enumerate(parts):
                total = wide(wanted[place]) + wide(part) if at else wide(part)
                wanted[place] = converted(total, work, dtype).reshape(width)
            if len(parts) > 1:
                mean = wide(wanted[place]) / TYPES[work].type(len(parts))
                wanted[place] = converted(mean, work, dtype).reshape(width)
        for start, padding, window in ((0, 0, 1), (0, 0, 1 << 20), (17, 0, 9000), (0, 3, 9000), (0, 3, 1 << 20)):
            found = b"".join(gathered(rows, padding, sources, dtype, store.blocks, start=start, window_bytes=window))
            table = np.frombuffer(found, TYPES[dtype]).reshape(-1, *width)
            assert table[: 70 - start].tobytes() == wanted[start:].tobytes()
            assert len(table) == 70 - start + padding
            if padding:
                mean = converted(wanted.reshape(-1), dtype, "F64").reshape(wanted.shape).mean(0)
                close = converted(table[70:].reshape(-1), dtype, "F64").reshape(3, *width)
                np.testing.assert_allclose(close, np.broadcast_to(mean, close.shape), rtol=0.005, atol=1e-6)


def test_rows_that_lie_all_over_are_read_once_a_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Store.create(tmp_path / "store", block_size=4096, map_size=1 << 26)) as store:
        values = np.arange(400 * 512, dtype=np.float32).reshape(400, 512)
        tensor = stored(store, values, "F32")
        order = np.random.default_rng(1).permutation(400)
        reads: list[bytes] = []
        read = BlockReader.read

        def counting(self: BlockReader, block: bytes, where: str) -> bytes:
            reads.append(block)
            return read(self, block, where)

        monkeypatch.setattr(BlockReader, "read", counting)
        found = gathered(order[None, :], 0, {0: (tensor, "x")}, "F32", store.blocks, window_bytes=200 * 2048)
        assert b"".join(found) == values[order].tobytes()
        assert len(reads) <= 2 * len(tensor.blocks) + 2


# -- what has a row for each token ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shapes", "config", "wanted"),
    [
        (
            {"model.embed_tokens.weight": (9, 4), "model.layers.0.w": (9, 4), "lm_head.weight": (9, 4)},
            {},
            ["model.embed_tokens.weight", "lm_head.weight"],
        ),
        ({"wte.weight": (9, 4), "wpe.weight": (9, 4), "h.0.w": (4, 4)}, {"vocab_size": 9}, ["wte.weight"]),
        (
            {
                "bert.embeddings.word_embeddings.weight": (9, 4),
                "bert.embeddings.position_embeddings.weight": (9, 4),
                "bert.embeddings.token_type_embeddings.weight": (2, 4),
                "cls.predictions.bias": (9,),
                "cls.predictions.decoder.weight": (9, 4),
            },
            {},
            ["bert.embeddings.word_embeddings.weight", "cls.predictions.bias", "cls.predictions.decoder.weight"],
        ),
        (
            {"backbone.embeddings.weight": (9, 4), "backbone.layers.0.w": (9, 4)},
            {"vocab_size": 9},
            ["backbone.embeddings.weight"],
        ),
        (
            {"shared.weight": (9, 4), "lm_head.weight": (9, 4), "lm_head.bias": (9,)},
            {},
            ["shared.weight", "lm_head.weight", "lm_head.bias"],
        ),
        (
            {
                "model.embed_tokens.weight": (9, 4),
                "model.embed_tokens_per_layer.weight": (9, 8),
                "visual.embed.weight": (7, 4),
            },
            {},
            ["model.embed_tokens.weight", "model.embed_tokens_per_layer.weight"],
        ),
        ({"a": (9, 4), "embeddings.weight": (9, 4)}, {}, []),
    ],
)
def test_vocabulary_tensors(shapes: dict[str, tuple[int, ...]], config: dict[str, Any], wanted: list[str]) -> None:
    assert vocabulary_tensors(shapes, config) == wanted


# -- the grammar ------------------------------------------------------------------------------------------------------


def asked(**more: Any) -> dict[str, Any]:
    entries = [{"model": name, "parameters": {"weight": 1}} for name in ("a", "b")]
    return {"merge_method": "linear", "models": entries, **more}


def parsed(**more: Any) -> Recipe:
    return recipe_from_mapping(asked(**more))


@pytest.mark.parametrize(
    ("more", "path", "message"),
    [
        ({"tokenizer_source": "union", "tokenizer": {}}, "tokenizer", "one of the two"),
        ({"tokenizer_source": 5}, "tokenizer_source", "union, base or a model's name, not int"),
        ({"tokenizer_source": {"path": "a"}}, "tokenizer_source", "without model"),
        ({"tokenizer_source": "a+"}, "tokenizer_source", "MODEL+ADAPTER"),
        ({"tokenizer": [1]}, "tokenizer", "must be a mapping"),
        ({"tokenizer": {"sources": "a"}}, "tokenizer.sources", "did you mean source?"),
        ({"tokenizer": {"tokens": ["a"]}}, "tokenizer.tokens", "mapping of tokens"),
        ({"tokenizer": {"tokens": {5: {}}}}, "tokenizer.tokens.5", "in quotes"),
        ({"tokenizer": {"tokens": {"x": "a"}}}, "tokenizer.tokens.x", "source and force"),
        ({"tokenizer": {"tokens": {"x": {"sorce": "a"}}}}, "tokenizer.tokens.x.sorce", "did you mean source"),
        ({"tokenizer": {"tokens": {"x": {"force": True}}}}, "tokenizer.tokens.x.force", "needs a source"),
        ({"tokenizer": {"tokens": {"x": {"source": "a", "force": 1}}}}, "tokenizer.tokens.x.force", "true or false"),
        (
            {"tokenizer": {"tokens": {"x": {"source": {"kind": "model"}}}}},
            "tokenizer.tokens.x.source.kind",
            "neither zero",
        ),
        (
            {"tokenizer": {"tokens": {"x": {"source": {"model": "a", "token": "b"}}}}},
            "tokenizer.tokens.x.source.kind",
            "model_token",
        ),
        (
            {"tokenizer": {"tokens": {"x": {"source": {"kind": "zero", "model": "a"}}}}},
            "tokenizer.tokens.x.source.model",
            "unknown key",
        ),
        (
            {"tokenizer": {"tokens": {"x": {"source": {"kind": "model_token", "model": "a", "token_id": -1}}}}},
            "tokenizer.tokens.x.source.token_id",
            "0 or more",
        ),
        (
            {"tokenizer": {"tokens": {"x": {"source": {"kind": "model_token", "token": "b"}}}}},
            "tokenizer.tokens.x.source.model",
            "a model's name, not nothing",
        ),
        ({"tokenizer": {"pad_to_multiple_of": 1.5}}, "tokenizer.pad_to_multiple_of", "whole number"),
        ({"tokenizer": {"pad_to_multiple_of": 10**12}}, "tokenizer.pad_to_multiple_of", "to 65,536"),
        ({"tokenizer": {"pad_to_multiple_of": True}}, "tokenizer.pad_to_multiple_of", "whole number"),
        ({"chat_template": "chatmll"}, "chat_template", "did you mean chatml?"),
        ({"chat_template": 5}, "chat_template", "must be text"),
        ({"tokenizer_sorce": "union"}, "tokenizer_sorce", "did you mean tokenizer_source?"),
    ],
)
def test_mistakes(more: dict[str, Any], path: str, message: str) -> None:
    assert message in problems_of(lambda: parsed(**more))[path]


def test_all_mistakes_are_told_together() -> None:
    rules = {"x": {"force": True}, "y": {"source": {"kind": "zero", "a": 1}}}
    found = problems_of(
        lambda: parsed(tokenizer={"tokens": rules, "pad_to_multiple_of": -1}, chat_template="?", dtype="int8")
    )
    assert set(found) == {
        "tokenizer.tokens.x.force",
        "tokenizer.tokens.y.source.a",
        "tokenizer.pad_to_multiple_of",
        "chat_template",
        "dtype",
    }


@pytest.mark.parametrize(
    "more",
    [
        {"tokenizer_source": "union"},
        {"tokenizer_source": "base", "chat_template": "auto"},
        {"tokenizer_source": {"model": {"path": "base"}}},
        {"tokenizer_source": {"model": {"path": "union", "revision": "v1"}, "lora": {"path": "x"}}},
        {
            "tokenizer": {
                "source": "c",
                "tokens": {
                    "<x>": {"source": "d", "force": True},
                    "<y>": {"source": {"kind": "zero"}},
                    "<z>": {"source": {"kind": "model_token", "model": "b", "token_id": 0}},
                    "<w>": {"source": {"kind": "model_token", "model": {"model": {"path": "b"}}, "token": "t"}},
                    "<v>": {},
                },
                "pad_to_multiple_of": 64,
            },
            "chat_template": "{{ messages[0]['content'] }}",
        },
    ],
)
def test_the_normal_form_is_the_same_recipe(more: dict[str, Any]) -> None:
    recipe = parsed(**more)
    assert recipe_from_mapping(recipe.as_json()) == recipe
    assert recipe.renamed({"b": "q"}).renamed({"q": "b"}) == recipe


def test_models_that_only_the_tokenizer_names() -> None:
    rules = {
        "x": {"source": "d"},
        "y": {"source": {"kind": "model_token", "model": "e", "token": "t"}},
        "z": {"source": "a"},
    }
    recipe = parsed(tokenizer={"source": "c", "tokens": rules})
    assert recipe.model_names == ("a", "b")
    assert recipe.tokenizer_models == ("c", "d", "e")
    assert recipe.renamed({"c": "q", "e": "f"}).tokenizer_models == ("q", "d", "f")
    assert parsed(tokenizer_source="union").tokenizer_models == ()
    assert isinstance(parsed().tokenizer, type(None))


def test_output_is_typed() -> None:
    output = output_vocabulary(Vocabulary({"a": 0}, {}), (), ["b"], 4)
    assert isinstance(output, Output)
    assert (output.size, output.padding, output.rows) == (2, 2, 4)
