"""Memory for blocks is used again when nobody holds it, and not before."""

from __future__ import annotations

import numpy as np

from mpfs.store.memory import Memory

U16 = np.dtype(np.uint16)


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_is_used_again_once_the_last_view_is_gone() -> None:
    memory = Memory()
    array = memory.empty(1000, U16)
    assert (array.shape, array.dtype, array.flags.writeable) == ((1000,), U16, True)
    array[:] = 7
    where, view = address(array), array.view(np.uint8).data[10:20]
    del array
    other = memory.empty(1000, U16)
    assert address(other) != where
    assert bytes(view) == b"\x07\x00" * 5
    del view
    assert address(memory.empty(1000, U16)) == where


def test_other_sizes_have_memory_of_their_own() -> None:
    memory = Memory()
    where = address(memory.empty(1000, U16))
    assert address(memory.empty(500, np.dtype(np.uint32))) == where
    assert memory.empty(1001, U16).nbytes == 2002


def test_what_is_forgotten_is_gone() -> None:
    memory = Memory()
    held = memory.empty(1000, U16)
    memory.empty(1000, U16)
    memory.forget()
    assert memory._free == {2000: []}
    held[:] = 1
    assert held.sum() == 1000


def test_no_more_is_kept_than_the_writer_holds() -> None:
    memory = Memory()
    held = [memory.empty(8 << 20, U16) for _ in range(6)]
    del held
    assert sum(size * len(free) for size, free in memory._free.items()) == 64 << 20


def test_large_memory_begins_with_a_page() -> None:
    memory = Memory()
    assert [address(memory.empty(size, np.dtype(np.uint8))) % 4096 for size in (1 << 20, 256 << 10)] == [0, 0]
