"""Golden repositories: an independent reader, and today's code, can read every format version that there was."""

from __future__ import annotations

import ast
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import decoder
import lmdb
import pytest

from mpfs.errors import UnsupportedFormatError
from mpfs.objects import Commit, Plan, Run, Snapshot, Tensor, object_id
from mpfs.repository import Repository
from mpfs.store import Store
from mpfs.store.config import FORMAT_VERSION
from mpfs.store.validate import validate

HERE = Path(__file__).parent
VERSIONS = [f"v{number}" for number in range(1, FORMAT_VERSION + 1)]

KINDS: dict[str, Any] = {"tensors": Tensor, "snapshots": Snapshot, "commits": Commit, "plans": Plan, "runs": Run}


@pytest.fixture(params=VERSIONS)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of a golden repository."""
    return Path(shutil.copytree(HERE / "golden" / request.param, tmp_path / request.param))


def expected(golden: Path) -> dict[str, dict[str, str]]:
    """Digests of files by ref and path."""
    found: dict[str, dict[str, str]] = json.loads((HERE / "golden" / f"{golden.name}.files.json").read_text("utf-8"))
    return found


def digests(files: Any) -> dict[str, str]:
    """Digests by path, of (path, bytes)."""
    return {path: hashlib.sha256(data).hexdigest() for path, data in files}


def test_the_decoder_is_independent() -> None:
    text = (HERE / "decoder.py").read_text("utf-8")
    nodes = list(ast.walk(ast.parse(text)))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    assert names == {"hashlib", "json", "lmdb", "struct", "xxhash"}
    assert {node.module for node in nodes if isinstance(node, ast.ImportFrom)} == {"collections.abc", "typing"}
    assert len(text.splitlines()) <= 165


def test_an_independent_reader_reproduces_every_file(golden: Path) -> None:
    repository = decoder.Repository(golden)
    repository.check()
    wanted = expected(golden)
    assert repository.refs.keys() == wanted.keys()
    assert {ref for ref, (kind, _) in repository.refs.items() if kind == "tag"} == {"v1"}
    for ref, (_, commit) in repository.refs.items():
        assert digests(repository.files(commit)) == wanted[ref], ref
    assert [entry["reason"] for name, _, entry in repository.reflog if name == "removed"] == ["branch: at base", "rm"]


def test_it_has_something_of_everything(golden: Path) -> None:
    repository = decoder.Repository(golden)
    empty = [name for name, records in repository.raw.items() if not records]
    assert not empty
    dtypes = {tensor["dtype"] for tensor in repository.objects["tensors"].values()}
    assert dtypes == {"F32", "F16", "BF16", "F64", "F4", "I64", "U8"}
    assert {len(value) for value in repository.raw["blocks"].values()} >= {3, 4096}


def test_today_s_code_reads_it(golden: Path, tmp_path: Path) -> None:
    with Repository.open(golden) as repository:
        assert repository.info.format_version == int(golden.name[1:])
        assert repository.fsck(read_data=True).problems == ()
        for ref, files in expected(golden).items():
            out = tmp_path / "out" / ref
            repository.checkout(ref, out)
            found = [(str(item.relative_to(out)), item.read_bytes()) for item in out.rglob("*") if item.is_file()]
            assert digests(found) == files


def test_every_object_is_encoded_today_as_it_was_then(golden: Path) -> None:
    raw = decoder.Repository(golden).raw
    for database, kind in KINDS.items():
        for key, value in raw[database].items():
            item = kind.decode(value)
            validate(item)
            assert item.encode() == value
            assert object_id(item.encode()) == key.hex()


def test_work_goes_on_in_it(golden: Path, tmp_path: Path) -> None:
    with Repository.open(golden) as repository:
        before = repository.resolve("merged")
        repository.branch("more", "base")
        repository.checkout("base", tmp_path / "base")
        assert not repository.import_checkpoint(tmp_path / "base", "more").new_commit
        repository.import_checkpoint(tmp_path / "base", "other")
        repository.gc(reflog_days=0, compact=True)
        assert repository.resolve("merged") == before
        assert repository.fsck(read_data=True).ok
    decoder.Repository(golden).check()


def test_the_decoder_finds_damage(golden: Path) -> None:
    for database in (b"blocks", b"stats", b"refs", b"tensors"):
        flip(golden, database)
        with pytest.raises((ValueError, KeyError)):
            decoder.Repository(golden).check()
        flip(golden, database)
        decoder.Repository(golden).check()


def flip(golden: Path, database: bytes) -> None:
    """Change the last bit of the first record."""
    with lmdb.open(str(golden / "store-1"), max_dbs=20) as environment:
        handle = environment.open_db(database)
        with environment.begin(write=True, db=handle) as transaction:
            key, value = next(iter(transaction.cursor()))
            transaction.put(key, value[:-1] + bytes([value[-1] ^ 1]))


@pytest.mark.parametrize("version", [FORMAT_VERSION + 1, 10**9])
def test_a_newer_format_is_refused(golden: Path, version: int) -> None:
    config = json.loads((golden / "config.json").read_text())
    (golden / "config.json").write_text(json.dumps({**config, "format_version": version}))
    with pytest.raises(UnsupportedFormatError, match="newer than this MPFS understands"):
        Store.open(golden)
    with pytest.raises(ValueError, match="format version"):
        decoder.Repository(golden)
