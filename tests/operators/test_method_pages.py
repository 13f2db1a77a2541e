"""The pages on methods agree with the code, and the method that one of them shows works."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import operator_cases as cases
import pytest
import torch
from safetensors.torch import save_file

from mpfs.errors import NotFoundError, RecipeError, UsageError
from mpfs.merge.operators import Operator, Parameters, get_operator, operator_names
from mpfs.merge.operators.registry import GROUP
from mpfs.repository import Repository

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = sorted((DOCS / "methods").glob("*.md"))
SHOWN = re.search(r"^```python\n(.*?)^```", (DOCS / "writing-a-method.md").read_text("utf-8"), re.M | re.S)
RECIPE = re.search(r"^```yaml\n(.*?)^```", (DOCS / "writing-a-method.md").read_text("utf-8"), re.M | re.S)


@pytest.mark.parametrize("name", operator_names())
def test_every_method_has_a_section_with_its_parameters(name: str) -> None:
    pages = [text for page in PAGES if re.search(rf"^## .*\b{name}\b", text := page.read_text("utf-8"), re.M)]
    assert len(pages) == 1
    # A page's opening table holds for all of its methods.
    sections = re.split(r"^## ", pages[0], flags=re.M)
    own = "\n".join([sections[0], *(section for section in sections if name in section.split("\n")[0])])
    for parameter in get_operator(name).parameters:
        row = re.search(rf"^\| `{parameter.name}` \| (.*?) ?\| (.*?) \|", own, re.M)
        assert row is not None, parameter.name
        assert row[1].strip() == ("per model" if parameter.per_model else "")
        value = "required" if parameter.required else f"`{str(parameter.default).lower()}`"
        if parameter.name == "normalize" and len(sections) > 5:
            row = re.search(rf"^\| `{name}` \|[^|]*\|[^|]*\| (.*?) \|", own, re.M)
            assert row is not None
            assert row[1] == value
        else:
            assert row[2] == value, parameter.name
    assert re.search(r"^Source: ", own, re.M)


def test_every_method_is_in_the_tables() -> None:
    for page in (DOCS / "methods" / "README.md", DOCS / "mergekit-compatibility.md"):
        text = page.read_text("utf-8")
        assert [name for name in operator_names() if f"`{name}`" not in text] == []


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place for distributions; `my_package` with the page's method is there."""
    assert SHOWN is not None
    (tmp_path / "my_package.py").write_text(SHOWN[1], "utf-8")
    information = tmp_path / "my_package-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n", "utf-8")
    points = ["agreement = my_package:Agreement", "lost = my_package:Lost", "other = my_package:Agreement"]
    (information / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *points]), "utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_package", raising=False)
    return tmp_path


def test_the_method_on_the_page_works(installed: Path) -> None:
    operator = get_operator("agreement")
    assert isinstance(operator, Operator)
    assert get_operator("agreement") is operator
    assert "agreement" in operator_names()
    base, models = cases.inputs(1000, 3, torch.bfloat16)
    values = Parameters({"strength": 0.5}, [{}] * 3)
    assert operator.validate(values) == []
    assert operator.validate(Parameters({}, [{}])) == ["agreement takes 2 or more models besides the base, not 1"]
    whole = cases.merge("agreement", base, models, values)
    cut = cases.merge("agreement", base, models, values, cuts=[64, 192, 640])
    assert torch.equal(cases.bits(whole), cases.bits(cut))
    changed = whole != base
    assert 0.1 < float(changed.double().mean()) < 0.4  # a quarter agrees
    norms = [float((model.double() - base.double()).norm()) for model in models]
    assert float((whole.double() - base.double()).norm()) == pytest.approx(0.5 * sum(norms) / 3, rel=0.05)
    assert torch.equal(cases.merge("agreement", base, [base] * 3, values), base)


def test_the_recipe_on_the_page_runs(installed: Path, tmp_path: Path) -> None:
    """A method of another package, found by its entry point, with a parameter that only it has."""
    assert RECIPE is not None
    tensors = {}
    for seed, name in enumerate(("base", "e0", "e1", "e2")):
        generator = torch.Generator().manual_seed(seed)
        base = torch.full((40, 30), 0.5)
        tensors[name] = {part: base + torch.randn(base.shape, generator=generator) * seed for part in ("mlp", "attn")}
    file = tmp_path / "recipe.yml"
    with Repository.create(tmp_path / "repo", block_size=4096, map_size=1 << 28, author="tester") as repository:
        for name, model in tensors.items():
            save_file(model, tmp_path / f"{name}.safetensors")
            repository.import_checkpoint(tmp_path / f"{name}.safetensors", name, threads=1)
        file.write_text(RECIPE[1], "utf-8")
        repository.merge(file, "merged", threads=1)
        merged = repository.load("merged")
        for part, strength in (("mlp", 0.5), ("attn", 1.0)):
            base, *experts = (model[part].reshape(-1) for model in tensors.values())
            wanted = cases.merge("agreement", base, experts, Parameters({"strength": strength}, [{}] * 3))
            assert torch.equal(merged[part].reshape(-1), wanted)
        file.write_text(RECIPE[1].replace("strength", "strenght"), "utf-8")
        with pytest.raises(RecipeError, match=r"strenght: agreement has no such parameter; did you mean strength\?"):
            repository.plan(file)


def test_what_cannot_be_loaded_is_told(installed: Path) -> None:
    with pytest.raises(UsageError, match=r"lost .* cannot be loaded"):
        get_operator("lost")
    with pytest.raises(UsageError, match="is not an Operator named other"):
        get_operator("other")
    with pytest.raises(NotFoundError) as caught:
        get_operator("agrement")
    assert caught.value.details["nearest"] == "agreement"
