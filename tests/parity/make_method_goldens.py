"""Make method_goldens.npz: what mergekit 0.1.5 answers for the methods that goldens.npz leaves out.

    python tests/parity/make_method_goldens.py /opt/mk-venv/bin/python

The models, mergekit's environment and the one change made to it are those of make_goldens.py; see there. Here mergekit
is started once a dtype, for all cases. The inputs are in goldens.npz; this file holds `output/CASE/DTYPE` for some of
the tensors, listed in `tensors`, and `cases`, the JSON text of the recipes that were asked. Where mergekit answers in
another dtype than it was asked for (arcee_fusion, ramplus_tl) the answer is rounded to that one.

`draws/della` counts, for one tensor in float32, in how many of `draws` runs with different seeds della kept an element.
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
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

GOLDENS = Path(__file__).with_name("method_goldens.npz")
DRAWS = 200
DRAWN = "model.layers.0.self_attn.k_proj.weight"

TENSORS = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.0.mlp.gate_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.layers.0.input_layernorm.weight",
)
"""Those whose answers are kept."""

RUNNER = (
    common.RUNNER.rsplit("sys.argv[0]", 1)[0]
    + """
import json

main = next(iter(scripts)).load()
for recipe, out, seed in json.loads(sys.argv[1]):
    sys.argv = ["mergekit-yaml", recipe, out, "--random-seed", str(seed), "--no-copy-tokenizer"]
    sys.argv.append("--no-write-model-card")
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
"""
)


def recipe(
    method: str,
    models: list[int | str],
    shared: dict[str, Any] | None = None,
    *,
    base: bool = True,
    weighted: bool = False,
) -> dict[str, Any]:
    """A recipe in mergekit's grammar; numbers are experts, `weighted` gives them make_goldens' weights and densities."""
    listed = []
    for model in models:
        own = {}
        if weighted and isinstance(model, int):
            own = {"weight": common.WEIGHTS[model], "density": common.DENSITIES[model]}
        listed.append({"model": f"expert{model}" if isinstance(model, int) else model, "parameters": own})
    found: dict[str, Any] = {"merge_method": method, "models": listed, "parameters": shared or {}}
    return {**found, "base_model": "base"} if base else found


CASES: dict[str, dict[str, Any]] = {
    "passthrough": recipe("passthrough", [2], base=False),
    "passthrough-scale": recipe("passthrough", [2], {"scale": 0.7}, base=False),
    "nearswap-near": recipe("nearswap", ["base", 0], {"t": 0.0003}),
    "nearswap-far": recipe("nearswap", ["base", 5], {"t": 0.5}),
    "nearswap-coarse": recipe("nearswap", [1, "base"], {"t": 0.001}),
    "slerp-little": recipe("slerp", ["base", 0], {"t": 0.3}),
    "slerp-much": recipe("slerp", [5, "base"], {"t": 0.75}),
    "breadcrumbs-three": recipe("breadcrumbs", [0, 1, 2], weighted=True),
    "breadcrumbs-gamma": recipe("breadcrumbs", [0, 1, 3], {"gamma": 0.1, "normalize": True}, weighted=True),
    "breadcrumbs-ties-six": recipe("breadcrumbs_ties", [0, 1, 2, 3, 4, 5], weighted=True),
    "breadcrumbs-ties-gamma": recipe("breadcrumbs_ties", [1, 2], {"gamma": 0.3, "lambda": 0.7}, weighted=True),
    "stock-two": recipe("model_stock", [0, 1]),
    "stock-four": recipe("model_stock", [0, 1, 2, 3]),
    "stock-rows": recipe("model_stock", [0, 1, 2], {"filter_wise": True}),
    "nuslerp": recipe("nuslerp", [0, 2], base=False, weighted=True),
    "nuslerp-base": recipe("nuslerp", [0, 2], weighted=True),
    "nuslerp-rows": recipe("nuslerp", [0, 2], {"nuslerp_flatten": False}, base=False, weighted=True),
    "nuslerp-rows-base": recipe("nuslerp", [5, 2], {"nuslerp_flatten": False}, weighted=True),
    "nuslerp-first": recipe(
        "nuslerp", [0, 2], {"nuslerp_flatten": False, "nuslerp_row_wise": True}, base=False, weighted=True
    ),
    "nuslerp-first-base": recipe(
        "nuslerp", [0, 2], {"nuslerp_flatten": False, "nuslerp_row_wise": True}, weighted=True
    ),
    "multislerp-two": recipe("multislerp", [0, 2], base=False, weighted=True),
    "multislerp-four": recipe("multislerp", [0, 1, 2, 5], base=False, weighted=True),
    "multislerp-base": recipe("multislerp", [0, 1, 2, 5], weighted=True),
    "multislerp-sum": recipe("multislerp", [0, 1, 2, 5], {"normalize_weights": False}, weighted=True),
    "karcher-two": recipe("karcher", [0, 2], base=False),
    "karcher-five": recipe("karcher", [0, 1, 2, 3, 5], base=False),
    "karcher-base": recipe("karcher", [0, 1, "base"], {"max_iter": 3}),
    "sce": recipe("sce", [0, 1, 2]),
    "sce-some": recipe("sce", [0, 1, 2, 5], {"select_topk": 0.3}),
    "sce-half": recipe("sce", [0, 5], {"select_topk": 0.5}),
    "arcee": recipe("arcee_fusion", ["base", 0]),
    "arcee-other": recipe("arcee_fusion", ["base", 5]),
    "ram": recipe("ram", [0, 1, 2]),
    "ram-epsilon": recipe("ram", [0, 1, 3, 5], {"epsilon": 0.003}),
    "ramplus": recipe("ramplus_tl", [0, 1, 3]),
    "ramplus-epsilon": recipe("ramplus_tl", [0, 1, 3, 5], {"epsilon": 0.003, "r": 0.5, "alpha": 0.8}),
}

DELLA: dict[str, Any] = {
    **recipe("della_linear", [5], {"epsilon": 0.2, "rescale": False}),
    "models": [{"model": "expert5", "parameters": {"weight": 1.0, "density": 0.4}}],
}


def ask(
    python: str, folder: Path, models: dict[str, common.Model], dtype: str, jobs: list[tuple[str, dict[str, Any], int]]
) -> dict[str, common.Model]:
    """What mergekit makes of the jobs: (name, recipe, seed)."""
    for model, tensors in models.items():
        (folder / model).mkdir()
        save_file(tensors, folder / model / "model.safetensors", metadata={"format": "pt"})
        (folder / model / "config.json").write_text(json.dumps({**common.CONFIG, "torch_dtype": dtype}))
    (folder / "runner.py").write_text(RUNNER)
    for name, job, _ in jobs:
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"dtype": dtype, **job}))
    command = [python, "runner.py", json.dumps([(f"{name}.yaml", f"out-{name}", seed) for name, _, seed in jobs])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"mergekit failed:\n{done.stderr[-4000:]}")
    return {name: load_file(folder / f"out-{name}" / "model.safetensors") for name, _, _ in jobs}


def bits(model: common.Model, dtype: torch.dtype) -> NDArray[Any]:
    """The bit patterns of the kept tensors, one after the other, rounded to `dtype`."""
    flat = torch.cat([model[name].to(dtype).reshape(-1) for name in TENSORS])
    array: NDArray[Any] = flat.view(common.INTEGERS[flat.element_size()]).numpy()
    return array


def main() -> None:
    """Make the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", help="the Python of an environment with mergekit 0.1.5")
    parser.add_argument("-o", "--output", type=Path, default=GOLDENS)
    arguments = parser.parse_args()
    arrays: dict[str, NDArray[Any]] = {
        "cases": np.array(json.dumps(CASES)),
        "tensors": np.array(json.dumps(TENSORS)),
        "draws": np.array(DRAWS),
    }
    for name, dtype in common.DTYPES.items():
        models = common.models(dtype)
        jobs = [(case, job, 0) for case, job in CASES.items()]
        if name != "float32":
            # What karcher gives if it may work in float32.
            wide = [(case, job) for case, job in CASES.items() if job["merge_method"] == "karcher"]
            jobs += [(f"{case}-wide", {**job, "dtype": "float32", "out_dtype": name}, 0) for case, job in wide]
        else:
            jobs += [(f"della-{seed}", DELLA, seed) for seed in range(DRAWS)]
        with tempfile.TemporaryDirectory() as folder:
            answers = ask(arguments.python, Path(folder), models, name, jobs)
        for case, answer in answers.items():
            if not case.startswith("della-"):
                arrays[f"output/{case}/{name}"] = bits(answer, dtype)
        kept = [answer[DRAWN] != models["base"][DRAWN] for case, answer in answers.items() if case.startswith("della-")]
        if kept:
            arrays["draws/della"] = torch.stack(kept).sum(0).to(torch.int16).numpy()
        print(name, flush=True)
    np.savez_compressed(arguments.output, allow_pickle=False, **arrays)
    print(f"{arguments.output}: {arguments.output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
