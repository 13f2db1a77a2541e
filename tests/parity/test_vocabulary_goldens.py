"""Vocabularies and chat templates against what mergekit 0.1.5 made of the same recipes (make_vocabulary_goldens.py).

The numbers of new tokens are arbitrary in mergekit (the order of a hash map), so rows are compared token by token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from mpfs.errors import MPFSError
from mpfs.merge.recipe.chat_templates import CHAT_TEMPLATES
from mpfs.repository import Repository

pytest.importorskip("tokenizers")

GOLDENS = Path(__file__).with_name("vocabulary_goldens.npz")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

REFUSED = {
    "both": "tokenizer_source already",
    "no-source-forced": "force needs a source",
    "unknown-token": "no model has this token",
    "lacking-token": "b has no 'e'",
    "wrong-token": "b has no 'nope'",
    "wrong-row": "b has no row 99",
    "neither": "one of token and token_id",
    "both-ways": "one of token and token_id",
    "kind": "neither zero nor model_token",
    "negative": "a whole number from 0",
    "nothing": "union, base or a model's name, not nothing",
    "base-without": "bare has no tokenizer files",
    "short-template": "no jinja template",
    "no-template": "no jinja template",
    "case": "did you mean chatml",
}

OWN_WORDS: dict[str, Callable[[str], str]] = {
    "chatml": lambda text: text,
    "mistral": lambda text: text,
    "llama3": lambda text: text.replace("<|eot_id|>\n", "<|eot_id|>"),
    "exaone": lambda text: "\n".join(text.split()).replace("\n[|endofturn|]", "[|endofturn|]"),
    "alpaca": lambda text: text.strip().replace("\n\n", "\n").replace("### ", "\n### ").replace("\n\n", "\n").strip(),
}
"""What is left of a rendered template when mergekit's slips in it (see mergekit-compatibility.md) are overlooked."""


@cache
def goldens() -> dict[str, NDArray[Any]]:
    with np.load(GOLDENS, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


@cache
def stored(name: str) -> Any:
    return json.loads(str(goldens()[name]))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Repository]:
    """The models that mergekit was given, as far as vocabularies go."""
    root = tmp_path_factory.mktemp("vocabulary")
    with Repository.create(root / "repo", block_size=4096, map_size=1 << 28, author="tester") as repository:
        for name, told in stored("models").items():
            (root / name).mkdir()
            kinds = (("embedding", EMBEDDING), ("head", HEAD))
            tensors = {
                key: torch.from_numpy(goldens()[f"{kind}/input/{name}"])
                for kind, key in kinds
                if f"{kind}/input/{name}" in goldens()
            }
            tensors["model.layers.0.mlp.up_proj.weight"] = torch.ones(3, 4)
            tensors = {key: values.to(getattr(torch, told["dtype"])) for key, values in tensors.items()}
            save_file(tensors, root / name / "model.safetensors", metadata={"format": "pt"})
            config = {"vocab_size": told["rows"], "num_hidden_layers": 1, "tie_word_embeddings": told["tied"]}
            (root / name / "config.json").write_text(json.dumps(config))
            for path, text in told["files"].items():
                (root / name / path).write_text(text)
            repository.import_checkpoint(root / name, name, threads=1)
        yield repository


def files_of(repository: Repository, ref: str) -> dict[str, str]:
    reader = repository.reader(ref)
    names = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    present = {file.path for file in repository.snapshot(ref).files}
    return {path: b"".join(reader.open(path).iter_chunks()).decode() for path in names if path in present}


@pytest.mark.parametrize("case", stored("cases"))
def test_equals_mergekit(repository: Repository, case: str) -> None:
    from tokenizers import Tokenizer

    recipe, told = stored("cases")[case], stored(f"told/{case}")
    report = repository.merge(recipe, "merged", threads=1)
    files, found = files_of(repository, "merged"), repository.load("merged")
    assert json.loads(files["config.json"])["vocab_size"] == told["vocab_size"]
    text = json.loads(files["tokenizer.json"])
    ours = Tokenizer.from_str(files["tokenizer.json"]).get_vocab()
    # What only other files tell of is added when the tokenizer is loaded, and by mergekit when it is saved.
    late = {token for token in told["vocabulary"] if token not in ours}
    assert late <= {"<dec>", "<bos>", "<pad>", "<x1>"}
    assert set(ours) == set(told["vocabulary"]) - late
    ours |= {token: told["vocabulary"][token] for token in late}
    added = {item["content"]: [item["special"], item["normalized"]] for item in text["added_tokens"]}
    named_special = {"<pad>"}  # transformers makes a token that is named in tokenizer_config.json a special one
    for token, flags in told["added"].items():
        if token not in late and token not in named_special:
            assert added[token] == flags, token
    kinds = (("embedding", EMBEDDING), ("head", HEAD))
    for kind, key in kinds:
        if f"{kind}/{case}" not in goldens():
            assert key not in found
            continue
        wanted = torch.from_numpy(goldens()[f"{kind}/{case}"])
        assert len(found[key]) == len(wanted) == told["vocab_size"]
        for token, row in told["vocabulary"].items():
            mine = found[key][ours[token]].float()
            if case == "slices" and kind == "head" and not wanted[row].any():
                # Only the last slice's models count there, and a token that these lack has nothing but zeros.
                assert torch.equal(mine, torch.from_numpy(goldens()["head/input/a"])[ours[token]])
                continue
            if case == "union-means" and token in ("x", "q"):
                # The mean of three, which mergekit sums in the order of a set.
                torch.testing.assert_close(mine, wanted[row], rtol=2e-7, atol=2e-7)
            else:
                assert torch.equal(mine, wanted[row]), (kind, token)
        for row in range(len(ours), len(wanted)):
            # Padding is a mean over all rows, summed in float64 here.
            torch.testing.assert_close(found[key][row].float(), wanted[row], rtol=2e-7, atol=3e-8)
    if "base_model" in recipe:  # else the tokenizer is that of the first in a set
        check_template(case, files, told)
    assert any("tokenizer: " in note for note in report.notes) == (
        {"tokenizer", "tokenizer_source"} & set(recipe) != set()
    )


def check_template(case: str, files: dict[str, str], told: dict[str, Any]) -> None:
    template = json.loads(files.get("tokenizer_config.json", "{}")).get("chat_template")
    if "template" in told:
        assert (template or None) == (told["template"] or None) or template.strip() == told["template"].strip()
    else:
        assert template == CHAT_TEMPLATES[case.removeprefix("template-")]


@pytest.mark.parametrize("name", sorted(CHAT_TEMPLATES))
def test_named_templates_say_the_same(name: str) -> None:
    jinja2 = pytest.importorskip("jinja2")
    from make_vocabulary_goldens import CONVERSATIONS, render

    assert jinja2
    for turns, answers in zip(CONVERSATIONS, stored("rendered")[name], strict=True):
        for prompt, theirs in zip((False, True), answers, strict=True):
            ours = render(CHAT_TEMPLATES[name], turns, prompt=prompt)
            if turns or theirs != "!":
                assert OWN_WORDS[name](ours) == OWN_WORDS[name](theirs)


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_what_mergekit_refuses(repository: Repository, case: str) -> None:
    with pytest.raises(MPFSError, match=REFUSED[case]):
        repository.plan(stored("refused")[case])


def test_every_refusal_is_tried() -> None:
    assert set(REFUSED) == set(stored("refused"))
