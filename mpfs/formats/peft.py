"""PEFT adapters: what adapter_config.json and the names of the tensors say is done to which tensor of a model.

Names and shapes only: no data is read here. The rules are PEFT's for LoRA: the change of a weight is scale · B·A, with
scale = alpha / r, or alpha / sqrt(r) with `use_rslora`; `rank_pattern` and `alpha_pattern` set r and alpha of some
modules; with `fan_in_fan_out` the weight lies transposed; `modules_to_save` (and biases) replace whole tensors; with
`use_dora` the rows of the changed weight are scaled to learned lengths. Source: Hu et al., arXiv 2106.09685;
Kalajdzievski, arXiv 2312.03732 (rslora); Liu et al., arXiv 2402.09353 (DoRA).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

from mpfs.errors import BadInputError

CONFIG_PATH = "adapter_config.json"

_PREFIX = "base_model.model."
_PART = re.compile(
    r"^(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(\.(?!weight$|bias$)[^.]+)?(\.(?P<kind>weight|bias))?$"
)
_UNSUPPORTED = (
    "megatron_config",
    "layer_replication",
    "eva_config",
    "corda_config",
    "use_qalora",
    "trainable_token_indices",
)
"""Options that change what an adapter's tensors mean, and that are not supported here."""

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class LowRank:
    """A change of one weight: scale · B·A, transposed if the weight lies so. Names are those in the adapter.

    `down` (A) is (rank, in), `up` (B) is (out, rank). `magnitude` (DoRA) is the length of each row of the result.
    """

    target: str
    down: str
    up: str
    scale: float
    transposed: bool
    magnitude: str | None = None


@dataclass(frozen=True, slots=True)
class Replacement:
    """A tensor that takes the place of the model's whole one; with `scale` it is added to it, times that."""

    target: str
    source: str
    scale: float | None = None


@dataclass(frozen=True, slots=True)
class Adapter:
    """What an adapter does to a model."""

    low_rank: tuple[LowRank, ...]
    replacements: tuple[Replacement, ...]


def read_adapter(config: Mapping[str, Any], adapter: Shapes, model: Shapes, new: Sequence[str] = ()) -> Adapter:
    """Find out what an adapter does.

    Args:
        config: its adapter_config.json.
        adapter: the shapes of its tensors.
        model: the shapes of the model's tensors.
        new: names of tensors that the adapter may add to the model.

    Raises:
        BadInputError: it is no LoRA, is damaged, or has tensors that match nothing; all of those are named.
    """
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise BadInputError(f"the adapter is of type {kind}; LORA (with rslora or DoRA) is what can be applied")
    used = [name for name in _UNSUPPORTED if config.get(name)]
    if used:
        raise BadInputError(f"the adapter uses {', '.join(used)}, which cannot be applied")
    reader = _Reader(config, adapter, model, new)
    return reader.read()


