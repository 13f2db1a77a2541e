"""The store: blocks, objects and refs in one LMDB environment, with transactions, locks, gc and fsck."""

from mpfs.store.blocks import BlockInfo, BlockReader
from mpfs.store.fsck import FsckReport, Problem, check
from mpfs.store.gc import GcPlan, GcResult, execute_gc, plan_gc
from mpfs.store.objects import ObjectReader
from mpfs.store.refs import Ref, ReflogEntry, RefReader, check_ref_name
from mpfs.store.repair import HealReport, RepairReport, heal, repair
from mpfs.store.reuse import ReuseTable, reuse_key
from mpfs.store.statistics import stats_key, stats_keys
from mpfs.store.store import DEFAULT_BLOCK_SIZE, Store, StoreInfo
from mpfs.store.writer import RefMove, StagedBlock, WriteFigures, Writer

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
    "repair",
    "reuse_key",
    "stats_key",
    "stats_keys",
]
