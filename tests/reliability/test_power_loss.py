"""Power lost at any instant: no state that the disk could be in has lost anything that was said to be done."""

from __future__ import annotations

import random
import shutil
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from crowd import variants
from power_loss import Disk, Event, record, write_state
from seeds import exploration_seed

from mpfs.errors import MPFSError, NotARepositoryError
from mpfs.repository import Repository

SCRIPT = Path(__file__).parent / "power_loss.py"


@pytest.fixture(scope="module")
def events(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Event]]:
    """A recorded run, and where it was."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not there to record with (Debian: apt-get install strace)")
    folder = tmp_path_factory.mktemp("power")
    root = folder / "root"
    root.mkdir()
    variants(folder / "sources")
    found = record([sys.executable, str(SCRIPT), str(root), str(folder / "sources")], folder / "trace", root)
    return str(root), found


def replay(events: tuple[str, list[Event]], scratch: Path, seed: int, *, share: float, states: int) -> Counter[str]:
    """Lose power after a share of the events, and look at the states that the disk may then have."""
    source = random.Random(seed)
    root, recorded = events
    disk = Disk()
    done: dict[str, str] = {}
    outcomes: Counter[str] = Counter()
    for event in recorded:
        if event.path == f"{root}/done":
            if event.kind == "write":
                name, commit = event.data.decode().split()
                done[name] = commit
            continue
        disk.apply(event)
        if source.random() < share:
            outcomes["points"] += 1
            for name, state in disk.states(source, states):
                write_state(state, root, scratch)
                outcomes[look(scratch / "repo", done, f"{name} after {event.kind} {event.path}")] += 1
    assert set(done) == {"created", "base", "expert", "gone", "merged", "new"}
    return outcomes


def look(path: Path, done: dict[str, str], where: str) -> str:
    """What is found after the loss."""
    try:
        repository = Repository.open(path)
    except NotARepositoryError:
        assert not done, f"the repository is gone: {where}"
        return "not there yet"
    with repository:
        report = repository.fsck(read_data=True)
        assert report.ok, (where, report.problems[:3])
        refs = {ref.name: ref.commit for ref in repository.refs()}
        for name, commit in done.items():
            if name == "gone" and name not in refs:
                continue  # it was to be removed, and may be as soon as that was asked for
            if commit != "-":
                log = [item.identity for item in repository.log(name)]
                later = [entry.new for entry in repository.reflog(name)]
                assert commit in log or commit in later[-2:], f"{name} has lost {commit}: {where}"
            elif name == "gone":
                assert name not in refs, where
    return "whole"


def test_the_model_itself(tmp_path: Path) -> None:
    """What is not synced can be lost, what is synced cannot."""
    disk = Disk()
    for number, event in enumerate(
        [
            Event("mkdir", "/r"), Event("create", "/r/f"), Event("write", "/r/f", data=b"one"), Event("sync", "/r/f"),
            Event("write", "/r/f", offset=3, data=b"two"), Event("sync", "/r"), Event("create", "/r/g"),
        ]
    ):  # fmt: skip
        event.start = event.number = number
        disk.apply(event)
    found = {str(sorted(state.items())) for _, state in disk.states(random.Random(1), 50)}
    assert any("onetwo" in text for text in found)
    assert any("b'one'" in text for text in found)
    assert all("/r/f" in text for text in found)
    assert {"/r/g" in text for text in found} == {True, False}


def test_no_loss_of_power_loses_anything(events: tuple[str, list[Event]], tmp_path: Path) -> None:
    outcomes = replay(events, tmp_path / "disk", 1, share=0.12, states=2)
    assert outcomes["whole"] > 40


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_loss_of_power_at_any_point_loses_anything(events: tuple[str, list[Event]], tmp_path: Path) -> None:
    seed = exploration_seed()
    outcomes = replay(events, tmp_path / "disk", seed, share=1.0, states=6)
    print(len(events[1]), "events", dict(outcomes))
    assert outcomes["whole"] > 400


@pytest.mark.parametrize("forgotten", ["sync", "directory"])
def test_the_model_notices_a_sync_that_is_forgotten(
    events: tuple[str, list[Event]], tmp_path: Path, forgotten: str
) -> None:
    root, recorded = events
    if forgotten == "sync":  # of data.mdb, be it by a call or by its descriptor
        kept = [event for event in recorded if not (event.kind == "sync" and event.path.endswith("data.mdb"))]
        kept = [replace(event, sync=False) for event in kept]
    else:
        kept = [event for event in recorded if not (event.kind == "sync" and event.path == root)]
    with pytest.raises((AssertionError, MPFSError)):
        replay((root, kept), tmp_path / "disk", 1, share=0.2, states=2)
