"""A small family of models on disk: a base, experts, and as many variants as a test wants, each by its number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mpfs.repository import Repository
from mpfs.testing.checkpoints import TensorContent, safetensors_bytes, write

BLOCK_SIZE = 16384
BATCH = 64 << 10
"""Bytes of a write transaction, so low that an import has some dozens of them."""

_SHAPE = (256, 400)
_TENSORS = 4


def variant(root: Path, number: int) -> Path:
    """A checkpoint of 1.6 MB that depends on its number alone; number 0 is the base."""
    folder = root / f"variant-{number}"
    if not folder.exists():
        tensors = []
        for index in range(_TENSORS):
            base = np.random.default_rng(index).standard_normal(_SHAPE, np.float32)
            delta = np.random.default_rng([index, number]).standard_normal(_SHAPE, np.float32)
            data = base + np.float32(0.01 * bool(number)) * delta
            tensors.append(TensorContent(f"layers.{index}.weight", "F32", _SHAPE, data.tobytes()))
        config = b'{"model_type": "test", "number": %d}' % number
        content = safetensors_bytes(tensors, {"format": "pt"})
        write(folder, {"model.safetensors": content, "config.json": config})
    return folder


def recipe(number: int, method: str = "task_arithmetic") -> dict[str, Any]:
    """A merge of both experts into the base whose every block depends on the number."""
    weight = 0.25 + number / 1024
    return {
        "merge_method": method,
        "base_model": "base",
        "models": [
            {"model": "one", "parameters": {"weight": weight}},
            {"model": "two", "parameters": {"weight": 0.5}},
        ],
        "dtype": "float32",
    }


def new_repository(path: Path, root: Path) -> Path:
    """A repository with a base and two experts; closed."""
    with Repository.create(path, block_size=BLOCK_SIZE, map_size=1 << 32, author="tester") as repository:
        for number, name in enumerate(["base", "one", "two"]):
            repository.import_checkpoint(variant(root, number), name, base=None if number == 0 else "base")
    return path
