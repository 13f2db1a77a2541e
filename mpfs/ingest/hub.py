"""Models on the Hugging Face hub: `org/name`, `org/name@revision`, `hf://org/name@revision/directory`.

The revision is resolved to a commit hash first, and that is what is read and what stays as the import's source. Address and
token are what huggingface_hub takes them from: its environment variables, or `endpoint` and `token` in the storage options.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpfs.errors import BadInputError, NotFoundError
from mpfs.ingest.remote import RemoteTree

_SCHEME = "hf://"
_ID = re.compile(r"(?P<repo>[\w][\w.-]*/[\w][\w.-]*)(@(?P<revision>[^@/]+))?(?P<inside>(/[^@]*)?)")


def is_hub_model(source: str) -> bool:
    """Whether a source is a model on the hub: by its scheme, or as `org/name` where there is no such directory."""
    if source.startswith(_SCHEME):
        return True
    match = _ID.fullmatch(source)
    return match is not None and not match["inside"] and not Path(source.partition("/")[0]).exists()


def open_model(source: str, options: Mapping[str, Any] | None = None) -> RemoteTree:
    """A model on the hub, at the commit that its revision is now.

    Raises:
        NotFoundError: the hub has no such model or revision, or does not let us see it.
        BadInputError: it cannot be reached, or the extra is not installed.
    """
    match = _ID.fullmatch(source.removeprefix(_SCHEME))
    if match is None:
        raise BadInputError(f"{source}: not a model's id; it is org/name or org/name@revision")
    try:
        from huggingface_hub import HfApi, HfFileSystem
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError:
        why = "" if source.startswith(_SCHEME) else "there is no such path; "
        raise NotFoundError(f"{source}: {why}to import from the hub install mpfs[hub]", file=source) from None
    known = {name: value for name, value in (options or {}).items() if name in ("endpoint", "token")}
    try:
        commit = HfApi(**known).model_info(match["repo"], revision=match["revision"], timeout=30).sha
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        if status in (401, 403, 404):
            raise NotFoundError(
                f"{source}: there is no such path, and the hub shows us no such model or revision (HTTP {status}); a private or "
                "gated one needs a token: hf auth login",
                file=source,
            ) from error
        raise _unreachable(source, error) from error
    except Exception as error:
        raise _unreachable(source, error) from error
    root = f"{match['repo']}@{commit}"
    system = HfFileSystem(**known, skip_instance_cache=True)
    return RemoteTree(
        system, f"{root}{match['inside'].rstrip('/')}", f"{_SCHEME}{root}{match['inside'].rstrip('/')}", pinned=True
    )


def _unreachable(source: str, error: Exception) -> BadInputError:
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__
    return BadInputError(f"{source}: there is no such path, and the hub cannot be reached ({text})", file=source)
