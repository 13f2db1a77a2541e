"""Models on the Hugging Face hub: `org/name`, `org/name@revision`, `hf://org/name@revision/directory`.

The revision is resolved to a commit hash first, and that is what is read and what stays as the import's source. Address and
token are what huggingface_hub takes them from: its environment variables, or `endpoint` and `token` in the storage options.

Whoever mistypes a path that looks like `org/name` ends up here, so the question whether there is such a model is given up
after seconds. Later requests are repeated by huggingface_hub, as long as it likes.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mpfs.errors import BadInputError, NotFoundError
from mpfs.ingest.remote import RemoteTree

_SCHEME = "hf://"
_PATIENCE = 5.0
"""Seconds, in which the hub has to say whether it has a model; huggingface_hub's HF_HUB_ETAG_TIMEOUT can say otherwise."""

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
        from huggingface_hub import HfApi, HfFileSystem, constants
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError:
        why = "" if source.startswith(_SCHEME) else "there is no such path; "
        raise NotFoundError(f"{source}: {why}to import from the hub install mpfs[hub]", file=source) from None
    known = {name: value for name, value in (options or {}).items() if name in ("endpoint", "token")}
    asked = constants.HF_HUB_ETAG_TIMEOUT
    patience = _PATIENCE if asked == constants.DEFAULT_ETAG_TIMEOUT else float(asked)
    repo, revision = match["repo"], match["revision"]
    try:
        commit = _within(
            patience, lambda: HfApi(**known).model_info(repo, revision=revision, timeout=patience).sha, "the hub"
        )
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


def _within(seconds: float, call: Callable[[], str | None], what: str) -> str | None:
    """What a call returns or raises; TimeoutError if that takes longer.

    A timeout of the request is not enough: it is for each of a host's addresses, and name servers have their own.
    """
    outcome: list[str | None] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="mpfs-hub", daemon=True)
    thread.start()
    thread.join(seconds)
    if failure:
        raise failure[0]
    if not outcome:
        raise TimeoutError(f"no answer from {what} in {seconds:g} s")
    return outcome[0]


def _unreachable(source: str, error: Exception) -> BadInputError:
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__
    return BadInputError(f"{source}: there is no such path, and the hub cannot be reached ({text})", file=source)
