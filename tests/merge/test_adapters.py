"""Adapters as experts: against what PEFT made of them (tests/parity/make_adapter_goldens.py), and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from merge_cases import Lab
from numpy.typing import NDArray
from safetensors.torch import save, save_file

from mpfs.errors import BadInputError, NotFoundError
from mpfs.formats.peft import read_adapter
from mpfs.merge.derived import PREFIX
from mpfs.repository import Repository
from mpfs.testing.checkpoints import read, write
from mpfs.testing.torch_checkpoints import PEFT_DAMAGES, AdapterContent, peft_adapters, peft_bytes

pytest_plugins = ["merge_fixtures"]

GOLDENS = Path(__file__).parents[1] / "parity" / "adapter_goldens.npz"


@cache
def goldens() -> dict[str, NDArray[Any]]:
    with np.load(GOLDENS, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def stored(prefix: str) -> dict[str, torch.Tensor]:
    return {
        name.removeprefix(prefix): torch.from_numpy(values)
        for name, values in goldens().items()
        if name.startswith(prefix)
    }


CASES = [name.removeprefix("config/") for name in goldens() if name.startswith("config/")]


@pytest.mark.parametrize("case", CASES)
def test_equals_peft(lab: Lab, case: str) -> None:
    lab.add("base", stored("base/"))
    folder = lab.root / "adapter"
    folder.mkdir()
    save_file(stored(f"adapter/{case}/"), folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(str(goldens()[f"config/{case}"]))
    recipe = {
        "merge_method": "task_arithmetic",
        "base_model": "base",
        "models": [{"model": f"base+{folder}", "parameters": {"weight": 1.0}}],
    }
    report = lab.merge(recipe)
    found, base = lab.load(), stored("base/")
    changed = stored(f"merged/{case}/")
    assert changed
    for name, values in base.items():
        torch.testing.assert_close(found[name], changed.get(name, values), rtol=2e-6, atol=2e-6)
    # What is not adapted is only referenced, and the model with its adapter is made once.
    derived = [ref for ref in lab.repository.refs() if ref.name.startswith(PREFIX)]
    assert len(derived) == 1
    before, after = lab.blocks("base"), lab.blocks(derived[0].name)
    assert {name for name in before if before[name] != after[name]} == set(changed)
    assert lab.merge(recipe).commit == report.commit


def adapter(lab: Lab, tensors: Mapping[str, torch.Tensor], **options: object) -> Path:
    """An adapter's directory, with r = alpha = 16 unless told otherwise."""
    folder = lab.root / "adapter"
    folder.mkdir()
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": 16, "lora_alpha": 16, **options}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder


def passed_through(model: str) -> dict[str, Any]:
    return {"merge_method": "passthrough", "models": [{"model": model}]}


@pytest.mark.parametrize(("rslora", "scale"), [(False, 1.0), (True, 4.0)])
def test_scale(lab: Lab, rslora: bool, scale: float) -> None:
    """Case M5: rank 16, alpha 16; bf16 matrices whose product is 6, on a base of 0.5."""
    lab.add("base", {"q.weight": torch.full((70, 33), 0.5, dtype=torch.bfloat16)})
    parts = {
        "base_model.model.q.lora_A.weight": torch.full((16, 33), 0.75, dtype=torch.bfloat16),
        "base_model.model.q.lora_B.weight": torch.full((70, 16), 0.5, dtype=torch.bfloat16),
    }
    lab.merge(passed_through(f"base+{adapter(lab, parts, use_rslora=rslora)}"))
    merged = lab.load()["q.weight"]
    assert (merged.dtype, set(merged.flatten().tolist())) == (torch.bfloat16, {0.5 + 6 * scale})


