"""Small families of models, a repository to merge them in, and the formulas of the methods in plain torch."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from safetensors.torch import save_file

from mpfs.errors import RecipeError
from mpfs.merge.random import bernoulli, stream_key
from mpfs.merge.reports import MergeReport
from mpfs.objects import BlockId, Plan, Tensor
from mpfs.repository import Repository
from mpfs.store import BlockReader

BLOCK_SIZE = 4096
MAP_SIZE = 1 << 30

Tensors: TypeAlias = dict[str, torch.Tensor]


class Lab:
    """A repository, and models in it by name."""

    def __init__(self, root: Path, block_size: int = BLOCK_SIZE) -> None:
        self.root = root
        self.repository = Repository.create(root / "repo", block_size=block_size, map_size=MAP_SIZE, author="tester")
        self.names: list[str] = []

    def add(self, name: str, tensors: Mapping[str, torch.Tensor], files: Mapping[str, bytes] | None = None) -> None:
        """Import a model, whose directory also holds `files`."""
        directory = self.root / "sources" / name
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        save_file(dict(tensors), directory / "model.safetensors", metadata={"format": "pt"})
        for path, content in (files or {}).items():
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            (directory / path).write_bytes(content)
        self.repository.import_checkpoint(directory, name, threads=1)
        self.names.append(name)

    def merge(self, recipe: Mapping[str, Any] | Plan, into: str = "merged", **options: Any) -> MergeReport:
        """Merge on two threads."""
        options.setdefault("threads", 2)
        return self.repository.merge(recipe, into, **options)

    def load(self, ref: str = "merged") -> Tensors:
        """A model's tensors."""
        return self.repository.load(ref)

    def blocks(self, ref: str) -> dict[str, Tensor]:
        """A model's tensor objects."""
        return self.repository.tensors(ref)

    def close(self) -> None:
        """Close the repository."""
        self.repository.close()


@dataclass(frozen=True)
class Family:
    """A base and experts tuned from it."""

    base: Tensors
    experts: list[Tensors]
    names: list[str] = field(default_factory=list)

    def add_to(self, lab: Lab) -> None:
        """Import them as `base`, `e0`, `e1`, …"""
        lab.add("base", self.base)
        for index, expert in enumerate(self.experts):
            lab.add(f"e{index}", expert)


SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (97, 64),
    "layer.0.weight": (64, 80),
    "layer.0.bias": (80,),
    "layer.1.weight": (33, 31),
    "scalar": (),
    "one": (1,),
    "empty": (0, 4),
}
"""Shapes with whole and broken columns of 4096 bytes, and degenerate ones."""


