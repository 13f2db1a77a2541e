"""Checking out to a place that fsspec can write to: object stores and the like."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Any

import fsspec  # type: ignore[import-untyped]

from mpfs.errors import MPFSError, UsageError
from mpfs.objects.progress import Progress
from mpfs.store import Store
from mpfs.vfs.checkout import CheckoutResult
from mpfs.vfs.plan import PlannedFile, chunks

_LOCAL = ("file://", "local://")


def is_url(target: str) -> bool:
    """Whether a target is for fsspec to write to, and not a directory."""
    return "://" in target and not target.startswith(_LOCAL)


def local_path(target: str) -> str:
    """The directory that a target means which is no URL, or one of a local file."""
    return next((target.removeprefix(prefix) for prefix in _LOCAL if target.startswith(prefix)), target)


def upload(
    files: Sequence[PlannedFile],
    store: Store,
    url: str,
    name: str,
    *,
    force: bool = False,
    update: bool = False,
    options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> CheckoutResult:
    """Write planned files under a URL.

    An object store cannot put many objects in place at once. They are written in fsspec's transaction, which lets
    them appear together at the end where the file system can do so (S3 can: it completes the uploads last), and
    config.json comes last in any case, so that no loader takes what is incomplete for a model. If it fails, what was
    new is removed again, as far as the place can still be reached.

    Args:
        files: from `plan_files`.
        store: holds the blocks.
        url: such as s3://bucket/prefix. Nothing must be there.
        name: what the snapshot is called, for messages.
        force: write over what is there; files that are not planned stay.
        update: the same, for an earlier checkout; there is no telling cheaply what changed, so all is written.
        options: fsspec's storage options.
        progress: told about the bytes written.

    Raises:
        UsageError: something is there, or fsspec lacks what it needs for such URLs (an extra: mpfs[s3]).
        IntegrityError: a block is missing or damaged.
        MPFSError: it cannot be written.
    """
    started = time.monotonic()
    system, root = _resolve(url, options or {})
    try:
        before = system.find(root) if system.exists(root) else []
    except Exception as error:
        raise _failed(url, error) from error
    if before and not (force or update):
        raise UsageError(f"{url}: there are files already; choose another place, or write over them with --force")
    total, done = sum(file.size for file in files), 0
    places = {file.path: f"{root.rstrip('/')}/{file.path}" for file in files}
    try:
        with system.transaction:
            for file in sorted(files, key=_last_things_last):
                system.makedirs(places[file.path].rpartition("/")[0], exist_ok=True)
                with system.open(places[file.path], "wb") as target:
                    for chunk in chunks(file, store, name):
                        target.write(chunk)
                        done += len(chunk)
                        if progress is not None:
                            progress(done, total)
    except BaseException as error:
        # Some file systems name things with a leading slash, and some without.
        known = {path.lstrip("/") for path in before}
        for place in places.values():
            if place.lstrip("/") not in known:
                with suppress(Exception):
                    system.rm_file(place)
        if isinstance(error, MPFSError) or not isinstance(error, Exception):
            raise
        raise _failed(url, error) from error
    return CheckoutResult(url, tuple(file.path for file in files), total, time.monotonic() - started)


def _resolve(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    protocol = url.partition("://")[0]
    try:
        # An instance of its own: a transaction is the instance's, not the caller's.
        system, root = fsspec.core.url_to_fs(url, skip_instance_cache=True, **options)
    except ImportError as error:
        extra = {"s3": " (pip install 'mpfs[s3]')", "s3a": " (pip install 'mpfs[s3]')"}.get(protocol, "")
        raise UsageError(f"{url}: fsspec cannot write there yet: {error}{extra}") from error
    except ValueError as error:
        raise UsageError(f"{url}: {error}") from error
    return system, str(root)


def _failed(url: str, error: Exception) -> MPFSError:
    return MPFSError(f"{url}: cannot be written: {error or type(error).__name__}", target=url)


def _last_things_last(file: PlannedFile) -> tuple[int, str]:
    """Weights first, then what makes use of them, and what a loader looks for first of all last."""
    name = PurePosixPath(file.path).name
    rank = 0 if name.endswith(".safetensors") else 1
    return (3 if name == "config.json" else 2 if name.endswith(".index.json") else rank, file.path)
