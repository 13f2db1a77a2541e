"""Make grammar_goldens.npz: what mergekit 0.1.5 makes of recipes with gradients, filters, slices and tied heads.

    python tests/parity/make_grammar_goldens.py /opt/mk-venv/bin/python

mergekit's environment and the one change made to it are those of make_goldens.py; see there. The models are Llamas of
four layers (`a`, `b`, `c`, all tuned from `base`) and `tied`, which has no head of its own. The file holds
`input/MODEL` and `output/CASE` as arrays of float32, each the model's tensors one after the other in the order of
`names/…`, the JSON text of their names and shapes; and `cases`, the JSON text of the recipes that were asked.
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
from safetensors.torch import load_file, save_file

GOLDENS = Path(__file__).with_name("grammar_goldens.npz")
LAYERS = 4

RUNNER = (
    common.RUNNER.rsplit("sys.argv[0]", 1)[0]
    + """
import json, traceback

main = next(iter(scripts)).load()
for recipe, out in json.loads(sys.argv[1]):
    sys.argv = ["mergekit-yaml", recipe, out, "--no-copy-tokenizer", "--no-write-model-card"]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
    except Exception:
        os.makedirs(out, exist_ok=True)
        with open(os.path.join(out, "error.txt"), "w") as file:
            file.write(traceback.format_exc())
