"""Make vocabulary_goldens.npz: what mergekit 0.1.5 makes of recipes with a tokenizer or a chat template.

    python tests/parity/make_vocabulary_goldens.py /opt/mk-venv/bin/python

mergekit's environment and the one change made to it are those of make_goldens.py; see there. The models are Llamas of
one layer whose tokenizers differ. The file holds `models` and `cases`, the JSON text of what the models are (files and
dtype) and of the recipes; `embedding/input/MODEL` and `head/input/MODEL` as float32; and for each case `embedding/CASE`,
`head/CASE` and `told/CASE`, the JSON text of the output's ids by token, added tokens, config values and chat template. Of
the templates that mergekit knows by name only what they render is kept (`rendered`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import make_goldens as common
import make_grammar_goldens as grammar
import numpy as np
import torch
import yaml
from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers import models as kinds

GOLDENS = Path(__file__).with_name("vocabulary_goldens.npz")

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

RUNNER = grammar.RUNNER.replace(', "--no-copy-tokenizer"', "")

NAMED = ("alpaca", "chatml", "exaone", "llama3", "mistral")

SAYS_1, SAYS_2 = (f"{{% for m in messages %}}[{n}]{{{{ m['content'] }}}}{{% endfor %}}" for n in (1, 2))

CONVERSATIONS: list[list[dict[str, str]]] = [
    [{"role": role, "content": content} for role, content in turns]
    for turns in (
        [("user", "Hi")],
        [("system", "Be brief."), ("user", "Hi")],
        [("user", " Hi \n"), ("assistant", " Yo \n"), ("user", "Q")],
        [("system", " S \n"), ("user", " U "), ("assistant", " A "), ("user", "V"), ("assistant", "B")],
        [("user", "U"), ("user", "V")],
        [("assistant", "A"), ("user", "U")],
        [],
    )
]


def tokenizer(
    plain: Sequence[str],
    added: Sequence[tuple[str, bool]] = (),
    merges: Sequence[tuple[str, str]] = (),
    kind: str = "bpe",
) -> str:
    """A tokenizer.json. `added` are tokens, and whether they are special."""
    ids = {token: index for index, token in enumerate(plain)}
    if kind == "unigram":
        made = Tokenizer(kinds.Unigram([(token, -float(index)) for token, index in ids.items()], 0, False))
        made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    elif kind == "wordpiece":
        made = Tokenizer(kinds.WordPiece(ids, unk_token="[UNK]"))
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    else:
        made = Tokenizer(kinds.BPE(ids, list(merges)))
        made.pre_tokenizer = pre_tokenizers.Whitespace()
    for content, special in added:
        token = AddedToken(content, special=special, normalized=False)
        (made.add_special_tokens if special else made.add_tokens)([token])
    return str(made.to_str())


def model(
    text: str | None, *, rows: int | None = None, dtype: str = "float32", tied: bool = False, **config: Any
) -> dict[str, Any]:
    """What a model is: its tokenizer files, rows, dtype and so on."""
    files: dict[str, str] = {}
    count = rows or 0
    if text is not None:
        files = {
            "tokenizer.json": text,
            "tokenizer_config.json": json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config}),
        }
        count = rows or Tokenizer.from_str(text).get_vocab_size()
    return {"files": files, "rows": count, "dtype": dtype, "tied": tied}


_BASE = tokenizer([*"abcdef", "ab"], [("<s>", True), ("<pad>", False)], [("a", "b")])
_A = tokenizer([*"fedcba", "ab", "zz", "x", "sp"], [("<s>", True), ("<im>", True), ("hello", False)], [("a", "b")])
_B = tokenizer([*"abcxqr"], [("<s>", True), ("hello", False), ("sp", True)])
_C = tokenizer([*"xbcq"], [("</s>", True)])

MODELS: dict[str, dict[str, Any]] = {
    "base": model(_BASE),
    "a": model(_A, chat_template=SAYS_1),
    "b": model(_B, rows=13, chat_template=SAYS_1 + "\n"),
    "c": model(_C, chat_template=SAYS_2),
    "tied": model(_A, tied=True),
    "bare": model(None, rows=9),
    "half": model(_A, dtype="bfloat16"),
    "other": model(_B, dtype="bfloat16"),
    "third": model(_BASE, dtype="bfloat16"),
    "late": model(
        tokenizer([*"cab"]),
        rows=9,
        bos_token="<bos>",
        pad_token="<pad>",
        additional_special_tokens=["<x1>"],
        added_tokens_decoder={
            "5": {
                "content": "<dec>",
                "special": False,
                "lstrip": True,
                "rstrip": False,
                "normalized": False,
                "single_word": False,
            }
        },
    ),
    "uni": model(tokenizer(["<unk>", "▁a", "▁b", "x", "uu"], [("<s>", True)], kind="unigram")),
    "piece": model(tokenizer(["[UNK]", "a", "##b", "c", "x"], [("[CLS]", True)], kind="wordpiece")),
}


def linear(*weights: tuple[str, float], **more: Any) -> dict[str, Any]:
    """A weighted sum."""
    models = [{"model": name, "parameters": {"weight": weight}} for name, weight in weights]
    return {"merge_method": "linear", "models": models, "parameters": {"normalize": False}, **more}


def only(name: str, *others: str, **more: Any) -> dict[str, Any]:
    """The aligned rows of one model."""
    return linear((name, 1.0), *((other, 0.0) for other in others), **more)


def tokens(**rules: Any) -> dict[str, Any]:
    """A tokenizer with rules for tokens."""
    return {"source": "union", "tokens": rules}


def from_token(name: str, **which: Any) -> dict[str, Any]:
    """The row of another token."""
    return {"kind": "model_token", "model": name, **which}


CASES: dict[str, dict[str, Any]] = {
    "union-base": only("base", "a", "b", base_model="base", tokenizer_source="union"),
    "union-a": only("a", "base", "b", base_model="base", tokenizer_source="union"),
    "union-b": only("b", "a", "base", base_model="base", tokenizer_source="union"),
    "union-means": only("base", "a", "b", "c", base_model="base", tokenizer={}),
    "union-no-base": only("c", "a", "b", tokenizer_source="union"),
    "base-a": only("a", "base", "b", base_model="base", tokenizer_source="base"),
    "base-b": only("b", "a", "base", base_model="base", tokenizer={"source": "base"}),
    "model-base": only("base", "a", "b", base_model="base", tokenizer_source="a"),
    "model-b": only("b", "a", "base", base_model="base", tokenizer_source={"model": {"path": "a"}}),
    "model-c": only("c", "a", "b", base_model="a", tokenizer={"source": "c"}),
    "arithmetic": {
        "merge_method": "task_arithmetic",
        "base_model": "base",
        "models": [{"model": "a", "parameters": {"weight": 0.7}}, {"model": "b", "parameters": {"weight": 0.4}}],
        "tokenizer_source": "union",
    },
    "ties": {
        "merge_method": "ties",
        "base_model": "third",
        "models": [
            {"model": "half", "parameters": {"weight": 0.7, "density": 1}},
            {"model": "other", "parameters": {"weight": 0.4, "density": 1}},
        ],
        "tokenizer_source": "union",
    },
    "slices": {
        "merge_method": "passthrough",
        "slices": [
            {"sources": [{"model": "a", "layer_range": [0, 1]}]},
            {"sources": [{"model": "b", "layer_range": [0, 1]}]},
        ],
        "tokenizer_source": "a",
    },
    "padded": only("base", "a", "b", base_model="base", tokenizer={"source": "union", "pad_to_multiple_of": 8}),
    "padded-half": only("third", "half", "other", base_model="third", tokenizer={"pad_to_multiple_of": 16}),
    "padded-not": only("base", "a", "b", base_model="base", tokenizer={"pad_to_multiple_of": 0}),
    "padded-exactly": only("base", "third", base_model="base", tokenizer={"source": "base", "pad_to_multiple_of": 9}),
    "half-mean": only("third", "half", "other", base_model="third", tokenizer_source="union"),
    "half-mean-f32": only("third", "half", "other", base_model="third", tokenizer_source="union", dtype="float32"),
    "half-mean-out": only(
        "third", "half", "other", base_model="third", tokenizer_source="union", dtype="float32", out_dtype="bfloat16"
    ),
    "mixed": only("third", "half", "b", base_model="third", tokenizer_source="union"),
    "mixed-half": only("third", "half", "b", base_model="third", tokenizer_source="union", dtype="bfloat16"),
    "tied": only("tied", "base", base_model="base", tokenizer_source="union"),
    "bare": only("bare", "base", "a", base_model="base", tokenizer_source="union"),
    "late": only("late", "c", base_model="late", tokenizer_source="base"),
    "late-union": only("c", "late", base_model="late", tokenizer_source="union"),
    "unigram": only("uni", "b", base_model="uni", tokenizer_source="union"),
    "wordpiece": only("b", "piece", base_model="piece", tokenizer_source="union"),
    "wordpiece-new": only("uni", "piece", "b", base_model="b", tokenizer_source="union"),
    "rule-model": only("base", "a", "b", base_model="base", tokenizer=tokens(x={"source": "b"}, zz={"source": "a"})),
    "rule-not-forced": only("a", "base", "b", base_model="base", tokenizer=tokens(x={"source": "b"})),
    "rule-forced": only(
        "a",
        "base",
        "b",
        base_model="base",
        tokenizer=tokens(x={"source": "b", "force": True}, a={"source": "b", "force": True}),
    ),
    "rule-token": only(
        "base",
        "a",
        "b",
        base_model="base",
        tokenizer=tokens(
            new={"source": from_token("b", token="q")},
            newer={"source": from_token("b", token_id=12)},
            c={"source": from_token("a", token_id=0), "force": True},
        ),
    ),
    "rule-zero": only(
        "base",
        "a",
        "b",
        base_model="base",
        tokenizer=tokens(
            new={"source": {"kind": "zero"}},
            c={"source": {"kind": "zero"}, "force": True},
            d={"source": {"kind": "zero"}},
        ),
    ),
    "rule-zero-lacking": only("b", "base", base_model="base", tokenizer=tokens(d={"source": {"kind": "zero"}})),
    "rule-over-base": only("b", "base", "a", base_model="base", tokenizer=tokens(d={"source": "a"})),
    "outside": only("base", "a", base_model="base", tokenizer_source="b"),
    "template-text": only(
        "a", "base", base_model="a", tokenizer_source="base", chat_template="{{ messages[0]['content'] }}"
    ),
    "template-kept": only("base", "a", base_model="base", tokenizer_source="a"),
    "template-base": only("base", "a", base_model="base", tokenizer_source="base"),
    "template-auto": only("base", "c", "a", "b", base_model="base", tokenizer_source="union", chat_template="auto"),
    "template-auto-one": only("base", "c", base_model="base", tokenizer_source="base", chat_template="auto"),
    "template-auto-none": only("base", "third", base_model="base", tokenizer_source="base", chat_template="auto"),
    "template-alone": only("base", "third", base_model="base", chat_template=SAYS_2),
    **{f"template-{name}": only("base", "third", base_model="base", chat_template=name) for name in NAMED},
}

REFUSED: dict[str, dict[str, Any]] = {
    "both": only("a", "base", base_model="base", tokenizer_source="union", tokenizer={"source": "union"}),
    "no-source-forced": only("a", "base", base_model="base", tokenizer=tokens(a={"force": True})),
    "unknown-token": only("a", "base", base_model="base", tokenizer=tokens(new={})),
    "lacking-token": only("a", "base", "b", base_model="base", tokenizer=tokens(e={"source": "b"})),
    "wrong-token": only("a", "b", base_model="b", tokenizer=tokens(new={"source": from_token("b", token="nope")})),
    "wrong-row": only("a", "b", base_model="b", tokenizer=tokens(new={"source": from_token("b", token_id=99)})),
    "neither": only("a", "b", base_model="b", tokenizer=tokens(new={"source": from_token("b")})),
    "both-ways": only(
        "a", "b", base_model="b", tokenizer=tokens(new={"source": from_token("b", token="q", token_id=3)})
    ),
    "kind": only("a", "b", base_model="b", tokenizer=tokens(new={"source": {"kind": "other"}})),
    "negative": only("a", "b", base_model="b", tokenizer={"pad_to_multiple_of": -4}),
    "nothing": only("a", "b", base_model="b", tokenizer={"source": None}),
    "base-without": only("bare", "a", base_model="bare", tokenizer_source="base"),
    "short-template": only("a", "b", base_model="a", chat_template="{{ x }}yyyyyyyyyyyy"),
    "no-template": only("a", "b", base_model="a", chat_template="no braces, but long enough"),
    "case": only("a", "b", base_model="a", chat_template="ChatML"),
}
"""What mergekit refuses in the middle of the merge, or, of chat templates, only logs."""


def tensors(name: str, seed: int) -> common.Model:
    """A model's."""
    generator = torch.Generator().manual_seed(seed)
    told = MODELS[name]
    shapes = {**common.shapes(), EMBEDDING: (told["rows"], common.HIDDEN), HEAD: (told["rows"], common.HIDDEN)}
    found = {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}
    if told["tied"]:
        del found[HEAD]
    return {key: values.to(getattr(torch, told["dtype"])) for key, values in found.items()}


