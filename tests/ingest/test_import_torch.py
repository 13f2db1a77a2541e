"""Torch files: every tensor comes back as torch.load gives it, from published checkpoints and from odd ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from ingest_cases import assert_clean, directory_digests, new_repository, refused
from safetensors.torch import load_file, save_file

from mpfs.errors import BadInputError, FormatError, NotFoundError, UnsafeInputError
from mpfs.ingest import source as source_module
from mpfs.repository import Repository

SIBLINGS = ("antibody/antibody_4_2", "shark/shark_4_2", "tcr/tcr_4_2", "antibody/antibody_4_1", "tcr/tcr_4_1")
CHGNET = {
    "0.2.0/chgnet_0.2.0_e30f77s348m32": 99,
    "0.3.0/chgnet_0.3.0_e29f68s314m37": 136,
    "r2scan/chgnet_r2scan_transfer_learning_e15f36s161m23": 136,
}


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    """A repository with small blocks."""
    with new_repository(tmp_path / "repo") as made:
        yield made


def same_bits(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Same names, dtypes, shapes and bits."""
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        # Cloned, as a tensor of one element counts as contiguous with any stride.
        left, right = (
            each.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
            for each in (found[name], tensor)
        )
        assert torch.equal(left, right), name


def state_of(path: Path) -> dict[str, torch.Tensor]:
    """The file's state dict, as torch reads it."""
    loaded = torch.load(path, map_location="cpu", weights_only=True)
    loaded = loaded["model"]["state_dict"] if "model" in loaded else loaded
    return {name: tensor for name, tensor in loaded.items() if isinstance(tensor, torch.Tensor)}


class TestPublishedModels:
    def test_every_anarcii_model(
        self, repository: Repository, real_models: Callable[[str], Path], tmp_path: Path
    ) -> None:
        models = real_models("anarcii") / "anarcii/models"
        files = sorted(models.rglob("*.pt"))
        assert {f"{file.parent.name}/{file.stem.removesuffix('_128_512')}" for file in files} >= set(SIBLINGS)
        for file in files:
            report = repository.import_checkpoint(file, file.stem)
            same_bits(repository.load(file.stem), state_of(file))
            assert report.skipped == ()
            repository.checkout(file.stem, tmp_path / file.stem)
            same_bits(load_file(tmp_path / file.stem / "model.safetensors"), state_of(file))
        assert_clean(repository)

    @pytest.mark.parametrize("name", CHGNET)
    def test_chgnet_training_checkpoints(
        self, repository: Repository, real_models: Callable[[str], Path], name: str
    ) -> None:
        file = real_models("chgnet") / f"chgnet/pretrained/{name}.pth.tar"
        report = repository.import_checkpoint(file, "main")
        assert report.tensors == CHGNET[name]
        assert {"optimizer", "scheduler"} <= set(report.skipped)
        same_bits(repository.load("main"), state_of(file))
        again = repository.import_checkpoint(file, "keyed", key="model.state_dict")
        assert (again.snapshot, again.new_blocks) == (report.snapshot, 0)

    def test_a_wrong_key_lists_those_that_there_are(
        self, repository: Repository, real_models: Callable[[str], Path]
    ) -> None:
        file = real_models("chgnet") / f"chgnet/pretrained/{next(iter(CHGNET))}.pth.tar"
        with refused(repository, NotFoundError, match=r'"model\.state_dict" \(99 tensors\)'):
            repository.import_checkpoint(file, "main", key="state_dict")

    def test_lpips_legacy_pickles(self, repository: Repository, real_models: Callable[[str], Path]) -> None:
        files = sorted((real_models("lpips") / "lpips/weights").rglob("*.pth"))
        assert len(files) == 6
        for number, file in enumerate(files):
            repository.import_checkpoint(file, f"lpips/{number}")
            same_bits(repository.load(f"lpips/{number}"), state_of(file))


