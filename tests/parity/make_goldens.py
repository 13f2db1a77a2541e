"""Make goldens.npz: what mergekit 0.1.5 answers, for test_mergekit_goldens.py to compare MPFS with.

    python3 -m venv /opt/mk-venv && /opt/mk-venv/bin/pip install torch==2.13.0 mergekit==0.1.5
    python tests/parity/make_goldens.py /opt/mk-venv/bin/python

mergekit runs as a black box, through its command line in its own environment. One thing is changed from outside: its
process has torch's sorts made stable, because which of equal magnitudes an unstable sort puts first is an accident of
the machine. The inputs are tiny Llama checkpoints from a seeded generator; they are stored with the answers.

The file holds, as numpy arrays of bit patterns (integers of the type's width), `input/DTYPE/MODEL` and
`output/CASE/DTYPE`, each the model's tensors one after the other in the order of `tensors`, the JSON text of their
names and shapes; and `cases`, the JSON text of what was asked.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

GOLDENS = Path(__file__).with_name("goldens.npz")

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
EXPERTS = 6

WEIGHTS = [0.3, 0.55, 1.1, -0.2, 0.17, 0.9]
DENSITIES = [0.5, 0.1, 0.7, 0.33, 1.0, 0.05]
CASES: dict[str, dict[str, Any]] = {
    "linear-one": {"method": "linear", "experts": [2], "shared": {}},
    "linear-three": {"method": "linear", "experts": [0, 1, 2], "shared": {}},
    "linear-six": {"method": "linear", "experts": [0, 1, 2, 3, 4, 5], "shared": {}},
    "linear-sum": {"method": "linear", "experts": [3, 1, 0, 5], "shared": {"normalize": False}},
    "arithmetic-six": {"method": "task_arithmetic", "experts": [0, 1, 2, 3, 4, 5], "shared": {}},
    "arithmetic-mean": {
        "method": "task_arithmetic",
        "experts": [0, 1, 3],
        "shared": {"normalize": True, "lambda": 0.7},
    },
    "ties-three": {"method": "ties", "experts": [0, 1, 2], "shared": {}},
    "ties-six": {"method": "ties", "experts": [5, 4, 3, 2, 1, 0], "shared": {"int8_mask": True}},
    "ties-sum": {"method": "ties", "experts": [0, 1, 2, 3], "shared": {"normalize": False, "lambda": 1.3}},
    "ties-edges": {
        "method": "ties",
        "experts": [0, 1, 2, 4],
        "shared": {"lambda": -0.4},
        "densities": {"0": 0.0, "1": 0.0001, "2": 1.5, "4": 0.999},
        "weights": {"0": 2.0, "1": 0.0, "2": -1.0, "4": 1.0},
    },
    "dare-dense": {
        "method": "dare_linear",
        "experts": [0, 1, 2, 5],
        "shared": {"normalize": True},
        "densities": {"0": 1.0, "1": 1.0, "2": 0.0, "5": 1.0},
    },
    "dare-ties-dense": {
        "method": "dare_ties",
        "experts": [0, 1, 2, 5, 3],
        "shared": {"lambda": 0.5},
        "densities": {"0": 1.0, "1": 2.0, "2": 0.0, "5": 1.0, "3": 1.0},
    },
    "dare-masked": {
        "method": "dare_linear",
        "experts": [5],
        "shared": {},
        "densities": {"5": 0.3},
        "weights": {"5": 1.0},
    },
}
"""What is asked of mergekit. Weights and densities are those above unless a case says otherwise, by expert."""

HIDDEN, INTERMEDIATE, VOCABULARY = 16, 18, 21
"""Small, and odd enough that some tensors' sizes are no multiple of a vector."""

RUNNER = """
import functools, importlib.metadata, os, sys
import torch

os.environ["HF_HUB_OFFLINE"] = "1"


def stable(function):
    @functools.wraps(function)
    def call(tensor, dim=-1, descending=False, stable=True, **rest):
        return function(tensor, stable=True, dim=dim, descending=descending, **rest)

    return call


for owner in (torch, torch.Tensor):
    owner.sort, owner.argsort = stable(owner.sort), stable(owner.argsort)
scripts = importlib.metadata.entry_points(group="console_scripts", name="mergekit-yaml")
sys.argv[0] = "mergekit-yaml"
next(iter(scripts)).load()()
"""

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": INTERMEDIATE,
    "max_position_embeddings": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": VOCABULARY,
}

Model = dict[str, torch.Tensor]


