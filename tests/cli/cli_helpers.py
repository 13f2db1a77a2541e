"""Small models, and the command line run in this process or in another one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from mpfs_cli.main import run
from safetensors.torch import save_file

RECIPE = """\
merge_method: task_arithmetic
base_model: base
models:
  - model: a
    parameters: {weight: 0.5}
  - model: b
    parameters: {weight: 0.25}
"""


class Result(NamedTuple):
    """What a command line printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """stdout as the one JSON document that it must be."""
        return json.loads(self.out)


class Command:
    """Runs command lines in this process, in the current directory."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd

    def __call__(self, *arguments: str | Path, code: int | None = 0) -> Result:
        self._capfd.readouterr()
        found = run([str(argument) for argument in arguments])
        out, err = self._capfd.readouterr()
        result = Result(found, out, err)
        assert code is None or found == code, result
        return result


def process(
    *arguments: str | Path, cwd: Path, env: dict[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run the real entry point in a process of its own."""
    return subprocess.run(
        command_line(*arguments),
        cwd=cwd,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output="stdout" not in options,
        text=True,
        timeout=60,
        **options,
    )


def command_line(*arguments: str | Path) -> list[str]:
    """What the console script `mpfs` does."""
    return [sys.executable, "-c", "from mpfs_cli.main import main; main()", *map(str, arguments)]


def model(seed: int, shift: float = 0.0) -> dict[str, torch.Tensor]:
    """A small model; models differ from that with shift 0 by about `shift`, and in `frozen` not at all."""
    generator = torch.Generator().manual_seed(1)
    other = torch.Generator().manual_seed(seed)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) + shift * torch.randn(shape, generator=other)

    return {
        "layer.0.weight": tensor(64, 64),
        "layer.1.weight": tensor(128, 64).to(torch.bfloat16),
        "norm.weight": tensor(64),
        "frozen": torch.arange(2000, dtype=torch.float32),
    }


def write_model(directory: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A model as a directory in Hugging Face layout."""
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text('{"model_type": "tiny", "torch_dtype": "float32"}\n')
    (directory / "sub").mkdir()
    (directory / "sub" / "notes.txt").write_text("kept as it is\n")
    return directory


def flip_byte(repository: Path, payload: bytes) -> None:
    """Damage a block in the store: the one that begins with `payload`."""
    path = repository / "store" / "data.mdb"
    data = path.read_bytes()
    assert data.count(payload) == 1
    at = data.index(payload)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([data[at] ^ 1]))
