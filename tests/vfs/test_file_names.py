"""Names that some file systems cannot have or keep apart: legal here, told at import, refused there before a byte is written."""

from __future__ import annotations

import errno
import os
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpfs.errors import BadInputError
from mpfs.formats.portable import notes, same_elsewhere, windows_problem
from mpfs.repository import Repository
from mpfs.testing.checkpoints import TensorContent, read, safetensors_bytes, write
from mpfs.vfs import checkout as checkout_module

WEIGHTS = {"model.safetensors": safetensors_bytes([TensorContent("w", "F32", (2,), b"12345678")])}
ACCENT = "é.txt"
ODD: dict[str, bytes] = {
    **WEIGHTS,
    **{
        name: name.encode()
        for name in ("README.md", "readme.md", "Sub/a.txt", "sub/b.txt", "CON", "nul.txt", "x:y", "a?")
    },
    **dict.fromkeys(("dot.", "space ", "lpt¹.json"), b"x"),
    unicodedata.normalize("NFC", ACCENT): b"one",
    unicodedata.normalize("NFD", ACCENT): b"two",
}


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    with Repository.create(tmp_path / "repo", block_size=4096, map_size=1 << 30, author="tester") as made:
        yield made


def add(repository: Repository, tmp_path: Path, files: Mapping[str, bytes]) -> tuple[str, ...]:
    """Import a directory with these files to `main`; the import's notes."""
    return repository.import_checkpoint(write(tmp_path / "in", {**WEIGHTS, **files}), "main").notes


class FileSystem:
    """Stands for `os` in a module: what is made below a checkout's directory goes through another file system's rules."""

    def __init__(self, rule: Callable[[str], str]) -> None:
        self._rule = rule

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _path(self, path: str | os.PathLike[str]) -> str:
        text = os.fspath(path)
        inside = re.search(r"\.mpfs-checkout-\w{8}/", text)
        if inside is None:
            return text
        return text[: inside.end()] + "/".join(map(self._rule, text[inside.end() :].split("/")))

    def open(self, path: str | os.PathLike[str], *rest: Any, **options: Any) -> int:
        return os.open(self._path(path), *rest, **options)

    def makedirs(self, path: str | os.PathLike[str], *rest: Any, **options: Any) -> None:
        os.makedirs(self._path(path), *rest, **options)


def windows(name: str) -> str:
    if windows_problem(name) is not None and not name.endswith((".", " ")):
        raise OSError(errno.EINVAL, "Invalid argument", name)
    return name.rstrip(". ").lower()


def decomposing(name: str) -> str:
    return unicodedata.normalize("NFD", name)


def test_linux_has_them_all(repository: Repository, tmp_path: Path) -> None:
    add(repository, tmp_path, ODD)
    repository.checkout("main", tmp_path / "out")
    assert read(tmp_path / "out") == ODD


def test_the_import_says_which_they_are(repository: Repository, tmp_path: Path) -> None:
    assert add(repository, tmp_path, {"config.json": b"{}"}) == ()
    told = "\n".join(add(repository, tmp_path, ODD))
    assert "differ in case or accents only" in told
    for name in ("README.md", "readme.md", "Sub", "sub"):
        assert f'"{name}"' in told
    assert (
        'Windows cannot have "CON", "a?", "dot.", "lpt¹.json", "nul.txt", "space ", "x:y" ("CON" is a device)' in told
    )


@pytest.mark.parametrize(
    ("files", "rule", "message"),
    [
        ({"README.md": b"1", "readme.md": b"2"}, str.lower, r'"readme.md" is the same as another path'),
        ({"Sub/a": b"1", "sub/b": b"2"}, str.lower, r'makes .* of "Sub", "Sub/a"'),
        ({"A": b"1", "a/b": b"2"}, str.lower, r'"A" is the same as another path'),
        (
            {unicodedata.normalize(form, ACCENT): b"1" for form in ("NFC", "NFD")},
            decomposing,
            "the same as another path",
        ),
        ({unicodedata.normalize("NFC", ACCENT): b"1"}, decomposing, "makes"),
        ({"x:y": b"1"}, windows, r'cannot have "x:y" \(":" is in "x:y"\)'),
        ({"con.json": b"1"}, windows, r'cannot have "con.json" \("con.json" is a device\)'),
        ({"dot.": b"1"}, windows, r'makes "dot" of "dot\."'),
        ({"a/space ": b"1"}, windows, r'makes "a/space" of "a/space "'),
    ],
)
def test_another_file_system_says_so_before_a_byte_is_written(
    repository: Repository,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: Mapping[str, bytes],
    rule: Callable[[str], str],
    message: str,
) -> None:
    add(repository, tmp_path, files)
    monkeypatch.setattr(checkout_module, "os", FileSystem(rule))
    written: list[int] = []
    monkeypatch.setattr(checkout_module, "_allocate", lambda fd, size: written.append(size))
    (tmp_path / "place").mkdir()
    with pytest.raises(BadInputError, match=message):
        repository.checkout("main", tmp_path / "place" / "out")
    assert written == []
    assert os.listdir(tmp_path / "place") == []


def test_plain_names_are_no_matter_anywhere(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(repository, tmp_path, {"config.json": b"{}", "unet/x.txt": b"x"})
    monkeypatch.setattr(checkout_module, "os", FileSystem(windows))
    repository.checkout("main", tmp_path / "out")
    assert read(tmp_path / "out") == {**WEIGHTS, "config.json": b"{}", "unet/x.txt": b"x"}


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("model-00001-of-00002.safetensors", None),
        ("1_Pooling/config.json", None),
        (".gitattributes", None),
        ("console.txt", None),
        ("a/COM1.txt", '"COM1.txt" is a device'),
        ("com¹", '"com¹" is a device'),
        ("aux .c", '"aux .c" is a device'),
        ("a./b", '"a." ends in a dot'),
        ("b ", '"b " ends in a space'),
        ("a\tb", r'"\t" is in "a\tb"'),
        ('a"b', r'"\"" is in "a\"b"'),
        ("a|b", '"|" is in "a|b"'),
    ],
)
def test_what_windows_cannot_have(path: str, problem: str | None) -> None:
    assert windows_problem(path) == problem


NAMES = st.text("aAbBéÉß./", min_size=1, max_size=6).filter(
    lambda name: name == "/".join(filter(None, name.split("/")))
)


@given(paths=st.sets(NAMES, max_size=6))
def test_groups_are_of_names_that_differ_and_fold_alike(paths: set[str]) -> None:
    groups = same_elsewhere(paths)
    members = [name for group in groups for name in group]
    assert len(members) == len(set(members))
    assert all(len({name.casefold() for name in group}) == 1 for group in groups)
    lowered = {path.casefold() for path in paths}
    if len(lowered) < len(paths):
        assert groups
    assert bool(notes(paths)) >= bool(groups)
