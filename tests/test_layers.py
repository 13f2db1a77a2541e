"""The layers of the code base, read off the syntax trees: who may import whom, and who may touch the environment.

CONTRIBUTING.md explains the rules. Each check is a function from source text to a list of complaints, and is
itself tested on a small bad sample, so that none of them can fall silent unnoticed.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Import package -> directory, as in pyproject.toml.
TREES = {"mpfs": ROOT / "mpfs", "mpfs_cli": ROOT / "cli"}

# From top to bottom: a module imports from its own layer and from layers below it. The name "mpfs" stands for
# mpfs/__init__.py alone, not for what is in the package.
LAYERS = (
    "mpfs.testing",
    "mpfs_cli",
    "mpfs",
    "mpfs.repository",
    "mpfs.ingest",
    "mpfs.merge",
    "mpfs.vfs",
    "mpfs.history",
    "mpfs.formats",
    "mpfs.stats",
    "mpfs.store",
    "mpfs.objects",
    "mpfs.errors",
    "mpfs.version",
    "mpfs.deferred",
)

# What mpfs/__init__.py offers comes from here.
FACADE_IMPORTS = frozenset({"mpfs.repository", "mpfs.objects", "mpfs.errors", "mpfs.version", "mpfs.deferred"})

# These two may touch the environment and the terminal; for everyone else such things are parameters.
OUTERMOST = frozenset({"mpfs.testing", "mpfs_cli"})

# (module, module or layer it imports) -> why it has to. A row that is no longer needed fails a test.
IMPORT_EXCEPTIONS: Mapping[tuple[str, str], str] = {}

# (module, what it touches) -> why it has to. A row that is no longer needed fails a test.
ENVIRONMENT_EXCEPTIONS: Mapping[tuple[str, str], str] = {
    (
        "mpfs.vfs.fsspec",
        "os.environ",
    ): "DESIGN §7: mpfs:// takes its repository from $MPFS_REPO where `repo=` is not given",
}

ENVIRONMENT = frozenset(
    {
        "os.environ",
        "os.environb",
        "os.getenv",
        "os.getenvb",
        "os.putenv",
        "os.unsetenv",
        "os.isatty",
        "os.path.expandvars",
        "os.get_terminal_size",
        "shutil.get_terminal_size",
        "sys.argv",
        "sys.stdin",
        "sys.stdout",
        "sys.stderr",
    }
)

MAX_LINES = 600

# Too slow to import for a command line that only wants to print a log.
HEAVY = ("torch", "numba")


@dataclass(frozen=True)
class Module:
    """One source file under its import name."""

    name: str
    source: str
    is_package: bool = False

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.source, self.name)

    @property
    def layer(self) -> str | None:
        return "mpfs" if self.name == "mpfs" else layer_of(self.name)


def modules() -> Iterator[Module]:
    """Every module that is shipped."""
    for package, directory in TREES.items():
        for path in sorted(directory.rglob("*.py")):
            parts = [package, *path.relative_to(directory).with_suffix("").parts]
            is_package = parts[-1] == "__init__"
            yield Module(".".join(parts[:-1] if is_package else parts), path.read_text("utf-8"), is_package)


def layer_of(dotted: str) -> str | None:
    """The layer that an imported name belongs to; None for what is not ours, "mpfs" for the facade's names."""
    ours = [layer for layer in LAYERS if dotted == layer or dotted.startswith(layer + ".")]
    return max(ours, key=len, default=None)


def imports(module: Module) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything imported, lazily, for types only, or by a constant name, too."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.name.split(".") if module.is_package else module.name.split(".")[:-1]
                anchor = package[: len(package) - (node.level - 1)]
                base = ".".join([*anchor, *([base] if base else [])])
            for alias in node.names:
                yield node.lineno, base if alias.name == "*" else f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and node.args:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            name = node.args[0]
            if called in {"import_module", "__import__"} and isinstance(name, ast.Constant):
                target = str(name.value)
                yield node.lineno, f"mpfs{target}" if target.startswith(".") else target


