"""Make draw_goldens.npz: means and variances of what mergekit 0.1.5 gives over many seeds, by methods that draw.

    python tests/parity/make_draw_goldens.py /opt/mk-venv/bin/python

mergekit's environment and the one change made to it are those of make_goldens.py; see there. It goes by
mergekit-pytorch, in float32, on one small tensor. The file holds `base`, `e0`, `e1`; `cases`, the JSON text of the
recipes; `draws`, how many seeds; and for each case `mean/CASE` and `variance/CASE`, by element, in float64.
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
from make_architecture_goldens import RAW_RUNNER, by_file
from safetensors.torch import load_file, save_file

GOLDENS = Path(__file__).with_name("draw_goldens.npz")
SHAPE = (10, 16)
DRAWS = 400


def recipe(method: str, **shared: Any) -> dict[str, Any]:
    """Two experts of different weights and densities."""
    models = [
        {"model": "e0", "parameters": {"weight": 0.6, "density": 0.4}},
        {"model": "e1", "parameters": {"weight": 0.9, "density": 0.6}},
    ]
    return {"merge_method": method, "base_model": "base", "models": models, "parameters": shared, "dtype": "float32"}


CASES = {
    "dare_linear": recipe("dare_linear"),
    "dare_linear-plain": recipe("dare_linear", rescale=False, normalize=True),
    "dare_ties": recipe("dare_ties"),
    "della_linear": recipe("della_linear", epsilon=0.3),
    "della": recipe("della", epsilon=0.2),
}


def main() -> None:
    """Make the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", help="the Python of an environment with mergekit 0.1.5")
    parser.add_argument("-o", "--output", type=Path, default=GOLDENS)
    arguments = parser.parse_args()
    generator = torch.Generator().manual_seed(3)
    base = torch.randn(SHAPE, generator=generator) * 0.05
    models = {"base": base} | {f"e{i}": base + torch.randn(SHAPE, generator=generator) * 0.01 for i in range(2)}
    arrays: dict[str, Any] = {name: values.reshape(-1).numpy() for name, values in models.items()}
    arrays |= {"cases": np.array(json.dumps(CASES)), "draws": np.array(DRAWS)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model, values in models.items():
            (folder / model).mkdir()
            save_file({"x": values}, folder / model / "model.safetensors", metadata={"format": "pt"})
        (folder / "runner.py").write_text(RAW_RUNNER)
        for case, job in CASES.items():
            (folder / f"{case}.yaml").write_text(yaml.safe_dump(by_file(job)))
            jobs = [(f"{case}.yaml", f"out-{case}-{seed}", seed) for seed in range(DRAWS)]
            command = [arguments.python, "runner.py", json.dumps(jobs)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"mergekit failed:\n{done.stderr[-4000:]}")
            found = [load_file(folder / f"out-{case}-{seed}" / "model.safetensors")["x"] for seed in range(DRAWS)]
            answers = torch.stack(found).double().reshape(DRAWS, -1)
            arrays |= {f"mean/{case}": answers.mean(0).numpy(), f"variance/{case}": answers.var(0).numpy()}
            print(case, flush=True)
    np.savez_compressed(arguments.output, allow_pickle=False, **arrays)
    print(f"{arguments.output}: {arguments.output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
