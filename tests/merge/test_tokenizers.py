"""Merges whose recipes ask for a vocabulary or a chat template: files, configs, plans, and what goes wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from merge_cases import Lab, Tensors

from mpfs.errors import BadInputError, MismatchError, MPFSError, RecipeError, UsageError
from mpfs.merge.derived import PREFIX
from mpfs.merge.recipe.chat_templates import CHAT_TEMPLATES

pytest.importorskip("tokenizers")
pytest_plugins = ["merge_fixtures"]

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SAYS = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


def tokenizer(words: Sequence[str], special: Sequence[str] = ()) -> bytes:
    """A tokenizer.json."""
    added = [{"id": len(words) + at, "content": token, "special": True, **FLAGS} for at, token in enumerate(special)]
    vocabulary = {word: index for index, word in enumerate(words)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": words[0]}
    value = {"version": "1.0", "added_tokens": added, "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    return json.dumps(value).encode()


def values(rows: int, seed: int, *, head: bool = True, dtype: torch.dtype = torch.float32) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    names = (EMBEDDING, HEAD) if head else (EMBEDDING,)
    found = {name: torch.randn(rows, 40, generator=generator).to(dtype) for name in names}
    return {**found, "model.layers.0.w": torch.randn(6, 5, generator=generator).to(dtype)}


def add(
    lab: Lab, name: str, words: Sequence[str], special: Sequence[str] = (), *, rows: int = 0, seed: int = 0,
    files: dict[str, bytes] | None = None, config: dict[str, Any] | None = None, head: bool = True,
) -> Tensors:  # fmt: skip
    """Import a model with a tokenizer."""
    count = rows or len(words) + len(special)
    tensors = values(count, seed or sum(map(ord, name)), head=head)
    told = {"vocab_size": count, "tie_word_embeddings": not head, **(config or {})}
    given = {"config.json": json.dumps(told).encode(), "tokenizer.json": tokenizer(words, special), **(files or {})}
    lab.add(name, tensors, {path: content for path, content in given.items() if content})
    return tensors


def asked(*names: str, base: str | None = "base", **more: Any) -> dict[str, Any]:
    """The first model's rows, aligned."""
    models = [{"model": name, "parameters": {"weight": float(not at)}} for at, name in enumerate(names)]
    recipe = {"merge_method": "linear", "models": models, "parameters": {"normalize": False}, **more}
    return recipe if base is None else {**recipe, "base_model": base}


def files_of(lab: Lab, ref: str = "merged") -> dict[str, bytes]:
    reader = lab.repository.reader(ref)
    paths = [file.path for file in lab.repository.snapshot(ref).files if not file.path.endswith(".safetensors")]
    return {path: b"".join(reader.open(path).iter_chunks()) for path in paths}


def derived(lab: Lab) -> list[str]:
    return [ref.name for ref in lab.repository.refs() if ref.name.startswith(PREFIX)]


WORDS = [f"w{index}" for index in range(60)]


def test_what_stays_is_shared_and_made_once(lab: Lab) -> None:
    """New tokens go to the end: the base's blocks before them are the same, and nothing is made of b, which has all."""
    before = add(lab, "base", WORDS)
    add(lab, "a", [*WORDS, "new"])
    report = lab.merge(asked("base", "a", tokenizer_source="union"))
    assert lab.merge(asked("base", "a", tokenizer_source="union")).commit == report.commit
    (name,) = derived(lab)
    for key in (EMBEDDING, HEAD):
        old, new = lab.blocks("base")[key], lab.blocks(name)[key]
        assert new.shape == (61, 40)
        assert new.blocks[: len(old.blocks) - 1] == old.blocks[:-1]
        assert torch.equal(lab.load()[key][:60], before[key])
    assert {item.identity for item in lab.repository.log("merged", inputs=True)} >= {lab.repository.resolve("base")}
    assert lab.blocks(name)["model.layers.0.w"] == lab.blocks("base")["model.layers.0.w"]