def import_complaints(module: Module, exceptions: Mapping[tuple[str, str], str] = IMPORT_EXCEPTIONS) -> list[str]:
    """Imports that point upward."""
    here = module.layer
    if here is None or (here == "mpfs" and module.name != "mpfs"):
        return [f"{module.name} belongs to no layer: add it to LAYERS, at its place"]
    complaints = []
    for line, target in imports(module):
        there = layer_of(target)
        if there is None or there == here or {(module.name, target), (module.name, there)} & exceptions.keys():
            continue
        where = f"{module.name}:{line} imports {target}"
        if here == "mpfs" and there not in FACADE_IMPORTS:
            complaints.append(
                f"{where}, but mpfs/__init__.py offers only what {', '.join(sorted(FACADE_IMPORTS))} have"
            )
        elif LAYERS.index(there) < LAYERS.index(here):
            complaints.append(f"{where}, but {there} is above {here}")
    return complaints


def touched(module: Module) -> Iterator[tuple[int, str]]:
    """Line and name of each use of the process's environment, arguments, streams or terminal."""
    watched = {name.split(".")[0] for name in ENVIRONMENT}
    names: dict[str, str] = {}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in watched:
                    names[alias.asname or alias.name.split(".")[0]] = (
                        alias.name if alias.asname else alias.name.split(".")[0]
                    )
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            for alias in node.names:
                if f"{node.module}.{alias.name}" in ENVIRONMENT:
                    yield node.lineno, f"{node.module}.{alias.name}"
                elif node.module.split(".")[0] in watched:
                    names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and (dotted := _dotted(node, names)) in ENVIRONMENT:
            yield node.lineno, dotted
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"print", "input"}:
            yield node.lineno, f"{node.func.id}()"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "isatty":
            yield node.lineno, "isatty()"


def _dotted(node: ast.expr, names: Mapping[str, str]) -> str:
    """`a.b.c` with its first name resolved through the imports, or "" for anything else."""
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    if isinstance(node, ast.Attribute) and (base := _dotted(node.value, names)):
        return f"{base}.{node.attr}"
    return ""


def environment_complaints(
    module: Module, exceptions: Mapping[tuple[str, str], str] = ENVIRONMENT_EXCEPTIONS
) -> list[str]:
    """Uses of the environment below the outermost layers."""
    if module.layer in OUTERMOST:
        return []
    return [
        f"{module.name}:{line} touches {name}; take it as a parameter"
        for line, name in touched(module)
        if (module.name, name) not in exceptions
    ]


def form_complaints(module: Module) -> list[str]:
    """No docstring, or too long."""
    complaints = []
    if not (ast.get_docstring(module.tree) or "").strip():
        complaints.append(f"{module.name} has no docstring")
    if (lines := len(module.source.splitlines())) > MAX_LINES:
        complaints.append(f"{module.name} has {lines} lines; split it well before {MAX_LINES} (aim at under 500)")
    return complaints


