"""The file system view: a snapshot as the bytes of its files. Readers, checkout, fsspec.

`mpfs.vfs.fsspec` is imported by fsspec itself, by its entry point, and not from here.
"""

from typing import TYPE_CHECKING

from mpfs.deferred import names

if TYPE_CHECKING:
    from mpfs.vfs.checkout import (
        CheckoutResult,
        check_out,
        execute,
    )
    from mpfs.vfs.layout import (
        DEFAULT_SHARD_SIZE,
        INDEX_PATH,
        FileLayout,
        Segment,
        Synthesis,
        SynthesisedFile,
        shard,
        synthesise_files,
    )
    from mpfs.vfs.plan import CheckoutPlan, PlannedFile, Variant, plan_checkout, plan_files
    from mpfs.vfs.reader import FileReader, SnapshotReader, load_tensor
else:
    __getattr__, __dir__ = names(
        __name__,
        {
            "mpfs.vfs.checkout": ("CheckoutResult", "check_out", "execute"),
            "mpfs.vfs.layout": (
                "DEFAULT_SHARD_SIZE",
                "INDEX_PATH",
                "FileLayout",
                "Segment",
                "Synthesis",
                "SynthesisedFile",
                "shard",
                "synthesise_files",
            ),
            "mpfs.vfs.plan": ("CheckoutPlan", "PlannedFile", "Variant", "plan_checkout", "plan_files"),
            "mpfs.vfs.reader": ("FileReader", "SnapshotReader", "load_tensor"),
        },
    )

__all__ = [
    "DEFAULT_SHARD_SIZE",
    "INDEX_PATH",
    "CheckoutPlan",
    "CheckoutResult",
    "FileLayout",
    "FileReader",
    "PlannedFile",
    "Segment",
    "SnapshotReader",
    "Synthesis",
    "SynthesisedFile",
    "Variant",
    "check_out",
    "execute",
    "load_tensor",
    "plan_checkout",
    "plan_files",
    "shard",
    "synthesise_files",
]
