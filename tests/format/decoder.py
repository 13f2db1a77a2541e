"""A reader of MPFS repositories, written from docs/format.md alone: nothing of mpfs is imported here.

`read(path)` checks every record of a repository and returns its refs; `files(repository, commit)` gives the bytes of
the files of a commit. Whatever is not as the specification says raises `ValueError`.
"""

import hashlib
import json
import struct
from collections.abc import Iterator
from typing import Any

import lmdb
import xxhash

NAMES = (
    "F4 F6_E2M3 F6_E3M2 BOOL U8 I8 F8_E4M3 F8_E5M2 F8_E4M3FNUZ F8_E5M2FNUZ F8_E8M0 U16 I16 F16 BF16 U32 I32 F32 U64 "
    "I64 F64 C64"
)
DTYPES = NAMES.split()
BITS = dict(zip(DTYPES, (4, 6, 6, *[8] * 8, *[16] * 4, *[32] * 3, *[64] * 4), strict=True))
OBJECTS = {"tensors": "tensor", "snapshots": "snapshot", "commits": "commit", "plans": "plan", "runs": "run"}
DATABASES = (
    *OBJECTS,
    *["blocks", "block_info", "stats", "tensor_stats", "run_index", "refs", "reflog", "reuse", "pairs", "meta"],
)