def test_plans_are_the_same_wherever_and_whenever_they_are_made(tmp_path: Path) -> None:
    plans = []
    for place in ("one", "two"):
        lab = Lab(tmp_path / place)
        add(lab, "base", WORDS)
        add(lab, "a", list(reversed(WORDS)), ["<x>"])
        recipe = asked("a", "base", tokenizer={"pad_to_multiple_of": 64}, chat_template="chatml")
        plans.append(lab.repository.plan(recipe))
        commits = {ref.name: ref.commit for ref in lab.repository.refs()}
        for name in derived(lab):
            lab.repository.remove_ref(name)
        again = lab.repository.plan(recipe)
        assert again.plan.encode() == plans[-1].plan.encode()
        assert {name: commits[name] for name in derived(lab)} == {
            name: lab.repository.resolve(name) for name in derived(lab)
        }
        lab.close()
    assert [tensor.as_json() for tensor in plans[0].plan.tensors] == [
        tensor.as_json() for tensor in plans[1].plan.tensors
    ]
    assert plans[0].plan.notes == plans[1].plan.notes


def test_the_plan_says_what_will_be_done(lab: Lab) -> None:
    add(lab, "base", WORDS, ["<s>"])
    add(lab, "a", [*WORDS[:50], "x", "y"], ["<im>"])
    rules = {"<new>": {"source": {"kind": "model_token", "model": "a", "token": "x"}}}
    notes = lab.repository.plan(asked("a", "base", tokenizer={"tokens": rules, "pad_to_multiple_of": 16})).plan.notes
    assert notes[0] == (
        "tokenizer: 61 tokens of base, 3 new ones of a ('x', 'y', '<im>'), 1 that the recipe lists ('<new>'); padded to 80 rows"
    )
    names = f"{HEAD}, {EMBEDDING}"
    assert notes[1] == f"a: rows of {names}: 54 of its own, 11 of base, 15 of padding"
    assert notes[2] == f"base: rows of {names}: 61 of its own, 4 of a, 15 of padding"


def test_the_donors_files_and_numbers(lab: Lab) -> None:
    """With another model's tokenizer come its special tokens' numbers and its generation config."""
    ids = {"bos_token_id": 60, "eos_token_id": [60, 3], "pad_token_id": 61, "image_token_id": 5}
    files = {
        "generation_config.json": b'{"eos_token_id": 60}',
        "merges.txt": b"base",
        "vocab.json": b"{}",
        "other.txt": b"kept",
    }
    add(lab, "base", WORDS, ["<s>", "<pad>"], config=ids, files=files)
    theirs = {"tokenizer_config.json": json.dumps({"chat_template": SAYS}).encode()}
    add(lab, "a", list(reversed(WORDS)), ["<im>", "<s>"], config={"eos_token_id": 60}, files=theirs)
    report = lab.merge(asked("base", "a", tokenizer_source="a"))
    found = files_of(lab)
    config = json.loads(found["config.json"])
    assert config["bos_token_id"] == 61  # <s>, where a has it
    assert config["eos_token_id"] == 60  # a's own
    assert config["pad_token_id"] is None  # a has no such token
    assert config["image_token_id"] == 54  # w5
    assert any("pad_token_id 61 is no token of the output" in note for note in report.notes)
    assert json.loads(found["generation_config.json"]) == {"eos_token_id": 61}
    assert found["tokenizer.json"] == files_of(lab, "a")["tokenizer.json"]
    assert json.loads(found["tokenizer_config.json"])["chat_template"] == SAYS
    assert found["other.txt"] == b"kept"
    assert not {"merges.txt", "vocab.json"} & set(found)


def test_the_donors_generation_config(lab: Lab) -> None:
    add(lab, "base", WORDS, files={"generation_config.json": b'{"top_k": 1}'})
    add(lab, "a", WORDS[::-1], files={"generation_config.json": b'{"top_k": 2}'})
    lab.merge(asked("base", "a", tokenizer_source="a"))
    assert files_of(lab)["generation_config.json"] == b'{"top_k": 2}'
    lab.merge(asked("base", "a", tokenizer_source="union"))
    assert files_of(lab)["generation_config.json"] == b'{"top_k": 1}'


