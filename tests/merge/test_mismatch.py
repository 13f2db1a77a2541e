"""Models that do not quite fit: vocabularies of other sizes, tied heads, methods that need more models than have a tensor."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from merge_cases import Lab, Tensors, config, recipe

from mpfs.errors import MismatchError
from mpfs.merge.derived import PREFIX

pytest_plugins = ["merge_fixtures"]

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def llama(words: int, seed: int, *, head: bool = True, layers: int = 2, dtype: torch.dtype = torch.float32) -> Tensors:
    """A model of some words and layers."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (words, 24)}
    shapes |= {f"model.layers.{layer}.mlp.weight": (40, 24) for layer in range(layers)}
    shapes["model.norm.weight"] = (24,)
    if head:
        shapes[HEAD] = (words, 24)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def add(lab: Lab, name: str, tensors: Tensors, **more: object) -> None:
    values = {"vocab_size": len(tensors[EMBEDDING]), "num_hidden_layers": 2, **more}
    lab.add(name, tensors, {"config.json": config(**values)})


def config_of(lab: Lab, ref: str = "merged") -> dict[str, Any]:
    value: dict[str, Any] = json.loads(b"".join(lab.repository.reader(ref).open("config.json").iter_chunks()))
    return value


@pytest.mark.parametrize(("ours", "theirs"), [(70, 64), (64, 70), (513, 100)])
@pytest.mark.parametrize("method", ["task_arithmetic", "linear", "slerp"])
def test_vocabularies_are_cut(lab: Lab, method: str, ours: int, theirs: int) -> None:
    """Case M7, with the policy crop: as if both had been cut before."""
    base, expert = llama(ours, 1), llama(theirs, 2)
    add(lab, "base", base)
    add(lab, "e0", expert)
    asked = recipe(method, 1, parameters={"t": 0.3})
    with pytest.raises(MismatchError, match=r"--on-mismatch crop.*--on-mismatch base"):
        lab.merge(asked)
    report = lab.merge(asked, on_mismatch="crop")
    fewest = min(ours, theirs)
    assert any(f"to {fewest} words" in note for note in report.notes)
    for name, tensors in (("base", base), ("e0", expert)):
        cut = {key: x[:fewest].clone() if len(x) == len(tensors[EMBEDDING]) else x for key, x in tensors.items()}
        add(lab, name, cut)
    lab.merge(asked, into="wanted")
    assert lab.repository.snapshot("merged").tensors == lab.repository.snapshot("wanted").tensors
    assert config_of(lab)["vocab_size"] == fewest


def test_a_cut_model_is_made_once_and_shares_its_blocks(lab: Lab) -> None:
    add(lab, "base", llama(4000, 1, dtype=torch.bfloat16))
    add(lab, "e0", llama(3990, 2, dtype=torch.bfloat16))
    commit = lab.merge(recipe("task_arithmetic", 1), on_mismatch="crop").commit
    assert lab.merge(recipe("task_arithmetic", 1), on_mismatch="crop").commit == commit
    derived = [ref.name for ref in lab.repository.refs() if ref.name.startswith(PREFIX)]
    assert len(derived) == 1
    before, after = lab.blocks("base")[EMBEDDING], lab.blocks(derived[0])[EMBEDDING]
    assert after.blocks[:-1] == before.blocks[: len(after.blocks) - 1]
    assert len(set(after.blocks) - set(before.blocks)) <= 1
    inputs = lab.repository.log("merged", inputs=True)
    assert {item.identity for item in inputs} >= {lab.repository.resolve("base")}


@pytest.mark.parametrize("tied", ["base", "e0"])
def test_a_tied_head(lab: Lab, tied: str) -> None:
    """Case M8: the embedding stands in for a head that is not stored; the output has one, and its config says so."""
    models = {name: llama(64, seed, head=name != tied) for seed, name in enumerate(("base", "e0"))}
    for name, tensors in models.items():
        add(lab, name, tensors, tie_word_embeddings=name == tied)
    report = lab.merge(recipe("task_arithmetic", 1, weights=[1.0]))
    assert any(f"{tied} ties {HEAD} to {EMBEDDING}" in note for note in report.notes)
    wanted = models["e0"].get(HEAD, models["e0"][EMBEDDING])
    torch.testing.assert_close(lab.load()[HEAD], wanted)
    assert config_of(lab)["tie_word_embeddings"] is False


