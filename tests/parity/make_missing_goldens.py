"""Make missing_goldens.npz: what mergekit 0.1.5 does where some of the models lack a tensor.

    python tests/parity/make_missing_goldens.py /opt/mk-venv/bin/python

mergekit-yaml takes names from an architecture's template, which lets only a head be missing; so this goes by
mergekit-pytorch with --tensor-union, in float32. Its environment and the one change made to it are those of
make_goldens.py; see there. The models hold two tensors each, `kept` and `gone`; in each pattern some lack `gone`.

The file holds `input/MODEL` (both tensors, flat, one after the other); `cases`, the JSON text of {case: recipe};
`patterns`, that of {pattern: the models that lack the tensor}; and for each case and pattern either `output/CASE/PATTERN`,
what `gone` came to, or its name in `refused` or in `left_out`, the JSON texts of what mergekit stopped at and of what
it wrote without the tensor.
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
from make_architecture_goldens import by_file, recipe
from make_goldens import RUNNER
from safetensors.torch import load_file, save_file

GOLDENS = Path(__file__).with_name("missing_goldens.npz")
SHAPE = (5, 8)
MODELS = ("base", "e0", "e1", "e2", "e3")

CASES: dict[str, dict[str, Any]] = {
    "linear": recipe("linear", [0, 1, 2], base=False),
    "karcher": recipe("karcher", [0, 1, 2], base=False),
    "multislerp": recipe("multislerp", [0, 1, 2], base=False),
    "multislerp-base": recipe("multislerp", [0, 1, 2], base=True),
    "nuslerp": recipe("nuslerp", [0, 1], base=False),
    "nuslerp-base": recipe("nuslerp", [0, 1], base=True),
    "slerp": recipe("slerp", ["base", 0], {"t": 0.3}, base=True),
    "nearswap": recipe("nearswap", ["base", 0], {"t": 0.002}, base=True),
    "arcee": recipe("arcee_fusion", ["base", 0], base=True),
    "passthrough": recipe("passthrough", [0], base=False),
    "arithmetic": recipe("task_arithmetic", [0, 1, 2], base=True),
    "ties": recipe("ties", [0, 1, 2], base=True),
    "breadcrumbs": recipe("breadcrumbs", [0, 1, 2], base=True),
    "stock": recipe("model_stock", [0, 1, 2], base=True),
    "sce": recipe("sce", [0, 1, 2], base=True),
    "ram": recipe("ram", [0, 1, 2], {"epsilon": 0.003}, base=True),
}

PATTERNS = {
    "an expert lacks it": ["e0"],
    "two experts lack it": ["e0", "e1"],
    "all experts lack it": ["e0", "e1", "e2"],
    "the base lacks it": ["base"],
    "the base and an expert lack it": ["base", "e0"],
}

RAW_RUNNER = (
    RUNNER.rsplit("scripts = ", 1)[0]
    + """
import json

scripts = importlib.metadata.entry_points(group="console_scripts", name="mergekit-pytorch")
main = next(iter(scripts)).load()
for recipe, out in json.loads(sys.argv[1]):
    sys.argv = ["mergekit-pytorch", recipe, out, "--random-seed", "0", "--tensor-union", "--quiet"]
    try:
        main(standalone_mode=False)
    except Exception as error:
        os.makedirs(out, exist_ok=True)
        with open(os.path.join(out, "error.txt"), "w") as file:
            file.write(f"{type(error).__name__}: {error}")
"""
)


def models() -> dict[str, dict[str, torch.Tensor]]:
    """The models, whole."""
    generator = torch.Generator().manual_seed(11)
    base = {name: torch.randn(SHAPE, generator=generator) * 0.05 for name in ("kept", "gone")}
    found = {"base": base}
    for model in MODELS[1:]:
        found[model] = {name: x + torch.randn(SHAPE, generator=generator) * 0.006 for name, x in base.items()}
    return found


def main() -> None:
    """Make the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", help="the Python of an environment with mergekit 0.1.5")
    parser.add_argument("-o", "--output", type=Path, default=GOLDENS)
    arguments = parser.parse_args()
    arrays: dict[str, Any] = {"cases": np.array(json.dumps(CASES)), "patterns": np.array(json.dumps(PATTERNS))}
    refused: dict[str, str] = {}
    left_out: list[str] = []
    for model, tensors in models().items():
        arrays[f"input/{model}"] = torch.cat([tensors["kept"].reshape(-1), tensors["gone"].reshape(-1)]).numpy()
    for number, (pattern, lacking) in enumerate(PATTERNS.items()):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for model, tensors in models().items():
                (folder / model).mkdir()
                stored = {key: x for key, x in tensors.items() if key == "kept" or model not in lacking}
                save_file(stored, folder / model / "model.safetensors", metadata={"format": "pt"})
            (folder / "runner.py").write_text(RAW_RUNNER)
            for case, job in CASES.items():
                (folder / f"{case}.yaml").write_text(yaml.safe_dump({"dtype": "float32", **by_file(job)}))
            command = [arguments.python, "runner.py", json.dumps([(f"{case}.yaml", f"out-{case}") for case in CASES])]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"mergekit failed:\n{done.stderr[-4000:]}")
            for case in CASES:
                error = folder / f"out-{case}" / "error.txt"
                if error.exists():
                    refused[f"{case}/{pattern}"] = " ".join(error.read_text().split())[:200]
                    continue
                found = load_file(folder / f"out-{case}" / "model.safetensors")
                if "gone" not in found:
                    left_out.append(f"{case}/{pattern}")
                else:
                    arrays[f"output/{case}/{pattern}"] = found["gone"].float().reshape(-1).numpy()
        print(f"{number + 1} of {len(PATTERNS)}", flush=True)
    arrays |= {"refused": np.array(json.dumps(refused)), "left_out": np.array(json.dumps(left_out))}
    np.savez_compressed(arguments.output, allow_pickle=False, **arrays)
    print(f"{arguments.output}: {arguments.output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
