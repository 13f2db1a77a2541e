"""Which implementation to use: the numba kernels where numba works, the numpy reference elsewhere."""

from __future__ import annotations

import sys
import threading
import warnings

from mpfs.stats import reference
from mpfs.stats.accumulators import Backend
from mpfs.stats.decode import FORMATS

_lock = threading.Lock()
_chosen: Backend | None = None


def backend() -> Backend:
    """The implementation in use. The first call of all compiles, which takes seconds (see `mpfs.stats.native`)."""
    global _chosen
    if _chosen is None:
        with _lock:
            if _chosen is None:
                _chosen = _choose()
    return _chosen


def warm_up() -> None:
    """Compile the kernels now, so that the first block does not have to wait (seconds, once per installation: they are
    kept on disk where they can be). Does nothing without numba."""
    if kernels_available():
        from mpfs.stats import fast

        for dtype in FORMATS:
            fast.warm_up(dtype)


def kernels_available() -> bool:
    """Whether the numba kernels are used rather than the numpy reference. Compiles them if that is still to do."""
    return backend() is not reference


def _choose() -> Backend:
    if sys.byteorder != "little":
        return reference
    try:
        from mpfs.stats import fast

        fast.warm_up("BF16")
    except ImportError:
        return reference
    except Exception as error:  # a numba that does not fit numpy or the machine must not stop an import
        warnings.warn(
            f"numba cannot compile the statistics kernels, numpy is used: {error}", RuntimeWarning, stacklevel=4
        )
        return reference
    return fast
