"""Make the golden repository of the current format version: python tests/format/make_golden.py

A golden repository is made once for each format version and then kept: later code must open it. Run this again only
before a version is released. Beside the repository lie the digests of all files of all refs, taken from the sources,
not from the repository.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch

from mpfs.objects import Budget
from mpfs.repository import Repository
from mpfs.store.config import FORMAT_VERSION
from mpfs.testing.checkpoints import TensorContent, safetensors_bytes, write

GOLDEN = Path(__file__).parent / "golden"
BLOCK_SIZE = 4096


def weights(seed: int) -> list[TensorContent]:
    """Tensors of every kind: several blocks, less than one, empty, scalar, packed, tied."""
    random = np.random.default_rng(7)
    delta = np.random.default_rng(seed)
    tensors = []
    for name, shape in (("layers.0.weight", (60, 50)), ("layers.1.weight", (64, 64)), ("norm.weight", (50,))):
        values = random.standard_normal(shape, np.float32) + (seed > 0) * delta.standard_normal(shape, np.float32) / 64
        tensors.append(TensorContent(name, "F32", shape, values.astype("<f4").tobytes()))
    half = random.standard_normal((40, 64), np.float32).astype("<f2")
    tensors.append(TensorContent("half", "F16", (40, 64), half.tobytes()))
    tensors.append(TensorContent("empty", "F32", (2, 0), b""))
    tensors.append(TensorContent("scalar", "F64", (), np.float64(1.5).tobytes()))
    tensors.append(TensorContent("packed", "F4", (6,), b"\x12\x34\x56"))
    tensors.append(TensorContent("positions", "I64", (600,), np.arange(600, dtype="<i8").tobytes()))
    return tensors


def sources(folder: Path) -> dict[str, Path]:
    """Checkpoints by branch."""
    made = {}
    for seed, name in enumerate(("base", "expert/one", "expert/two")):
        directory = folder / str(seed)
        config = json.dumps({"model_type": "golden", "seed": seed, "name": "größe"}, ensure_ascii=False).encode()
        content = {
            "config.json": config,
            "model.safetensors": safetensors_bytes(weights(seed), {"format": "pt"}),
            "nested/vocabulary.txt": b"token\n" * 1500,
            "empty.txt": b"",
        }
        made[name] = write(directory, content)
    torch.save({"w": torch.arange(3000, dtype=torch.bfloat16).reshape(30, 100)}, folder / "model.bin")
    made["torch"] = folder / "model.bin"
    return made


def main() -> None:
    """Make it."""
    target = GOLDEN / f"v{FORMAT_VERSION}"
    shutil.rmtree(target, ignore_errors=True)
    expected: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = sources(folder)
        with Repository.create(target, block_size=BLOCK_SIZE, map_size=1 << 30, author="golden") as repository:
            for ref, source in made.items():
                base = "base" if ref.startswith("expert") else None
                repository.import_checkpoint(source, ref, base=base, message=f"Import {ref}")
                if source.is_dir():
                    files = [item for item in source.rglob("*") if item.is_file()]
                    expected[ref] = {str(item.relative_to(source)): _digest(item) for item in files}
            models = [{"model": model, "parameters": {"weight": 0.5, "density": 0.5}} for model in list(made)[1:3]]
            recipe = {
                "merge_method": "ties", "base_model": "base", "models": models, "dtype": "float32",
                "parameters": {"normalize": True},
            }  # fmt: skip
            repository.merge(recipe, "merged")
            repository.merge(recipe, "merged", budget=Budget("percent", 50.0))
            repository.plan({**recipe, "merge_method": "task_arithmetic"})
            repository.tag("v1", "merged~1")
            repository.branch("removed", "base")
            repository.remove_ref("removed")
            for ref in ("torch", "merged", "v1"):
                out = folder / "out" / ref
                repository.checkout(ref, out)
                expected[ref] = {str(item.relative_to(out)): _digest(item) for item in out.rglob("*") if item.is_file()}
            repository.gc(compact=True)
    (target / "store-1" / "lock.mdb").unlink()
    text = json.dumps(expected, indent=1, sort_keys=True)
    (GOLDEN / f"v{FORMAT_VERSION}.files.json").write_text(text + "\n", encoding="utf-8")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    main()
