"""A commit: a snapshot, where it came from, who made it, when and why."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from mpfs.objects.encoding import Json, decode, encode
from mpfs.objects.ids import ObjectId

KIND = "commit"


@dataclass(frozen=True, slots=True)
class Input:
    """A commit that went into another. `role` is "base" or "expert"; `name` is what the user called it."""

    role: str
    name: str
    commit: ObjectId

    def as_json(self) -> Json:
        """The JSON form."""
        return {"role": self.role, "name": self.name, "commit": self.commit}


@dataclass(frozen=True, slots=True)
class ManifestFile:
    """A file that an import has read: its posix path relative to the source, bytes, and SHA-256 in hex."""

    path: str
    size: int
    sha256: str

    def as_json(self) -> Json:
        """The JSON form."""
        return {"path": self.path, "size": self.size, "sha256": self.sha256}


@dataclass(frozen=True, slots=True)
class Commit:
    """An immutable commit. `time` is in seconds since 1970, UTC. `source` says what was imported, if it was, and
    `manifest` which files that was made of, sorted by path."""

    snapshot: ObjectId
    parents: tuple[ObjectId, ...]
    inputs: tuple[Input, ...]
    plan: ObjectId | None
    message: str
    author: str
    time: int
    source: str | None = None
    manifest: tuple[ManifestFile, ...] = ()

    @property
    def iso_time(self) -> str:
        """The time as ISO 8601, UTC."""
        return datetime.fromtimestamp(self.time, UTC).isoformat().replace("+00:00", "Z")

    def encode(self) -> bytes:
        """The canonical encoding."""
        value: Json = {
            "kind": KIND,
            "snapshot": self.snapshot,
            "parents": list(self.parents),
            "inputs": [item.as_json() for item in self.inputs],
            "plan": self.plan,
            "message": self.message,
            "author": self.author,
            "time": self.time,
            "source": self.source,
        }
        if self.manifest:
            value["manifest"] = [file.as_json() for file in self.manifest]
        return encode(value)

    @classmethod
    def decode(cls, data: bytes) -> Commit:
        """Read a commit back.

        Raises:
            ValueError: the bytes are not a commit object.
        """
        value = decode(data, KIND)
        try:
            return cls(
                snapshot=value["snapshot"],
                parents=tuple(value["parents"]),
                inputs=tuple(Input(item["role"], item["name"], item["commit"]) for item in value["inputs"]),
                plan=value["plan"],
                message=value["message"],
                author=value["author"],
                time=value["time"],
                source=value.get("source"),
                manifest=tuple(
                    ManifestFile(item["path"], item["size"], item["sha256"]) for item in value.get("manifest", ())
                ),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"malformed commit object: {error!r}") from error
