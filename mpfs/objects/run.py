"""A run: the record of one execution of a plan. It is kept beside the commit, which must not depend on timing."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from mpfs.objects.encoding import decode, encode
from mpfs.objects.ids import ObjectId

KIND = "run"


@dataclass(frozen=True, slots=True)
class Figures:
    """What a merge really did. Bytes are stored bytes of distinct blocks; `seconds` is wall time.

    `expert_bytes_full` is what a merge without a budget would read of the experts, `expert_bytes_planned` what the
    plan allows, `expert_bytes_read` what was read. `blocks_kept` are output blocks that are the base's,
    `blocks_computed` were computed, `blocks_reused` were found in the reuse table. `fidelity` is measured on request.
    `variants` is the number of merges that ran together (1: it ran alone): what several of them read or wrote is counted for
    each that reads it and for the first that writes it, and `seconds` is this one's share of the time, by bytes.
    """

    expert_bytes_full: int = 0
    expert_bytes_planned: int = 0
    expert_bytes_read: int = 0
    base_bytes_read: int = 0
    bytes_written: int = 0
    blocks_kept: int = 0
    blocks_computed: int = 0
    blocks_reused: int = 0
    blocks_deduplicated: int = 0
    seconds: float = 0.0
    fidelity: float | None = None
    variants: int = 1

    def as_json(self) -> dict[str, int | float | None]:
        """The JSON form, by field name."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Run:
    """One execution. `started` is in seconds since 1970, UTC."""

    commit: ObjectId
    plan: ObjectId
    started: int
    figures: Figures

    def encode(self) -> bytes:
        """The canonical encoding: what says that a merge ran with others is left out where it ran alone, as ever."""
        figures = self.figures.as_json()
        if self.figures.variants == 1:
            del figures["variants"]
        return encode(
            {
                "kind": KIND,
                "commit": self.commit,
                "plan": self.plan,
                "started": self.started,
                "figures": figures,
            }
        )

    @classmethod
    def decode(cls, data: bytes) -> Run:
        """Read a run back; figures that this version does not know are left out.

        Raises:
            ValueError: the bytes are not a run object.
        """
        value = decode(data, KIND)
        try:
            known = {field.name for field in fields(Figures)}
            figures = Figures(**{key: item for key, item in value["figures"].items() if key in known})
            return cls(value["commit"], value["plan"], value["started"], figures)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"malformed run object: {error!r}") from error
