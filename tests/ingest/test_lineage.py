"""Where a model comes from: implausible bases are doubted with figures, likely ones found, stated ones read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from ingest_cases import assert_clean, new_repository

from mpfs.ingest.lineage import stated_bases
from mpfs.objects import Commit
from mpfs.repository import Repository
from mpfs.testing.checkpoints import TensorContent, safetensors_bytes, write


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    with new_repository(tmp_path / "repo") as made:
        yield made


def model(path: Path, seed: int, delta: float = 0.0, prefix: str = "", shape: tuple[int, ...] = (60, 64)) -> Path:
    """Weights of a seed, changed by a share of their size; another seed is another model."""
    base, noise = np.random.default_rng(seed), np.random.default_rng(int(delta * 1e6) + 77)
    tensors = []
    for n in range(4):
        values = base.standard_normal(shape, np.float32)
        values = values + np.float32(delta) * noise.standard_normal(shape, np.float32)
        tensors.append(TensorContent(f"{prefix}layers.{n}.weight", "F32", shape, values.tobytes()))
    return write(path, {"model.safetensors": safetensors_bytes(tensors)})


class TestDoubts:
    def test_a_fine_tune_is_not_doubted(self, repository: Repository, tmp_path: Path) -> None:
        repository.import_checkpoint(model(tmp_path / "base", 1), "base")
        report = repository.import_checkpoint(model(tmp_path / "tuned", 1, 0.05), "tuned", base="base")
        assert (report.notes, report.base) == ((), "base")

    def test_another_model_is(self, repository: Repository, tmp_path: Path) -> None:
        repository.import_checkpoint(model(tmp_path / "base", 1), "base")
        report = repository.import_checkpoint(model(tmp_path / "other", 2), "other", base="base")
        (note,) = report.notes
        assert "base is probably not its base: 100% of it have a counterpart, and differ by 1.4" in note
        (item,) = repository._store.objects.get(Commit, report.commit).inputs
        assert item.name == "base"

    def test_other_shapes_are(self, repository: Repository, tmp_path: Path) -> None:
        repository.import_checkpoint(model(tmp_path / "base", 1), "base")
        report = repository.import_checkpoint(model(tmp_path / "wide", 1, shape=(61, 64)), "wide", base="base")
        assert "only 0% of it have a counterpart" in report.notes[0]

    def test_other_names_are_not(self, repository: Repository, tmp_path: Path) -> None:
        repository.import_checkpoint(model(tmp_path / "base", 1), "base")
        report = repository.import_checkpoint(model(tmp_path / "t", 1, 0.05, "model."), "tuned", base="base")
        assert report.notes == ()


class TestAuto:
    def test_the_nearest_is_found(self, repository: Repository, tmp_path: Path) -> None:
        repository.import_checkpoint(model(tmp_path / "one", 1), "one")
        repository.import_checkpoint(model(tmp_path / "two", 2), "two")
        repository.import_checkpoint(model(tmp_path / "sibling", 1, 0.2), "sibling", base="one")
        report = repository.import_checkpoint(model(tmp_path / "tuned", 1, 0.05), "tuned", base="auto")
        assert report.base == "one"
        assert report.notes[0].startswith("base one: 100% of it have a counterpart, and differ by 0.0")
        (item,) = repository._store.objects.get(Commit, report.commit).inputs
        assert (item.role, item.name, item.commit) == ("base", "one", repository.resolve("one"))
        again = repository.import_checkpoint(tmp_path / "tuned", "tuned", base="auto")
        assert not again.new_commit
        assert_clean(repository)

    def test_none_is_near(self, repository: Repository, tmp_path: Path) -> None:
        repository.import_checkpoint(model(tmp_path / "one", 1), "one")
        report = repository.import_checkpoint(model(tmp_path / "two", 2), "two", base="auto")
        assert (report.base, report.notes) == (None, ("no base found: no model here is near enough",))
        assert report.new_commit

    def test_real_siblings(self, repository: Repository, real_models: Callable[[str], Path]) -> None:
        models = real_models("anarcii") / "anarcii/models"
        repository.import_checkpoint(models / "antibody/antibody_4_2_128_512.pt", "antibody")
        report = repository.import_checkpoint(models / "shark/shark_4_2_128_512.pt", "shark", base="auto")
        assert report.base == "antibody"


class TestStatedBases:
    @pytest.mark.parametrize(
        ("files", "expected"),
        [
            ({"README.md": b"---\nbase_model: org/base\nlicense: mit\n---\n# x"}, ("org/base",)),
            ({"README.md": b"---\r\nbase_model:\r\n- a/b\r\n- c/d\r\n---\r\n"}, ("a/b", "c/d")),
            ({"README.md": b"# base_model: a/b"}, ()),
            ({"README.md": b"---\nbase_model: [\n---\n"}, ()),
            ({"README.md": b"---\nbase_model: a/b"}, ()),
            ({"adapter_config.json": b'{"base_model_name_or_path": "a/b"}'}, ("a/b",)),
            ({"config.json": b'{"_name_or_path": "a/b"}', "README.md": b"---\nbase_model: a/b\n---\n"}, ("a/b",)),
            ({"config.json": b'{"_name_or_path": "/home/x/out"}'}, ()),
            ({"config.json": b'{"_name_or_path": 3}'}, ()),
            ({"config.json": b"[" * 100_000}, ()),
            ({}, ()),
        ],
    )
    def test_read(self, files: dict[str, bytes], expected: tuple[str, ...]) -> None:
        assert stated_bases(files) == expected

    def test_noted(self, repository: Repository, tmp_path: Path) -> None:
        source = model(tmp_path / "m", 1)
        write(source, {"config.json": b'{"_name_or_path": "org/base"}'})
        report = repository.import_checkpoint(source, "m")
        assert report.stated_bases == ("org/base",)
        assert "names org/base as its base" in report.notes[0]


def test_quantised_weights_are_named(repository: Repository, tmp_path: Path) -> None:
    content = safetensors_bytes(
        [
            TensorContent("l.qweight", "I32", (2, 2), bytes(16)),
            TensorContent("l.scales", "F16", (2,), bytes(4)),
            TensorContent("l.g_idx", "I32", (2,), bytes(8)),
        ]
    )
    config = b'{"quantization_config": {"quant_method": "gptq", "bits": 4}}'
    write(tmp_path / "m", {"model.safetensors": content, "config.json": config})
    report = repository.import_checkpoint(tmp_path / "m", "m")
    assert report.notes == (
        "quantised weights are kept as they are, and cannot be merged: GPTQ, 4 bits: 1 weight in 3 tensors",
    )
