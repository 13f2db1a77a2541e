"""Every block of a checkpoint, damaged in the file: whoever reads it says so, and what does not need it goes on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mpfs.errors import IntegrityError
from mpfs.objects import BlockId
from mpfs.repository import Repository

GOLDEN = Path(__file__).parent.parent / "format" / "golden" / "v1"
RECIPE = {
    "merge_method": "task_arithmetic",
    "base_model": "base",
    "models": [{"model": "expert/one", "parameters": {"weight": 0.375}}],
    "dtype": "float32",
}


def blocks_of(repository: Repository, ref: str) -> dict[BlockId, str]:
    """The blocks of a revision's tensors, and a tensor that each is of."""
    return {block: name for name, tensor in repository.tensors(ref).items() for block in tensor.blocks}


def test_a_checkout_and_a_merge_find_every_damaged_block(tmp_path: Path) -> None:
    with Repository.open(shutil.copytree(GOLDEN, tmp_path / "whole")) as repository:
        blocks = blocks_of(repository, "expert/one")
        other = blocks_of(repository, "torch")
        offsets = {}
        for block in blocks:
            info = repository._store.blocks.info(block)
            assert info is not None
            assert info.offset is not None
            offsets[block] = info.offset + info.stored_size // 2
    caught = 0
    for block, name in blocks.items():
        path = Path(shutil.copytree(GOLDEN, tmp_path / block.hex()))
        flip(path, offsets[block])
        with Repository.open(path) as repository:
            with pytest.raises(IntegrityError, match=block.hex()) as error:
                repository.checkout("expert/one", tmp_path / "out")
            assert name in error.value.message or "model.safetensors" in error.value.message
            assert not (tmp_path / "out").exists()
            if name != "packed":  # which torch cannot hold
                with pytest.raises(IntegrityError):
                    repository.tensor("expert/one", name)
            try:
                repository.merge(RECIPE, "result", reuse=False)
            except IntegrityError:
                caught += 1
                assert "result" not in {ref.name for ref in repository.refs()}
            else:
                # A block that the merge has no use for: the tensors that both have alike are referenced, not read.
                assert block in blocks_of(repository, "base")
                repository.remove_ref("result")
            if block not in other:
                repository.checkout("torch", tmp_path / "torch")
                shutil.rmtree(tmp_path / "torch")
            assert [item.object for item in repository.fsck(read_data=True).problems] == [block.hex()]
    assert caught >= 8


def flip(path: Path, offset: int) -> None:
    """Flip a bit of data.mdb."""
    with (path / "store-1" / "data.mdb").open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
