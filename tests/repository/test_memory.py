"""Anonymous memory stays below a constant, whatever the model's size (DESIGN §4, invariant 7)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from child_server import Children

from mpfs.formats.safetensors import build_header
from mpfs.repository import Repository

LIMIT = 1 << 30

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCABULARY = 1024, 5, 16, 8, 128, 3072, 75_968
"""A slice of Qwen3-0.6B: 5 of its 28 layers and half of its vocabulary, 310 MB in bfloat16."""


def shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes as Qwen3 has them."""
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        found |= {
            f"{prefix}input_layernorm.weight": (HIDDEN,),
            f"{prefix}post_attention_layernorm.weight": (HIDDEN,),
            f"{prefix}self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{prefix}self_attn.q_norm.weight": (HEAD_DIM,),
            f"{prefix}self_attn.k_norm.weight": (HEAD_DIM,),
            f"{prefix}mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{prefix}mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{prefix}mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        }
    return found


def write_model(folder: Path, expert: int | None) -> Path:
    """A model, generated in pieces; every weight of an expert differs from the base a little."""
    folder.mkdir()
    raw, header = build_header([(name, "BF16", shape) for name, shape in shapes().items()], {"format": "pt"})
    pool = np.random.default_rng(0).standard_normal(1 << 22, np.float32) * np.float32(0.02)
    deltas = np.random.default_rng(1 + (expert or 0)).standard_normal(1 << 22, np.float32) * np.float32(5e-4)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(raw)
        for number, entry in enumerate(header.entries):
            left = entry.nbytes // 2
            while left:
                start = (number * 7919 + left) % (1 << 20)
                count = min(left, 1 << 21)
                values = pool[start : start + count]
                if expert is not None:
                    values = values + deltas[start // 2 : start // 2 + count]
                file.write((values.view(np.uint32) >> np.uint32(16)).astype("<u2").tobytes())
                left -= count
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "torch_dtype": "bfloat16"}))
    return folder


def test_import_and_merge_of_a_large_model(tmp_path: Path) -> None:
    names = {"base": None, "one": 1, "two": 2}
    imports = {name: str(write_model(tmp_path / name, expert)) for name, expert in names.items()}
    Repository.create(tmp_path / "repo", map_size=1 << 36).close()
    recipe = {
        "merge_method": "ties",
        "base_model": "base",
        "models": [{"model": name, "parameters": {"weight": 0.5, "density": 0.5}} for name in ("one", "two")],
        "dtype": "bfloat16",
    }
    with Children() as children:
        outcome = children.run(op="memory", repo=str(tmp_path / "repo"), imports=imports, recipe=recipe, into="merged")
    result = outcome.result
    print(json.dumps(result))
    assert result["computed"] > 250
    assert max(result["peaks"].values()) < LIMIT, result


@pytest.mark.slow
def test_a_sweep_takes_the_memory_of_a_merge(tmp_path: Path) -> None:
    """Whatever the number of variants; here 4, of a model of 310 MB."""
    names = {"base": None, "one": 1, "two": 2}
    imports = {name: str(write_model(tmp_path / name, expert)) for name, expert in names.items()}
    Repository.create(tmp_path / "repo", map_size=1 << 36).close()
    recipe = {
        "merge_method": "ties",
        "base_model": "base",
        "models": [{"model": name, "parameters": {"weight": 0.5}} for name in ("one", "two")],
        "dtype": "bfloat16",
    }
    values = {"parameters.density": [0.05 * step for step in range(1, 5)]}
    with Children() as children:
        outcome = children.run(
            op="memory", repo=str(tmp_path / "repo"), imports=imports, recipe=recipe, into="sweep", values=values
        )
    result = outcome.result
    print(json.dumps(result))
    assert result["computed"] > 4 * 250
    assert max(result["peaks"].values()) < LIMIT, result