def render(template: str, conversation: list[dict[str, str]], *, prompt: bool) -> str:
    """What a chat template makes of a conversation; how it fails begins with `!`."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    try:
        return environment.from_string(template).render(
            messages=conversation, add_generation_prompt=prompt, bos_token="<s>", eos_token="</s>"
        )
    except jinja2.TemplateError:
        return "!"


def told_by(out: Path) -> dict[str, Any]:
    """What an output's files say."""
    config = json.loads((out / "config.json").read_text())
    told: dict[str, Any] = {"vocab_size": config["vocab_size"], "template": None, "vocabulary": None}
    text = out / "tokenizer.json"
    if text.exists():
        found = Tokenizer.from_file(str(text))
        told["vocabulary"] = found.get_vocab()
        told["added"] = {
            item["content"]: [item["special"], item["normalized"]]
            for item in json.loads(text.read_text())["added_tokens"]
        }
    if (out / "chat_template.jinja").exists():
        told["template"] = (out / "chat_template.jinja").read_text()
    return told


def main() -> None:
    """Make the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", help="the Python of an environment with mergekit 0.1.5")
    parser.add_argument("-o", "--output", type=Path, default=GOLDENS)
    arguments = parser.parse_args()
    arrays: dict[str, Any] = {
        "models": np.array(json.dumps(MODELS)),
        "cases": np.array(json.dumps(CASES)),
        "refused": np.array(json.dumps(REFUSED)),
    }

    def keep(name: str, values: common.Model) -> None:
        for kind, key in (("embedding", EMBEDDING), ("head", HEAD)):
            if key in values:
                arrays[f"{kind}/{name}"] = values[key].float().numpy()

    rendered: dict[str, list[list[str]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for seed, (one, told) in enumerate(MODELS.items(), start=1):
            (folder / one).mkdir()
            values = tensors(one, seed)
            save_file(values, folder / one / "model.safetensors", metadata={"format": "pt"})
            config = {**common.CONFIG, "vocab_size": told["rows"], "torch_dtype": told["dtype"]}
            config["tie_word_embeddings"] = told["tied"]
            (folder / one / "config.json").write_text(json.dumps(config))
            for path, text in told["files"].items():
                (folder / one / path).write_text(text)
            keep(f"input/{one}", values)
        (folder / "runner.py").write_text(RUNNER)
        every = {**CASES, **{f"refused-{case}": recipe for case, recipe in REFUSED.items()}}
        for case, recipe in every.items():
            (folder / f"{case}.yaml").write_text(yaml.safe_dump(recipe))
        jobs = json.dumps([(f"{case}.yaml", f"out-{case}") for case in every])
        done = subprocess.run(
            [arguments.python, "runner.py", jobs],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"mergekit failed:\n{done.stderr[-4000:]}")
        for case in every:
            out = folder / f"out-{case}"
            failed = (out / "error.txt").exists()
            if failed or case.startswith("refused-"):
                told_error = (out / "error.txt").read_text().strip().splitlines()[-1] if failed else "NOT REFUSED"
                print(f"{case}: {told_error[:160]}")
                continue
            keep(case, load_file(out / "model.safetensors"))
            told = told_by(out)
            if case.removeprefix("template-") in NAMED:
                template = told.pop("template")
                rendered[case.removeprefix("template-")] = [
                    [render(template, turns, prompt=prompt) for prompt in (False, True)] for turns in CONVERSATIONS
                ]
            arrays[f"told/{case}"] = np.array(json.dumps(told))
    arrays["rendered"] = np.array(json.dumps(rendered))
    np.savez_compressed(arguments.output, allow_pickle=False, **arrays)
    print(f"{arguments.output}: {arguments.output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
