"""Make architecture_goldens.npz: what mergekit 0.1.5 makes of whole models of four architectures, by every method.

    python tests/parity/make_architecture_goldens.py /opt/mk-venv/bin/python

Every method that draws no random numbers, on a Llama, a Qwen3, a GPT-2 (its head tied) and a BERT (with its integer
positions) of one layer, in float32, float16 and bfloat16. mergekit's environment and the one change made to it are those
of make_goldens.py; see there. It is started once an architecture and dtype: as mergekit-yaml, but for BERT, whose
template makes it stop in the planning of any merge (a TypeError about the aliases of position_ids), as mergekit-pytorch.

The file holds `input/ARCHITECTURE/MODEL` in float32, the model's floating-point tensors one after the other in the
order of `names/ARCHITECTURE`, the JSON text of names and shapes (mergekit was given them rounded to the dtype);
`config/ARCHITECTURE`; `output/ARCHITECTURE/CASE/DTYPE`, the bit patterns in the same order; and `cases`, the JSON text
of the recipes. Where mergekit answers in another dtype than it was asked for (arcee_fusion, ramplus_tl) the answer is
rounded to that one; `output/ARCHITECTURE/karcher-wide/DTYPE` is what karcher gives if it may work in float32.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import make_goldens as common
import numpy as np
import torch
import yaml
from make_method_goldens import RUNNER
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

GOLDENS = Path(__file__).with_name("architecture_goldens.npz")

WORDS, HIDDEN, WIDE, POSITIONS, EXPERTS = 11, 8, 12, 6, 4

WEIGHTS = [0.3, 0.55, 1.1, -0.2]
DENSITIES = [0.5, 0.1, 0.7, 0.33]


def recipe(
    method: str, experts: list[int | str], shared: dict[str, Any] | None = None, *, base: bool
) -> dict[str, Any]:
    """A recipe in mergekit's grammar; numbers are experts, each with a weight and a density of its own."""
    listed = [
        {"model": f"e{expert}", "parameters": {"weight": WEIGHTS[expert], "density": DENSITIES[expert]}}
        if isinstance(expert, int)
        else {"model": expert}
        for expert in experts
    ]
    found: dict[str, Any] = {"merge_method": method, "models": listed, "parameters": shared or {}}
    return {**found, "base_model": "base"} if base else found


CASES: dict[str, dict[str, Any]] = {
    "linear": recipe("linear", [0, 1, 2], base=False),
    "linear-sum": recipe("linear", [3, 1, 0, 2], {"normalize": False}, base=False),
    "passthrough": recipe("passthrough", [2], base=False),
    "passthrough-scale": recipe("passthrough", [2], {"scale": 0.7}, base=False),
    "nearswap": recipe("nearswap", ["base", 0], {"t": 0.002}, base=True),
    "arithmetic": recipe("task_arithmetic", [0, 1, 2, 3], {"lambda": 0.7}, base=True),
    "ties": recipe("ties", [0, 1, 2, 3], base=True),
    "ties-sum": recipe("ties", [2, 1, 0], {"normalize": False, "lambda": 1.3, "int8_mask": True}, base=True),
    "breadcrumbs": recipe("breadcrumbs", [0, 1, 2], {"gamma": 0.1}, base=True),
    "breadcrumbs-ties": recipe("breadcrumbs_ties", [0, 1, 2, 3], {"gamma": 0.05, "normalize": True}, base=True),
    "ram": recipe("ram", [0, 1, 2], {"epsilon": 0.003}, base=True),
    "ramplus": recipe("ramplus_tl", [0, 1, 3], {"epsilon": 0.003, "r": 0.5, "alpha": 0.8}, base=True),
    "slerp": recipe("slerp", ["base", 0], {"t": 0.3}, base=True),
    "nuslerp": recipe("nuslerp", [0, 2], base=False),
    "nuslerp-base": recipe("nuslerp", [0, 2], base=True),
    "nuslerp-rows": recipe("nuslerp", [0, 2], {"nuslerp_flatten": False}, base=False),
    "nuslerp-rows-base": recipe("nuslerp", [1, 2], {"nuslerp_flatten": False}, base=True),
    "nuslerp-first-base": recipe("nuslerp", [0, 2], {"nuslerp_flatten": False, "nuslerp_row_wise": True}, base=True),
    "multislerp": recipe("multislerp", [0, 1, 2], base=False),
    "multislerp-base": recipe("multislerp", [0, 1, 2, 3], base=True),
    "multislerp-sum": recipe("multislerp", [0, 1, 2], {"normalize_weights": False}, base=True),
    "karcher": recipe("karcher", [0, 1, 2], base=False),
    "stock": recipe("model_stock", [0, 1, 2], base=True),
    "stock-rows": recipe("model_stock", [0, 1], {"filter_wise": True}, base=True),
    "sce": recipe("sce", [0, 1, 2], base=True),
    "sce-some": recipe("sce", [0, 1, 2], {"select_topk": 0.3}, base=True),
    "arcee": recipe("arcee_fusion", ["base", 1], base=True),
}

