"""Make adapter_goldens.npz: what PEFT makes of adapters of many kinds, applied to a tiny model and merged into it.

    /opt/mk-venv/bin/python tests/parity/make_adapter_goldens.py

To be run in an environment with peft (mergekit's, see make_goldens.py). The file holds `base/TENSOR`, and for each case
`config/CASE` (the text of adapter_config.json), `adapter/CASE/TENSOR` and `merged/CASE/TENSOR`, all float32.
"""

from __future__ import annotations

import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

# Of mergekit's environment, not of this one.
peft: Any = import_module("peft")
pytorch_utils: Any = import_module("transformers.pytorch_utils")

GOLDENS = Path(__file__).with_name("adapter_goldens.npz")


class Layer(torch.nn.Module):
    """A linear layer with a bias, one without, and one that lies transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = torch.nn.Linear(12, 10)
        self.up_proj = torch.nn.Linear(12, 20, bias=False)
        self.c_attn = pytorch_utils.Conv1D(14, 12)


class Tiny(torch.nn.Module):
    """Layers, an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(30, 12)
        self.layers = torch.nn.ModuleList([Layer(), Layer()])
        self.lm_head = torch.nn.Linear(12, 30, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Not used."""
        return ids


CASES: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"]},
    "rslora": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "use_rslora": True},
    "patterns": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "up_proj"],
        "rank_pattern": {"layers.0.q_proj": 2, "up_proj": 6},
        "alpha_pattern": {"layers.1.up_proj": 3, "q_proj": 5},
    },
    "transposed": {"r": 4, "lora_alpha": 4, "target_modules": ["c_attn"], "fan_in_fan_out": True},
    "saved": {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "bias": {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "bias": "lora_only"},
    "lora-bias": {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "lora_bias": True},
    "embedding": {"r": 3, "lora_alpha": 4, "target_modules": ["embed_tokens"]},
    "dora": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"], "use_dora": True},
    "dora-transposed": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["c_attn"],
        "use_dora": True,
        "fan_in_fan_out": True,
    },
}


def main() -> None:
    """Make the file."""
    torch.manual_seed(3)
    base = Tiny().state_dict()
    arrays: dict[str, Any] = {f"base/{name}": values.numpy().copy() for name, values in base.items()}
    for case, options in CASES.items():
        model = Tiny()
        model.load_state_dict(base)
        adapted = peft.get_peft_model(model, peft.LoraConfig(**options))
        with torch.no_grad():
            for name, values in adapted.named_parameters():
                if values.requires_grad:
                    values.add_(torch.randn_like(values) * (0.3 if "magnitude" not in name else 0.1))
        with tempfile.TemporaryDirectory() as folder:
            adapted.save_pretrained(folder)
            arrays[f"config/{case}"] = np.array((Path(folder) / "adapter_config.json").read_text())
            for name, values in load_file(Path(folder) / "adapter_model.safetensors").items():
                arrays[f"adapter/{case}/{name}"] = values.numpy().copy()
        merged = adapted.merge_and_unload().state_dict()
        for name, values in merged.items():
            if not torch.equal(values, base[name]):
                arrays[f"merged/{case}/{name}"] = values.numpy().copy()
    np.savez_compressed(GOLDENS, allow_pickle=False, **arrays)
    print(f"{GOLDENS}: {GOLDENS.stat().st_size} bytes")


if __name__ == "__main__":
    main()
