"""MPFS: a storage layer for model weights, with git's habits.

Checkpoints are imported into a repository as content-addressed blocks, merged under a budget of bytes to read, and
published as commits, which can be compared and checked out.

>>> import mpfs
>>> repo = mpfs.open("models.mpfs", create=True)  # doctest: +SKIP
"""

from importlib.metadata import PackageNotFoundError, version

from mpfs.errors import MPFSError
from mpfs.objects import Budget
from mpfs.repository import Repository
from mpfs.repository import open_repository as open  # noqa: A004  # mpfs.open, like gzip.open

try:
    __version__ = version("mpfs")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "unknown"

__all__ = ["Budget", "MPFSError", "Repository", "__version__", "open"]