RAW = ("bert",)
"""Architectures that mergekit-yaml cannot merge."""

RAW_RUNNER = (
    RUNNER.replace("mergekit-yaml", "mergekit-pytorch")
    .replace(', "--no-copy-tokenizer"', "")
    .replace('sys.argv.append("--no-write-model-card")', "pass")
)

Shapes = dict[str, tuple[int, ...]]


def llama() -> Shapes:
    """A Llama with a head of its own."""
    return {
        "model.embed_tokens.weight": (WORDS, HIDDEN),
        "model.layers.0.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
        "model.layers.0.self_attn.k_proj.weight": (HIDDEN // 2, HIDDEN),
        "model.layers.0.self_attn.v_proj.weight": (HIDDEN // 2, HIDDEN),
        "model.layers.0.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        "model.layers.0.mlp.gate_proj.weight": (WIDE, HIDDEN),
        "model.layers.0.mlp.up_proj.weight": (WIDE, HIDDEN),
        "model.layers.0.mlp.down_proj.weight": (HIDDEN, WIDE),
        "model.layers.0.input_layernorm.weight": (HIDDEN,),
        "model.layers.0.post_attention_layernorm.weight": (HIDDEN,),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (WORDS, HIDDEN),
    }


def qwen3() -> Shapes:
    """A Qwen3: a Llama with norms of queries and keys."""
    norms = {f"model.layers.0.self_attn.{part}_norm.weight": (HIDDEN // 2,) for part in "qk"}
    return {**llama(), **norms}


def gpt2() -> Shapes:
    """A GPT-2: weights lie transposed, everything has a bias, and the head is the embedding."""
    layer = "transformer.h.0."
    linear = {
        "attn.c_attn": (HIDDEN, 3 * HIDDEN),
        "attn.c_proj": (HIDDEN, HIDDEN),
        "mlp.c_fc": (HIDDEN, WIDE),
        "mlp.c_proj": (WIDE, HIDDEN),
    }
    found: Shapes = {"transformer.wte.weight": (WORDS, HIDDEN), "transformer.wpe.weight": (POSITIONS, HIDDEN)}
    for name, shape in linear.items():
        found |= {f"{layer}{name}.weight": shape, f"{layer}{name}.bias": shape[1:]}
    for name in (f"{layer}ln_1", f"{layer}ln_2", "transformer.ln_f"):
        found |= {f"{name}.weight": (HIDDEN,), f"{name}.bias": (HIDDEN,)}
    return found


def bert() -> Shapes:
    """A BERT without a head."""
    found: Shapes = {
        "embeddings.word_embeddings.weight": (WORDS, HIDDEN),
        "embeddings.position_embeddings.weight": (POSITIONS, HIDDEN),
        "embeddings.token_type_embeddings.weight": (2, HIDDEN),
    }
    layer = "encoder.layer.0."
    linear = {
        layer + "attention.self.query": (HIDDEN, HIDDEN),
        layer + "attention.self.key": (HIDDEN, HIDDEN),
        layer + "attention.self.value": (HIDDEN, HIDDEN),
        layer + "attention.output.dense": (HIDDEN, HIDDEN),
        layer + "intermediate.dense": (WIDE, HIDDEN),
        layer + "output.dense": (HIDDEN, WIDE),
        "pooler.dense": (HIDDEN, HIDDEN),
    }
    for name, shape in linear.items():
        found |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    for name in ("embeddings.LayerNorm", layer + "attention.output.LayerNorm", layer + "output.LayerNorm"):
        found |= {f"{name}.weight": (HIDDEN,), f"{name}.bias": (HIDDEN,)}
    return found


ARCHITECTURES = {"llama": llama(), "qwen3": qwen3(), "gpt2": gpt2(), "bert": bert()}

POSITION_IDS = "embeddings.position_ids"
"""BERT's integers: no float, the same in every model."""

_SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "max_position_embeddings": POSITIONS,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": WORDS,
}
_DECODER = {**_SIZES, "num_key_value_heads": 1, "head_dim": HIDDEN // 2, "tie_word_embeddings": False}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **_DECODER},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **_DECODER},
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": HIDDEN,
        "n_head": 2,
        "n_inner": WIDE,
        "n_layer": 1,
        "n_positions": POSITIONS,
        "vocab_size": WORDS,
    },
    "bert": {"architectures": ["BertModel"], "model_type": "bert", "type_vocab_size": 2, **_SIZES},
}


def models(architecture: str) -> dict[str, common.Model]:
    """The base and its experts in float32: normal weights and deltas, of which expert 3's are sparse."""
    generator = torch.Generator().manual_seed(20240314 + sorted(ARCHITECTURES).index(architecture))

    def normal(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    base = {name: normal(shape) * 0.05 for name, shape in ARCHITECTURES[architecture].items()}
    found = {"base": base}
    for expert in range(EXPERTS):
        found[f"e{expert}"] = {}
        for name, values in base.items():
            delta = normal(tuple(values.shape)) * 0.006 * (1 + 0.3 * expert)
            if expert == 3:
                delta *= normal(tuple(values.shape)) > 1
            found[f"e{expert}"][name] = values + delta
    return found


def files(tensors: common.Model, architecture: str, dtype: torch.dtype) -> common.Model:
    """What lies in the model's file: the tensors in `dtype`, and integers as they are."""
    found = {name: values.to(dtype) for name, values in tensors.items()}
    if architecture == "bert":
        found[POSITION_IDS] = torch.arange(POSITIONS)[None]
    return found


def ask(python: str, architecture: str, dtype: str) -> dict[str, common.Model]:
    """What mergekit makes of every case."""
    jobs: dict[str, dict[str, Any]] = {case: {"dtype": dtype, **job} for case, job in CASES.items()}
    if dtype != "float32":
        jobs["karcher-wide"] = {**CASES["karcher"], "dtype": "float32", "out_dtype": dtype}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model, tensors in models(architecture).items():
            (folder / model).mkdir()
            stored = files(tensors, architecture, common.DTYPES[dtype])
            save_file(stored, folder / model / "model.safetensors", metadata={"format": "pt"})
            config = {**CONFIGS[architecture], "torch_dtype": dtype}
            (folder / model / "config.json").write_text(json.dumps(config))
        raw = architecture in RAW
        (folder / "runner.py").write_text(RAW_RUNNER if raw else RUNNER)
        for case, job in jobs.items():
            (folder / f"{case}.yaml").write_text(yaml.safe_dump(by_file(job) if raw else job))
        command = [python, "runner.py", json.dumps([(f"{case}.yaml", f"out-{case}", 0) for case in jobs])]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"mergekit failed:\n{done.stderr[-4000:]}")
        return {case: load_file(folder / f"out-{case}" / "model.safetensors") for case in jobs}


def by_file(job: dict[str, Any]) -> dict[str, Any]:
    """The recipe for mergekit-pytorch: models are files."""
    found = {**job, "models": [{**item, "model": f"{item['model']}/model.safetensors"} for item in job["models"]]}
    return {**found, "base_model": "base/model.safetensors"} if "base_model" in job else found


def flat(model: common.Model, architecture: str, dtype: torch.dtype) -> NDArray[Any]:
    """The bit patterns of the floating-point tensors, rounded to `dtype`; the names must be those of the inputs."""
    wanted = files(models(architecture)["base"], architecture, dtype)
    if sorted(model) != sorted(wanted):
        raise SystemExit(f"mergekit wrote other tensors: {sorted(set(model) ^ set(wanted))}")
    values = torch.cat([model[name].to(dtype).reshape(-1) for name in ARCHITECTURES[architecture]])
    array: NDArray[Any] = values.view(common.INTEGERS[values.element_size()]).numpy()
    return array


def main() -> None:
    """Make the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", help="the Python of an environment with mergekit 0.1.5")
    parser.add_argument("-o", "--output", type=Path, default=GOLDENS)
    arguments = parser.parse_args()
    arrays: dict[str, NDArray[Any]] = {"cases": np.array(json.dumps(CASES))}
    for architecture, shapes in ARCHITECTURES.items():
        arrays[f"names/{architecture}"] = np.array(json.dumps(shapes))
        arrays[f"config/{architecture}"] = np.array(json.dumps(CONFIGS[architecture]))
        for model, tensors in models(architecture).items():
            arrays[f"input/{architecture}/{model}"] = torch.cat([x.reshape(-1) for x in tensors.values()]).numpy()
        for name, dtype in common.DTYPES.items():
            for case, answer in ask(arguments.python, architecture, name).items():
                arrays[f"output/{architecture}/{case}/{name}"] = flat(answer, architecture, dtype)
            print(architecture, name, flush=True)
    np.savez_compressed(arguments.output, allow_pickle=False, **arrays)
    print(f"{arguments.output}: {arguments.output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