"""
)


def stack(*parts: tuple[str, int, int]) -> list[dict[str, Any]]:
    """Slices of one source each."""
    return [{"sources": [{"model": model, "layer_range": [start, stop]}]} for model, start, stop in parts]


def weighted(**models: Any) -> list[dict[str, Any]]:
    """Entries with a weight each."""
    return [{"model": model, "parameters": {"weight": weight}} for model, weight in models.items()]


CASES: dict[str, dict[str, Any]] = {
    "linear-gradient": {
        "merge_method": "linear",
        "models": weighted(a=[0.0, 1.0], b=[1.0, 0.5, 0.2]),
    },
    "linear-filters": {
        "merge_method": "linear",
        "models": weighted(
            a=[{"filter": "mlp", "value": [0.1, 0.9]}, {"filter": "self_attn", "value": 0.3}, {"value": 0.6}],
            b=[{"filter": "layers.1.", "value": 2.0}],
        ),
        "parameters": {"weight": [{"filter": "*", "value": 0.25}]},
    },
    "ties-gradient": {
        "merge_method": "ties",
        "base_model": "base",
        "models": [
            {"model": "a", "parameters": {"density": [1, 0.7, 0.1], "weight": 1.0}},
            {"model": "b", "parameters": {"density": 0.5, "weight": [0, 0.3, 0.7, 1]}},
            {
                "model": "c",
                "parameters": {"density": 0.33, "weight": [{"filter": "mlp", "value": 0.5}, {"value": 0}]},
            },
        ],
        "parameters": {"normalize": True, "int8_mask": True},
    },
    "slerp-gradient": {
        "merge_method": "slerp",
        "base_model": "base",
        "slices": [
            {
                "sources": [
                    {"model": "base", "layer_range": [0, LAYERS]},
                    {"model": "c", "layer_range": [0, LAYERS]},
                ]
            }
        ],
        "parameters": {
            "t": [
                {"filter": "self_attn", "value": [0, 0.5, 0.3, 0.7, 1]},
                {"filter": "mlp", "value": [1, 0.5, 0.7, 0.3, 0]},
                {"value": 0.5},
            ]
        },
    },
    "stack": {
        "merge_method": "passthrough",
        "slices": stack(("a", 0, 3), ("b", 1, 4), ("a", 2, 3)),
    },
    "stack-scaled": {
        "merge_method": "passthrough",
        "slices": [
            {"sources": [{"model": "a", "layer_range": [0, 2]}]},
            {
                "sources": [
                    {
                        "model": "b",
                        "layer_range": [1, 3],
                        "parameters": {"scale": [{"filter": "o_proj", "value": 0.0}, {"value": 1.0}]},
                    }
                ]
            },
        ],
    },
    "slices-linear": {
        "merge_method": "linear",
        "slices": [
            {
                "sources": [
                    {"model": "a", "layer_range": [0, 2], "parameters": {"weight": [0.2, 0.8]}},
                    {"model": "b", "layer_range": [2, 4]},
                ],
                "parameters": {"weight": [{"filter": "layers.3", "value": 0.9}, {"filter": "layers.0", "value": 0.4}]},
            },
            {
                "sources": [{"model": "c", "layer_range": [3, 4], "parameters": {"weight": 1.0}}],
            },
        ],
        "parameters": {"weight": 0.5},
    },
    "slices-arithmetic": {
        "merge_method": "task_arithmetic",
        "base_model": "base",
        "slices": [
            {
                "sources": [
                    {"model": "a", "layer_range": [0, 4]},
                    {"model": "base", "layer_range": [0, 4]},
                    {"model": "b", "layer_range": [0, 4]},
                ]
            },
        ],
        "parameters": {"weight": [0.1, 0.9]},
    },
    "slices-without-base": {
        "merge_method": "task_arithmetic",
        "base_model": "base",
        "slices": [
            {"sources": [{"model": "a", "layer_range": [0, 4]}, {"model": "b", "layer_range": [0, 4]}]},
        ],
        "parameters": {"weight": 0.5},
    },
    "slices-own-base": {
        "merge_method": "task_arithmetic",
        "base_model": "base",
        "slices": [
            {
                "base_model": "c",
                "sources": [{"model": "a", "layer_range": [0, 4]}, {"model": "c", "layer_range": [0, 4]}],
            },
        ],
        "parameters": {"weight": 0.5},
    },
    "one-layer": {
        "merge_method": "linear",
        "slices": [
            {
                "sources": [
                    {"model": "a", "layer_range": [1, 2], "parameters": {"weight": [0.0, 1.0]}},
                    {"model": "b", "layer_range": [2, 3], "parameters": {"weight": [1.0, 3.0]}},
                ],
            },
        ],
    },
    "truth-gradient": {
        "merge_method": "linear",
        "models": weighted(a=0.3, b=0.4),
        "parameters": {"normalize": [True, False]},
    },
    "inner-miss": {
        "merge_method": "linear",
        "models": weighted(a=[{"filter": "layers", "value": [{"filter": "mlp", "value": 0.9}]}, {"value": 0.1}], b=0.5),
    },
    "tied-linear": {"merge_method": "linear", "models": weighted(a=0.3, tied=0.7)},
    "tied-first": {"merge_method": "linear", "models": weighted(tied=0.3, b=0.7)},
    "tied-base": {"merge_method": "task_arithmetic", "base_model": "tied", "models": weighted(a=0.3, b=0.7)},
    "tied-expert": {"merge_method": "task_arithmetic", "base_model": "base", "models": weighted(a=0.3, tied=0.7)},
    "tied-all": {"merge_method": "linear", "models": weighted(tied=1.0)},
    "empty-gradient": {
        "merge_method": "linear",
        "models": weighted(a=[], b=0.5),
        "parameters": {"weight": 0.1},
    },
    "single-module": {
        "merge_method": "linear",
        "modules": {"default": {"models": weighted(a=0.3, b=0.7)}},
    },
}


def models() -> dict[str, common.Model]:
    """The models, float32."""
    generator = torch.Generator().manual_seed(5)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in common.shapes().items():
        for layer in range(LAYERS) if ".layers.0." in name else (0,):
            shapes[name.replace(".layers.0.", f".layers.{layer}.")] = shape

    def normal(shape: tuple[int, ...], scale: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    base = {name: normal(shape, 0.02) for name, shape in shapes.items()}
    found = {"base": base}
    for model in ("a", "b", "c", "tied"):
        found[model] = {name: values + normal(tuple(values.shape), 0.004) for name, values in base.items()}
    del found["tied"]["lm_head.weight"]
    return found


def main() -> None:
    """Make the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", help="the Python of an environment with mergekit 0.1.5")
    parser.add_argument("-o", "--output", type=Path, default=GOLDENS)
    arguments = parser.parse_args()
    arrays: dict[str, Any] = {"cases": np.array(json.dumps(CASES))}

    def keep(kind: str, name: str, tensors: common.Model) -> None:
        arrays[f"names/{kind}/{name}"] = np.array(json.dumps({key: list(x.shape) for key, x in tensors.items()}))
        arrays[f"{kind}/{name}"] = torch.cat([x.float().reshape(-1) for x in tensors.values()]).numpy()

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model, tensors in models().items():
            (folder / model).mkdir()
            save_file(tensors, folder / model / "model.safetensors", metadata={"format": "pt"})
            config = {**common.CONFIG, "num_hidden_layers": LAYERS, "torch_dtype": "float32"}
            config["tie_word_embeddings"] = model == "tied"
            (folder / model / "config.json").write_text(json.dumps(config))
            keep("input", model, tensors)
        (folder / "runner.py").write_text(RUNNER)
        for case, recipe in CASES.items():
            (folder / f"{case}.yaml").write_text(yaml.safe_dump(recipe))
        jobs = json.dumps([(f"{case}.yaml", f"out-{case}") for case in CASES])
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [arguments.python, "runner.py", jobs],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"mergekit failed:\n{done.stderr[-4000:]}")
        for case in CASES:
            out = folder / f"out-{case}"
            if (out / "error.txt").exists():
                print(f"{case}: {(out / 'error.txt').read_text().strip().splitlines()[-1]}")
                continue
            keep("output", case, load_file(out / "model.safetensors"))
            config = json.loads((out / "config.json").read_text())
            arrays[f"config/{case}"] = np.array(json.dumps(config))
    np.savez_compressed(arguments.output, allow_pickle=False, **arrays)
    print(f"{arguments.output}: {arguments.output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
