"""import --base: exact statistics of the pair, in the same pass and with the same care as blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mpfs.errors import IntegrityError, RefConflictError
from mpfs.repository import Repository
from mpfs.store import BlockReader
from mpfs.store.environment import Environment

BLOCK = 1 << 16
SHAPES = {"a": (512, 300), "b": (300, 300), "same": (200, 200), "half": (512, 256), "small": (100,)}


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    with Repository.create(tmp_path / "repository", block_size=BLOCK) as made:
        yield made


def models(folder: Path, dtype: torch.dtype = torch.bfloat16) -> tuple[Path, Path]:
    """A base and an expert: one tensor is the same, one shares its first half, one has another shape, one is new."""
    generator = torch.Generator().manual_seed(4)
    base = {name: (torch.randn(shape, generator=generator) * 0.02).to(dtype) for name, shape in SHAPES.items()}
    tuned = {
        name: (weight.float() + torch.randn(weight.shape, generator=generator) * 5e-4).to(dtype)
        for name, weight in base.items()
    }
    tuned["same"] = base["same"]
    tuned["half"][:256] = base["half"][:256]
    base["reshaped"], tuned["reshaped"] = torch.zeros(10, 4, dtype=dtype), torch.zeros(4, 10, dtype=dtype)
    tuned["new"] = torch.ones(5, dtype=dtype)
    base["counter"], tuned["counter"] = torch.tensor([1]), torch.tensor([2])
    save_file(base, folder / "base.safetensors")
    save_file(tuned, folder / "tuned.safetensors")
    return folder / "base.safetensors", folder / "tuned.safetensors"


def records(repository: Repository) -> dict[bytes, bytes]:
    """Everything in the pair table."""
    environment: Environment = repository._store.environment
    with environment.read() as txn:
        return {bytes(key): bytes(value) for key, value in txn.scan("pairs")}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_it_is_what_an_analysis_finds(repository: Repository, tmp_path: Path, dtype: torch.dtype) -> None:
    base, tuned = models(tmp_path, dtype)
    repository.import_checkpoint(base, "base")
    report = repository.import_checkpoint(tuned, "tuned", base="base", threads=3)
    assert report.pairs == 4
    found = records(repository)
    assert len(found) == 4 + 3, "a distance for each, and a histogram for those of several blocks"
    environment = repository._store.environment
    with environment.write() as txn:
        for key in found:
            txn.delete("pairs", key)
    assert repository.analyze(["tuned"], "base").pairs == 4
    assert records(repository) == found
    assert repository.analyze(["tuned"], "base").known == 4
    assert repository.fsck(read_data=True).ok


def test_of_the_base_only_what_differs_is_read(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, tuned = models(tmp_path)
    repository.import_checkpoint(base, "base")
    seen: list[bytes] = []
    plain = BlockReader.view

    def view(self: BlockReader, blocks: Sequence[bytes], where: str) -> AbstractContextManager[list[memoryview]]:
        seen.extend(blocks)
        return plain(self, blocks, where)

    monkeypatch.setattr(BlockReader, "view", view)
    report = repository.import_checkpoint(tuned, "tuned", base="base")
    monkeypatch.undo()
    ours, theirs = (
        {name: tensor.blocks for name, tensor in repository.tensors(ref).items()} for ref in ("base", "tuned")
    )
    wanted = {
        block
        for name in ("a", "b", "half", "small")
        for block, other in zip(ours[name], theirs[name], strict=True)
        if block != other
    }
    assert report.pairs == 4
    assert set(seen) >= wanted
    assert not set(seen) & (set(ours["same"]) | set(ours["half"]) - wanted)


def test_without_a_base_nothing_is_compared(repository: Repository, tmp_path: Path) -> None:
    base, tuned = models(tmp_path)
    repository.import_checkpoint(base, "base")
    assert repository.import_checkpoint(tuned, "tuned").pairs == 0
    assert not records(repository)
    assert repository.import_checkpoint(tuned, "tuned", base="base", verify=True).new_commit
    found = records(repository)
    with repository._store.environment.write() as txn:
        for key in found:
            txn.delete("pairs", key)
    again = repository.import_checkpoint(tuned, "tuned", base="base", verify=True)
    assert not again.new_commit
    assert again.pairs == 4
    assert records(repository) == found
    assert len(records(repository)) == 7


def test_nothing_is_kept_of_an_import_that_fails(repository: Repository, tmp_path: Path) -> None:
    base, tuned = models(tmp_path)
    repository.import_checkpoint(base, "base")
    repository.tag("taken", "base")
    with pytest.raises(RefConflictError):
        repository.import_checkpoint(tuned, "taken", base="base")
    assert not records(repository)


def test_a_damaged_base_is_told(repository: Repository, tmp_path: Path) -> None:
    base, tuned = models(tmp_path)
    repository.import_checkpoint(base, "base")
    with repository._store.environment.write() as txn:
        txn.delete("blocks", repository.tensors("base")["a"].blocks[0])
    with pytest.raises(IntegrityError, match="a of the base"):
        repository.import_checkpoint(tuned, "tuned", base="base")