def test_every_file_that_lists_added_tokens_follows(lab: Lab) -> None:
    decoder = {"60": {"content": "<s>", "special": True, **FLAGS}}
    told = {
        "tokenizer_config.json": json.dumps({"added_tokens_decoder": decoder}).encode(),
        "added_tokens.json": b'{"<s>": 60}',
    }
    add(lab, "base", WORDS, ["<s>"], files=told)
    add(lab, "a", WORDS, ["<im>"])
    lab.merge(asked("base", "a", tokenizer_source="union"))
    found = files_of(lab)
    listed = json.loads(found["tokenizer_config.json"])["added_tokens_decoder"]
    assert listed == {**decoder, "61": {"content": "<im>", "special": True, **FLAGS}}
    assert json.loads(found["added_tokens.json"]) == {"<s>": 60, "<im>": 61}
    assert json.loads(found["config.json"])["vocab_size"] == 62


@pytest.mark.slow
def test_transformers_loads_the_result(lab: Lab, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    told = {
        "tokenizer_config.json": b'{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "pad_token": "<late>"}'
    }
    add(lab, "base", WORDS, ["<s>"], files=told, rows=62)
    add(lab, "a", [*WORDS, "more"], ["<im>"])
    lab.merge(asked("base", "a", tokenizer_source="union", chat_template="chatml"))
    lab.repository.checkout("merged", tmp_path / "out")
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert len(loaded) == 64 == len(lab.load()[EMBEDDING])
    assert loaded("w3 more <im>")["input_ids"] == [3, 62, 63]
    assert loaded.chat_template == CHAT_TEMPLATES["chatml"]
    assert loaded.pad_token_id == 61


def test_rows_of_a_tied_model_come_from_the_heads_of_others(lab: Lab) -> None:
    base = add(lab, "base", WORDS)
    tied = add(lab, "tied", WORDS[:50], head=False)
    lab.merge(asked("tied", "base", tokenizer_source="union"))
    assert torch.equal(lab.load()[HEAD], torch.cat([tied[EMBEDDING], base[HEAD][50:]]))
    assert json.loads(files_of(lab)["config.json"])["tie_word_embeddings"] is False
    lab.merge(asked("tied", base="tied", tokenizer_source="base"))
    assert HEAD not in lab.load()


def test_biases_of_heads_move_with_the_head(lab: Lab) -> None:
    for name, words in (("base", WORDS), ("a", WORDS[::-1])):
        tensors = {**values(60, len(words)), "lm_head.bias": torch.arange(60.0)}
        lab.add(name, tensors, {"tokenizer.json": tokenizer(words)})
    lab.merge(asked("a", "base", tokenizer_source="base"))
    assert lab.load()["lm_head.bias"].tolist() == list(range(59, -1, -1))


def test_tokens_without_rows(lab: Lab) -> None:
    """Words beyond a model's rows count as absent; what nobody has a row for is zero, and said to be."""
    base = add(lab, "base", [*WORDS, "none"], rows=60)
    add(lab, "a", WORDS[::-1], rows=50)
    report = lab.merge(asked("a", "base", tokenizer_source="union"))
    found = lab.load()[EMBEDDING]
    assert torch.equal(found[:10], base[EMBEDDING][:10])
    assert not found[60].any()
    assert any("no model has a row for, and which get zeros: 'none'" in note for note in report.notes)


def test_a_vocabulary_without_a_token_in_common(lab: Lab) -> None:
    add(lab, "base", WORDS)
    add(lab, "other", ["x", "y", "z"])
    report = lab.merge(asked("base", tokenizer={"source": "other", "pad_to_multiple_of": 2}))
    assert lab.load()[EMBEDDING].tolist() == [[0.0] * 40] * 4
    assert any("3 zero, 1 of padding" in note for note in report.notes)


def test_a_model_beside_the_merge_lends_rows(lab: Lab) -> None:
    add(lab, "base", WORDS)
    lent = add(lab, "lender", ["x", "y"])
    rules = {"y": {"source": "lender"}, "z": {"source": {"kind": "model_token", "model": "lender", "token_id": 0}}}
    report = lab.merge(asked("base", tokenizer={"source": "base", "tokens": rules}))
    assert torch.equal(lab.load()[EMBEDDING][60:], lent[EMBEDDING].flip(0))
    plan = lab.repository.find_plan(report.plan).plan
    assert [model.name for model in plan.models] == ["base"]


def test_fidelity_and_budgets(lab: Lab) -> None:
    """What is measured is the merge of the aligned models."""
    add(lab, "base", WORDS)
    add(lab, "a", [*WORDS[::-1], "x"])
    recipe = asked("a", merge_method="task_arithmetic", tokenizer_source="union")
    recipe.pop("parameters")
    full = lab.merge(recipe, verify_fidelity=True)
    assert full.figures.fidelity == pytest.approx(1.0)
    assert json.loads(json.dumps(lab.repository.find_plan(full.plan).plan.recipe))["tokenizer"] == {"source": "union"}


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float32"])
def test_rows_of_another_dtype(lab: Lab, dtype: str | None) -> None:
    """What comes from others is taken in the dtype of the merge; a model that only moves its own rows keeps its own."""
    words = [*WORDS, "x"]
    base, tuned = values(60, 1, dtype=torch.bfloat16), values(61, 2)
    lab.add("base", base, {"tokenizer.json": tokenizer(WORDS)})
    lab.add("a", tuned, {"tokenizer.json": tokenizer(words[::-1])})
    lab.merge(asked("base", "a", tokenizer_source="union", **({} if dtype is None else {"dtype": dtype})))
    wanted = torch.cat([base[EMBEDDING].float(), tuned[EMBEDDING][:1]])
    wide = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    found = lab.load()[EMBEDDING]
    assert found.dtype == wide
    assert torch.equal(found, wanted.to(wide))
    made = {name: lab.blocks(name)[EMBEDDING].dtype for name in derived(lab)}
    assert {name.split("-")[0]: kind for name, kind in made.items()} == {
        "derived/a": "F32",
        "derived/base": "BF16" if dtype == "bfloat16" else "F32",
    }


# -- chat templates ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("here", ["config", "file", "processor", "several", "nowhere"])
def test_a_template_goes_where_one_was(lab: Lab, here: str) -> None:
    given: dict[str, dict[str, bytes]] = {
        "config": {"tokenizer_config.json": b'{"a": 1, "chat_template": "old"}'},
        "file": {"chat_template.jinja": b"old", "tokenizer_config.json": b'{"a": 1, "chat_template": "older"}'},
        "processor": {"chat_template.json": b'{"chat_template": "old"}', "tokenizer_config.json": b'{"a": 1}'},
        "several": {
            "tokenizer_config.json": b'{"a": 1, "chat_template": [{"name": "default", "template": "old"}]}',
            "additional_chat_templates/rag.jinja": b"old",
        },
        "nowhere": {},
    }
    add(lab, "base", WORDS, files=given[here])
    report = lab.merge(asked("base", chat_template=SAYS))
    found = files_of(lab)
    config = json.loads(found.get("tokenizer_config.json", b"{}"))
    in_file = here in ("file", "nowhere")
    assert found.get("chat_template.jinja") == (SAYS.encode() if in_file else None)
    assert config == ({} if here == "nowhere" else {"a": 1} if in_file else {"a": 1, "chat_template": SAYS})
    assert json.loads(found.get("chat_template.json", b"null")) == (
        {"chat_template": SAYS} if here == "processor" else None
    )
    assert not [path for path in found if path.startswith("additional")]
    assert not any("rows of" in note for note in report.notes)


def test_auto_counts_and_prefers_the_first(lab: Lab) -> None:
    def one(text: str) -> dict[str, bytes]:
        return {"chat_template.jinja": text.encode()}

    add(lab, "base", WORDS)
    for name, text in (("a", SAYS + "1"), ("b", SAYS + "2"), ("c", SAYS + "2\n")):
        add(lab, name, WORDS, files=one(text))
    lab.merge(asked("b", "a", "base", chat_template="auto"))
    assert files_of(lab)["chat_template.jinja"].decode() == SAYS + "2"
    lab.merge(asked("a", "b", "c", "base", chat_template="auto"))
    assert files_of(lab)["chat_template.jinja"].decode() == SAYS + "2"
    report = lab.merge(asked("base", chat_template="auto"))
    assert "chat_template: none of the models has one" in report.notes
    assert "chat_template.jinja" not in files_of(lab)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("chatml", "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"),
        (
            "llama3",
            "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nU<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        ("mistral", "<s> [INST] S\n\nU [/INST]"),
        ("alpaca", "S\n\n### Instruction:\nU\n\n### Response:\n"),
        ("exaone", "[|system|]S[|endofturn|]\n[|user|]U\n[|assistant|]"),
    ],
)
def test_what_named_templates_say(name: str, said: str) -> None:
    jinja2 = pytest.importorskip("jinja2")
    turns = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(CHAT_TEMPLATES[name])
    assert template.render(messages=turns, add_generation_prompt=True, bos_token="<s>", eos_token="</s>") == said


