"""Torch files, TorchScript programs and PEFT adapters for tests: hypothesis strategies for valid ones, and ways to damage them.

As in `mpfs.testing.checkpoints`: what the strategies make is valid and often odd, and no reader may take what a damage
makes for whole. Needs hypothesis.
"""

from __future__ import annotations

import io
import json
import pickle
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import save


@dataclass(frozen=True, slots=True)
class TorchContent:
    """A torch file, and what an import is to find in it. `key` is what --key has to say, if anything."""

    data: bytes
    state: Mapping[str, torch.Tensor]
    key: str | None


def torch_bytes(value: object, *, legacy: bool = False) -> bytes:
    """What torch.save writes; `legacy` is the format before torch 1.6."""
    stream = io.BytesIO()
    torch.save(value, stream, _use_new_zipfile_serialization=not legacy)
    return stream.getvalue()


@st.composite
def torch_files(draw: st.DrawFn) -> TorchContent:
    """A torch file with views, tied and expanded tensors and ones in any order of dimensions; plain, in a training
    checkpoint, or beside other state dicts."""
    names = draw(st.lists(st.text("abc._", min_size=1, max_size=8), unique=True, min_size=1, max_size=6))
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]
    state: dict[str, torch.Tensor] = {}
    for name in names:
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
        tensor = torch.randn((6, 10), generator=generator).to(draw(st.sampled_from(dtypes)))
        shape = draw(st.sampled_from(["as it is", "transposed", "a slice", "expanded", "tied", "a scalar", "empty"]))
        state[name] = {
            "as it is": tensor,
            "transposed": tensor.t(),
            "a slice": tensor[1:4, ::3],
            "expanded": tensor[:1].expand(6, 10),
            "tied": next(iter(state.values()), tensor),
            "a scalar": tensor[2, 3],
            "empty": tensor[:0],
        }[shape]
    kind = draw(st.sampled_from(["plain", "training", "several"]))
    value: object = state
    key = None
    if kind == "training":
        value = {
            "model": state,
            "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1}]},
            "epoch": 3,
        }
    elif kind == "several":
        value, key = {"model": {"x": torch.ones(2)}, "ema": state}, "ema"
    return TorchContent(torch_bytes(value, legacy=draw(st.booleans())), state, key)


def with_records(content: bytes, edit: Callable[[str, bytes], bytes | None]) -> bytes:
    """A torch archive with other contents of its records, under right checksums; None leaves one out."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(out, "w") as new:
        for record in old.infolist():
            changed = edit(record.filename.partition("/")[2], old.read(record))
            if changed is not None:
                new.writestr(record.filename, changed, record.compress_type)
    return out.getvalue()


def _record(name: str, change: Callable[[bytes], bytes | None]) -> Callable[[bytes], bytes]:
    return lambda content: with_records(content, lambda record, old: change(old) if record == name else old)


def _in_data(content: bytes) -> bytes:
    """One bit of the first tensor's numbers, which a checksum covers."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        (first,) = (record for record in archive.infolist() if record.filename.endswith("/data/0"))
        data = archive.read(first)
    at = content.index(data, first.header_offset + 30)
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