def heavy_imports(statement: str, *, path: Path | None = None) -> str:
    """What a fresh interpreter says on executing `statement`; "" if that imports nothing heavy.

    Shows the traceback of each heavy import, even of one that the code under test would catch or undo.
    """
    watch = f"""
import sys, traceback
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name in {HEAVY!r}:
            print(f"{{name}} is imported:", file=sys.stderr)
            traceback.print_stack(file=sys.stderr)
        return None
sys.meta_path.insert(0, Watch())
sys.path[:0] = {[str(path)] if path else []!r}
{statement}
"""
    done = subprocess.run([sys.executable, "-c", watch], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return done.stderr or ("" if done.returncode == 0 else f"exit code {done.returncode}")


def assert_none(complaints: Iterable[str]) -> None:
    """Fail with every complaint on a line of its own."""
    if found := list(complaints):
        pytest.fail("\n".join(["", *found]), pytrace=False)


# The code base.


def test_imports_point_downward() -> None:
    assert_none(complaint for module in modules() for complaint in import_complaints(module))


def test_only_the_outermost_layers_touch_the_environment() -> None:
    assert_none(complaint for module in modules() for complaint in environment_complaints(module))


def test_every_module_has_a_docstring_and_a_bearable_length() -> None:
    assert_none(complaint for module in modules() for complaint in form_complaints(module))


def test_no_exception_has_outlived_its_use() -> None:
    used_imports = {
        (module.name, name)
        for module in modules()
        for _, target in imports(module)
        for name in (target, layer_of(target))
    }
    used_environment = {(module.name, name) for module in modules() for _, name in touched(module)}
    assert IMPORT_EXCEPTIONS.keys() - used_imports == set()
    assert ENVIRONMENT_EXCEPTIONS.keys() - used_environment == set()
    assert all([*IMPORT_EXCEPTIONS.values(), *ENVIRONMENT_EXCEPTIONS.values()]), "each exception gives its reason"


@pytest.mark.parametrize("module", ["mpfs.repository", "mpfs_cli.main"])
def test_start_up_imports_nothing_heavy(module: str) -> None:
    assert_none(filter(None, [heavy_imports(f"import {module}")]))


def test_every_package_is_listed_in_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    listed = set(project["tool"]["setuptools"]["packages"])
    present = {module.name for module in modules() if module.is_package}
    assert_none(f"pyproject.toml does not list {name}" for name in sorted(present - listed))
    assert_none(f"pyproject.toml lists {name}, which is not there" for name in sorted(listed - present))


def test_every_directory_with_modules_is_a_package() -> None:
    directories = {path.parent for directory in TREES.values() for path in directory.rglob("*.py")}
    assert_none(f"{path} lacks __init__.py" for path in directories if not (path / "__init__.py").is_file())


# The checks.


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("mpfs.store.blocks", "from mpfs.merge import plan"),
        ("mpfs.store.blocks", "from mpfs.merge.plan import Plan"),
        ("mpfs.store.blocks", "import mpfs.merge.plan as plan"),
        ("mpfs.store.blocks", "from ..merge import plan"),
        ("mpfs.store.blocks", "from .. import merge"),
        ("mpfs.store.blocks", "def f():\n    from mpfs.stats import sketch"),
        ("mpfs.store.blocks", "if TYPE_CHECKING:\n    from mpfs.vfs.reader import Reader"),
        ("mpfs.store.blocks", "importlib.import_module('mpfs.formats.torch')"),
        ("mpfs.store.blocks", "import mpfs"),
        ("mpfs.store.blocks", "from mpfs import open"),
        ("mpfs.store.blocks", "from mpfs import *"),
        ("mpfs.objects.plan", "from mpfs.stats import sketch"),
        ("mpfs.errors", "from mpfs.objects import ids"),
        ("mpfs.merge.engine", "from mpfs.ingest import importer"),
        ("mpfs.vfs.fuse", "from mpfs.repository import Repository"),
        ("mpfs.repository", "from mpfs_cli import main"),
        ("mpfs.repository", "from mpfs.testing import faults"),
        ("mpfs_cli.main", "from mpfs.testing import faults"),
        ("mpfs", "from mpfs.store import environment"),
        ("mpfs", "importlib.import_module('.vfs', 'mpfs')"),
        ("mpfs.novelty", "import json"),
        ("mpfs.novelty.deep", "import json"),
    ],
)
def test_import_check_complains(name: str, source: str) -> None:
    module = Module(name, source, is_package=name == "mpfs")
    assert len(import_complaints(module, {})) == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("mpfs.store.blocks", "import os, lmdb\nfrom mpfs import errors, objects\nfrom mpfs.store import env"),
        ("mpfs.store.blocks", "from . import env\nfrom .env import Environment\nfrom ..objects import ids"),
        ("mpfs.merge.operators.ties", "from mpfs.merge.operators.base import Operator\nfrom mpfs.stats import sketch"),
        ("mpfs.ingest.importer", "from mpfs.merge import recipe\nimport mpfstools"),
        ("mpfs.repository", "from mpfs.ingest import importer\nimport mpfs.merge.engine"),
        ("mpfs", "from mpfs.errors import MPFSError\nfrom .repository import Repository\nfrom .objects import ids"),
        ("mpfs_cli.main", "import mpfs\nfrom mpfs.merge import recipe\nfrom . import app"),
        ("mpfs.testing.faults", "import mpfs\nfrom mpfs_cli import main"),
    ],
)
def test_import_check_is_content(name: str, source: str) -> None:
    assert import_complaints(Module(name, source, is_package=name == "mpfs"), {}) == []