# -- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "kind", "message"),
    [
        ({"tokenizer.json": b"{"}, BadInputError, "a: tokenizer.json cannot be read"),
        ({"tokenizer.json": b'{"model": 5}'}, BadInputError, "a: tokenizer.json cannot be read"),
        (
            {"tokenizer.json": tokenizer(["a"]).replace(b'"a": 0', b'"a": 4294967295')},
            BadInputError,
            "up to 4,294,967,295",
        ),
        ({"tokenizer_config.json": b"[]"}, BadInputError, "tokenizer_config.json: not a JSON object"),
        ({"tokenizer.json": b"", "tokenizer.model": b"x"}, BadInputError, "only tokenizer.model.*save_pretrained"),
        ({"tokenizer.json": b"", "vocab.json": b'{"a": "b"}'}, BadInputError, "vocab.json: not a vocabulary"),
    ],
)
def test_tokenizers_that_cannot_be_read(lab: Lab, files: dict[str, bytes], kind: type[MPFSError], message: str) -> None:
    add(lab, "base", WORDS)
    add(lab, "a", WORDS, files=files)
    with pytest.raises(kind, match=message):
        lab.repository.plan(asked("a", "base", tokenizer_source="union"))
    assert not derived(lab)


@pytest.mark.parametrize("path", ["vocab.json", "vocab.txt"])
def test_older_tokenizers_are_read(lab: Lab, path: str) -> None:
    """Their vocabularies count; tokens can be added to none."""
    words = WORDS[::-1]
    content = json.dumps({word: at for at, word in enumerate(words)}) if path == "vocab.json" else "\n".join(words)
    base = add(lab, "base", WORDS)
    add(lab, "a", words, files={"tokenizer.json": b"", path: content.encode()}, rows=60)
    lab.merge(asked("base", "a", tokenizer_source="a"))
    assert torch.equal(lab.load()[EMBEDDING], base[EMBEDDING].flip(0))
    with pytest.raises(
        BadInputError, match=r"a: tokens are to be added to its tokenizer, which has no tokenizer\.json"
    ):
        lab.repository.plan(
            asked("base", "a", tokenizer={"source": "a", "tokens": {"n": {"source": {"kind": "zero"}}}})
        )