TORCH_DAMAGES: Mapping[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "cut at the end": lambda content: content[:-10],
    "a bit of the data": _in_data,
    "a record cut": _record("data/0", lambda old: old[:-4]),
    "a record longer": _record("data/0", lambda old: old + bytes(4)),
    "a record gone": _record("data/0", lambda old: None),
    "no pickle": _record("data.pkl", lambda old: None),
    "the pickle cut": _record("data.pkl", lambda old: old[: len(old) // 2]),
    "another pickle": _record("data.pkl", lambda old: pickle.dumps([1, 2, 3], 2)),
    "zeros": lambda content: bytes(len(content)),
    "web page": lambda content: b"<!DOCTYPE html><html><body>Access denied</body></html>",
    "git-lfs pointer": lambda content: (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"
    ),
}
"""Ways to break a zip archive of torch's, also a TorchScript program, whose first storage holds at least one number."""


# -- TorchScript ----------------------------------------------------------------------------------------------------


class _Holder(torch.nn.Module):
    """A module that computes nothing, with an attribute that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What it is given."""
        return x


def torchscript_bytes(module: torch.nn.Module) -> bytes:
    """What torch.jit.save writes of a module, compiled."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stream = io.BytesIO()
        torch.jit.save(torch.jit.script(module), stream)
    return stream.getvalue()


@st.composite
def torchscript_files(draw: st.DrawFn) -> TorchContent:
    """A TorchScript program of nested modules, with tied weights, views and buffers."""
    root = _Holder()
    modules: list[torch.nn.Module] = [root]
    for number in range(draw(st.integers(0, 3))):
        inner = _Holder()
        draw(st.sampled_from(modules)).add_module(draw(st.sampled_from(["m", "0", "layer"])) + str(number), inner)
        modules.append(inner)
    made: list[torch.nn.Parameter] = []
    for number in range(draw(st.integers(1, 6))):
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
        tensor = torch.randn((4, 6), generator=generator)
        owner = draw(st.sampled_from(modules))
        kind = draw(st.sampled_from(["parameter", "tied", "half", "buffer", "view", "integers"]))
        if kind == "tied" and made:
            owner.register_parameter(f"p{number}", draw(st.sampled_from(made)))
        elif kind in ("parameter", "tied", "half"):
            made.append(torch.nn.Parameter(tensor.half() if kind == "half" else tensor))
            owner.register_parameter(f"p{number}", made[-1])
        else:
            owner.register_buffer(
                f"b{number}", tensor.t()[1:3] if kind == "view" else tensor.long() if kind[0] == "i" else tensor
            )
    state = {name: tensor.detach() for name, tensor in root.state_dict().items()}
    return TorchContent(torchscript_bytes(root), state, None)


# -- PEFT -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AdapterContent:
    """An adapter's files, the model that it is for, and what comes out of the two, in float32."""

    files: Mapping[str, bytes]
    model: Mapping[str, torch.Tensor]
    expected: Mapping[str, torch.Tensor]


def peft_bytes(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> dict[str, bytes]:
    """The files of an adapter."""
    return {
        "adapter_model.safetensors": save({name: tensor.contiguous() for name, tensor in tensors.items()}),
        "adapter_config.json": json.dumps({"peft_type": "LORA", **config}).encode(),
    }


@st.composite
def peft_adapters(draw: st.DrawFn) -> AdapterContent:
    """A LoRA of some of a model's matrices, with ranks and scales of their own, with or without rslora, and whole tensors."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    shapes = {
        f"model.layers.{layer}.{part}.weight": size
        for layer in range(2)
        for part, size in (("q", (6, 5)), ("up", (9, 6)))
    }
    model = {name: random(*shape) for name, shape in shapes.items()} | {"model.norm.weight": random(6)}
    rank, alpha, root = draw(st.integers(1, 4)), draw(st.integers(1, 32)), draw(st.booleans())
    config: dict[str, Any] = {
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": root,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    tensors: dict[str, torch.Tensor] = {}
    expected = dict(model)
    before = draw(st.sampled_from(["base_model.model.", "base_model.model.", ""]))
    for name in draw(st.lists(st.sampled_from(sorted(shapes)), unique=True, min_size=1)):
        module = name.removesuffix(".weight")
        own = {"r": rank, "alpha": alpha}
        for key, pattern in (("r", "rank_pattern"), ("alpha", "alpha_pattern")):
            if draw(st.booleans()):
                own[key] = draw(st.integers(1, 5))
                config[pattern][module] = own[key]
        a, b = random(own["r"], shapes[name][1]), random(shapes[name][0], own["r"])
        tensors |= {f"{before}{module}.lora_A.weight": a, f"{before}{module}.lora_B.weight": b}
        scale = own["alpha"] / (own["r"] ** 0.5 if root else own["r"])
        expected[name] = model[name] + b @ a * scale
    if draw(st.booleans()):
        expected["model.norm.weight"] = tensors[f"{before}model.norm.weight"] = random(6)
    return AdapterContent(peft_bytes(tensors, config), model, expected)


PEFT_DAMAGES: Mapping[str, Callable[[dict[str, torch.Tensor], dict[str, Any]], object]] = {
    "no B": lambda tensors, config: tensors.pop("q.lora_B.weight"),
    "A of another shape": lambda tensors, config: tensors.update({"q.lora_A.weight": torch.ones(2, 7)}),
    "another rank": lambda tensors, config: config.update(r=3),
    "no rank": lambda tensors, config: config.pop("r"),
    "no alpha": lambda tensors, config: config.pop("lora_alpha"),
    "another module": lambda tensors, config: tensors.update({"v.lora_A.weight": tensors.pop("q.lora_A.weight")}),
    "a tensor of no model": lambda tensors, config: tensors.update({"nothing": torch.ones(1)}),
    "another type": lambda tensors, config: config.update(peft_type="IA3"),
    "an option that is not supported": lambda tensors, config: config.update(layer_replication=[[0, 1]]),
    "a pattern that is none": lambda tensors, config: config.update(rank_pattern={"(": 3}),
    "integers": lambda tensors, config: tensors.update({"q.lora_A.weight": torch.ones(2, 5, dtype=torch.int8)}),
    "DoRA without magnitudes": lambda tensors, config: config.update(use_dora=True),
}
"""Ways to break an adapter of rank 2 for a model with `q.weight` of (6, 5): its tensors, and its config."""
