"""MPFS: a storage layer for model weights, with git's habits.

Checkpoints are imported into a repository as content-addressed blocks, merged under a budget of bytes to read, and
published as commits, which can be compared and checked out.

>>> import mpfs
>>> repo = mpfs.open("models.mpfs", create=True)  # doctest: +SKIP
"""

from typing import TYPE_CHECKING

from mpfs.deferred import names

if TYPE_CHECKING:
    from mpfs.errors import MPFSError
    from mpfs.objects import Budget
    from mpfs.repository import Repository
    from mpfs.repository import open_repository as open  # noqa: A004  # mpfs.open, like gzip.open
    from mpfs.version import __version__
else:
    __getattr__, __dir__ = names(
        __name__,
        {
            "mpfs.errors": ("MPFSError",),
            "mpfs.objects": ("Budget",),
            "mpfs.repository": ("Repository", "open_repository as open"),
            "mpfs.version": ("__version__",),
        },
    )

__all__ = ["Budget", "MPFSError", "Repository", "__version__", "open"]