class _Reader:
    def __init__(self, config: Mapping[str, Any], adapter: Shapes, model: Shapes, new: Sequence[str]) -> None:
        self.config = config
        self.adapter = adapter
        self.model = model
        self.new = new
        self.problems: list[str] = []
        self.by_suffix: dict[str, list[str]] = {}
        for name in model:
            parts = name.split(".")
            for start in range(len(parts)):
                self.by_suffix.setdefault(".".join(parts[start:]), []).append(name)

    def read(self) -> Adapter:
        modules: dict[str, dict[str, str]] = {}
        replacements: list[Replacement] = []
        for name in self.adapter:
            found = _PART.match(name)
            if found is None:
                target = self._target(_plain(name))
                if target is None:
                    self.problems.append(f"{name} matches no tensor of the model")
                else:
                    replacements.append(self._replacement(target, name))
                continue
            part = found["part"] + ("_bias" if found["kind"] == "bias" else "")
            modules.setdefault(found["module"], {})[part] = name
        low_rank: list[LowRank] = []
        for module, parts in modules.items():
            self._module(module, parts, low_rank, replacements)
        targets = [item.target for item in low_rank] + [item.target for item in replacements]
        twice = sorted({target for target in targets if targets.count(target) > 1})
        self.problems.extend(f"{target} is changed twice" for target in twice)
        if not targets and not self.problems:
            self.problems.append("it has no tensors")
        if self.problems:
            shown = "; ".join(self.problems[:5])
            more = f" and {len(self.problems) - 5} more" if len(self.problems) > 5 else ""
            raise BadInputError(f"the adapter does not fit the model: {shown}{more}", problems=self.problems)
        return Adapter(tuple(low_rank), tuple(replacements))

    def _replacement(self, target: str, name: str) -> Replacement:
        ours, theirs = self.adapter[name], self.model.get(target)
        if theirs is not None and ours[1:] != theirs[1:]:
            self.problems.append(f"{name} is {list(ours)}, but {target} is {list(theirs)}")
        return Replacement(target, name)

    def _module(
        self, module: str, parts: dict[str, str], low_rank: list[LowRank], replacements: list[Replacement]
    ) -> None:
        embedding = "lora_embedding_A" in parts or "lora_embedding_B" in parts
        down, up = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A", "lora_B")
        missing = [part for part in (down, up) if part not in parts]
        target = self._target(f"{_plain(module)}.weight")
        if missing:
            self.problems.append(f"{module} has no {missing[0]}")
            return
        if target is None:
            self.problems.append(f"{parts[down]} matches no tensor of the model")
            return
        a, b, weight = self.adapter[parts[down]], self.adapter[parts[up]], self.model[target]
        if len(a) != 2 or len(b) != 2 or len(weight) != 2:
            self.problems.append(f"{target} is {list(weight)}: only matrices can be adapted, not convolutions")
            return
        # The embedding's weight is (words, size), while B·A is (size, words).
        transposed = embedding or bool(self.config.get("fan_in_fan_out"))
        change = (b[0], a[1])
        if a[0] != b[1] or (change[::-1] if transposed else change) != weight:
            self.problems.append(
                f"{module}: A {list(a)} and B {list(b)} do not fit {target} {list(weight)}"
                + (" with fan_in_fan_out" if transposed and not embedding else "")
            )
            return
        scale = self._scale(_plain(module), a[0])
        if scale is None:
            return
        low_rank.append(LowRank(target, parts[down], parts[up], scale, transposed, parts.get("lora_magnitude_vector")))
        if embedding and "lora_magnitude_vector" in parts:
            self.problems.append(f"{module} uses DoRA on an embedding, which cannot be applied")
        if self.config.get("use_dora") and "lora_magnitude_vector" not in parts:
            self.problems.append(f"{module} has no lora_magnitude_vector, though the adapter uses DoRA")
        bias = parts.get(f"{up}_bias")
        if bias is not None:
            place = target.removesuffix("weight") + "bias"
            if place in self.model:
                replacements.append(Replacement(place, bias, scale))
            else:
                self.problems.append(f"{bias} is to be added to {place}, which the model has not")

    def _scale(self, module: str, rank: int) -> float | None:
        """alpha over the rank or its root; None if the config tells another rank than the tensors."""
        stated = self._pattern("rank_pattern", module, self.config.get("r"))
        alpha = self._pattern("alpha_pattern", module, self.config.get("lora_alpha"))
        if not isinstance(stated, int) or not isinstance(alpha, int | float):
            self.problems.append(f"{CONFIG_PATH} has no r or no lora_alpha for {module}")
            return None
        if stated != rank:
            self.problems.append(f"{module} has rank {rank}, but {CONFIG_PATH} says {stated}")
            return None
        return float(alpha) / (sqrt(rank) if self.config.get("use_rslora") else rank)

    def _pattern(self, key: str, module: str, default: Any) -> Any:
        for pattern, value in (self.config.get(key) or {}).items():
            try:
                if re.match(rf"(.*\.)?({pattern})$", module):
                    return value
            except re.error:
                self.problems.append(f"{CONFIG_PATH}: {key} has a pattern that is none: {pattern}")
        return default

    def _target(self, name: str) -> str | None:
        """The model's tensor that is meant: of this name, or the only one that ends in it, or that it ends in."""
        if name in self.model or name in self.new:
            return name
        found = self.by_suffix.get(name, [])
        if len(found) == 1:
            return found[0]
        parts = name.split(".")
        for start in range(1, len(parts) - 1):
            shorter = ".".join(parts[start:])
            if shorter in self.model or shorter in self.new:
                return shorter
        return None


def _plain(name: str) -> str:
    """A name as the model has it, without what PEFT wraps around modules."""
    plain = name.removeprefix(_PREFIX).removeprefix("base_model.")
    plain = re.sub(r"\.modules_to_save(\.default)?\.", ".", plain)
    return plain.replace(".base_layer.", ".").replace(".original_module.", ".")