def shapes() -> dict[str, tuple[int, ...]]:
    """The tensors of the tiny Llama."""
    layer = "model.layers.0."
    return {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        layer + "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
        layer + "self_attn.k_proj.weight": (HIDDEN // 2, HIDDEN),
        layer + "self_attn.v_proj.weight": (HIDDEN // 2, HIDDEN),
        layer + "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        layer + "mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
        layer + "mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
        layer + "mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        layer + "input_layernorm.weight": (HIDDEN,),
        layer + "post_attention_layernorm.weight": (HIDDEN,),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }


def models(dtype: torch.dtype) -> dict[str, Model]:
    """The base and its experts: normal weights and deltas; expert 1 has few distinct deltas, expert 3 a sparse one.

    Some of the base is zero, and of that some negative zero; there the deltas are the experts' own values.
    """
    generator = torch.Generator().manual_seed(20230608)

    def normal(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    base: Model = {}
    for name, shape in shapes().items():
        values = normal(shape) * 0.02
        values.view(-1)[::7] = 0.0
        values.view(-1)[::14] = -0.0
        base[name] = values.to(dtype)
    result = {"base": base}
    for i in range(EXPERTS):
        expert: Model = {}
        for name, values in base.items():
            delta = normal(tuple(values.shape)) * 0.002 * (1 + 0.3 * i)
            if i == 1:
                delta = (delta * 400).round() / 512
            if i == 3:
                delta = delta * (normal(tuple(values.shape)) > 1)
            expert[name] = (values.float() + delta).to(dtype)
        result[f"expert{i}"] = expert
    return result


def recipe(case: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The case in mergekit's grammar."""
    listed = [
        {"model": f"expert{i}", "parameters": {"weight": weight, "density": density}}
        for i, weight, density in expert_parameters(case)
    ]
    result = {"merge_method": case["method"], "models": listed, "parameters": case["shared"], "dtype": dtype}
    return result if case["method"] == "linear" else {**result, "base_model": "base"}


def expert_parameters(case: dict[str, Any]) -> list[tuple[int, float, float]]:
    """The case's experts in listing order, each with its weight and density."""
    weights, densities = case.get("weights", {}), case.get("densities", {})
    return [(i, weights.get(str(i), WEIGHTS[i]), densities.get(str(i), DENSITIES[i])) for i in case["experts"]]


def bits(model: Model) -> NDArray[Any]:
    """The bit patterns of a model's tensors, one after the other."""
    if sorted(model) != sorted(shapes()):
        raise SystemExit(f"mergekit wrote other tensors: {sorted(model)}")
    flat = torch.cat([model[name].reshape(-1) for name in shapes()])
    array: NDArray[Any] = flat.view(INTEGERS[flat.element_size()]).numpy()
    return array


def run_mergekit(python: str, folder: Path, case: dict[str, Any], dtype: str) -> Model:
    """Merge the models in `folder` and return the result."""
    (folder / "runner.py").write_text(RUNNER)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe(case, dtype)))
    command = [python, "runner.py", "recipe.yaml", "out", "--random-seed", "0"]
    command += ["--no-copy-tokenizer", "--no-write-model-card"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"mergekit failed:\n{done.stderr[-4000:]}")
    return load_file(folder / "out" / "model.safetensors")


def main() -> None:
    """Make the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", help="the Python of an environment with mergekit 0.1.5")
    parser.add_argument("-o", "--output", type=Path, default=GOLDENS)
    arguments = parser.parse_args()
    asked = {
        name: {
            "method": case["method"],
            "shared": case["shared"],
            "experts": [
                {"model": f"expert{i}", "weight": weight, "density": density}
                for i, weight, density in expert_parameters(case)
            ],
        }
        for name, case in CASES.items()
    }
    arrays: dict[str, NDArray[Any]] = {
        "cases": np.array(json.dumps(asked)),
        "tensors": np.array(json.dumps(shapes())),
    }
    for dtype_name, dtype in DTYPES.items():
        inputs = models(dtype)
        with tempfile.TemporaryDirectory() as folder:
            for model, tensors in inputs.items():
                (Path(folder) / model).mkdir()
                save_file(tensors, Path(folder) / model / "model.safetensors", metadata={"format": "pt"})
                config = {**CONFIG, "torch_dtype": dtype_name}
                (Path(folder) / model / "config.json").write_text(json.dumps(config))
                arrays[f"input/{dtype_name}/{model}"] = bits(tensors)
            for name, case in CASES.items():
                merged = run_mergekit(arguments.python, Path(folder), case, dtype_name)
                arrays[f"output/{name}/{dtype_name}"] = bits(merged)
                print(f"{dtype_name} {name}", flush=True)
    np.savez_compressed(arguments.output, allow_pickle=False, **arrays)
    print(f"{arguments.output}: {arguments.output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
