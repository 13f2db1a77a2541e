"""docs/recipes.md: every recipe on the page runs, and what it quotes is what is said."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from merge_cases import Lab, config
from safetensors.torch import save_file

from mpfs.errors import RecipeError
from mpfs.merge.recipe import parse_recipe

pytest_plugins = ["merge_fixtures"]

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")
RECIPES = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
SIZE = 8


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    names = ["model.embed_tokens", "model.norm", "lm_head"]
    names += [f"model.layers.{layer}.{part}" for layer in range(4) for part in ("self_attn.q_proj", "mlp.up_proj")]
    return {f"{name}.weight": torch.randn(SIZE, SIZE, generator=generator) for name in names}


def tokenizer(special: list[str]) -> bytes:
    """A tokenizer.json of as many tokens as there are rows."""
    words = {f"w{index}": index for index in range(SIZE - len(special))}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": len(words) + index, "content": token, **flags} for index, token in enumerate(special)]
    model = {"type": "WordLevel", "vocab": words, "unk_token": "w0"}
    return json.dumps({"version": "1.0", "added_tokens": added, "model": model}).encode()


@pytest.fixture
def models(lab: Lab) -> Lab:
    """The models that the page speaks of."""
    for seed, name in enumerate(("base", "chat", "code", "math")):
        files = {"config.json": config(num_hidden_layers=4, vocab_size=SIZE, tie_word_embeddings=False)}
        files["tokenizer.json"] = tokenizer(["<|im_start|>", "<|im_end|>"] if name == "chat" else [])
        lab.add(name, tensors(seed), files)
    folder = lab.root / "style-lora"
    folder.mkdir()
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    parts = {f"{prefix}.lora_A.weight": torch.ones(2, SIZE), f"{prefix}.lora_B.weight": torch.ones(SIZE, 2)}
    save_file(parts, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    return lab


@pytest.mark.parametrize("text", RECIPES, ids=[str(index) for index in range(len(RECIPES))])
def test_recipes_run(models: Lab, text: str) -> None:
    path = models.root / "recipe.yml"
    path.write_text(text, encoding="utf-8")
    report = models.repository.merge(path, "merged", threads=1)
    assert models.load()
    for note in report.notes:
        if note.startswith(("recognised in base", "tokenizer: 8 tokens")) and "padded" not in note:
            assert f"note: {note}" in PAGE


def test_there_are_recipes_on_the_page() -> None:
    assert len(RECIPES) >= 7


def test_the_mistake_that_is_quoted() -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(
            "merge_method: linear\nmodels:\n  - model: a\n    parameters: {weight: 1}\n  - model: b\n    weight: 1\n",
            where="recipe.yml",
        )
    assert caught.value.message.split("; ")[0] in PAGE
