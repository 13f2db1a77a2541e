"""Fixtures of the tests beside this file, which name it in `pytest_plugins`.

Not a conftest.py, of which mypy allows only one without packages.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from merge_cases import Lab


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """An empty repository with small blocks."""
    lab = Lab(tmp_path)
    yield lab
    lab.close()
