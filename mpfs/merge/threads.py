"""One thread for each of torch's operations, while a merge spreads its columns over threads of its own."""

from __future__ import annotations

import threading

from mpfs.merge.deferred import torch


class OneThreadEach:
    """Turns torch's own threads off on the threads that ask for it, and on again. Imports torch when first asked."""

    def __init__(self) -> None:
        self._here = threading.local()
        self._lock = threading.Lock()
        self._before: int | None = None

    def on_this_thread(self) -> None:
        """Call before torch computes on a thread."""
        if not getattr(self._here, "done", False):
            with self._lock:
                if self._before is None:
                    self._before = torch.get_num_threads()
            torch.set_num_threads(1)
            self._here.done = True

    def restore(self) -> None:
        """Give threads that begin later, and the one that calls, as many as there were."""
        if self._before is not None:
            torch.set_num_threads(self._before)
