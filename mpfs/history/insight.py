"""What is behind a plan, as numbers for pictures: who changes which layer how much, who disagrees with whom, and what
every budget would have bought. Plain data; `mpfs.merge.insight` finds it, `mpfs.history.page` draws it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpfs.objects.encoding import Json


@dataclass(frozen=True, slots=True)
class Share:
    """What one expert changes of some tensors, and what of that is read.

    `energy` is the squared norm of its weighted delta (estimated), `energy_read` that of the columns that are read;
    `nbytes` the bytes in which it differs from the base, `nbytes_read` those that the plan reads.
    """

    energy: float = 0.0
    energy_read: float = 0.0
    nbytes: int = 0
    nbytes_read: int = 0

    def __add__(self, other: Share) -> Share:
        return Share(
            self.energy + other.energy,
            self.energy_read + other.energy_read,
            self.nbytes + other.nbytes,
            self.nbytes_read + other.nbytes_read,
        )


@dataclass(frozen=True, slots=True)
class TensorShares:
    """A merged tensor's shares, an entry for each expert (None where an expert lacks it)."""

    name: str
    experts: tuple[Share | None, ...]


@dataclass(frozen=True, slots=True)
class Layer:
    """Tensors that go together, and their shares added up."""

    name: str
    tensors: int
    experts: tuple[Share | None, ...]


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """So many bytes read of the experts buy this fidelity (predicted)."""

    nbytes: int
    fidelity: float


@dataclass(frozen=True, slots=True)
class Insight:
    """The numbers.

    `experts` are the models other than the base. `conflict` has the cosine between the weighted deltas of each two of
    them over all tensors, None where one has no delta. `curves` has, by policy, what each budget buys. `chosen` is
    the plan itself.
    """

    experts: tuple[str, ...]
    tensors: tuple[TensorShares, ...]
    conflict: tuple[tuple[float | None, ...], ...]
    curves: Mapping[str, tuple[CurvePoint, ...]]
    chosen: CurvePoint

    def layers(self) -> tuple[Layer, ...]:
        """The tensors by layer, in natural order of their names."""
        groups: dict[str, list[TensorShares]] = {}
        for tensor in self.tensors:
            groups.setdefault(layer_of(tensor.name), []).append(tensor)
        return tuple(
            Layer(name, len(groups[name]), _added([item.experts for item in groups[name]]))
            for name in sorted(groups, key=natural)
        )

    def as_json(self) -> Json:
        """The JSON form."""
        return {
            "experts": list(self.experts),
            "layers": [
                {
                    "layer": layer.name,
                    "tensors": layer.tensors,
                    "experts": [
                        None
                        if share is None
                        else {
                            "energy": share.energy,
                            "energy_read": share.energy_read,
                            "bytes": share.nbytes,
                            "bytes_read": share.nbytes_read,
                        }
                        for share in layer.experts
                    ],
                }
                for layer in self.layers()
            ],
            "conflict": [list(row) for row in self.conflict],
            "curves": {
                policy: [[point.nbytes, point.fidelity] for point in points] for policy, points in self.curves.items()
            },
            "chosen": [self.chosen.nbytes, self.chosen.fidelity],
        }


def layer_of(name: str) -> str:
    """A tensor's layer: its name up to the first number, or up to the last part but one where there is none."""
    parts = name.split(".")
    for place, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: place + 1])
    return ".".join(parts[:-1]) if len(parts) > 1 else name


def natural(text: str) -> list[tuple[int, int, str]]:
    """A sort key by which layer 2 comes before layer 10."""
    return [
        (1, int(part), "") if part.isdecimal() and part.isascii() else (0, 0, part)
        for part in re.split(r"([0-9]+)", text)
    ]


def _added(rows: Sequence[tuple[Share | None, ...]]) -> tuple[Share | None, ...]:
    result: list[Share | None] = []
    for column in zip(*rows, strict=True):
        shares = [share for share in column if share is not None]
        result.append(sum(shares, Share()) if shares else None)
    return tuple(result)
