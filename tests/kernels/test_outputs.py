"""Memory for results is used again when nobody holds it, and not before."""

from __future__ import annotations

import numpy as np

from mpfs.merge.kernels.outputs import Outputs

U16 = np.dtype(np.uint16)


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_is_used_again_once_the_last_view_is_gone() -> None:
    outputs = Outputs()
    array = outputs.empty(1000, U16)
    assert (array.shape, array.dtype, array.flags.writeable) == ((1000,), U16, True)
    array[:] = 7
    where, view = address(array), array.view(np.uint8).data[10:20]
    del array
    other = outputs.empty(1000, U16)
    assert address(other) != where
    assert bytes(view) == b"\x07\x00" * 5
    del view
    assert address(outputs.empty(1000, U16)) == where


def test_other_sizes_have_memory_of_their_own() -> None:
    outputs = Outputs()
    where = address(outputs.empty(1000, U16))
    assert address(outputs.empty(500, np.dtype(np.uint32))) == where
    assert outputs.empty(1001, U16).nbytes == 2002


def test_what_is_forgotten_is_gone() -> None:
    outputs = Outputs()
    held = outputs.empty(1000, U16)
    outputs.empty(1000, U16)
    outputs.forget()
    assert outputs._free == {2000: []}
    held[:] = 1
    assert held.sum() == 1000


def test_no_more_is_kept_than_the_writer_holds() -> None:
    outputs = Outputs()
    held = [outputs.empty(8 << 20, U16) for _ in range(6)]
    del held
    assert sum(size * len(free) for size, free in outputs._free.items()) == 64 << 20