class TestStateDicts:
    def test_layouts_of_memory(self, repository: Repository, tmp_path: Path) -> None:
        base = torch.arange(24_000.0).reshape(60, 400)
        state = {
            "transposed": base.t(),
            "sliced": base[::2, 1::3],
            "expanded": torch.ones(1).expand(5, 3000),
            "view": base[10:20],
            "tied": base[10:20],
            "one": torch.tensor([7.0]).as_strided((1,), (5,)),
            "scalar": torch.tensor(3.0),
            "none": torch.empty(2, 0),
            "half": base.to(torch.float16),
            "eight": base.to(torch.float8_e4m3fn).t(),
            "long": torch.arange(3),
            "flag": torch.tensor([True, False]),
            "complex": torch.complex(base[0], base[1]),
            "conjugated": torch.complex(base[0], base[1]).conj(),
        }
        torch.save(state, tmp_path / "odd.pt")
        repository.import_checkpoint(tmp_path / "odd.pt", "main", threads=3)
        found = repository.load("main")
        same_bits(found, {name: tensor.resolve_conj().contiguous() for name, tensor in state.items()})
        tensors = repository.tensors("main")
        assert tensors["view"] == tensors["tied"]
        assert_clean(repository)

    def test_copies_of_tensors_exist_one_at_a_time(
        self, repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        torch.save({f"t{number}": torch.randn(90, 70).t() for number in range(20)}, tmp_path / "x.pt")
        made: list[source_module.TensorBytes] = []
        most = 0
        original = source_module.TensorBytes.read

        def read(self: source_module.TensorBytes, offset: int, size: int) -> bytes:
            nonlocal most
            if self not in made:
                made.append(self)
            data = original(self, offset, size)
            most = max(most, sum(each._data is not None for each in made))
            return data

        monkeypatch.setattr(source_module.TensorBytes, "read", read)
        repository.import_checkpoint(tmp_path / "x.pt", "main", threads=1)
        assert (len(made), most) == (20, 1)

    def test_several_state_dicts_need_a_key(self, repository: Repository, tmp_path: Path) -> None:
        torch.save(
            {"ema": {"w": torch.ones(3)}, "model": {"w": torch.zeros(3), "b": torch.zeros(1)}}, tmp_path / "t.pt"
        )
        with refused(repository, BadInputError, match=r'--key: "ema" \(1 tensor\); "model" \(2 tensors\)'):
            repository.import_checkpoint(tmp_path / "t.pt", "main")
        report = repository.import_checkpoint(tmp_path / "t.pt", "main", key="ema")
        assert torch.equal(repository.tensor("main", "w"), torch.ones(3))
        assert report.skipped == ("model",)

    def test_a_key_is_for_torch_files(self, repository: Repository, tmp_path: Path) -> None:
        save_file({"w": torch.zeros(1)}, tmp_path / "model.safetensors")
        with refused(repository, BadInputError, match="--key"):
            repository.import_checkpoint(tmp_path / "model.safetensors", "main", key="model")
        with refused(repository, BadInputError, match="--key"):
            repository.import_checkpoint(tmp_path, "main", key="model")

    def test_code_is_never_run(self, repository: Repository, tmp_path: Path) -> None:
        torch.save({"w": torch.zeros(1), "hook": Path}, tmp_path / "evil.pt")
        with refused(repository, UnsafeInputError):
            repository.import_checkpoint(tmp_path / "evil.pt", "main")

    @pytest.mark.parametrize("keep", [0.1, 0.5, 0.99])
    def test_damaged_archives(self, repository: Repository, tmp_path: Path, keep: float) -> None:
        path = tmp_path / "cut.pt"
        torch.save({"w": torch.randn(5000)}, path)
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
        with refused(repository, FormatError):
            repository.import_checkpoint(path, "main")

    def test_a_flipped_bit(self, repository: Repository, tmp_path: Path) -> None:
        path = tmp_path / "flipped.pt"
        torch.save({"w": torch.randn(5000)}, path)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        with refused(repository, FormatError):
            repository.import_checkpoint(path, "main")


def sharded(root: Path, shards: Mapping[str, Mapping[str, torch.Tensor]], listed: Mapping[str, str]) -> Path:
    """A directory with torch shards and an index."""
    root.mkdir(exist_ok=True)
    for name, state in shards.items():
        torch.save(dict(state), root / name)
    (root / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": dict(listed)}))
    return root


ONE, TWO = "pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"


class TestDirectories:
    def test_shards(self, repository: Repository, tmp_path: Path) -> None:
        shards = {ONE: {"a": torch.ones(3)}, TWO: {"b": torch.zeros(4), "c": torch.ones(1)}}
        root = sharded(tmp_path / "in", shards, {"a": ONE, "b": TWO, "c": TWO})
        (root / "config.json").write_text("{}")
        report = repository.import_checkpoint(root, "main")
        assert [file.path for file in repository.ls("main")] == ["config.json", "model.safetensors"]
        assert report.skipped == ("pytorch_model.bin.index.json",)
        same_bits(repository.load("main"), {**shards[ONE], **shards[TWO]})

    def test_shards_that_lack_what_the_index_lists(self, repository: Repository, tmp_path: Path) -> None:
        shards = {ONE: {"a": torch.ones(3)}, TWO: {"b": torch.zeros(4)}}
        root = sharded(tmp_path / "in", shards, {"a": ONE, "b": TWO, "c": TWO})
        with refused(repository, FormatError, match=r'1 tensor .* lacks: "c" \("c" should be in "pytorch_model-00002'):
            repository.import_checkpoint(root, "main")

    def test_shards_that_were_swapped(self, repository: Repository, tmp_path: Path) -> None:
        root = sharded(tmp_path / "in", {ONE: {"b": torch.ones(3)}, TWO: {"a": torch.zeros(4)}}, {"a": ONE, "b": TWO})
        with refused(repository, FormatError, match="do not belong together"):
            repository.import_checkpoint(root, "main")

    def test_a_tensor_in_two_shards(self, repository: Repository, tmp_path: Path) -> None:
        shards = {ONE: {"a": torch.ones(3)}, TWO: {"a": torch.zeros(3), "b": torch.zeros(1)}}
        root = sharded(tmp_path / "in", shards, {"a": ONE, "b": TWO})
        with refused(repository, FormatError, match='"a" is in another shard'):
            repository.import_checkpoint(root, "main")

    def test_components_keep_apart(self, repository: Repository, tmp_path: Path) -> None:
        """Torch files of sub-directories stay there, under names that loaders of safetensors look for."""
        root = tmp_path / "in"
        for name, value in {
            "unet/diffusion_pytorch_model.bin": 1.0,
            "text_encoder/pytorch_model.bin": 2.0,
            "lora/adapter_model.bin": 3.0,
        }.items():
            (root / name).parent.mkdir(parents=True)
            torch.save({"w": torch.tensor([value])}, root / name)
        save_file({"w": torch.tensor([4.0])}, root / "model.safetensors")
        (root / "other.bin.index.json").write_text("not an index of what is imported")
        before = directory_digests(root)
        report = repository.import_checkpoint(root, "main")
        assert report.skipped == ()
        loaded = {name: tensor.item() for name, tensor in repository.load("main").items()}
        assert loaded == {"w": 4.0, "unet/w": 1.0, "text_encoder/w": 2.0, "lora/w": 3.0}
        repository.checkout("main", tmp_path / "out")
        found = directory_digests(tmp_path / "out")
        assert sorted(found) == [
            "lora/adapter_model.safetensors",
            "model.safetensors",
            "other.bin.index.json",
            "text_encoder/model.safetensors",
            "unet/diffusion_pytorch_model.safetensors",
        ]
        assert all(found[name] == before[name] for name in ("model.safetensors", "other.bin.index.json"))
