"""What is loaded when: the names that packages offer before their modules are imported, and modules that must wait.

What a command line takes to start is most of what a short one takes at all. Times are not tested; what is imported is.
"""

from __future__ import annotations

import ast
import pickle
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import mpfs
from mpfs.deferred import Deferred, names

ROOT = Path(__file__).resolve().parents[1]

PACKAGES = [
    ".".join(path.parent.relative_to(ROOT).parts)
    for path in sorted((ROOT / "mpfs").rglob("__init__.py"))
    if "mpfs.deferred" in path.read_text("utf-8")
]
"""Packages whose names wait for those who want them."""


def tree(package: str) -> ast.Module:
    """The syntax tree of a package's `__init__.py`."""
    return ast.parse((ROOT / Path(*package.split(".")) / "__init__.py").read_text("utf-8"))


def checked(package: str) -> dict[str, tuple[str, str]]:
    """What type checkers and editors are told: module and name of each name that a package offers."""
    (block,) = (
        node
        for node in tree(package).body
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    )
    found = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        found.update({alias.asname or alias.name: (str(node.module), alias.name) for alias in node.names})
    return found


def fresh(code: str, *arguments: str, cwd: Path | None = None) -> str:
    """What a new interpreter prints that runs some code."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_packages_are_found() -> None:
    assert {"mpfs", "mpfs.store", "mpfs.history"} <= set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_gives_what_type_checkers_are_told(package: str) -> None:
    told = checked(package)
    module = import_module(package)
    assert set(module.__all__) == set(told)
    for name, (where, original) in told.items():
        assert getattr(module, name) is getattr(import_module(where), original), name


@pytest.mark.parametrize("package", PACKAGES)
def test_no_name_is_that_of_a_submodule(package: str) -> None:
    folder = ROOT / Path(*package.split("."))
    modules = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    assert modules & set(checked(package)) == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_lists_its_names_before_they_are_loaded(package: str) -> None:
    code = f"import sys, {package} as package\nassert set(package.__all__) <= set(dir(package))\nprint(*sys.modules)"
    loaded = set(fresh(code).split())
    assert {name for name in loaded if name.startswith(f"{package}.")} <= {"mpfs.deferred"}


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'mpfs' has no attribute 'Repositry'"):
        getattr(mpfs, "Repositry")  # noqa: B009  # mypy knows, too, that it is not there
    with pytest.raises(ImportError, match=r"cannot import name 'Stroe' from 'mpfs\.store'"):
        exec("from mpfs.store import Stroe")


def test_names_are_looked_up_once_and_may_be_renamed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("offering")
    monkeypatch.setitem(sys.modules, "offering", module)
    find, listed = names("offering", {"json": ("loads as parse", "dumps")})
    assert {"parse", "dumps"} <= set(listed())
    assert "loads" not in listed()
    assert find("parse") is import_module("json").loads
    assert "parse" in vars(module)
    assert "dumps" not in vars(module)


def test_a_deferred_module() -> None:
    code = (
        "import sys\nfrom mpfs.deferred import Deferred\nmodule = Deferred('colorsys')\n"
        "assert 'colorsys' not in sys.modules\nprint(module.rgb_to_hsv(1, 1, 1))"
    )
    assert fresh(code) == "(0.0, 0.0, 1)\n"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        Deferred("colorsys").nothing  # noqa: B018


def test_what_is_pickled_is_found_again_by_who_has_loaded_nothing() -> None:
    data = pickle.dumps(mpfs.Budget("percent", 10.0))
    code = f"import pickle\nvalue = pickle.loads({data!r})\nimport mpfs\nassert value == mpfs.Budget('percent', 10.0)"
    assert fresh(code) == ""


HISTORY = {
    "numpy",
    "torch",
    "numba",
    "pydantic",
    "yaml",
    "fsspec",
    "rich",
    "mpfs.merge.compile",
    "mpfs.ingest.importer",
}
HISTORY |= {"mpfs.store.fsck", "mpfs.store.gc", "mpfs.store.repair", "mpfs.history.diff", "mpfs.vfs.reader"}
"""What nobody waits for who looks at commits and refs."""


def test_importing_mpfs_loads_no_part_of_it() -> None:
    loaded = set(fresh("import sys, mpfs\nprint(*sys.modules)").split())
    assert {name for name in loaded if name.startswith("mpfs")} == {"mpfs", "mpfs.deferred"}


def test_opening_a_repository_loads_the_store_and_no_more(tmp_path: Path) -> None:
    code = (
        "import sys, mpfs\nwith mpfs.open(sys.argv[1], create=True) as repository:\n"
        "    assert repository.log() == repository.refs() == []\nprint(*sys.modules)"
    )
    loaded = set(fresh(code, str(tmp_path / "r")).split())
    assert "lmdb" in loaded
    assert HISTORY & loaded == set()
