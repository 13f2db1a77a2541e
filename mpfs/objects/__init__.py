"""Pure data: what a repository is made of, without any I/O.

Objects are frozen dataclasses with one canonical encoding (`encoding`), and are named by its SHA-256. Blocks are
plain bytes, named by their XXH3-128.
"""

from mpfs.objects.commit import Commit, Input, ManifestFile
from mpfs.objects.ids import BlockId, ObjectId, block_id, object_id
from mpfs.objects.plan import Bound, Budget, Cost, Cut, ModelRef, Plan, PlanTensor, Selection
from mpfs.objects.run import Figures, Run
from mpfs.objects.snapshot import BlobFile, File, PartsFile, SafetensorsFile, Snapshot, TensorFile
from mpfs.objects.tensor import Tensor

__all__ = [
    "BlobFile",
    "BlockId",
    "Bound",
    "Budget",
    "Commit",
    "Cost",
    "Cut",
    "Figures",
    "File",
    "Input",
    "ManifestFile",
    "ModelRef",
    "ObjectId",
    "PartsFile",
    "Plan",
    "PlanTensor",
    "Run",
    "SafetensorsFile",
    "Selection",
    "Snapshot",
    "Tensor",
    "TensorFile",
    "block_id",
    "object_id",
]