@pytest.mark.parametrize("target", ["mpfs.merge.plan.Plan", "mpfs.merge"])
def test_import_exception_covers_its_module_only(target: str) -> None:
    source = "from mpfs.merge.plan import Plan"
    exceptions = {("mpfs.store.blocks", target): "a reason"}
    assert import_complaints(Module("mpfs.store.blocks", source), exceptions) == []
    assert len(import_complaints(Module("mpfs.store.refs", source), exceptions)) == 1


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import os\nos.environ['X']", "os.environ"),
        ("import os as system\nsystem.getenv('X')", "os.getenv"),
        ("import os.path\nos.path.expandvars('$X')", "os.path.expandvars"),
        ("import os.path as p\np.expandvars('$X')", "os.path.expandvars"),
        ("from os import path\npath.expandvars('$X')", "os.path.expandvars"),
        ("from os import environ", "os.environ"),
        ("def f():\n    import sys\n    return sys.argv[1:]", "sys.argv"),
        ("import sys\nsys.stdout.write('x')", "sys.stdout"),
        ("from sys import stderr as err", "sys.stderr"),
        ("import shutil\nshutil.get_terminal_size()", "shutil.get_terminal_size"),
        ("stream.isatty()", "isatty()"),
        ("print('x')", "print()"),
        ("input()", "input()"),
    ],
)
def test_environment_check_complains(source: str, name: str) -> None:
    complaints = environment_complaints(Module("mpfs.store.blocks", source), {})
    assert len(complaints) == 1
    assert f"touches {name};" in complaints[0]
    assert environment_complaints(Module("mpfs.store.blocks", source), {("mpfs.store.blocks", name): "a reason"}) == []
    assert environment_complaints(Module("mpfs_cli.main", source), {}) == []


def test_environment_check_is_content() -> None:
    source = '"""print(os.environ)"""\nimport os, sys\nos.fsync(fd)\nsys.byteorder\nself.environ\nobj.print()\n'
    assert environment_complaints(Module("mpfs.store.blocks", source), {}) == []


def test_form_check_complains() -> None:
    assert form_complaints(Module("mpfs.x", "import os\n")) == ["mpfs.x has no docstring"]
    assert form_complaints(Module("mpfs.x", '""""""\n')) == ["mpfs.x has no docstring"]
    assert form_complaints(Module("mpfs.x", '"""Doc."""\n' + "x = 1\n" * (MAX_LINES - 1))) == []
    assert len(form_complaints(Module("mpfs.x", '"""Doc."""\n' + "x = 1\n" * MAX_LINES))) == 1


def test_heavy_import_check_complains(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")
    (tmp_path / "light.py").write_text("import json\n")
    (tmp_path / "heavy.py").write_text("try:\n    import torch\nexcept ImportError:\n    pass\n")
    assert heavy_imports("import light", path=tmp_path) == ""
    assert "heavy.py" in heavy_imports("import heavy", path=tmp_path)
    assert "No module named 'absent_module'" in heavy_imports("import absent_module", path=tmp_path)


def test_the_walk_finds_the_code() -> None:
    found = {module.name: module for module in modules()}
    assert found["mpfs.errors"].layer == "mpfs.errors"
    assert found["mpfs.merge.operators.base"].layer == "mpfs.merge"
    assert found["mpfs_cli"].is_package
