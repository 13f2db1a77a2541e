"""Which version of MPFS this is: a module of its own, since looking it up takes longer than importing the rest."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("mpfs")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "unknown"
