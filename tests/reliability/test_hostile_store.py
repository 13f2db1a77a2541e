"""Other people's repositories: objects forged under their right hashes, odd refs, a config that lies.

Whoever can write to a repository can store anything. Whatever it is: typed errors, nothing outside is touched.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from seeds import exploration_seed

from mpfs.errors import MPFSError, NotARepositoryError, RefConflictError, UsageError
from mpfs.objects import object_id
from mpfs.objects.encoding import encode
from mpfs.repository import Repository
from mpfs.store.refs import set_ref
from mpfs.store.seal import seal

GOLDEN = Path(__file__).parent.parent / "format" / "golden" / "v1"

ODD: list[Any] = [
    None, -1, 0, 1, 2**31, 2**63, 10**30, 1.5, 1e308, True, "", "x", "../../escape", "/etc/passwd", "a\\b", "\0", "é" * 300,
    [], {}, [[]], [None], {"a": 1}, "0" * 64, "F" * 64, ["0" * 64], [["w", "0" * 64]], [2**62] * 3, "F4", "F999", "C:x",
    [[1, 0]], [[0, 2**40]], [[5, 5]], "NUL", ".", "..",
]  # fmt: skip


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    """A copy of the golden repository."""
    with Repository.open(shutil.copytree(GOLDEN, tmp_path / "repo")) as opened:
        yield opened


def everything(repository: Repository, ref: str, out: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """What a user could do with a ref that somebody else has made."""
    yield "show", lambda: repository.show(ref)
    yield "log", lambda: repository.log(ref, inputs=True)
    yield "ls", lambda: repository.ls(ref)
    yield "tensors", lambda: repository.tensors(ref)
    yield "load", lambda: repository.load(ref)
    yield "checkout", lambda: repository.checkout(ref, out)
    yield "checkout in shards", lambda: repository.checkout(ref, out, shard_size=20_000, force=True)
    yield "diff", lambda: repository.diff("base", ref)
    yield "diff exactly", lambda: repository.diff(ref, "expert/one", exact=True)
    yield "explain", lambda: repository.explain(ref)
    yield "run", lambda: repository.run_of(ref)
    yield "stats", lambda: repository.stats(ref)
    yield "merge", lambda: repository.merge(_recipe(ref), "merged-with-it", threads=1)
    yield "merge again", lambda: repository.merge(repository.find_plan(_plan_of(repository, ref)).plan, "again")
    yield "fsck", lambda: repository.fsck(read_data=True)
    yield "gc", lambda: repository.gc(dry_run=True)
    yield "repair", lambda: repository.repair()


def _recipe(ref: str) -> dict[str, Any]:
    models = [{"model": ref, "parameters": {"weight": 0.5}}]
    return {"merge_method": "task_arithmetic", "base_model": "base", "models": models, "dtype": "float32"}


def _plan_of(repository: Repository, ref: str) -> str:
    return repository.show(ref).commit.plan or "none"


def forge(repository: Repository, database: str, value: dict[str, Any]) -> str:
    """Store an object under its hash; the id."""
    data = encode(value)
    identity = object_id(data)
    with repository._store.environment.write() as txn:
        txn.put(database, bytes.fromhex(identity), data)
    return identity


def stored(repository: Repository, database: str, identity: str) -> dict[str, Any]:
    """An object as JSON."""
    with repository._store.environment.read() as txn:
        found: dict[str, Any] = json.loads(bytes(txn.get(database, bytes.fromhex(identity)) or b""))
        return found


def spoil(source: random.Random, value: Any) -> None:
    """Change something deep inside a JSON value."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            return
        key = source.choice(keys)
        if isinstance(value[key], dict | list) and value[key] and source.random() < 0.75:
            value = value[key]
            continue
        if isinstance(value, dict) and source.random() < 0.15:
            del value[key]
        else:
            value[key] = source.choice(ODD)
        return


def forged_ref(repository: Repository, source: random.Random, what: str) -> str:
    """A ref to a commit that is the golden one but for something that was spoiled in it; its name."""
    commit = stored(repository, "commits", repository.resolve("merged"))
    snapshot = stored(repository, "snapshots", commit["snapshot"])
    if what == "commit":
        spoil(source, commit)
    elif what == "snapshot":
        spoil(source, snapshot)
    elif what == "plan":
        plan = stored(repository, "plans", commit["plan"])
        spoil(source, plan)
        commit["plan"] = forge(repository, "plans", plan)
    else:
        (file,) = (item for item in snapshot["files"] if item["path"].endswith(".safetensors"))
        pair = source.choice(file["tensors"])
        tensor = stored(repository, "tensors", pair[1])
        spoil(source, tensor)
        pair[1] = forge(repository, "tensors", tensor)
    if what in ("snapshot", "tensor"):
        commit["snapshot"] = forge(repository, "snapshots", snapshot)
    identity = forge(repository, "commits", commit)
    key = b"forged"
    with repository._store.environment.write() as txn:
        txn.put("refs", key, seal(key, b"b" + bytes.fromhex(identity)))
    return "forged"


