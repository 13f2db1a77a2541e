"""The devices that a merge can compute on."""

from __future__ import annotations

from mpfs.errors import UsageError
from mpfs.merge.deferred import torch


def check_device(device: str) -> None:
    """See that torch can compute on a device here: `cpu`, `cuda` or `cuda:1`. Imports torch.

    Raises:
        UsageError: it cannot; the message says why.
    """
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise UsageError(
            f"{device!r} is no device: say cpu, cuda, or cuda:1 for the second GPU", device=device
        ) from error
    if found.type not in ("cpu", "cuda"):
        raise UsageError(f"merges run on cpu or cuda, not on {device}", device=device)
    if found.type == "cpu":
        return
    if torch.version.cuda is None and torch.version.hip is None:
        raise UsageError(
            f"{device}: torch {torch.__version__} is built without CUDA; install a build with it, or leave the device out",
            device=device,
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (found.index or 0) >= count:
        seen = "no GPU" if count == 0 else f"{count} GPU{'s' if count > 1 else ''}, the last one being cuda:{count - 1}"
        raise UsageError(f"{device}: torch finds {seen} here", device=device)
