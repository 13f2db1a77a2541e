"""Statistics of pairs of tensors: damaged, forged and stray ones are found, told and dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mpfs.repository import Repository
from mpfs.store.histogram import BINS, pack_histogram
from mpfs.store.pairs import HISTOGRAM, PairTable
from mpfs.store.seal import SEAL_SIZE, seal

NUMEL = 512 * 256
Forge = Callable[[bytes], bytes]


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    generator = torch.Generator().manual_seed(6)
    base = {"w": (torch.randn(512, 256, generator=generator) * 0.02).bfloat16(), "v": torch.ones(9)}
    tuned = {"w": (base["w"] + torch.randn(512, 256, generator=generator) * 1e-3).bfloat16(), "v": torch.zeros(9)}
    with Repository.create(tmp_path / "repository", block_size=1 << 16) as made:
        for name, weights, known in (("base", base, None), ("tuned", tuned, "base")):
            save_file(weights, tmp_path / f"{name}.safetensors")
            made.import_checkpoint(tmp_path / f"{name}.safetensors", name, base=known)
        yield made


def pair(repository: Repository) -> tuple[str, str]:
    """The ids of both w."""
    first, second = (repository.show(ref).commit.snapshot for ref in ("base", "tuned"))
    from mpfs.objects import Snapshot

    a, b = (repository._store.objects.get(Snapshot, item).tensors["w"] for item in (first, second))
    return a, b


def change(repository: Repository, suffix: bytes, forge: Forge, *, sealed: bool = True) -> str:
    """Put something else in the place of a record; the key in hex."""
    key = b"".join(sorted(bytes.fromhex(item) for item in pair(repository))) + suffix
    with repository._store.environment.write() as txn:
        value = txn.get("pairs", key)
        assert value is not None
        payload = forge(bytes(value[:-SEAL_SIZE]))
        txn.put("pairs", key, seal(key, payload) if sealed else payload + bytes(value[-SEAL_SIZE:]))
    return key.hex()


def test_a_whole_repository_has_no_problem(repository: Repository) -> None:
    table = PairTable(repository._store.environment)
    counts = table.histogram(*pair(repository), NUMEL)
    assert counts is not None
    assert counts.sum() == NUMEL
    assert repository.fsck(read_data=True).ok


BAD: list[tuple[str, bytes, Forge, bool]] = [
    ("distances cut", b"", lambda old: old[:-1], True),
    ("one distance less", b"", lambda old: old[:-8], True),
    ("negative", b"", lambda old: np.full(len(old) // 8, -1.0).tobytes(), True),
    ("not numbers", b"", lambda old: np.full(len(old) // 8, np.nan).tobytes(), True),
    ("flipped", b"", lambda old: bytes([old[0] ^ 1]) + old[1:], False),
    ("histogram cut", HISTOGRAM, lambda old: old[:-3], True),
    ("of other elements", HISTOGRAM, lambda _: pack_histogram(np.eye(1, BINS, 5, np.int64)[0]), True),
    ("no histogram", HISTOGRAM, lambda _: b"x" * 100, True),
    ("more behind", HISTOGRAM, lambda old: old + b"x", True),
    ("histogram flipped", HISTOGRAM, lambda old: bytes([old[0] ^ 1]) + old[1:], False),
]


@pytest.mark.parametrize(("suffix", "forge", "sealed"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_damage_is_found_unused_and_repaired(repository: Repository, suffix: bytes, forge: Forge, sealed: bool) -> None:
    key = change(repository, suffix, forge, sealed=sealed)
    assert [(item.kind, item.object) for item in repository.fsck().problems] == [("damaged_pairs", key)]
    if suffix == HISTOGRAM:
        assert PairTable(repository._store.environment).histogram(*pair(repository), NUMEL) is None
    report = repository.repair()
    assert report.after.ok
    assert any("pairs" in action for action in report.actions)
    again = repository.analyze(["tuned"], "base")
    assert (again.pairs, again.known) == (1, 1)
    assert repository.fsck(read_data=True).ok


@pytest.mark.parametrize(
    ("suffix", "forge"),
    [
        (b"", lambda old: (np.frombuffer(old) * 2).tobytes()),
        (HISTOGRAM, lambda _: pack_histogram(np.eye(1, BINS, 5, np.int64)[0] * NUMEL)),
    ],
    ids=["distances", "histogram"],
)
def test_well_formed_lies_are_found_when_data_is_read(repository: Repository, suffix: bytes, forge: Forge) -> None:
    key = change(repository, suffix, forge)
    assert repository.fsck().ok
    assert repository.fsck(read_data=True, statistics=False).ok
    assert [(item.kind, item.object) for item in repository.fsck(read_data=True).problems] == [("wrong_pairs", key)]
    assert repository.repair().after.ok


def test_what_names_no_pair_is_found(repository: Repository) -> None:
    a, b = sorted(map(bytes.fromhex, pair(repository)))
    stray = [b + a, a, a + b + b"x", a + bytes(32), bytes(32) + a]
    with repository._store.environment.write() as txn:
        for key in stray:
            txn.put("pairs", key, seal(key, bytes(8)))
    found = repository.fsck().problems
    assert {item.object for item in found if item.kind == "damaged_pairs"} == {key.hex() for key in stray}
    assert repository.repair().after.ok


def test_gc_drops_both_records_with_a_tensor(repository: Repository) -> None:
    repository.remove_ref("tuned")
    repository.gc(reflog_days=0)
    with repository._store.environment.read() as txn:
        assert txn.count("pairs") == 0
    assert repository.fsck().ok