def attack(folder: Path, what: str, seed: int) -> None:
    """Forge, and do everything."""
    path = folder / f"{what}-{seed}"
    source = random.Random(f"{what} {seed}")
    with Repository.open(shutil.copytree(GOLDEN, path / "repo")) as repository:
        ref = forged_ref(repository, source, what)
        for name, act in everything(repository, ref, path / "out"):
            try:
                act()
            except MPFSError:
                continue
            except Exception as error:
                raise AssertionError(f"{name} of a forged {what}, seed {seed}: {error!r}") from error
        assert {item.name for item in path.iterdir()} <= {"repo", "out"}
    assert not (folder / "escape").exists()
    shutil.rmtree(path)


@pytest.mark.parametrize("what", ["commit", "snapshot", "tensor", "plan"])
def test_forged_objects(tmp_path: Path, what: str) -> None:
    for seed in range(12):
        attack(tmp_path, what, seed)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("what", ["commit", "snapshot", "tensor", "plan"])
def test_many_forged_objects(tmp_path: Path, what: str) -> None:
    first = exploration_seed()
    for seed in range(first, first + 150):
        attack(tmp_path, what, seed)


@pytest.mark.parametrize(
    "name",
    ["", "/", "a/", "/a", "a//b", "..", "a/../b", "a/..", ".a", "-a", "a b", "a\0b", "a\nb", "é", "a:b", "a~1", "a^", "@{0}",
     "a.", "a/.b", "x" * 201, "0" * 64, "a\\b", "\ud800", "*", "$(id)", "a/-b"],
)  # fmt: skip
def test_refs_of_odd_names(repository: Repository, name: str) -> None:
    with pytest.raises(UsageError):
        repository.branch(name, "base")
    for act in (repository.resolve, repository.remove_ref, repository.log):
        with pytest.raises(MPFSError):
            act(name)


def test_refs_that_are_directories_of_others(repository: Repository) -> None:
    for name in ("base/inner", "expert"):
        with pytest.raises(RefConflictError):
            repository.branch(name, "base")
    with pytest.raises(MPFSError), repository._store.environment.write() as txn:
        set_ref(txn, "new", "x", expected=None, kind="branch", time=0, author="", reason="")


@pytest.mark.parametrize(
    "change",
    [{"store": "../elsewhere"}, {"store": "/tmp"}, {"store": ""}, {"store": "store-0"}, {"store": "store-01"}, {"store": None},
     {"store": ["store"]}, {"map_size": -1}, {"map_size": 0}, {"map_size": 1 << 62}, {"map_size": "1"}, {"map_size": 1e9},
     {"map_size": True}, {"format_version": 0}, {"format_version": -1}, {"format_version": "1"}, {"format_version": None},
     {"format_version": 1.0}, {"store": "store-2"}],
)  # fmt: skip
def test_a_config_that_lies(tmp_path: Path, change: dict[str, Any]) -> None:
    path = Path(shutil.copytree(GOLDEN, tmp_path / "repo"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(NotARepositoryError):
        Repository.open(path)


@pytest.mark.parametrize("text", ["[" * 100_000, "{" * 5, '{"format_version": ' + "9" * 5000 + "}", "\ufeff{}", "nul"])
def test_a_config_that_is_none(tmp_path: Path, text: str) -> None:
    path = Path(shutil.copytree(GOLDEN, tmp_path / "repo"))
    (path / "config.json").write_text(text)
    with pytest.raises(NotARepositoryError):
        Repository.open(path)


def test_pages_overwritten_at_random(tmp_path: Path) -> None:
    """Whole runs of bytes of data.mdb, not only bits: typed errors, or a report."""
    source = random.Random(3)
    original = (GOLDEN / "store-1" / "data.mdb").read_bytes()
    path = Path(shutil.copytree(GOLDEN, tmp_path / "repo"))
    reported = 0
    for _ in range(60):
        data = bytearray(original)
        at = source.randrange(len(data) - 300)
        if source.random() < 0.5:
            at = at // 4096 * 4096 + source.randrange(24)
        size = source.randrange(1, 200)
        data[at : at + size] = source.choice([bytes(size), b"\xff" * size, source.randbytes(size)])
        if source.random() < 0.1:
            data = data[: source.randrange(len(data))]
        (path / "store-1" / "data.mdb").write_bytes(data)
        try:
            with Repository.open(path) as repository:
                reported += not repository.fsck(read_data=True).ok
        except MPFSError:
            reported += 1
    assert reported > 20