def family(
    count: int,
    *,
    dtype: torch.dtype = torch.float32,
    expert_dtypes: Sequence[torch.dtype] | None = None,
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    seed: int = 0,
    same_tensors: Sequence[str] = (),
    changed: float = 1.0,
) -> Family:
    """A base and `count` experts of random deltas, whose size varies by tensor and by run of 1024 elements.

    Tensors named in `same_tensors` are the base's in all experts; of the others a share `changed` of the runs differs.
    """
    generator = torch.Generator().manual_seed(seed)
    dtypes = list(expert_dtypes or [dtype] * count)
    base = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    experts: list[Tensors] = []
    for index in range(count):
        expert: Tensors = {}
        for name, values in base.items():
            runs = -(-values.numel() // 1024)
            scale = 0.1 * torch.exp(torch.randn(max(runs, 1), generator=generator))
            scale = torch.where(torch.rand(max(runs, 1), generator=generator) < changed, scale, 0.0)
            noise = torch.randn(values.numel(), generator=generator) * scale.repeat_interleave(1024)[: values.numel()]
            moved = values.float() + (0 if name in same_tensors else noise.reshape(values.shape))
            expert[name] = torch.where(moved == values.float(), values.float(), moved).to(dtypes[index])
        experts.append(expert)
    return Family(base, experts)


def recipe(
    method: str,
    count: int,
    *,
    weights: Sequence[float] | None = None,
    densities: Sequence[float] | None = None,
    base: str | None = "base",
    names: Sequence[str] | None = None,
    **top: Any,
) -> dict[str, Any]:
    """A recipe for `e0`, `e1`, …; `linear` lists the base first, with weight 0.5."""
    models: list[dict[str, Any]] = []
    if method == "linear" and base is not None:
        models.append({"model": base, "parameters": {"weight": 0.5}})
    for index in range(count):
        parameters: dict[str, float] = {"weight": (weights or [0.3, 0.8, -0.4, 1.1, 0.6])[index]}
        if densities is not None:
            parameters["density"] = densities[index]
        models.append({"model": (names or [f"e{i}" for i in range(count)])[index], "parameters": parameters})
    value: dict[str, Any] = {"merge_method": method, "models": models, **top}
    if base is not None:
        value["base_model"] = base
    return value


def expected(lab: Lab, merge: Mapping[str, Any], seed: int = 0) -> Tensors:
    """The full merge of a recipe by the formulas of mergekit-semantics §5 and §6, over whole tensors in plain torch.

    The base must have every tensor.
    """
    method = merge["merge_method"]
    base_name = merge.get("base_model")
    names = [str(item["model"]) for item in merge["models"]]
    inputs = {name: lab.load(name) for name in {*names, *([base_name] if base_name else [])}}
    shared = dict(merge.get("parameters") or {})
    own = {str(item["model"]): {**shared, **(item.get("parameters") or {})} for item in merge["models"]}
    result: Tensors = {}
    for tensor in inputs[base_name or names[0]]:
        work = torch_dtype(merge["dtype"]) if "dtype" in merge else None
        if work is None:
            work = inputs[names[0]][tensor].dtype
            for model in inputs.values():
                work = torch.promote_types(work, model[tensor].dtype)
        out = torch_dtype(merge["out_dtype"]) if "out_dtype" in merge else work
        values = {name: model[tensor].to(work) for name, model in inputs.items()}
        if method == "linear":
            merged = _linear([(values[name], float(own[name]["weight"])) for name in names], shared)
        else:
            experts = [name for name in names if name != base_name]
            keys = [stream_key(seed, tensor, name) for name in experts]
            merged = _task_vectors(
                method, values[str(base_name)], [values[name] for name in experts], [own[name] for name in experts],
                shared, keys,
            )  # fmt: skip
        result[tensor] = merged.to(out)
    return result


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype of a recipe's name."""
    dtype = getattr(torch, name.removeprefix("torch."))
    assert isinstance(dtype, torch.dtype)
    return dtype


def _linear(inputs: Sequence[tuple[torch.Tensor, float]], shared: Mapping[str, Any]) -> torch.Tensor:
    dtype = inputs[0][0].dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    total = torch.zeros_like(inputs[0][0], dtype=wide)
    for values, weight in inputs:
        total = _fused(values.to(wide), float(torch.tensor(weight, dtype=wide)), total)
    if shared.get("normalize", True):
        total = total / torch.tensor([weight for _, weight in inputs], dtype=wide).sum()
    return total.to(dtype)


def _fused(x: torch.Tensor, weight: float, addend: torch.Tensor) -> torch.Tensor:
    """x · weight + addend, rounded once."""
    if addend.dtype == torch.float32:
        # The product of two float32 is exact in float64.
        return (x.double() * weight + addend.double()).float()
    pairs = zip(x.flatten().tolist(), addend.flatten().tolist(), strict=True)
    exact = [float(Fraction(a) * Fraction(weight) + Fraction(b)) for a, b in pairs]
    return torch.tensor(exact, dtype=torch.float64).reshape(x.shape)


def _task_vectors(
    method: str,
    base: torch.Tensor,
    experts: Sequence[torch.Tensor],
    own: Sequence[Mapping[str, Any]],
    shared: Mapping[str, Any],
    keys: Sequence[int],
) -> torch.Tensor:
    dtype = base.dtype
    sparse = []
    for expert, parameters, key in zip(experts, own, keys, strict=True):
        delta, density = expert - base, float(parameters.get("density", 1.0))
        if method == "ties":
            delta = _trim(delta, density)
        elif method.startswith("dare"):
            delta = _drop(delta, density, key, bool(shared.get("rescale", True)))
        sparse.append(delta)
    weights = torch.tensor([float(item["weight"]) for item in own], dtype=dtype)
    column = weights.reshape(-1, *[1] * base.dim())
    weighted = torch.stack(sparse) * column
    normalize = shared.get("normalize", method == "ties")
    if method in ("ties", "dare_ties"):
        sign = torch.where(weighted.sum(0) >= 0, 1, -1)
        mask = weighted.sign() == sign
        mixed = torch.where(mask, weighted, 0.0).to(dtype).sum(0)
        divisor = torch.where(mask, column, torch.zeros((), dtype=dtype)).sum(0)
        divisor = torch.where(divisor == 0, torch.ones((), dtype=dtype), divisor)
    else:
        mixed = weighted.sum(0)
        divisor = weights.sum()
        if abs(float(divisor)) < 1e-8:
            divisor = torch.ones((), dtype=dtype)
    if normalize:
        mixed = mixed / divisor
    if float(shared.get("lambda", 1.0)) != 1.0:
        mixed = mixed * float(shared["lambda"])
    return base + mixed


def _trim(delta: torch.Tensor, density: float) -> torch.Tensor:
    if density >= 1:
        return delta
    flat = delta.flatten()
    keep = 0 if density <= 0 else min(max(int(density * flat.numel()), 1), flat.numel())
    order = flat.abs().float().sort(descending=True, stable=True).indices[:keep]
    mask = torch.zeros(flat.numel(), dtype=torch.bool)
    mask[order] = True
    return torch.where(mask, flat, torch.zeros((), dtype=delta.dtype)).reshape(delta.shape)


def _drop(delta: torch.Tensor, density: float, key: int, rescale: bool) -> torch.Tensor:
    if density >= 1:
        return delta
    flat = delta.flatten()
    mask = torch.from_numpy(bernoulli(key, 0, flat.numel(), density)) & torch.tensor(density > 0)
    masked = torch.where(mask, flat, torch.zeros((), dtype=delta.dtype))
    work = delta.dtype if delta.dtype in (torch.bfloat16, torch.float64) else torch.float32
    before, after = (_l1(x).to(work) for x in (flat, masked))
    if rescale and float(before) >= 1e-7 and float(after) >= 1e-7:
        masked = masked * float(before / after)
    return masked.reshape(delta.shape)


def _l1(values: torch.Tensor) -> torch.Tensor:
    return torch.tensor(math.fsum(values.double().abs().tolist()), dtype=torch.float64)


def assert_same(actual: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """Names, dtypes, shapes and values are the same, values to the last bit (but zeros of either sign are equal)."""
    assert sorted(actual) == sorted(wanted)
    for name, tensor in wanted.items():
        got = actual[name]
        assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape), name
        differing = (got != tensor) & ~(got.isnan() & tensor.isnan())
        assert not differing.any(), f"{name}: {int(differing.sum())} of {tensor.numel()} differ"


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merge with the operators in torch from here on."""
    monkeypatch.setattr("mpfs.merge.engine.kernels", lambda: None, raising=False)


@contextmanager
def told_reads(monkeypatch: pytest.MonkeyPatch, tell: Callable[[list[BlockId]], object]) -> Iterator[None]:
    """Tell of the blocks that are read from the store within the `with` block, each time that some are."""
    reading = BlockReader.reading

    @contextmanager
    def telling(self: BlockReader, where: str) -> Iterator[Any]:
        with reading(self, where) as read:

            def read_and_tell(blocks: Iterable[BlockId]) -> list[memoryview]:
                wanted = list(blocks)
                tell(wanted)
                return read(wanted)

            yield read_and_tell

    with monkeypatch.context() as patch:
        patch.setattr(BlockReader, "reading", telling)
        yield


@contextmanager
def counted_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[BlockId]]:
    """The ids of all blocks that are read within the `with` block."""
    seen: set[BlockId] = set()
    with told_reads(monkeypatch, seen.update):
        yield seen


def block_sizes(tensors: Mapping[str, Tensor]) -> dict[BlockId, int]:
    """The blocks of some tensors, with their sizes."""
    return {block: size for tensor in tensors.values() for block, size in tensor.sized_blocks()}


def problems_of(call: Callable[[], object]) -> dict[str, str]:
    """The problems of the RecipeError that a call raises, messages by key path."""
    with pytest.raises(RecipeError) as caught:
        call()
    listed: Any = caught.value.details["problems"]
    found = {str(item["path"]): str(item["message"]) for item in listed}
    for path, message in found.items():
        assert path in caught.value.message
        assert message in caught.value.message
    return found


def config(**values: object) -> bytes:
    """A config.json."""
    return json.dumps(values, indent=2).encode()
