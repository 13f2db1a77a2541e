"""The files of a merged model: what loaders want, and nothing of the template lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from merge_cases import Lab, assert_same, config, expected, family, recipe
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mpfs.errors import MismatchError
from mpfs.merge import output
from mpfs.merge.config import config_with_dtype
from mpfs.vfs.layout import synthesise_files

pytest_plugins = ["merge_fixtures"]

SHAPES = {"a": (64, 80), "b": (33, 64), "scalar": (), "none": (0, 3)}
SIDE = {
    "config.json": config(model_type="llama", torch_dtype="float32", vocab_size=64),
    "tokenizer/vocab.txt": b"one\ntwo\n",
    "empty.txt": b"",
    "big.bin": bytes(range(256)) * 64,
}


def add_all(lab: Lab, files: dict[str, bytes] | None = None) -> None:
    models = family(2, shapes=SHAPES, seed=3)
    lab.add("base", models.base, SIDE if files is None else files)
    lab.add("e0", models.experts[0], {"config.json": b"{}", "notes.txt": b"of the expert"})
    lab.add("e1", models.experts[1])


def checked_out(lab: Lab, ref: str = "merged") -> Path:
    directory = lab.root / "out"
    lab.repository.checkout(ref, directory, force=True)
    return directory


def test_a_merge_loads_with_safetensors(lab: Lab) -> None:
    add_all(lab)
    asked = recipe("ties", 2, densities=[0.5, 0.5])
    lab.merge(asked)
    path = checked_out(lab) / "model.safetensors"
    assert_same(load_file(path), expected(lab, asked))
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_side_files_are_the_bases(lab: Lab) -> None:
    add_all(lab)
    lab.merge(recipe("ties", 2))
    directory = checked_out(lab)
    for name, content in SIDE.items():
        assert (directory / name).read_bytes() == content
    assert not (directory / "notes.txt").exists()


def test_config_says_the_dtype_that_was_asked_for(lab: Lab) -> None:
    add_all(lab)
    asked: list[tuple[dict[str, Any], str]] = [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"out_dtype": "float16", "dtype": "float32"}, "float16"),
    ]
    for keys, dtype in asked:
        lab.merge(recipe("task_arithmetic", 2, **keys))
        directory = checked_out(lab)
        written = json.loads((directory / "config.json").read_bytes())
        assert written == {**json.loads(SIDE["config.json"]), "torch_dtype": dtype}
        assert {str(t.dtype) for t in load_file(directory / "model.safetensors").values()} == {f"torch.{dtype}"}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"torch_dtype": "float32"}, {"torch_dtype": "bfloat16"}),
        ({"dtype": "float32", "x": 1}, {"dtype": "bfloat16", "x": 1}),
        ({"dtype": "float32", "torch_dtype": "float16"}, {"dtype": "bfloat16", "torch_dtype": "bfloat16"}),
        ({"x": 1}, {"x": 1, "torch_dtype": "bfloat16"}),
    ],
)
def test_either_name_of_the_dtype_field(before: dict[str, object], after: dict[str, object]) -> None:
    changed = json.loads(config_with_dtype(config(**before), "BF16"))
    assert changed == after
    assert list(changed)[: len(before)] == list(before)


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff", b'"text"', b"[" * 100_000])
def test_a_config_that_is_none_is_left_alone(content: bytes) -> None:
    assert config_with_dtype(content, "BF16") == content


def test_linear_without_a_base_takes_the_first_models_files(lab: Lab) -> None:
    add_all(lab)
    asked = recipe("linear", 2, base=None)
    lab.merge(asked)
    assert_same(lab.load(), expected(lab, asked))
    assert (checked_out(lab) / "notes.txt").read_bytes() == b"of the expert"


def test_tensors_that_are_not_floating_point_are_carried(lab: Lab) -> None:
    models = family(2, shapes=SHAPES)
    buffers = {
        "ids": torch.arange(3000),
        "mask": torch.tensor([True, False]),
        "bytes": torch.zeros(7, dtype=torch.uint8),
    }
    lab.add("base", models.base | buffers)
    for index, expert in enumerate(models.experts):
        lab.add(f"e{index}", expert | buffers)
    asked = recipe("ties", 2, dtype="bfloat16")
    report = lab.merge(asked)
    merged = lab.load()
    for name, values in buffers.items():
        assert merged[name].equal(values)
        assert merged[name].dtype == values.dtype
    assert any("ids (I64)" in note for note in report.notes)
    lab.add("e1", models.experts[1] | buffers | {"ids": torch.arange(3000) + 1})
    with pytest.raises(MismatchError, match="ids"):
        lab.merge(asked)
    lab.merge(asked, on_mismatch="base")
    assert lab.load()["ids"].equal(buffers["ids"])


def test_what_no_expert_has_still_gets_its_dtype(lab: Lab) -> None:
    models = family(1, shapes=SHAPES)
    lab.add("base", models.base | {"extra": torch.full((3000,), 1.5)})
    lab.add("e0", models.experts[0])
    for method in ("task_arithmetic", "ties", "dare_linear", "dare_ties"):
        report = lab.merge(recipe(method, 1, densities=[0.5], out_dtype="float16"))
        extra = lab.load()["extra"]
        assert extra.dtype == torch.float16
        assert extra.equal(torch.full((3000,), 1.5, dtype=torch.float16))
        plan = lab.repository.find_plan(report.plan).plan
        assert {tensor.name: tensor.note for tensor in plan.tensors}["extra"] == "no expert has it"


def test_degenerate_tensors_change_their_dtype_too(lab: Lab) -> None:
    shapes: dict[str, tuple[int, ...]] = {"none": (0, 3), "scalar": (), "one": (1, 1)}
    family(2, shapes=shapes).add_to(lab)
    for method in ("linear", "task_arithmetic", "ties", "dare_linear", "dare_ties"):
        asked = recipe(method, 2, densities=[0.5, 0.5], dtype="bfloat16")
        lab.merge(asked)
        assert_same(lab.load(), expected(lab, asked))


def test_weights_in_subdirectories_keep_their_files(lab: Lab) -> None:
    """As diffusers lays a pipeline out: each part is merged in its place."""
    models = family(2, shapes=SHAPES, seed=8)
    parts = family(2, shapes={"x": (40, 50), "a": (10,)}, seed=9)
    trees = [(models.base, parts.base), *zip(models.experts, parts.experts, strict=True)]
    for name, (root, part) in zip(("base", "e0", "e1"), trees, strict=True):
        source = lab.root / "part.safetensors"
        save_file(part, source)
        lab.add(name, root, {"vae/model.safetensors": source.read_bytes(), "vae/config.json": config(dtype="float32")})
    asked = recipe("ties", 2, densities=[0.5, 0.5])
    lab.merge(asked)
    wanted = expected(lab, asked)
    assert len(wanted) == len(SHAPES) + 2
    assert_same(lab.load(), wanted)
    directory = checked_out(lab)
    assert sorted(load_file(directory / "model.safetensors")) == sorted(SHAPES)
    part_file = load_file(directory / "vae" / "model.safetensors")
    assert sorted(part_file) == ["a", "x"]
    prefix = next(name for name in wanted if name.endswith("x") and name != "x").removesuffix("x")
    assert_same(part_file, {name: wanted[prefix + name] for name in part_file})


def test_shards_and_their_index(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    add_all(lab)
    monkeypatch.setattr(output, "synthesise_files", lambda tensors: synthesise_files(tensors, shard_size=21_000))
    asked = recipe("task_arithmetic", 2)
    lab.merge(asked)
    directory = checked_out(lab)
    index = json.loads((directory / "model.safetensors.index.json").read_bytes())
    shards = sorted(path.name for path in directory.glob("*.safetensors"))
    assert shards == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    loaded = {name: tensor for shard in shards for name, tensor in load_file(directory / shard).items()}
    assert_same(loaded, expected(lab, asked))
    assert sorted(index["weight_map"]) == sorted(loaded)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in loaded.values())


def test_the_index_of_a_sharded_base_does_not_outlive_its_shards(lab: Lab, tmp_path: Path) -> None:
    models = family(1, shapes={"a": (64, 64), "b": (64, 64)})
    source = tmp_path / "sharded"
    source.mkdir()
    weight_map = {}
    for number, name in enumerate("ab", start=1):
        shard = f"model-0000{number}-of-00002.safetensors"
        save_file({name: models.base[name]}, source / shard, metadata={"format": "pt"})
        weight_map[name] = shard
    index = {"metadata": {"total_size": 32768}, "weight_map": weight_map}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    lab.repository.import_checkpoint(source, "base")
    lab.add("e0", models.experts[0])
    asked = recipe("task_arithmetic", 1)
    lab.merge(asked)
    directory = checked_out(lab)
    assert sorted(path.name for path in directory.iterdir()) == ["model.safetensors"]
    assert_same(load_file(directory / "model.safetensors"), expected(lab, asked))


def test_a_merge_can_be_merged(lab: Lab) -> None:
    add_all(lab, {})
    lab.merge(recipe("ties", 2, densities=[0.5, 0.5]), into="first")
    asked = recipe("task_arithmetic", 2, names=["first", "e1"])
    lab.merge(asked, into="second")
    assert_same(lab.load("second"), expected(lab, asked))
    commit = lab.repository.show("second").commit
    assert [(item.role, item.name) for item in commit.inputs] == [
        ("expert", "first"),
        ("expert", "e1"),
        ("base", "base"),
    ]
    assert lab.repository.fsck(read_data=True).ok


def test_names_that_need_escaping(lab: Lab) -> None:
    name = 'weird "name" \u00e9\u4e2d /\\ '
    models = family(1, shapes={name: (64, 32)})
    models.add_to(lab)
    asked = recipe("ties", 1, densities=[0.5])
    lab.merge(asked)
    assert_same(load_file(checked_out(lab) / "model.safetensors"), expected(lab, asked))
