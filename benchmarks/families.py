"""Families of models to merge: published ones out of packages, and synthetic ones with Qwen3's names and shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from mpfs.repository import Repository
from mpfs.testing.real_models import real_package
from mpfs.testing.synthetic import Architecture, write_model

BASE = "base"

SMALL_QWEN3 = Architecture(128, 12, 4, 2, 32, 384, 4000)
"""About 3.1 million parameters, 6 MB in bf16: 1,500 blocks of 4 KiB."""


@dataclass(frozen=True, slots=True)
class Family:
    """A repository's branches: `base`, and the experts with their weights."""

    name: str
    experts: tuple[tuple[str, float], ...]

    def recipe(self, method: str, density: float | None = None) -> dict[str, object]:
        """A recipe that merges them all; with slerp, which takes one, the first."""
        if method == "slerp":
            name, _ = self.experts[0]
            return {"merge_method": method, "base_model": BASE, "models": [{"model": name}], "parameters": {"t": 0.4}}
        sparse = {} if density is None else {"density": density}
        models = [{"model": expert, "parameters": {"weight": weight, **sparse}} for expert, weight in self.experts]
        return {"merge_method": method, "base_model": BASE, "models": models}


def anarcii(repository: Repository, scratch: Path) -> Family:
    """A sequence model for antibodies, and its fine-tune for sharks' (f32)."""
    models = real_package("anarcii") / "anarcii/models"
    repository.import_checkpoint(models / "antibody/antibody_4_2_128_512.pt", BASE)
    repository.import_checkpoint(models / "shark/shark_4_2_128_512.pt", "shark")
    return Family("anarcii, antibody → shark", (("shark", 0.8),))


def chgnet(repository: Repository, scratch: Path) -> Family:
    """An interatomic potential, and its transfer to another functional (f32)."""
    models = real_package("chgnet") / "chgnet/pretrained"
    repository.import_checkpoint(models / "0.3.0/chgnet_0.3.0_e29f68s314m37.pth.tar", BASE)
    tuned = models / "r2scan/chgnet_r2scan_transfer_learning_e15f36s161m23.pth.tar"
    repository.import_checkpoint(tuned, "r2scan")
    return Family("chgnet, 0.3.0 → r2scan", (("r2scan", 0.8),))


def torchani(repository: Repository, scratch: Path) -> Family:
    """All 8 networks of an ensemble of potentials in one model, and their transfer to coupled cluster energies (f32)."""
    root = real_package("torchani") / "torchani/resources"
    for family, branch in (("ani-1x_8x", BASE), ("ani-1ccx_8x", "ccx")):
        tensors = {}
        for member in range(8):
            for file in sorted((root / family / f"train{member}" / "networks").glob("*.?param")):
                tensors[f"train{member}.{file.name}"] = np.fromfile(file, "<f4")
        save_file(tensors, scratch / f"{branch}.safetensors")
        repository.import_checkpoint(scratch / f"{branch}.safetensors", branch)
    return Family("torchani, ANI-1x → ANI-1ccx", (("ccx", 0.8),))


def qwen3(repository: Repository, scratch: Path) -> Family:
    """Five synthetic experts of a small Qwen3 (bf16), whose deltas differ by layer; some share the embeddings."""
    return synthetic(repository, scratch, SMALL_QWEN3, 5)


def synthetic(repository: Repository, scratch: Path, architecture: Architecture, experts: int) -> Family:
    """Any number of synthetic experts; each source is deleted once it is imported."""
    for expert in range(experts + 1):
        source = scratch / f"source-{expert}"
        write_model(source, architecture, seed=1, expert=expert)
        repository.import_checkpoint(source, BASE if expert == 0 else f"e{expert}")
        (source / "model.safetensors").unlink()
    weights = [0.6, 0.4, 0.3, 0.5, 0.2]
    return Family(
        f"synthetic Qwen3, {experts} experts", tuple((f"e{i + 1}", weights[i % len(weights)]) for i in range(experts))
    )


FAMILIES: tuple[Callable[[Repository, Path], Family], ...] = (anarcii, chgnet, torchani, qwen3)
