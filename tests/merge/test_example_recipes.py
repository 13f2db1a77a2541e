"""Recipes in the shape of those in mergekit's examples folder, on whole models of the named architectures and depths.

Llama 2 13B has 40 layers, Mistral 7B 32; every tensor is there, of tiny width. The models go by their hub names. The same
recipes run in test_slices.py on models of few layers, and faster.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from merge_cases import Lab, Tensors

pytest_plugins = ["merge_fixtures"]

WIDTH, HEADS, WORDS = 8, 2, 12
LLAMA, ORCA, PLATYPUS, WIZARD = (
    *("TheBloke/Llama-2-13B-fp16", "psmathur/orca_mini_v3_13b"),
    *("garage-bAInd/Platypus2-13B", "WizardLM/WizardMath-13B-V1.0"),
)
MISTRAL, INSTRUCT, BIO = (
    "mistralai/Mistral-7B-v0.1",
    "mistralai/Mistral-7B-Instruct-v0.2",
    "BioMistral/BioMistral-7B",
)

RECIPES = {
    "linear": f"""
models:
  - model: {ORCA}
    parameters:
      weight: 1.0
  - model: {PLATYPUS}
    parameters:
      weight: 0.3
  - model: {WIZARD}
    parameters:
      weight: 0.5
merge_method: linear
dtype: float16
""",
    "ties": f"""
models:
  - model: {ORCA}
    parameters:
      density: [1, 0.7, 0.1] # density gradient
      weight: 1.0
  - model: {PLATYPUS}
    parameters:
      density: 0.5
      weight: [0, 0.3, 0.7, 1] # weight gradient
  - model: {WIZARD}
    parameters:
      density: 0.33
      weight:
        - filter: mlp
          value: 0.5
        - value: 0
merge_method: ties
base_model: {LLAMA}
parameters:
  normalize: true
  int8_mask: true
dtype: float16
""",
    "gradient-slerp": f"""
slices:
  - sources:
      - model: {ORCA}
        layer_range: [0, 40]
      - model: {PLATYPUS}
        layer_range: [0, 40]
merge_method: slerp
base_model: {ORCA}
parameters:
  t:
    - filter: self_attn
      value: [0, 0.5, 0.3, 0.7, 1]
    - filter: mlp
      value: [1, 0.5, 0.7, 0.3, 0]
    - value: 0.5 # fallback for rest of tensors
dtype: float16
""",
    "44 layers": f"""
slices:
  - sources:
    - model: {ORCA}
      layer_range: [0, 24]
  - sources:
    - model: {PLATYPUS}
      layer_range: [20, 40]
merge_method: passthrough
dtype: float16
""",
    "bio-merge": f"""
models:
  - model: {INSTRUCT}
    parameters:
      density: 0.5
      weight: 0.5
  - model: {BIO}
    parameters:
      density: 0.5
      weight: 0.3
merge_method: ties
base_model: {MISTRAL}
parameters:
  normalize: false
  int8_mask: true
dtype: float16
""",
}


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """What a Llama or a Mistral holds."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (WORDS, WIDTH)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        found |= {f"{prefix}self_attn.{part}_proj.weight": (WIDTH, WIDTH) for part in "qo"}
        found |= {f"{prefix}self_attn.{part}_proj.weight": (WIDTH // 2, WIDTH) for part in "kv"}
        found |= {f"{prefix}mlp.{part}_proj.weight": (2 * WIDTH, WIDTH) for part in ("gate", "up")}
        found |= {f"{prefix}mlp.down_proj.weight": (WIDTH, 2 * WIDTH)}
        found |= {f"{prefix}{part}_layernorm.weight": (WIDTH,) for part in ("input", "post_attention")}
    return {**found, "model.norm.weight": (WIDTH,), "lm_head.weight": (WORDS, WIDTH)}


def config(architecture: str, layers: int) -> dict[str, Any]:
    return {
        "architectures": [f"{architecture}ForCausalLM"],
        "model_type": architecture.lower(),
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_attention_heads": HEADS,
        "num_hidden_layers": layers,
        "num_key_value_heads": HEADS // 2,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "vocab_size": WORDS,
    }


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Lab, dict[str, Tensors]]]:
    """The models, those of a family tuned from its base."""
    lab = Lab(tmp_path_factory.mktemp("examples"))
    models: dict[str, Tensors] = {}
    families = {"Llama": (40, (LLAMA, ORCA, PLATYPUS, WIZARD)), "Mistral": (32, (MISTRAL, INSTRUCT, BIO))}
    for architecture, (layers, names) in families.items():
        generator = torch.Generator().manual_seed(layers)
        base = {name: torch.randn(shape, generator=generator) * 0.05 for name, shape in shapes(layers).items()}
        for index, name in enumerate(names):
            models[name] = {
                key: (x + bool(index) * 0.01 * torch.randn(x.shape, generator=generator)).half()
                for key, x in base.items()
            }
            lab.add(name, models[name], {"config.json": json.dumps(config(architecture, layers)).encode()})
    yield lab, models
    lab.close()