def test_the_library_is_an_extra(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    add(lab, "base", WORDS)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UsageError, match=r"pip install 'mpfs\[tokenizers\]'"):
        lab.repository.plan(asked("base", tokenizer_source="union"))
    lab.merge(asked("base", chat_template="llama3"))


def test_rows_of_other_widths(lab: Lab) -> None:
    add(lab, "base", WORDS)
    tensors = {name: torch.zeros(61, 44) for name in (EMBEDDING, HEAD)}
    lab.add("a", {**tensors, "model.layers.0.w": torch.zeros(6, 5)}, {"tokenizer.json": tokenizer([*WORDS, "x"])})
    with pytest.raises(MismatchError, match="shapes differ"):
        lab.repository.plan(asked("base", "a", tokenizer_source="union"))


def test_all_that_is_wrong_with_tokens_is_told(lab: Lab) -> None:
    add(lab, "base", WORDS)
    rules: dict[str, Any] = {
        "new": {},
        "newer": {"source": "base"},
        "row": {"source": {"kind": "model_token", "model": "base", "token_id": 60}},
    }
    with pytest.raises(RecipeError) as caught:
        lab.repository.plan(asked("base", tokenizer={"tokens": rules}))
    told: Any = caught.value.details["problems"]
    assert [item["path"] for item in told] == [
        "tokenizer.tokens.new",
        "tokenizer.tokens.newer.source",
        "tokenizer.tokens.row.source",
    ]