def require(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(what)


class Repository:
    """Everything in a repository, by database; objects are parsed."""

    def __init__(self, path: object) -> None:
        with open(f"{path}/config.json", encoding="utf-8") as file:
            self.config = json.load(file)
        require(self.config["format_version"] == 1, f"format version {self.config['format_version']}")
        environment = lmdb.open(
            f"{path}/{self.config.get('store', 'store')}", readonly=True, lock=False, max_dbs=len(DATABASES)
        )
        self.raw: dict[str, dict[bytes, bytes]] = {}
        with environment.begin() as transaction:
            for name in DATABASES:
                handle = environment.open_db(name.encode(), transaction, create=False)
                self.raw[name] = dict(transaction.cursor(handle).iternext())
        environment.close()
        self.meta = {key.decode(): value.decode(errors="replace") for key, value in self.raw["meta"].items()}
        self.block_size = int(self.meta["block_size"])
        self.objects = {name: self._objects(name, kind) for name, kind in OBJECTS.items()}
        self.refs = dict(self._ref(key, value) for key, value in self.raw["refs"].items())
        self.reflog = [self._log_entry(key, value) for key, value in self.raw["reflog"].items()]

    def _objects(self, database: str, kind: str) -> dict[str, Any]:
        found = {}
        for key, value in self.raw[database].items():
            parsed = json.loads(value)
            canonical = json.dumps(parsed, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
            require(hashlib.sha256(value).digest() == key, f"{kind} {key.hex()} is not what its id says")
            require(canonical.encode() == value and parsed["kind"] == kind, f"{kind} {key.hex()} is not canonical")
            found[key.hex()] = parsed
        return found

    def _ref(self, key: bytes, value: bytes) -> tuple[str, tuple[str, str]]:
        payload = unseal(key, value)
        require(len(payload) == 33 and payload[:1] in (b"b", b"t"), f"ref {key!r}")
        return key.decode(), ("branch" if payload[:1] == b"b" else "tag", payload[1:].hex())

    def _log_entry(self, key: bytes, value: bytes) -> tuple[str, int, Any]:
        name, _, number = key.partition(b"\0")
        entry = json.loads(unseal(key, value))
        require(entry["kind"] == "reflog" and len(number) == 8, f"reflog {key!r}")
        return name.decode(), int.from_bytes(number, "big"), entry

    def check(self) -> None:
        """Every record against every other."""
        meta = "".join(f"{name}={self.meta[name]}\n" for name in ("format_version", "block_size", "hash_name", "uuid"))
        require(self.meta["checksum"] == xxhash.xxh3_64_hexdigest(meta.encode()), "meta checksum")
        require(self.meta["hash_name"] == "xxh3-128" and self.meta["format_version"] == "1", "meta")
        require(self.raw["blocks"].keys() == self.raw["block_info"].keys(), "blocks and block_info differ")
        for block, payload in self.raw["blocks"].items():
            codec, _, raw, stored, offset = struct.unpack("<B3xIQQq", self.raw["block_info"][block])
            require((codec, raw, stored) == (0, len(payload), len(payload)) and offset >= -1, f"info of {block.hex()}")
            require(xxhash.xxh3_128_digest(payload) == block, f"block {block.hex()} is damaged")
        for key, value in self.raw["stats"].items():
            record = unseal(key, value)
            require(len(key) == 25 and key[16] < len(DTYPES) and len(record) == 1080, f"stats {key.hex()}")
            count, nonfinite, zeros, *_ = struct.unpack_from("<QQQdddQ", record)
            elements = len(self.raw["blocks"][key[:16]]) * 8 // BITS[DTYPES[key[16]]]
            require(count == elements and nonfinite + zeros <= count, f"stats {key.hex()}")
        for identity in self.objects["tensors"]:
            self.tensor_bytes(identity)
        for key, value in self.raw["reuse"].items():
            payload = unseal(key, value)
            kinds = ("prepared", "planned")
            require(len(key) == 32 and (len(payload) % 16 == 0 or json.loads(payload)["kind"] in kinds), "reuse")
        for commit, run in self.raw["run_index"].items():
            require(self.objects["runs"][run.hex()]["commit"] == commit.hex(), "run_index")
        for identity, commit in self.objects["commits"].items():
            needed = [*commit["parents"], *(item["commit"] for item in commit["inputs"])]
            require(self.objects["commits"].keys() >= set(needed), f"commit {identity} lacks a parent or input")
            require(
                commit["plan"] is None or commit["plan"] in self.objects["plans"], f"commit {identity} lacks a plan"
            )
            for _ in self.files(identity):
                pass
        for _, target in self.refs.values():
            require(target in self.objects["commits"], f"a ref names {target}")

    def tensor_bytes(self, identity: str) -> bytes:
        """The raw bytes of a tensor; its statistics must be there."""
        tensor = self.objects["tensors"][identity]
        bits = BITS[tensor["dtype"]]
        size, ids = tensor["block_size"], bytes.fromhex(tensor["blocks"])
        total = bits
        for dimension in tensor["shape"]:
            total *= dimension
        require(total % 8 == 0 and size == self.block_size, f"tensor {identity}")
        pieces = []
        for index in range(len(ids) // 16):
            block = ids[index * 16 : index * 16 + 16]
            start = index * size if bits % 8 else index * size * 8 // bits
            key = block + bytes([DTYPES.index(tensor["dtype"])]) + start.to_bytes(8, "big")
            require(key in self.raw["stats"], f"block {index} of tensor {identity} has no statistics")
            pieces.append(self.raw["blocks"][block])
        require(all(len(piece) == size for piece in pieces[:-1]), f"tensor {identity} has a short block")
        data = b"".join(pieces)
        require(len(data) == total // 8, f"tensor {identity} has {len(data)} bytes, not {total // 8}")
        return data

    def files(self, commit: str) -> Iterator[tuple[str, bytes]]:
        """(path, bytes) of each file of a commit."""
        snapshot = self.objects["snapshots"][self.objects["commits"][commit]["snapshot"]]
        for file in snapshot["files"]:
            if file["type"] == "blob":
                data = self.tensor_bytes(file["content"])
            else:
                require(file["type"] == "safetensors", f"file type {file['type']}")
                parts = [file["header"], *(tensor for _, tensor in file["tensors"])]
                data = b"".join(self.tensor_bytes(part) for part in parts)
                self._check_header(file, data)
            require(len(data) == file["size"], f"{file['path']} has {len(data)} bytes, not {file['size']}")
            yield file["path"], data

    def _check_header(self, file: Any, data: bytes) -> None:
        (length,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + length])
        for name, identity in file["tensors"]:
            tensor, entry = self.objects["tensors"][identity], header[name]
            start, stop = (8 + length + offset for offset in entry["data_offsets"])
            require(entry["dtype"] == tensor["dtype"] and entry["shape"] == tensor["shape"], f"{name} in the header")
            require(data[start:stop] == self.tensor_bytes(identity), f"{name} is not where the header says")


def unseal(key: bytes, value: bytes) -> bytes:
    """The payload of a sealed record."""
    require(xxhash.xxh3_64_digest(key + value[:-8]) == value[-8:], f"the record under {key!r} is damaged")
    return value[:-8]
