"""Reading in any order from a stream that only goes forward: what is passed over waits until it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Stream(Protocol):
    """What is read from: the next bytes at each call, fewer at its end."""

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes, fewer only at the end."""

    def close(self) -> None:
        """Close it."""


class ForwardReader:
    """A stream that is opened when it is first read. Every byte of it can be asked for once. Not for several threads."""

    def __init__(self, open_stream: Callable[[], Stream]) -> None:
        self._open = open_stream
        self._stream: Stream | None = None
        self._at = 0
        self._passed: list[tuple[int, bytes]] = []

    @property
    def is_open(self) -> bool:
        """Whether the stream is open."""
        return self._stream is not None

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `offset`; fewer where the stream ends. Raises what the stream raises."""
        found = bytearray()
        kept: list[tuple[int, bytes]] = []
        for start, data in self._passed:
            first, last = max(offset, start), min(offset + size, start + len(data))
            if first >= last:
                kept.append((start, data))
                continue
            found += data[first - start : last - start]
            kept += [(a, b) for a, b in ((start, data[: first - start]), (last, data[last - start :])) if b]
        self._passed = sorted(kept)
        if self._stream is None:
            self._stream = self._open()
        begin = offset + len(found)
        if begin > self._at and len(found) < size:
            self._passed.append((self._at, self._stream.read(begin - self._at)))
            self._at = begin
        if len(found) < size:
            found += self._stream.read(size - len(found))
            self._at = offset + len(found)
        return bytes(found)

    def close(self) -> None:
        """Close the stream, and forget what was passed over."""
        if self._stream is not None:
            stream, self._stream = self._stream, None
            stream.close()
        self._passed, self._at = [], 0