def test_many_chunks(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the rows at a time and the blocks are, the result is that of the whole matrix."""
    monkeypatch.setattr("mpfs.merge.derived.CHUNK_BYTES", 1000)
    generator = torch.Generator().manual_seed(1)
    base, a, b = (torch.randn(shape, generator=generator) for shape in ((300, 70), (16, 70), (300, 16)))
    lab.add("base", {"q.weight": base})
    folder = adapter(lab, {"q.lora_A.weight": a, "q.lora_B.weight": b})
    lab.merge(passed_through(f"base+{folder}"))
    torch.testing.assert_close(lab.load()["q.weight"], base + b @ a)


def test_an_adapter_is_also_a_ref(lab: Lab) -> None:
    lab.add("base", {"q.weight": torch.zeros(8, 8)})
    parts = {"q.lora_A.weight": torch.ones(16, 8), "q.lora_B.weight": torch.ones(8, 16)}
    lab.repository.import_checkpoint(adapter(lab, parts), "tuned/lora", threads=1)
    lab.merge(passed_through("base+tuned/lora"))
    assert set(lab.load()["q.weight"].flatten().tolist()) == {16.0}
    with pytest.raises(BadInputError, match="base is no adapter"):
        lab.merge(passed_through("base+base"))
    with pytest.raises(NotFoundError, match="nowhere"):
        lab.merge(passed_through("base+nowhere"))


MODEL = {
    "model.layers.0.q.weight": (8, 6),
    "model.embed.weight": (30, 8),
    "conv.weight": (4, 4, 3, 3),
    "n.weight": (8,),
}
GOOD = {
    "base_model.model.model.layers.0.q.lora_A.weight": (4, 6),
    "base_model.model.model.layers.0.q.lora_B.weight": (8, 4),
}
CONFIG = {"r": 4, "lora_alpha": 8}


@pytest.mark.parametrize(
    ("config", "tensors", "said"),
    [
        ({"peft_type": "IA3"}, {}, "IA3"),
        ({"layer_replication": [[0, 1]]}, {}, "layer_replication"),
        ({}, {"other.lora_A.weight": (4, 6), "other.lora_B.weight": (8, 4)}, "other.lora_A.weight matches no tensor"),
        ({}, {"score.weight": (2, 8)}, "score.weight matches no tensor"),
        ({}, {"token_adapter.trainable_tokens_delta": (2, 8)}, "matches no tensor"),
        ({}, {"model.n.lora_A.weight": (4, 8), "model.n.lora_B.weight": (8, 4)}, "only matrices"),
        ({}, {"conv.lora_A.weight": (4, 4, 3, 3), "conv.lora_B.weight": (4, 4, 1, 1)}, "convolutions"),
        ({}, {"embed.lora_A.weight": (4, 8)}, "has no lora_B"),
        ({}, {"embed.lora_A.weight": (4, 8), "embed.lora_B.weight": (31, 4)}, r"\[31, 4\] do not fit"),
        ({"fan_in_fan_out": True}, {}, "with fan_in_fan_out"),
        ({"r": 8}, {}, "has rank 4, but adapter_config.json says 8"),
        ({"rank_pattern": {"q": 2}}, {}, "says 2"),
        ({"rank_pattern": {"(": 2}}, {}, "a pattern that is none"),
        ({"lora_alpha": None}, {}, "no lora_alpha"),
        ({"use_dora": True}, {}, "no lora_magnitude_vector"),
        ({}, {"model.embed.weight": (30, 9)}, r"\[30, 9\]"),
        ({}, {"model.layers.0.q.weight": (8, 6)}, "changed twice"),
    ],
)
def test_what_cannot_be_applied(config: dict[str, Any], tensors: dict[str, tuple[int, ...]], said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        read_adapter({**CONFIG, **config}, {**GOOD, **tensors}, MODEL)


def test_names_with_and_without_the_model_before_them() -> None:
    short = {name.removeprefix("model."): shape for name, shape in MODEL.items()}
    for model in (MODEL, short):
        found = read_adapter(CONFIG, GOOD, model)
        assert [item.target for item in found.low_rank] == [next(iter(model))]
        assert found.low_rank[0].scale == 2.0
    with pytest.raises(BadInputError, match="it has no tensors"):
        read_adapter(CONFIG, {}, MODEL)


def merged_with(repository: Repository, folder: Path, content: AdapterContent) -> dict[str, torch.Tensor]:
    """The model with the adapter, both imported from files."""
    write(folder / "model", {"model.safetensors": save(dict(content.model))})
    write(folder / "adapter", content.files)
    repository.import_checkpoint(folder / "model", "model")
    repository.import_checkpoint(folder / "adapter", "adapter")
    repository.checkout("adapter", folder / "out")
    assert read(folder / "out") == content.files
    repository.merge(passed_through("model+adapter"), "merged")
    return repository.load("merged")


@settings(max_examples=25)
@given(content=peft_adapters())
def test_any_adapter(tmp_path_factory: pytest.TempPathFactory, content: AdapterContent) -> None:
    folder = tmp_path_factory.mktemp("x")
    with Repository.create(folder / "repo", block_size=4096, map_size=1 << 30, author="tester") as repository:
        found = merged_with(repository, folder, content)
        assert sorted(found) == sorted(content.expected)
        for name, tensor in content.expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=2e-6, atol=2e-5)
    shutil.rmtree(folder)


@pytest.mark.parametrize("damage", PEFT_DAMAGES)
def test_damaged_adapters_make_nothing(lab: Lab, damage: str) -> None:
    tensors = {"q.lora_A.weight": torch.ones(2, 5), "q.lora_B.weight": torch.ones(6, 2)}
    config: dict[str, Any] = {"r": 2, "lora_alpha": 4}
    model = {"q.weight": torch.zeros(6, 5)}
    whole = AdapterContent(peft_bytes(tensors, config), model, {})
    assert merged_with(lab.repository, lab.root / "whole", whole)["q.weight"].tolist() == [[4.0] * 5] * 6
    PEFT_DAMAGES[damage](tensors, config)
    write(lab.root / "broken", peft_bytes(tensors, config))
    lab.repository.import_checkpoint(lab.root / "broken", "adapter")
    before = lab.repository.refs()
    with pytest.raises(BadInputError):
        lab.repository.merge(passed_through("model+adapter"), "merged")
    assert lab.repository.refs() == before
