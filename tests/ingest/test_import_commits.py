"""What an import commits and reports: parents, base, message, deduplication, and refs that move meanwhile."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ingest_cases import assert_clean, new_repository, refused
from safetensors.torch import save

from mpfs.errors import BadInputError, NotFoundError, RefConflictError, UsageError
from mpfs.objects import Commit, Input
from mpfs.repository import Repository
from mpfs.testing.checkpoints import write


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    """A repository with small blocks."""
    with new_repository(tmp_path / "repo") as made:
        yield made


def model(root: Path, name: str, value: float = 0.0, extra: float | None = None) -> Path:
    """A checkpoint of a few blocks, most of which depend on `value`."""
    layer = torch.arange(5000.0) + value
    state = {"layer.0": layer, "layer.1": layer.clone(), "flag": torch.tensor([value])}
    if extra is not None:
        state["extra"] = torch.full((2000,), extra)
    return write(root / name, {"model.safetensors": save(state, {"format": "pt"}), "config.json": b'{"a": 1}'})


def commit_of(repository: Repository, revision: str) -> Commit:
    return repository.show(revision).commit


def test_the_same_twice_writes_nothing_and_says_so(repository: Repository, tmp_path: Path) -> None:
    source = model(tmp_path, "m")
    first = repository.import_checkpoint(source, "main")
    log, size = repository.reflog("main"), repository.stats().blocks
    again = repository.import_checkpoint(source, "main")
    assert first.new_commit
    assert not again.new_commit
    assert (again.commit, again.snapshot, again.tensors, again.bytes) == (
        first.commit,
        first.snapshot,
        first.tensors,
        first.bytes,
    )
    assert (again.new_blocks, again.bytes_written) == (0, 0)
    assert again.deduplicated_blocks == first.new_blocks + first.deduplicated_blocks
    assert (repository.reflog("main"), repository.stats().blocks) == (log, size)
    elsewhere = repository.import_checkpoint(source, "other")
    assert (elsewhere.new_commit, elsewhere.new_blocks, elsewhere.snapshot) == (True, 0, first.snapshot)


def test_the_figures_add_up(repository: Repository, tmp_path: Path) -> None:
    source = model(tmp_path, "m")
    calls: list[tuple[int, int]] = []
    report = repository.import_checkpoint(source, "main", progress=lambda done, total: calls.append((done, total)))
    assert report.bytes == sum(path.stat().st_size for path in source.iterdir())
    assert report.tensors == 3
    # 2 x 20,000 bytes in blocks of 4,096, of which the second five are the first's (C2), a flag, header and config.
    assert (report.new_blocks, report.deduplicated_blocks) == (8, 5)
    assert report.bytes_written == report.bytes - 20_000
    assert [total for _, total in calls] == [report.bytes] * len(calls)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    assert calls[-1] == (report.bytes, report.bytes)
    storage = repository.stats("main")
    assert (storage.logical_bytes, storage.unique_bytes) == (report.bytes, report.bytes_written)
    tensors = repository.tensors("main")
    assert tensors["layer.0"] == tensors["layer.1"]


def test_statistics_differ_by_dtype_where_blocks_do_not(repository: Repository, tmp_path: Path) -> None:
    data = torch.arange(4096, dtype=torch.int32)
    write(
        tmp_path / "a",
        {"model.safetensors": save({"i": data, "f": data.view(torch.float32).clone(), "z": data[1024:2048].clone()})},
    )
    report = repository.import_checkpoint(tmp_path / "a", "main")
    assert report.deduplicated_blocks == 5
    assert_clean(repository)


def test_the_commit(repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = repository.import_checkpoint(model(tmp_path, "base"), "main")
    monkeypatch.chdir(tmp_path)
    model(tmp_path, "tuned", 1.0)
    report = repository.import_checkpoint("tuned", "expert/one", base="main", message="Tuned on texts")
    commit = commit_of(repository, "expert/one")
    assert repository.resolve("expert/one") == report.commit
    assert commit.inputs == (Input("base", "main", base.commit),)
    assert (commit.message, commit.author, commit.parents, commit.plan) == ("Tuned on texts", "tester", (), None)
    assert commit.source == str((tmp_path / "tuned").resolve())
    assert commit_of(repository, "main").message == "Import base"
    assert repository.reflog("expert/one")[-1].reason == "import: tuned"
    monkeypatch.chdir(tmp_path / "tuned")
    repository.import_checkpoint(".", "here")
    assert commit_of(repository, "here").message == "Import tuned"


def test_a_branch_gets_a_new_commit_on_top(repository: Repository, tmp_path: Path) -> None:
    first = repository.import_checkpoint(model(tmp_path, "one"), "main")
    second = repository.import_checkpoint(model(tmp_path, "two", 1.0), "main")
    back = repository.import_checkpoint(tmp_path / "one", "main")
    assert commit_of(repository, "main").parents == (second.commit,)
    assert repository.resolve("main~2") == first.commit
    assert (back.new_commit, back.new_blocks, back.snapshot) == (True, 0, first.snapshot)


def test_another_base_is_another_commit(repository: Repository, tmp_path: Path) -> None:
    source = model(tmp_path, "m", 2.0)
    repository.import_checkpoint(model(tmp_path, "base"), "base")
    plain = repository.import_checkpoint(source, "main")
    based = repository.import_checkpoint(source, "main", base="base")
    again = repository.import_checkpoint(source, "main", base="base")
    assert (plain.new_commit, based.new_commit, again.new_commit) == (True, True, False)
    assert commit_of(repository, "main").inputs[0].name == "base"


def test_what_cannot_be_a_target(repository: Repository, tmp_path: Path) -> None:
    source = model(tmp_path, "m")
    repository.import_checkpoint(source, "main")
    repository.tag("v1", "main")
    with refused(repository, RefConflictError, match="v1 is a tag"):
        repository.import_checkpoint(source, "v1")
    with refused(repository, UsageError):
        repository.import_checkpoint(source, "../up")
    with refused(repository, RefConflictError, match="there is a ref main"):
        repository.import_checkpoint(model(tmp_path, "n", 3.0), "main/sub")
    with refused(repository, NotFoundError, match="nothing"):
        repository.import_checkpoint(source, "new", base="nothing")


@pytest.mark.parametrize("what", ["moved", "made", "removed"])
def test_a_ref_that_moves_meanwhile(repository: Repository, tmp_path: Path, what: str) -> None:
    repository.import_checkpoint(model(tmp_path, "one"), "main")
    repository.import_checkpoint(model(tmp_path, "two", 1.0), "other")
    ref = "new" if what == "made" else "main"
    done: list[int] = []

    def progress(_done: int, _total: int) -> None:
        if not done:
            done.append(1)
            if what == "moved":
                repository.reset("main", "other")
            elif what == "made":
                repository.branch("new", "other")
            else:
                repository.remove_ref("main")

    source = model(tmp_path, "three", 2.0)
    with pytest.raises(RefConflictError, match="nothing was changed"):
        repository.import_checkpoint(source, ref, progress=progress)
    found = {item.name: item.commit for item in repository.refs()}
    other = found.pop("other")
    expected = (
        {"moved": {"main": other}, "made": {"main": repository.resolve("main~0"), "new": other}}
        if (what != "removed")
        else {"removed": {}}
    )
    assert found == expected[what]
    assert len(repository.log(inputs=True)) == len({*found.values(), other})
    assert_clean(repository)
    assert repository.import_checkpoint(source, ref).new_commit


def test_any_number_of_threads_gives_the_same(repository: Repository, tmp_path: Path) -> None:
    source = model(tmp_path, "m", 5.0, extra=1.0)
    snapshots = set()
    for threads in (1, 2, 7):
        with new_repository(tmp_path / f"repo{threads}") as other:
            snapshots.add(other.import_checkpoint(source, "main", threads=threads).snapshot)
    assert snapshots == {repository.import_checkpoint(source, "main").snapshot}


def test_a_source_that_cannot_be_read(repository: Repository, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        os.symlink("/proc/self/mem", tmp_path / "x.safetensors")  # reading at 0 fails, whoever asks
    else:
        (tmp_path / "x.safetensors").touch(mode=0)
    with pytest.raises(BadInputError):
        repository.import_checkpoint(tmp_path / "x.safetensors", "main")


def test_a_path_that_is_not_unicode(repository: Repository, tmp_path: Path) -> None:
    source = model(tmp_path, "m").rename(tmp_path / os.fsdecode(b"m\xff"))
    repository.import_checkpoint(source, "main")
    commit = commit_of(repository, "main")
    assert commit.message == "Import m\\udcff"
    assert (commit.source or "").endswith("/m\\udcff")
    assert repository.reflog("main")[-1].reason.endswith("/m\\udcff")
