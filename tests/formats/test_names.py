"""Names that differ between models are matched by known rules, and misses name what is near."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpfs.formats.names import PREFIXES, near, rename

LAYERS = [f"layers.{n}.{part}" for n in range(3) for part in ("self_attn.q_proj.weight", "mlp.up_proj.weight")]
LLAMA = ["model.embed_tokens.weight", *(f"model.{name}" for name in LAYERS), "model.norm.weight", "lm_head.weight"]


def test_the_same_names() -> None:
    assert not rename(LLAMA, LLAMA)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_prefix_more_or_less(prefix: str) -> None:
    wrapped = [prefix + name for name in LAYERS]
    assert rename(wrapped, LAYERS).names == dict(zip(wrapped, LAYERS, strict=True))
    assert rename(LAYERS, wrapped).names == dict(zip(LAYERS, wrapped, strict=True))
    assert len(rename(LAYERS, wrapped).rules) == 1


def test_a_prefix_for_another() -> None:
    old, new = ([prefix + name for name in LAYERS] for prefix in ("module.", "transformer."))
    found = rename(old, new)
    assert found.names == dict(zip(old, new, strict=True))
    assert found.rules == ("module.* → transformer.*",)


def test_gamma_and_beta() -> None:
    old = ["e.LayerNorm.gamma", "e.LayerNorm.beta", "e.dense.weight"]
    new = ["e.LayerNorm.weight", "e.LayerNorm.bias", "e.dense.weight"]
    assert rename(old, new).names == {"e.LayerNorm.gamma": "e.LayerNorm.weight", "e.LayerNorm.beta": "e.LayerNorm.bias"}
    assert rename(new, old).names == {"e.LayerNorm.weight": "e.LayerNorm.gamma", "e.LayerNorm.bias": "e.LayerNorm.beta"}


def test_vision_language_models_of_transformers_4_and_5() -> None:
    old = ["language_model.model.norm.weight", "language_model.lm_head.weight", "vision_tower.x.weight"]
    new = ["model.language_model.norm.weight", "lm_head.weight", "model.vision_tower.x.weight"]
    assert rename(old, new).names == dict(zip(old, new, strict=True))
    assert rename(new, old).names == dict(zip(new, old, strict=True))


def test_qwen2_vl() -> None:
    old = ["model.layers.0.a.weight", "model.embed_tokens.weight", "visual.blocks.0.w", "lm_head.weight"]
    new = [
        "model.language_model.layers.0.a.weight",
        "model.language_model.embed_tokens.weight",
        "model.visual.blocks.0.w",
        "lm_head.weight",
    ]
    assert rename(old, new).names == dict(zip(old[:3], new[:3], strict=True))
    assert rename(new, old).names == dict(zip(new[:3], old[:3], strict=True))


def test_weight_normalisation() -> None:
    old, new = ["c.weight_g", "c.weight_v"], [f"c.parametrizations.weight.original{n}" for n in (0, 1)]
    assert rename(old, new).names == dict(zip(old, new, strict=True))
    assert rename(new, old).names == dict(zip(new, old, strict=True))


def test_a_prefix_and_other_endings_at_once() -> None:
    old = [f"bert.{stem}" for stem in ("e.LayerNorm.gamma", "e.LayerNorm.beta", "e.dense.weight", "e.dense.bias")]
    new = ["e.LayerNorm.weight", "e.LayerNorm.bias", "e.dense.weight", "e.dense.bias"]
    assert rename(old, new).names == dict(zip(old, new, strict=True))
    assert rename(new, old).names == dict(zip(new, old, strict=True))
    assert rename(old, new).rules[0] == "without bert."


def test_what_could_be_several_is_not_taken_for_one() -> None:
    found = rename(["layers.0.w", "x"], ["model.layers.0.w", "net.layers.0.w", "x"])
    assert found.names == {}
    assert set(found.ambiguous["layers.0.w"]) == {"model.layers.0.w", "net.layers.0.w"}
    found = rename(["model.a", "module.a"], ["a"])
    assert (found.names, found.ambiguous) == ({}, {"module.a": ("a",), "model.a": ("a",)})


def test_what_finds_more_is_no_matter_of_doubt() -> None:
    found = rename(LAYERS, [*(f"model.{name}" for name in LAYERS), f"encoder.{LAYERS[0]}"])
    assert found.names == {name: f"model.{name}" for name in LAYERS}
    assert found.ambiguous == {}


def test_shapes_decide_between_rules_and_refute_them() -> None:
    shapes = {"w": 3, "model.w": 3, "net.w": 4}
    found = rename(["w"], ["model.w", "net.w"], lambda ours, theirs: shapes[ours] == shapes[theirs])
    assert (found.names, found.ambiguous) == ({"w": "model.w"}, {})
    assert not rename(["w"], ["net.w"], lambda ours, theirs: shapes[ours] == shapes[theirs])


def test_an_encoder_is_no_decoder() -> None:
    assert not rename(["encoder.block.0.w"], ["decoder.block.0.w"])


def test_a_name_that_both_have_is_not_taken() -> None:
    assert rename(["a", "model.a"], ["a", "b"]).names == {}
    assert rename(["model.a"], ["a", "model.b"]).names == {"model.a": "a"}


@given(
    ours=st.sets(st.text("ab.", max_size=5)),
    theirs=st.sets(st.text("ab.", max_size=5)),
    prefix=st.sampled_from(PREFIXES),
)
def test_no_name_is_taken_twice(ours: set[str], theirs: set[str], prefix: str) -> None:
    found = rename([*ours, *(prefix + name for name in theirs)], [*theirs, *(prefix + name for name in ours)])
    assert len(set(found.names.values())) == len(found.names)
    assert not set(found.names.values()) & {*ours, *(prefix + name for name in theirs)}


def test_near_names() -> None:
    assert near("model.layers.1.mlp.upproj.weight", LLAMA)[0] == "model.layers.1.mlp.up_proj.weight"
    assert near("nothing like it", LLAMA) == []
