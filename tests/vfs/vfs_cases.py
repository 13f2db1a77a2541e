"""Repositories made by hand: tensors and side files staged through mpfs.store, without the importer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from safetensors.torch import save

from mpfs.formats.safetensors import parse_header
from mpfs.objects import BlobFile, Commit, File, SafetensorsFile, Snapshot, Tensor, block_id, object_id
from mpfs.store import RefMove, StagedBlock, Store

TIME = 1_700_000_000
BLOCK_SIZE = 4096
MAP_SIZE = 1 << 30


class Staged(NamedTuple):
    """A published snapshot, its commit's id, and every file's true content."""

    snapshot: Snapshot
    commit: str
    content: dict[str, bytes]


class Builder:
    """Publishes snapshots into a store."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def publish(
        self, content: Mapping[str, bytes], ref: str = "main", prefixes: Mapping[str, str] | None = None
    ) -> Staged:
        """Store files under a new ref. What ends in .safetensors is cut into tensors, under the prefix of its path."""
        objects: dict[str, Tensor] = {}
        files: list[File] = []
        with self.store.writer() as writer:

            def put(dtype: str, shape: tuple[int, ...], data: bytes) -> str:
                size = self.store.info.block_size
                pieces = [data[start : start + size] for start in range(0, len(data), size)]
                tensor = Tensor(dtype, shape, size, tuple(map(block_id, pieces)))
                for index, piece in enumerate(pieces):
                    start = tensor.block_start(index)
                    writer.put_block(StagedBlock(tensor.blocks[index], piece, dtype, start, b"stats"))
                identity = object_id(tensor.encode())
                objects[identity] = tensor
                return identity

            for path, data in sorted(content.items()):
                if path.endswith(".safetensors"):
                    length = 8 + int.from_bytes(data[:8], "little")
                    raw, rest = data[:length], data[length:]
                    entries = parse_header(raw, len(data), source=path).entries
                    tensors = tuple(
                        (entry.name, put(entry.dtype, entry.shape, rest[entry.start : entry.end])) for entry in entries
                    )
                    prefix = (prefixes or {}).get(path, "")
                    files.append(SafetensorsFile(path, len(data), put("U8", (length,), raw), prefix, tensors))
                else:
                    files.append(BlobFile(path, len(data), put("U8", (len(data),), data)))
            snapshot = Snapshot(tuple(files))
            commit = writer.publish(
                tensors=objects.values(),
                snapshot=snapshot,
                commit=Commit(object_id(snapshot.encode()), (), (), None, ref, "tester", TIME),
                move=RefMove(ref, None, "branch", "test"),
            )
        return Staged(snapshot, commit, dict(content))

    def tensors(self, snapshot: Snapshot) -> dict[str, Tensor]:
        """The tensor objects of a snapshot, by id."""
        return {identity: self.store.objects.get(Tensor, identity) for identity in snapshot.references()}


def sample_tensors() -> dict[str, torch.Tensor]:
    """Many kinds: several blocks, tied, 0-d, empty, integers, eight bits."""
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(100, 130, generator=generator)
    return {
        "embed.weight": weight,
        "lm_head.weight": weight.clone(),
        "layer.0.weight": torch.randn(64, 33, generator=generator).to(torch.bfloat16),
        "layer.0.half": torch.randn(64, 64, generator=generator).to(torch.float16),
        "layer.0.bias": torch.randn(33, generator=generator).to(torch.float64),
        "layer.0.scale": torch.tensor(1.0),
        "layer.0.none": torch.empty(0),
        "layer.0.flat": torch.empty(2, 0, dtype=torch.int64),
        "steps": torch.arange(7, dtype=torch.int64),
        "mask": torch.tensor([True, False, True]),
        "codes": torch.arange(200, dtype=torch.uint8),
        "eight": torch.randn(50, generator=generator).to(torch.float8_e4m3fn),
        "wörter.重み": torch.arange(5, dtype=torch.int32),
    }


def sample_files() -> dict[str, bytes]:
    """A checkpoint: one safetensors file with metadata of its own, side files, a sub-directory."""
    return {
        "config.json": b'{"model_type": "tiny"}\n',
        "empty.txt": b"",
        "model.safetensors": save(sample_tensors(), metadata={"format": "pt", "maker": "someone"}),
        "tokenizer/vocab.txt": b"\n".join(f"word{number}".encode() for number in range(3000)),
    }