def slerp(a: torch.Tensor, b: torch.Tensor, t: float) -> torch.Tensor:
    a, b = a.double(), b.double()
    angle = torch.acos((a * b).sum() / (a.norm() * b.norm()))
    return (torch.sin((1 - t) * angle) * a + torch.sin(t * angle) * b) / torch.sin(angle)


def trimmed(delta: torch.Tensor, density: float) -> torch.Tensor:
    """The largest magnitudes; of equal ones the first."""
    flat = delta.reshape(-1)
    kept = flat.abs().float().sort(descending=True, stable=True).indices[: max(1, int(density * flat.numel()))]
    return torch.zeros_like(flat).index_copy(0, kept, flat[kept]).reshape(delta.shape)


def linear(models: dict[str, Tensors], name: str, place: float) -> torch.Tensor:
    return (models[ORCA][name].double() + 0.3 * models[PLATYPUS][name] + 0.5 * models[WIZARD][name]) / 1.8


def gradient_slerp(models: dict[str, Tensors], name: str, place: float) -> torch.Tensor:
    values = [0, 0.5, 0.3, 0.7, 1] if "self_attn" in name else [1, 0.5, 0.7, 0.3, 0] if "mlp" in name else [0.5] * 5
    low = min(int(4 * place), 3)
    t = values[low] + (4 * place - low) * (values[low + 1] - values[low])
    return slerp(models[ORCA][name], models[PLATYPUS][name], t)


def bio(models: dict[str, Tensors], name: str, place: float) -> torch.Tensor:
    base = models[MISTRAL][name]
    sparse = [trimmed(models[other][name] - base, 0.5).double() * w for other, w in ((INSTRUCT, 0.5), (BIO, 0.3))]
    elected = torch.where(sparse[0] + sparse[1] >= 0, 1.0, -1.0)
    return base.double() + sum(part * (part.sign() == elected) for part in sparse)


FORMULAS: dict[str, Callable[[dict[str, Tensors], str, float], torch.Tensor]] = {
    "linear": linear,
    "gradient-slerp": gradient_slerp,
    "bio-merge": bio,
}


@pytest.mark.slow
@pytest.mark.parametrize("example", RECIPES)
def test_examples_run_as_they_are(zoo: tuple[Lab, dict[str, Tensors]], tmp_path: Path, example: str) -> None:
    lab, models = zoo
    file = tmp_path / "recipe.yml"
    file.write_text(RECIPES[example])
    lab.repository.merge(file, "merged", threads=1)
    merged = lab.load()
    layers = {"44 layers": 44, "bio-merge": 32}.get(example, 40)
    assert {name: tuple(x.shape) for name, x in merged.items()} == shapes(layers)
    assert {x.dtype for x in merged.values()} == {torch.float16}
    architecture = "Mistral" if example == "bio-merge" else "Llama"
    written = json.loads(b"".join(lab.repository.reader("merged").open("config.json").iter_chunks()))
    assert written == config(architecture, layers)
    if example in FORMULAS:
        for layer in (0, 7, layers - 1):
            for part in ("self_attn.q_proj", "mlp.down_proj", "input_layernorm"):
                name = f"model.layers.{layer}.{part}.weight"
                wanted = FORMULAS[example](models, name, layer / (layers - 1))
                torch.testing.assert_close(merged[name].double(), wanted, rtol=2e-3, atol=1e-4)
    if example == "44 layers":
        for layer in range(44):
            name = "model.layers.{}.mlp.up_proj.weight"
            source, theirs = (ORCA, layer) if layer < 24 else (PLATYPUS, layer - 4)
            assert torch.equal(merged[name.format(layer)], models[source][name.format(theirs)])
    if example == "ties":
        # In the first layer orca's delta is whole, and platypus weighs nothing; wizard only counts in the MLP.
        name = "model.layers.0.input_layernorm.weight"
        torch.testing.assert_close(merged[name], models[ORCA][name], rtol=1e-3, atol=1e-6)
        last = "model.layers.39.self_attn.q_proj.weight"
        assert 0 < int((merged[last] != models[LLAMA][last]).sum()) <= int(0.1 * 64) + int(0.5 * 64)
