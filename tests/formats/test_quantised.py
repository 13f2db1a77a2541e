"""Quantised weights are recognised by their layouts, with all the tensors that belong to them."""

from __future__ import annotations

from typing import Any

import pytest

from mpfs.formats.quantised import recognise

Tensors = dict[str, tuple[str, tuple[int, ...]]]

GPTQ: Tensors = {
    "l.q_proj.qweight": ("I32", (128, 64)),
    "l.q_proj.qzeros": ("I32", (8, 8)),
    "l.q_proj.scales": ("F16", (8, 64)),
    "l.q_proj.g_idx": ("I32", (1024,)),
}
AWQ: Tensors = {name: value for name, value in GPTQ.items() if not name.endswith("g_idx")}
NF4: Tensors = {
    "l.weight": ("U8", (2048, 1)),
    "l.weight.absmax": ("U8", (64,)),
    "l.weight.quant_map": ("F32", (16,)),
    "l.weight.nested_absmax": ("F32", (1,)),
    "l.weight.nested_quant_map": ("F32", (256,)),
    "l.weight.quant_state.bitsandbytes__nf4": ("U8", (90,)),
}
INT8: Tensors = {"l.weight": ("I8", (64, 64)), "l.SCB": ("F32", (64,)), "l.weight_format": ("U8", ())}
MXFP4: Tensors = {
    "l.mlp.experts.gate_up_proj_blocks": ("U8", (32, 64, 90, 16)),
    "l.mlp.experts.gate_up_proj_scales": ("U8", (32, 64, 90)),
}
PACKED: Tensors = {
    "l.weight_packed": ("I32", (64, 8)),
    "l.weight_scale": ("BF16", (64, 1)),
    "l.weight_shape": ("I64", (2,)),
}
FP8: Tensors = {"l.weight": ("F8_E4M3", (64, 64)), "l.weight_scale_inv": ("F32", (1, 1))}
HQQ: Tensors = {"l.W_q": ("U8", (64, 8)), "l.scale": ("F16", (64,)), "l.zero": ("F16", (64,))}
GGUF: Tensors = {"blk.0.attn_q.weight": ("U8", (64, 144))}
PLAIN: Tensors = {"norm.weight": ("F16", (64,)), "ids": ("I64", (64,)), "mask": ("U8", (3,)), "x_blocks": ("U8", (9,))}


@pytest.mark.parametrize(
    ("tensors", "scheme"),
    [
        (GPTQ, "GPTQ"),
        (AWQ, "AWQ"),
        (NF4, "bitsandbytes nf4"),
        (INT8, "bitsandbytes int8"),
        (MXFP4, "MXFP4"),
        (PACKED, "compressed-tensors"),
        (FP8, "FP8"),
        (HQQ, "HQQ"),
        (GGUF, "GGUF"),
    ],
)
def test_each_layout_with_its_scales(tensors: Tensors, scheme: str) -> None:
    found = recognise({**PLAIN, **tensors})
    assert found is not None
    assert found.members == dict.fromkeys(tensors, scheme)
    assert (found.schemes, found.weights) == ((scheme,), 1)
    assert str(found).startswith(scheme)


@pytest.mark.parametrize(
    ("tensors", "config", "scheme", "bits"),
    [
        (AWQ, {"quant_method": "gptq", "bits": 4}, "GPTQ", 4),
        (GPTQ, {"quant_method": "awq", "w_bit": 4}, "AWQ", 4),
        (NF4, {"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes nf4", 4),
        (INT8, {"load_in_8bit": True}, "bitsandbytes int8", 8),
        (MXFP4, {"quant_method": "mxfp4"}, "MXFP4", None),
        (GPTQ, "nonsense", "GPTQ", None),
        (GPTQ, {"quant_method": 3, "bits": "four"}, "GPTQ", None),
    ],
)
def test_config_says_more(tensors: Tensors, config: Any, scheme: str, bits: int | None) -> None:
    found = recognise(tensors, {"quantization_config": config})
    assert found is not None
    assert (found.schemes, found.bits) == ((scheme,), bits)


def test_plain_weights_are_not_quantised() -> None:
    assert recognise(PLAIN) is None
    assert recognise({}, {"quantization_config": {"quant_method": "gptq"}}) is None
    assert recognise({"qweight": ("F32", (3,)), "a.scales": ("F16", (3,))}) is None
