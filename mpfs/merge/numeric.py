"""Between stored bytes and torch tensors."""

from __future__ import annotations

import numpy as np
import torch

_TORCH = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}


def torch_dtype(dtype: str) -> torch.dtype:
    """torch's name of a mergeable dtype."""
    return _TORCH[dtype]


def to_torch(data: bytes | bytearray, dtype: str, work: torch.dtype) -> torch.Tensor:
    """Raw little-endian bytes of a mergeable dtype as a 1-D tensor in the work dtype.

    The result may share memory with `data` and must not be written to.
    """
    # A bytearray is writable, which torch wants of what it shares; bytes are copied into one.
    buffer = data if isinstance(data, bytearray) else bytearray(data)
    if not buffer:
        return torch.empty(0, dtype=work)
    return torch.frombuffer(buffer, dtype=_TORCH[dtype]).to(work)


def to_bytes(values: torch.Tensor, dtype: str) -> bytes:
    """A 1-D tensor as raw little-endian bytes of a mergeable dtype (rounded to nearest even where it must be)."""
    if values.numel() == 0:
        return b""
    stored = values.to(_TORCH[dtype]).contiguous().view(torch.uint8)
    return np.asarray(stored).tobytes()
