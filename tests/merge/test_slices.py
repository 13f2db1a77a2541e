"""Slices and modules: layers from several models, repeated layers, and recipes in the shape of mergekit's examples."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import yaml
from merge_cases import Lab, Tensors, config, problems_of

from mpfs.errors import MismatchError, RecipeError
from mpfs.merge.recipe import parse_recipe, recipe_from_mapping
from mpfs.merge.recipe.model import Recipe
from mpfs.objects import Budget

pytest_plugins = ["merge_fixtures"]


def model(layers: int, seed: int, size: int = 8) -> Tensors:
    """A Llama of some layers, in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"model.embed_tokens.weight": (16, size)}
    for layer in range(layers):
        shapes[f"model.layers.{layer}.self_attn.q_proj.weight"] = (size, size)
        shapes[f"model.layers.{layer}.mlp.up_proj.weight"] = (2 * size, size)
    shapes |= {"model.norm.weight": (1, size), "lm_head.weight": (16, size)}
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def add(lab: Lab, name: str, layers: int, seed: int, **more: object) -> Tensors:
    tensors = model(layers, seed)
    values = {"vocab_size": 16, "num_hidden_layers": layers, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
    lab.add(name, tensors, {"config.json": config(**values, **more)})
    return tensors


def config_of(lab: Lab) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(b"".join(lab.repository.reader("merged").open("config.json").iter_chunks()))
    return value


def stack(*parts: tuple[str, int, int]) -> dict[str, Any]:
    slices = [{"sources": [{"model": name, "layer_range": [start, stop]}]} for name, start, stop in parts]
    return {"merge_method": "passthrough", "slices": slices}


def test_a_stack_of_44_layers_stores_nothing_twice(lab: Lab) -> None:
    """Case C2: repeated layers are references in the store, and full copies in the files."""
    a, b = add(lab, "a", 32, 1), add(lab, "b", 32, 2)
    report = lab.merge(stack(("a", 0, 24), ("b", 12, 32)))
    merged = lab.load()
    assert config_of(lab)["num_hidden_layers"] == 44
    for layer in range(44):
        source, theirs = (a, layer) if layer < 24 else (b, layer - 12)
        for part in ("self_attn.q_proj", "mlp.up_proj"):
            ours = merged[f"model.layers.{layer}.{part}.weight"]
            assert torch.equal(ours, source[f"model.layers.{theirs}.{part}.weight"])
    assert torch.equal(merged["model.embed_tokens.weight"], a["model.embed_tokens.weight"])
    assert torch.equal(merged["lm_head.weight"], b["lm_head.weight"])
    assert (report.figures.expert_bytes_read, report.figures.blocks_computed) == (0, 0)
    assert len(merged) == 2 * 44 + 3


def test_repeated_layers_are_written_out_in_full(lab: Lab) -> None:
    a = add(lab, "a", 3, 1, layer_types=["full", "sliding", "other"])
    lab.merge(stack(("a", 0, 2), ("a", 1, 3)))
    assert config_of(lab)["layer_types"] == ["full", "sliding", "sliding", "other"]
    tensors = lab.repository.tensors("merged")
    assert tensors["model.layers.1.mlp.up_proj.weight"] == tensors["model.layers.2.mlp.up_proj.weight"]
    lab.repository.checkout("merged", lab.root / "out")
    from safetensors import safe_open

    with safe_open(lab.root / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        for layer in (1, 2):
            found = file.get_tensor(f"model.layers.{layer}.mlp.up_proj.weight")
            assert torch.equal(found, a["model.layers.1.mlp.up_proj.weight"])


def test_a_stack_in_another_dtype_is_computed(lab: Lab) -> None:
    a = add(lab, "a", 2, 1)
    lab.merge({**stack(("a", 1, 2)), "out_dtype": "float32"})
    name = "mlp.up_proj.weight"
    assert torch.equal(lab.load()[f"model.layers.0.{name}"], a[f"model.layers.1.{name}"].float())
    assert config_of(lab)["torch_dtype"] == "float32"


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        (
            """
models:
  - model: a
    parameters:
      weight: 1.0
  - model: b
    parameters:
      weight: 0.3
  - model: c
    parameters:
      weight: 0.5
merge_method: linear
dtype: float16
""",
            4,
        ),
        (
            """
models:
  - model: a
    parameters:
      density: [1, 0.7, 0.1] # density gradient
      weight: 1.0
  - model: b
    parameters:
      density: 0.5
      weight: [0, 0.3, 0.7, 1] # weight gradient
  - model: c
    parameters:
      density: 0.33
      weight:
        - filter: mlp
          value: 0.5
        - value: 0
merge_method: ties
base_model: base
parameters:
  normalize: true
  int8_mask: true
dtype: float16
""",
            4,
        ),
        (
            """
slices:
  - sources:
      - model: a
        layer_range: [0, 4]
      - model: b
        layer_range: [0, 4]
merge_method: slerp
base_model: a
parameters:
  t:
    - filter: self_attn
      value: [0, 0.5, 0.3, 0.7, 1]
    - filter: mlp
      value: [1, 0.5, 0.7, 0.3, 0]
    - value: 0.5 # fallback for rest of tensors
dtype: float16
""",
            4,
        ),
        (
            """
slices:
  - sources:
    - model: a
      layer_range: [0, 3]
  - sources:
    - model: b
      layer_range: [1, 4]
merge_method: passthrough
dtype: float16
""",
            6,
        ),
        (
            """
models:
  - model: a
    parameters:
      weight: 1.0
  - model: b
    parameters:
      weight:
        - filter: mlp
          value: [0.2, 0.8]
        - filter: model.norm
          value: 0.5
        - value: 0.4
merge_method: dare_ties
base_model: base
parameters:
  density: [0.33, 0.67]
  int8_mask: true
dtype: bfloat16
name: bio-merge
""",
            4,
        ),
    ],
    ids=["linear", "ties", "gradient-slerp", "stack", "bio-merge"],
)
def test_recipes_in_the_shape_of_the_examples(lab: Lab, text: str, layers: int) -> None:
    for seed, name in enumerate(("base", "a", "b", "c")):
        add(lab, name, 4, seed)
    recipe = parse_recipe(text)
    assert recipe_from_mapping(recipe.as_json()) == recipe
    lab.merge(yaml.safe_load(text))
    assert config_of(lab)["num_hidden_layers"] == layers
    assert config_of(lab)["torch_dtype"] == yaml.safe_load(text)["dtype"]
    assert {str(x.dtype) for x in lab.load().values()} == {f"torch.{yaml.safe_load(text)['dtype']}"}