def test_heads_that_are_all_tied_stay_so(lab: Lab) -> None:
    for seed, name in enumerate(("base", "e0")):
        add(lab, name, llama(64, seed, head=False), tie_word_embeddings=True)
    lab.merge(recipe("task_arithmetic", 1))
    assert HEAD not in lab.load()
    assert config_of(lab)["tie_word_embeddings"] is True


def test_a_head_that_is_missing_and_not_tied(lab: Lab) -> None:
    add(lab, "base", llama(64, 1, head=False), tie_word_embeddings=False)
    add(lab, "e0", llama(64, 2))
    with pytest.raises(MismatchError, match="e0 has 1 tensor that the base has not: lm_head"):
        lab.merge(recipe("task_arithmetic", 1))


def test_too_few_models_for_the_method(lab: Lab) -> None:
    """model_stock wants two experts: where only one has a tensor, the base's is kept, and listed."""
    models = [llama(64, seed) for seed in range(3)]
    del models[2]["model.norm.weight"]
    for name, tensors in zip(("base", "e0", "e1"), models, strict=True):
        add(lab, name, tensors)
    report = lab.merge(recipe("model_stock", 2))
    assert torch.equal(lab.load()["model.norm.weight"], models[0]["model.norm.weight"])
    assert any("e1 lacks 1 tensor" in note for note in report.notes)
    lab.merge(recipe("model_stock", 2, out_dtype="bfloat16"))
    assert torch.equal(lab.load()["model.norm.weight"], models[0]["model.norm.weight"].bfloat16())


def test_only_one_model_has_it(lab: Lab) -> None:
    models = [llama(64, seed) for seed in range(2)]
    del models[0]["model.norm.weight"]
    for index, tensors in enumerate(models):
        add(lab, f"e{index}", tensors)
    lab.merge(recipe("nuslerp", 2, base=None, out_dtype="bfloat16"))
    assert torch.equal(lab.load()["model.norm.weight"], models[1]["model.norm.weight"].bfloat16())


def test_models_of_other_lengths(lab: Lab) -> None:
    add(lab, "e0", llama(64, 1))
    add(lab, "e1", llama(64, 2, layers=3), num_hidden_layers=3)
    with pytest.raises(MismatchError, match=r"model.layers has 3 layers in e1, 2 in e0"):
        lab.merge(recipe("linear", 2, base=None))


def test_quantised_weights(lab: Lab) -> None:
    """The scales are floats that could be averaged, which would be wrong."""
    for seed, name in enumerate(("base", "e0")):
        values = llama(64, seed)
        values["model.layers.0.q.weight"] = torch.full((16, 16), seed + 1.0).to(torch.float8_e4m3fn)
        values["model.layers.0.q.weight_scale"] = torch.full((1,), seed + 1.0)
        add(lab, name, values, quantization_config={"quant_method": "fp8"})
    with pytest.raises(MismatchError, match=r"quantised weights cannot be merged: .*weight \(FP8 in base\)"):
        lab.merge(recipe("task_arithmetic", 1))
    lab.merge(recipe("task_arithmetic", 1), on_mismatch="base")
    assert lab.load()["model.layers.0.q.weight_scale"].item() == 1.0


def test_tensors_outside_the_language_model_are_merged(lab: Lab) -> None:
    """Case M9: what mergekit's templates do not know is merged like all else; integers are carried over."""
    for seed, name in enumerate(("base", "e0")):
        values = llama(64, seed)
        values["visual.x"] = torch.full((40,), float(seed))
        values["visual.ids"] = torch.arange(12)
        add(lab, name, values)
    report = lab.merge(recipe("task_arithmetic", 1, weights=[0.25]))
    assert set(lab.load()["visual.x"].tolist()) == {0.25}
    assert torch.equal(lab.load()["visual.ids"], torch.arange(12))
    assert any("visual.ids (I64)" in note for note in report.notes)
