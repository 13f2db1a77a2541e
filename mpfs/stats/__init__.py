"""Statistics of blocks: pure array functions, no I/O.

`block_stats` turns a block's bytes into a record of fixed size; `delta_gram` and `delta_summary` turn records into the
sizes and angles of deltas, without the blocks. The record's layout and exact arithmetic are in `mpfs.stats.record`, the
sketch's signs in `mpfs.stats.hashing`. numba is imported on first use, and everything works without it.
"""

from mpfs.stats.backend import kernels_available, warm_up
from mpfs.stats.block import block_stats
from mpfs.stats.decode import as_bits, decode
from mpfs.stats.estimate import DeltaSummary, combine, delta_gram, delta_summary
from mpfs.stats.lanesum import LaneSum
from mpfs.stats.record import COUNTS_ONLY, RECORD, SATURATED, SKETCH_WIDTH, Records

__all__ = [
    "COUNTS_ONLY",
    "RECORD",
    "SATURATED",
    "SKETCH_WIDTH",
    "DeltaSummary",
    "LaneSum",
    "Records",
    "as_bits",
    "block_stats",
    "combine",
    "decode",
    "delta_gram",
    "delta_summary",
    "kernels_available",
    "warm_up",
]
