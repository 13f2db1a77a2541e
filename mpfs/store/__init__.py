"""The store: blocks, objects and refs in one LMDB environment, with transactions, locks, gc and fsck."""

from typing import TYPE_CHECKING

from mpfs.deferred import names

if TYPE_CHECKING:
    from mpfs.store.blocks import BlockInfo, BlockReader
    from mpfs.store.fsck import FsckReport, Problem, check
    from mpfs.store.gc import GcPlan, GcResult, execute_gc, plan_gc
    from mpfs.store.objects import ObjectReader
    from mpfs.store.refs import Ref, ReflogEntry, RefReader, check_ref_name
    from mpfs.store.repair import HealReport, RepairReport, heal
    from mpfs.store.reuse import ReuseTable, reuse_key
    from mpfs.store.statistics import stats_key, stats_keys
    from mpfs.store.store import DEFAULT_BLOCK_SIZE, Store, StoreInfo
    from mpfs.store.writer import RefMove, StagedBlock, WriteFigures, Writer
else:
    __getattr__, __dir__ = names(
        __name__,
        {
            "mpfs.store.blocks": ("BlockInfo", "BlockReader"),
            "mpfs.store.fsck": ("FsckReport", "Problem", "check"),
            "mpfs.store.gc": ("GcPlan", "GcResult", "execute_gc", "plan_gc"),
            "mpfs.store.objects": ("ObjectReader",),
            "mpfs.store.refs": ("Ref", "ReflogEntry", "RefReader", "check_ref_name"),
            "mpfs.store.repair": ("HealReport", "RepairReport", "heal"),
            "mpfs.store.reuse": ("ReuseTable", "reuse_key"),
            "mpfs.store.statistics": ("stats_key", "stats_keys"),
            "mpfs.store.store": ("DEFAULT_BLOCK_SIZE", "Store", "StoreInfo"),
            "mpfs.store.writer": ("RefMove", "StagedBlock", "WriteFigures", "Writer"),
        },
    )

__all__ = [
    "DEFAULT_BLOCK_SIZE",
    "BlockInfo",
    "BlockReader",
    "FsckReport",
    "GcPlan",
    "GcResult",
    "HealReport",
    "ObjectReader",
    "Problem",
    "Ref",
    "RefMove",
    "RefReader",
    "ReflogEntry",
    "RepairReport",
    "ReuseTable",
    "StagedBlock",
    "Store",
    "StoreInfo",
    "WriteFigures",
    "Writer",
    "check",
    "check_ref_name",
    "execute_gc",
    "heal",
    "plan_gc",
    "reuse_key",
    "stats_key",
    "stats_keys",
]
