"""How long operations report how far they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[int, int], object]
"""Called with how much is done, and of how much (mostly bytes; the function that takes it says what)."""
