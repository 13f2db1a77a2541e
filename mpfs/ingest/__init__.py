"""Import: a checkpoint on disk becomes blocks with statistics, then a snapshot."""

from mpfs.ingest.importer import Ingested, ingest
from mpfs.ingest.pipeline import TensorJob, store_tensors
from mpfs.ingest.source import ByteSource, FileBytes, MemoryBytes

__all__ = ["ByteSource", "FileBytes", "Ingested", "MemoryBytes", "TensorJob", "ingest", "store_tensors"]