def wrong(**keys: Any) -> dict[str, str]:
    value = {"merge_method": "passthrough", **keys}
    return problems_of(lambda: recipe_from_mapping(value))


def source(layer_range: Any = (0, 2), name: str = "a", **more: Any) -> dict[str, Any]:
    return {"model": name, "layer_range": list(layer_range) if isinstance(layer_range, tuple) else layer_range, **more}


@pytest.mark.parametrize(
    ("slices", "path", "said"),
    [
        ([{"sources": [source((0, 0))]}], "slices[0].sources[0].layer_range", "[0, 0] holds no layer"),
        ([{"sources": [source((3, 1))]}], "slices[0].sources[0].layer_range", "[3, 1] is not a range"),
        ([{"sources": [source((-1, 1))]}], "slices[0].sources[0].layer_range", "is not a range"),
        ([{"sources": [source((1, 2, 3))]}], "slices[0].sources[0].layer_range", "must be [first, end)"),
        ([{"sources": [source(5)]}], "slices[0].sources[0].layer_range", "must be a list"),
        ([{"sources": [{"model": "a"}]}], "slices[0].sources[0].layer_range", "missing"),
        ([{"sources": []}], "slices[0].sources", "the list is empty"),
        ([{"source": [source()]}], "slices[0].source", "did you mean sources?"),
        ([{"sources": [source(layer_rang=[1, 2])]}], "slices[0].sources[0].layer_rang", "did you mean layer_range?"),
        ([{"sources": [source(), source((0, 2), "b")]}], "slices[0].sources", "passthrough takes 1 model"),
        ([{"sources": [source(scale=1)]}], "slices[0].sources[0].scale", "under `parameters:`"),
        ([], "slices", "the list is empty"),
        ("text", "slices", "must be a list"),
        (["text"], "slices[0]", "must be a mapping"),
    ],
)
def test_wrong_slices(slices: Any, path: str, said: str) -> None:
    """Case M12 among them."""
    assert said in wrong(slices=slices)[path]


def test_layer_ranges_of_other_lengths() -> None:
    slices = [{"sources": [source((0, 2), parameters={"weight": 1}), source((0, 3), "b", parameters={"weight": 1})]}]
    assert "of one length" in wrong(merge_method="linear", slices=slices)["slices[0].sources"]


def test_one_of_models_slices_and_modules() -> None:
    assert "there are models already" in wrong(models=[{"model": "a"}], slices=[{"sources": [source()]}])["slices"]
    assert "the mapping is empty" in wrong(modules={})["modules"]
    assert "missing" in wrong(modules={"x": {}})["modules.x.models"]
    assert "unknown key" in wrong(modules={"x": {"models": [{"model": "a"}], "y": 1}})["modules.x.y"]


def test_slices_that_the_models_do_not_have(lab: Lab) -> None:
    add(lab, "a", 2, 1)
    with pytest.raises(MismatchError, match=r"slices\[0\] takes layers 1 to 4 of a, which has 2"):
        lab.merge(stack(("a", 1, 5)))
    lab.add("plain", {"w": torch.ones(3)})
    with pytest.raises(MismatchError, match="slices need layers, and plain has none"):
        lab.merge(stack(("plain", 0, 1)))
    gradient = {"merge_method": "linear", "models": [{"model": "plain", "parameters": {"weight": [0, 1]}}]}
    with pytest.raises(MismatchError, match="a gradient is over layers, and plain has none"):
        lab.merge(gradient)


