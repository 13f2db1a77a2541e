"""Several processes in one repository: killed at any instant, and at work for long (see crowd.py for what is checked).

Longer: python tests/reliability/crowd.py kill|stress DIRECTORY AMOUNT SEED
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from seeds import exploration_seed

SCRIPT = Path(__file__).parent / "crowd.py"


def run(mode: str, folder: Path, amount: int, timeout: float) -> dict[str, Any]:
    """Run the script; its summary."""
    seed = exploration_seed()
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", str(SCRIPT), mode, str(folder), str(amount), str(seed)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    print(done.stderr)
    assert done.returncode == 0, done.stderr[-3000:]
    summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(summary)
    return summary


def test_killed_at_any_instant(tmp_path: Path) -> None:
    assert run("kill", tmp_path, 60, 250)["kills"] >= 60


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_a_thousand_instants(tmp_path: Path) -> None:
    summary = run("kill", tmp_path, 1002, 880)
    assert summary["kills"] >= 1002
    assert summary["acknowledged"] > 200


def test_a_crowd_at_work(tmp_path: Path) -> None:
    assert sum(run("stress", tmp_path, 8, 200)["operations"].values()) > 20


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_crowd_at_work_for_long(tmp_path: Path) -> None:
    assert sum(run("stress", tmp_path, 60, 380)["operations"].values()) > 200
