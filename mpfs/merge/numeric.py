"""Between stored bytes and torch tensors."""

from __future__ import annotations

from functools import cache

import numpy as np

from mpfs.merge.conversion import TYPES, converted
from mpfs.merge.deferred import torch


@cache
def torch_dtype(dtype: str) -> torch.dtype:
    """torch's name of a mergeable dtype."""
    return {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}[dtype]


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """The stored name of a mergeable dtype of torch's."""
    return next(name for name in TYPES if torch_dtype(name) == dtype)


def to_torch(data: bytes | bytearray, dtype: str, work: str) -> torch.Tensor:
    """Raw little-endian bytes of a mergeable dtype as a 1-D tensor in the work dtype (both by their stored names).

    The result may share memory with `data` and must not be written to.
    """
    if not data:
        return torch.empty(0, dtype=torch_dtype(work))
    buffer: bytearray | memoryview = data if isinstance(data, bytearray) else bytearray(data)
    if dtype != work:
        buffer = converted(np.frombuffer(buffer, TYPES[dtype]), dtype, work).data
    # A bytearray is writable, which torch wants of what it shares; bytes are copied into one.
    return torch.frombuffer(buffer, dtype=torch_dtype(work))


def to_bytes(values: torch.Tensor, dtype: str) -> bytes:
    """A 1-D tensor as raw little-endian bytes of a mergeable dtype (rounded to nearest even where it must be)."""
    if values.numel() == 0:
        return b""
    name = dtype_name(values.dtype)
    stored = np.asarray(values.cpu().contiguous().view(torch.uint8)).view(TYPES[name])
    return converted(stored, name, dtype).tobytes()
