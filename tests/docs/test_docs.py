"""The documentation is true: its Python runs, its links lead somewhere, its tables agree with the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mpfs import errors
from mpfs.objects import dtypes
from mpfs.stats import RECORD
from mpfs.store.environment import DATABASES

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
WITH_PYTHON = [ROOT / "README.md", ROOT / "docs" / "python-api.md"]
RECIPE = """\
merge_method: ties
base_model: base
models:
  - model: expert
    parameters: {weight: 1.0, density: 0.5}
"""


def blocks(page: Path, language: str) -> list[str]:
    """The fenced code blocks of a language on a page."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.name)
def test_python_examples_run_in_order(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    base = {name: torch.randn(8, 64, generator=generator) for name in ("a", "b")}
    for parent in ("models", "path/to"):
        for name, shift in (("base", 0.0), ("expert", 0.01)):
            directory = tmp_path / parent / name
            directory.mkdir(parents=True)
            save_file({key: value + shift for key, value in base.items()}, directory / "model.safetensors")
    (tmp_path / "ties.yml").write_text(RECIPE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    examples = blocks(page, "python")
    assert examples
    names: dict[str, object] = {}
    for example in examples:
        exec(compile(example, str(page), "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    missing = [
        target
        for target in targets
        if "://" not in target and not target.startswith("NNNN") and not (page.parent / target).exists()
    ]
    assert missing == []


def test_the_format_page_names_every_database() -> None:
    text = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")
    assert [name for name in DATABASES if f"`{name}`" not in text] == []


def test_the_format_page_has_the_dtype_codes_and_the_record() -> None:
    text = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")
    listed = re.search(r"from 0:\s+(.*?)\.\s", text, re.DOTALL)
    assert listed is not None
    assert re.split(r",\s+", listed[1]) == list(dtypes.BITS)
    fields = RECORD.fields
    assert fields is not None
    for name, (_, offset, *_) in fields.items():
        assert re.search(rf"^\| {offset} \| \d+ \| `{name}` \|", text, re.MULTILINE), name
    assert f"{RECORD.itemsize}-byte record" in text


def test_the_error_table_agrees_with_the_classes() -> None:
    text = (ROOT / "docs" / "python-api.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (`\w+`(?:, `\w+`)*) \| (\d+) \|", text, re.MULTILINE)
    assert rows
    for names, kinds, code in rows:
        for name, kind in zip(re.findall(r"\w+", names), re.findall(r"\w+", kinds), strict=True):
            cls = getattr(errors, name)
            assert (cls.kind, cls.exit_code) == (kind, int(code))