def test_modules(lab: Lab) -> None:
    """A model of two stacks: each has slices or models of its own."""
    models = {}
    for seed, name in enumerate(("a", "b")):
        parts = model(2, seed)
        parts |= {f"visual.{key}": x for key, x in model(3, seed + 10).items() if "layers" in key}
        lab.add(name, parts, {"config.json": config(text_config={"num_hidden_layers": 2}, vision_config={"depth": 3})})
        models[name] = parts
    both = {"models": [{"model": "a", "parameters": {"weight": 1}}, {"model": "b", "parameters": {"weight": 3}}]}
    slices = {"slices": [{"sources": [{**source((0, 1)), "parameters": {"weight": 1}}]}]}
    lab.merge({"merge_method": "linear", "modules": {"visual": both, "default": slices}})
    merged = lab.load()
    assert config_of(lab)["text_config"] == {"num_hidden_layers": 1}
    assert config_of(lab)["vision_config"] == {"depth": 3}
    assert "model.layers.1.mlp.up_proj.weight" not in merged
    name = "visual.model.layers.2.mlp.up_proj.weight"
    wanted = (models["a"][name].float() + 3 * models["b"][name].float()) / 4
    torch.testing.assert_close(merged[name], wanted.bfloat16())
    with pytest.raises(MismatchError, match=r"no module is about lm_head\.weight, model\.embed"):
        lab.merge({"merge_method": "linear", "modules": {"visual": both}})
    with pytest.raises(MismatchError, match=r"no tensor belongs to module vision: .*\(lm_head, model, visual"):
        lab.merge({"merge_method": "linear", "modules": {"vision": both, "default": both}})
    with pytest.raises(MismatchError, match="several stacks of layers"):
        lab.merge({"merge_method": "linear", **slices})


def test_a_saved_plan_of_slices_runs(lab: Lab) -> None:
    add(lab, "a", 3, 1)
    asked = {**stack(("a", 0, 2), ("a", 1, 3)), "out_dtype": "float32"}
    plan = lab.repository.plan(asked).plan
    assert any("recognised in a: 3 layers at model.layers" in note for note in plan.notes)
    assert lab.merge(plan, into="by-plan").snapshot == lab.merge(asked).snapshot


def test_names_of_models() -> None:
    reference = {"model": {"path": "a", "revision": "v1"}, "lora": {"path": "tuned"}}
    recipe = recipe_from_mapping({"merge_method": "passthrough", "models": [{"model": reference}]})
    assert recipe.model_names == ("a@v1+tuned",)
    assert isinstance(recipe.renamed({"a@v1+tuned": "b"}), Recipe)
    assert recipe.renamed({"a@v1+tuned": "b"}).model_names == ("b",)
    for name in ("+b", "a+", "a+b+c", "a+ "):
        assert wrong(models=[{"model": name}])


def test_a_revision_in_the_history_of_a_model(lab: Lab) -> None:
    first = add(lab, "a", 1, 1)
    commit = lab.repository.resolve("a")
    add(lab, "a", 1, 2)
    add(lab, "b", 1, 3)
    name = "model.norm.weight"
    lab.merge({"merge_method": "passthrough", "models": [{"model": f"a@{commit[:10]}"}]})
    assert torch.equal(lab.load()[name], first[name])
    with pytest.raises(Exception, match="is not in the history of b"):
        lab.merge({"merge_method": "passthrough", "models": [{"model": f"b@{commit[:10]}"}]})


def test_a_url_is_imported(lab: Lab) -> None:
    tensors = add(lab, "a", 1, 1)
    url = (lab.root / "sources" / "a").as_uri()
    lab.merge({"merge_method": "passthrough", "models": [{"model": url}]})
    assert set(lab.load()) == set(tensors)
    assert lab.repository.resolve("imported/a")


def test_fidelity_of_slices_under_a_budget(lab: Lab) -> None:
    """The full merge that a budgeted one is measured against is made from the plan's recipe."""
    for seed, name in enumerate(("base", "a", "b")):
        add(lab, name, 3, seed)
    sources = [{"model": name, "layer_range": [0, 3]} for name in ("base", "a", "b")]
    asked = {
        "merge_method": "task_arithmetic",
        "base_model": "base",
        "slices": [{"sources": sources}],
        "parameters": {"weight": [0.2, 0.9]},
    }
    report = lab.merge(asked, budget=Budget("percent", 60), verify_fidelity=True)
    assert report.figures.fidelity is not None
    assert 0 < report.figures.fidelity < 1
    assert report.figures.expert_bytes_read <= 0.6 * report.figures.expert_bytes_full


def test_missing_values_are_told_with_the_tensor(lab: Lab) -> None:
    add(lab, "a", 1, 1)
    asked = {"merge_method": "linear", "models": [source_of("a", [{"filter": "mlp", "value": 1}])]}
    with pytest.raises(RecipeError, match=r"weight is required \(for lm_head\.weight, model\.embed"):
        lab.merge(asked)


def source_of(name: str, weight: Any) -> dict[str, Any]:
    return {"model": name, "parameters": {"weight": weight}}
