"""Quantised weights: recognised by the names, dtypes and shapes of tensors, and by config.json. Pure.

A quantised weight is several tensors: packed integers, and scales, zero points or tables without which they mean
nothing. The scales are often F16 or F32, so that averaging them alone would look possible; `members` has them as well.

Layouts, from the libraries that write them: bitsandbytes (`weight` U8 with `weight.absmax`, `weight.quant_map` and
`weight.quant_state.bitsandbytes__nf4` or `__fp4`; `weight` I8 with `SCB`), GPTQ (`qweight`, `qzeros`, `scales`, `g_idx`),
AWQ (the same without `g_idx`), MXFP4 as in gpt-oss (`NAME_blocks`, `NAME_scales`), compressed-tensors (`weight_packed`,
`weight_scale`, …), FP8 (`weight` F8 with `weight_scale_inv` or `weight_scale`), HQQ (`W_q`), torch's own (`_packed_params`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mpfs.formats.messages import count

_NAMES = {
    "bitsandbytes": "bitsandbytes",
    "gptq": "GPTQ",
    "awq": "AWQ",
    "mxfp4": "MXFP4",
    "fp8": "FP8",
    "fbgemm_fp8": "FP8",
    "compressed-tensors": "compressed-tensors",
    "hqq": "HQQ",
}
"""What config.json's `quant_method` is called here."""

_PACKED_INTEGERS = frozenset({"I32", "U32", "I16", "U8", "I8", "I64"})
_BNB_TABLES = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_HQQ_PARTS = (
    *("scale", "zero", "axis", "group_size", "nbits", "packing", "shape", "view_as_float", "unpack_view_dtype"),
    *("channel_wise", "compute_dtype", "encoded_state_dict", "stores_quant_config", "optimize", "round_zero"),
    *("quant_scale", "quant_zero", "offload_meta"),
)
_GGUF_NAMES = ("blk.", "token_embd.", "output.", "enc.blk.", "dec.blk.", "v.blk.", "mm.")
"""How names of tensors begin in GGUF files, whose quantised types are U8 here."""

_BNB_STATE = "quant_state.bitsandbytes__"


@dataclass(frozen=True, slots=True)
class Quantisation:
    """What is quantised in a model. `members` are all tensors that belong to quantised weights, with what each weight
    is ("GPTQ"); `weights` is the number of weights; `bits` an element, where config.json says so."""

    members: Mapping[str, str]
    weights: int
    bits: int | None = None

    @property
    def schemes(self) -> tuple[str, ...]:
        """What there is, the most frequent first."""
        return tuple(scheme for scheme, _ in Counter(self.members.values()).most_common())

    def __str__(self) -> str:
        bits = f", {self.bits} bits" if self.bits is not None else ""
        return f"{' and '.join(self.schemes)}{bits}: {count(self.weights, 'weight')} in {count(len(self.members), 'tensor')}"


def recognise(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], config: Mapping[str, Any] | None = None
) -> Quantisation | None:
    """Find the quantised weights of a model.

    Args:
        tensors: dtype and shape by name.
        config: what config.json says, if there is one.

    Returns:
        None if no weight is quantised, as far as can be known. Of which type a GGUF file's tensors are says
        `mpfs.formats.gguf.Header.quantised`.
    """
    stated = _stated(config)
    method = _NAMES.get(str(stated.get("quant_method", "")).lower().replace("_", "-"))
    members: dict[str, str] = {}
    weights = 0
    for group, scheme in _groups(tensors, method):
        weights += 1
        for name in group:
            members.setdefault(name, scheme)
    if not weights:
        return None
    bits = stated.get("bits", stated.get("w_bit"))
    if stated.get("load_in_4bit") is True:
        bits = 4
    elif stated.get("load_in_8bit") is True:
        bits = 8
    return Quantisation(members, weights, bits if type(bits) is int else None)


def _stated(config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    found = (config or {}).get("quantization_config")
    return found if isinstance(found, Mapping) else {}


def _groups(tensors: Mapping[str, tuple[str, tuple[int, ...]]], method: str | None) -> Iterator[tuple[list[str], str]]:
    """The tensors of each quantised weight, and what it is."""

    def there(*names: str) -> list[str]:
        return [name for name in names if name in tensors]

    for name, (dtype, shape) in tensors.items():
        if name.endswith("qweight") and dtype in _PACKED_INTEGERS:
            stem = name.removesuffix("qweight")
            scales = there(f"{stem}scales", f"{stem}qzeros", f"{stem}g_idx")
            if scales:
                layout = "GPTQ" if f"{stem}g_idx" in scales else "AWQ"
                yield [name, *scales], method if method in ("GPTQ", "AWQ") else layout
        elif name.endswith("_blocks") and dtype == "U8" and f"{name.removesuffix('_blocks')}_scales" in tensors:
            if len(shape) > 1:
                yield [name, f"{name.removesuffix('_blocks')}_scales"], "MXFP4"
        elif name.endswith("weight_packed"):
            stem = name.removesuffix("_packed")
            yield (
                [
                    name,
                    *there(
                        f"{stem}_scale", f"{stem}_shape", f"{stem}_zero_point", f"{stem}_g_idx", f"{stem}_global_scale"
                    ),
                ],
                "compressed-tensors",
            )
        elif name.endswith("W_q") and dtype in _PACKED_INTEGERS:
            stem = name.removesuffix("W_q")
            yield [name, *there(*(stem + part for part in _HQQ_PARTS))], "HQQ"
        elif name.endswith(("_packed_params._packed_params", "._packed_params")):
            yield [name], "torch quantised"
        elif name.endswith("weight") and dtype.startswith("F8_"):
            yield (
                [name, *there(f"{name}_scale_inv", f"{name}_scale", f"{name.removesuffix('weight')}input_scale")],
                "FP8",
            )
        elif name.endswith("weight") and dtype == "U8":
            tables = there(*(f"{name}.{table}" for table in _BNB_TABLES))
            states = there(f"{name}.{_BNB_STATE}nf4", f"{name}.{_BNB_STATE}fp4")
            if tables or states:
                kind = f" {states[0].rpartition('__')[2]}" if states else ""
                yield [name, *tables, *states], f"bitsandbytes{kind}"
            elif name.startswith(_GGUF_NAMES) and len(shape) > 1:
                yield [name], "GGUF"
        elif name.endswith("weight") and dtype == "I8":
            satellites = there(
                f"{name.removesuffix('weight')}SCB", f"{name}_format", f"{name}_scale", f"{name}_zero_point"
            )
            if satellites:
                eight = f"{name.removesuffix('weight')}SCB" in satellites
                yield [name, *satellites], "bitsandbytes int8" if eight else method or "int8"
        elif dtype in ("F4", "F6_E2M3", "F6_E3M2"):
            yield [name, *there(f"{name}_scale", f"{name}_scale_2")], dtype.partition("_")[0]
