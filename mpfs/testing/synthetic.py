"""Large synthetic checkpoints with a real architecture's names and shapes, made where they are needed.

Nobody publishes a large bf16 family that a test can count on; for speed and memory the shapes and the distribution
of deltas over layers are what matters. Made in chunks, so that a checkpoint may be larger than memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mpfs.formats.safetensors import build_header

_CHUNK = 1 << 22
"""Elements made at a time."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """The sizes that a Qwen3 model's tensors follow from (tied embeddings, q_norm and k_norm)."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape by name."""
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, self.hidden)}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            shapes[prefix + "input_layernorm.weight"] = (self.hidden,)
            shapes[prefix + "post_attention_layernorm.weight"] = (self.hidden,)
            shapes[prefix + "self_attn.q_proj.weight"] = (self.heads * self.head_dim, self.hidden)
            shapes[prefix + "self_attn.k_proj.weight"] = (self.kv_heads * self.head_dim, self.hidden)
            shapes[prefix + "self_attn.v_proj.weight"] = (self.kv_heads * self.head_dim, self.hidden)
            shapes[prefix + "self_attn.o_proj.weight"] = (self.hidden, self.heads * self.head_dim)
            shapes[prefix + "self_attn.q_norm.weight"] = (self.head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (self.head_dim,)
            shapes[prefix + "mlp.gate_proj.weight"] = (self.intermediate, self.hidden)
            shapes[prefix + "mlp.up_proj.weight"] = (self.intermediate, self.hidden)
            shapes[prefix + "mlp.down_proj.weight"] = (self.hidden, self.intermediate)
        shapes["model.norm.weight"] = (self.hidden,)
        return shapes

    def config(self) -> dict[str, object]:
        """A config.json for it."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
        }


QWEN3_600M = Architecture(1024, 28, 16, 8, 128, 3072, 151936)
"""Qwen3-0.6B: 310 tensors, 596,049,920 parameters, 1.19 GB in bf16."""

QWEN3_TINY = Architecture(64, 4, 4, 2, 16, 192, 1000)
"""The same in small: 46 tensors, about 260,000 parameters."""


def write_model(directory: Path, architecture: Architecture, *, seed: int, expert: int = 0) -> int:
    """Write a checkpoint (one model.safetensors in bf16, and config.json); its weights' bytes.

    Expert 0 is the base: N(0, 0.02), norms around 1. Another expert is that base plus a delta whose standard deviation
    grows over the layers from 1e-4 to 1e-3. About 30% of an expert's matrices barely change (1e-5), and the embeddings
    of even experts not at all. The same arguments give the same bytes.

    Args:
        directory: made if it does not exist.
        architecture: the sizes.
        seed: of the family.
        expert: which model of the family.
    """
    directory.mkdir(parents=True, exist_ok=True)
    shapes = architecture.shapes()
    raw, header = build_header([(name, "BF16", shape) for name, shape in shapes.items()], {"format": "pt"})
    with open(directory / "model.safetensors", "wb") as file:
        file.write(raw)
        for entry in header.entries:
            for chunk in _tensor(entry.name, shapes, architecture, seed, expert):
                file.write(_bf16(chunk).tobytes())
    (directory / "config.json").write_text(json.dumps(architecture.config(), indent=2) + "\n", encoding="utf-8")
    return header.data_size


def _tensor(
    name: str, shapes: dict[str, tuple[int, ...]], architecture: Architecture, seed: int, expert: int
) -> Iterator[NDArray[np.float32]]:
    index = list(shapes).index(name)
    numel = prod(shapes[name])
    scale = _delta_scale(name, index, architecture, seed, expert)
    base = np.random.Generator(np.random.Philox(key=[seed, index]))
    change = np.random.Generator(np.random.Philox(key=[seed, index + 1_000_000 * expert]))
    is_norm = len(shapes[name]) == 1
    for start in range(0, numel, _CHUNK):
        size = min(_CHUNK, numel - start)
        values = base.standard_normal(size, np.float32) * np.float32(0.02) + np.float32(is_norm)
        if scale:
            # An expert starts from what the base's file holds, not from what it was rounded from.
            stored = (_bf16(values).astype(np.uint32) << np.uint32(16)).view(np.float32)
            values = stored + change.standard_normal(size, np.float32) * np.float32(scale)
        yield values


def _delta_scale(name: str, index: int, architecture: Architecture, seed: int, expert: int) -> float:
    if expert == 0 or (name == "model.embed_tokens.weight" and expert % 2 == 0):
        return 0.0
    parts = name.split(".")
    depth = int(parts[2]) / max(1, architecture.layers - 1) if parts[1] == "layers" else 0.5
    draw = np.random.Generator(np.random.Philox(key=[seed, 10_000_000 * expert + index])).random()
    return 1e-5 if draw < 0.3 else 1e-4 + 9e-4 * depth


def _bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round finite values to bf16, to nearest even."""
    bits = values.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(np.uint16)
